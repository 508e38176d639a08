"""The child process of ``ReportCompiler``: compiles one exported program for a target and dumps
what the compiler writes."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import jax
import jax.export
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.target_devices import devices_of
from capture.machine.target import Target


def main(job_file: str, dump: str) -> None:
    """Compile the job of a file; the compiler makes the folder of dumps."""
    # What JAX's persistent cache has kept would write no dump.
    jax.config.update("jax_enable_compilation_cache", False)
    job = pickle.loads(Path(job_file).read_bytes())
    devices = devices_of(Target.load(job["target"]), int(np.prod(job["mesh_shape"])))
    mesh = Mesh(np.asarray(devices).reshape(job["mesh_shape"]), job["axis_names"])

    def sharding(spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    exported = jax.export.deserialize(bytearray(job["program"]))
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(spec))
        for shape, dtype, spec in job["arguments"]
    ]
    results = [sharding(spec) for spec in job["results"]]

    def program(*leaves):
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    jitted = jax.jit(program, donate_argnums=tuple(job["donated"]), out_shardings=results)
    jitted.lower(*given).compile(
        compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True, **job["options"]}
    )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    main(*sys.argv[1:])
