"""What malloc gives out during ordinary steps on CPU, beside the most that it may be: booked bytes,
scratch of kernels, what a program that has ended has not given back, feeds, and objects.

    python -m benchmarks.heap_bound -o RESULT.json
    python -m benchmarks.heap_bound --kernels

Every model trains some steps on the devices of one process. If a step adds more than its bound, the
script exits with code 1. ``--kernels`` runs single products, convolutions, sorts and decompositions
instead, each beside the bound of its scratch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capture import environment
from capture.errors import CaptureError

CaptureError.check(environment.prepare(num_devices=4))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from capture.cli.output import table  # noqa: E402
from capture.compiler.executable import Compiler  # noqa: E402
from capture.machine.cluster import Cluster  # noqa: E402
from capture.model.workload import WorkloadSpec, takes_key  # noqa: E402
from capture.plan.choices import StageChoice  # noqa: E402
from capture.plan.stage import Stage  # noqa: E402
from capture.plan.stages import Plan  # noqa: E402
from capture.runtime.heap import OBJECT_BYTES, measure_heap  # noqa: E402
from capture.runtime.pipeline import pipeshard  # noqa: E402
from capture.runtime.process_memory import HeapMeter  # noqa: E402
from capture.tracing import trace  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
KIT, ZOO = ROOT / "tests" / "kit", ROOT / "models"

#: Name, workload, global batch size, micro-batches, data-parallel degrees of the stages, remat.
CASES = (
    ("VGG", f"{KIT}/images.py:vgg?size=32&channels=16", 512, 16, (1,), "none"),
    ("VGG, larger micro-batches", f"{KIT}/images.py:vgg?size=32&channels=16", 512, 4, (1,), "none"),
    (
        "encoder-decoder",
        f"{KIT}/sequences.py:encoder_decoder?vocab=16384&width=64&length=16",
        384,
        16,
        (1,),
        "none",
    ),
    (
        "encoder-decoder, untied, full",
        f"{KIT}/sequences.py:encoder_decoder?vocab=16384&width=64&length=16&tied=false",
        128,
        8,
        (1,),
        "full",
    ),
    ("GPT", f"{ZOO}/gpt.py:gpt?size=tiny&seq_len=256", 32, 8, (1, 1), "cheap"),
    ("mixture of experts", f"{ZOO}/moe.py:moe?size=tiny", 64, 8, (1, 2), "cheap"),
    ("Wide-ResNet", f"{ZOO}/wide_resnet.py:wide_resnet?size=tiny", 64, 4, (1,), "none"),
    ("LSTM", f"{KIT}/recurrent.py:recurrent_language_model?vocab=8000", 128, 8, (1,), "none"),
    ("U-Net", f"{ZOO}/unet.py:unet?size=tiny", 32, 4, (1,), "none"),
    ("MobileNet", f"{ZOO}/mobilenet.py:mobilenet?size=tiny", 64, 4, (2,), "none"),
)


def measure(
    workload: str,
    size: int,
    num_microbatches: int,
    degrees: tuple[int, ...],
    remat: Any,
    steps: int,
) -> dict[str, Any]:
    """Return the parts of the bound, and the least and the most that a step added."""
    loaded = WorkloadSpec.parse(workload).load()
    num_layers = len(trace(loaded, size // num_microbatches // max(degrees)).graph.layers)
    cuts = [num_layers * s // len(degrees) for s in range(len(degrees) + 1)]
    firsts = [sum(degrees[:s]) for s in range(len(degrees))]
    stages = tuple(
        Stage(
            cuts[s],
            cuts[s + 1],
            tuple(range(firsts[s], firsts[s] + data)),
            StageChoice(data, 1, remat),
        )
        for s, data in enumerate(degrees)
    )
    plan = Plan(Cluster((sum(degrees),)), num_layers, stages, size, num_microbatches, "1f1b")
    step = pipeshard(loaded, plan)
    state = step.init(jax.random.key(0))
    batch = jax.tree.map(np.asarray, loaded.batch(jax.random.key(1), size))
    key = jax.random.key(2) if takes_key(loaded) else None
    state, _ = step(state, batch, key)
    found = []
    for _ in range(steps):
        state, _, heap = measure_heap(step, state, batch, key)
        if heap is None:
            sys.exit("this system's C library has no mallinfo2; glibc 2.33 and newer does")
        found.append(heap)
    document = found[0].as_document()
    for one in ("source", "before_bytes", "peak_bytes", "step_bytes"):
        del document[one]
    return document | {
        "step_bytes": [heap.step_bytes for heap in found],
        "is_within": all(heap.step_bytes <= heap.bound_bytes for heap in found),
    }


def kernels() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield single operations whose kernels take scratch, with arguments."""
    for m, k, n in ((256, 64, 16384), (64, 256, 16384), (1000, 700, 1000), (64, 4096, 64)):
        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        yield f"product {m} x {k} x {n}", jnp.matmul, (a, b)
        yield f"product {m} x {k} x {n}, left transposed", lambda a, b: a.T @ b, (a.T, b)
    a, b = jnp.ones((16, 512, 512)), jnp.ones((16, 512, 512))
    yield "16 products of 512, left transposed", lambda a, b: a.swapaxes(1, 2) @ b, (a, b)
    for channels, features, groups, stride in (
        (16, 16, 1, 1),
        (32, 32, 1, 1),
        (32, 32, 32, 1),
        (32, 64, 4, 1),
        (16, 32, 1, 2),
    ):
        x = jnp.ones((32, 32, 32, channels))
        w = jnp.ones((3, 3, channels // groups, features))

        def forward(x, w, groups=groups, stride=stride):
            return jax.lax.conv_general_dilated(
                x,
                w,
                (stride, stride),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        name = f"convolution {channels} to {features}, {groups} groups, stride {stride}"
        yield name, forward, (x, w)
        for argument, what in enumerate(("input", "filter")):
            yield (
                f"{name}: gradient of the {what}",
                lambda x, w, y, f=forward, i=argument: jax.vjp(f, x, w)[1](y)[i],
                (x, w, forward(x, w)),
            )
    line, square = jnp.arange(1e6), jnp.eye(1024) * 1024 + 1
    yield "sort of a line", jnp.sort, (line,)
    yield "argsort of a line", jnp.argsort, (line,)
    yield "16 largest of a line", lambda x: jax.lax.top_k(x, 16), (line,)
    yield "FFT of a line", jnp.fft.fft, (line,)
    for decomposition in (jnp.linalg.cholesky, jnp.linalg.qr, jnp.linalg.eigh, jnp.linalg.svd):
        yield decomposition.__name__, decomposition, (square,)


def measure_kernel(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, int]:
    """Return what a program's kernels added beside its buffers, the most of four calls, and the
    bound."""
    compiled = Compiler()(function, arguments)
    most, heap = 0, HeapMeter()
    for _ in range(4):
        heap.start()
        result = jax.block_until_ready(compiled.call(*arguments))
        heap.stop()
        del result
        assert heap.peak_bytes is not None and heap.before_bytes is not None
        most = max(most, heap.peak_bytes - heap.before_bytes - compiled.transient_bytes)
    return {"scratch_bytes": most, "bound_bytes": compiled.scratch.nbytes}


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="single operations")
    parser.add_argument("--steps", type=int, default=4, help="measured per model")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.kernels:
        for name, function, arguments in kernels():
            rows.append({"kernel": name} | measure_kernel(function, arguments))
            rows[-1]["is_within"] = (
                rows[-1]["scratch_bytes"] <= rows[-1]["bound_bytes"] + OBJECT_BYTES
            )
        cells = [
            [r["kernel"], *(megabytes(r[k]) for k in ("scratch_bytes", "bound_bytes"))]
            for r in rows
        ]
        print(table(["kernel", "added, MB", "at most"], cells))
    else:
        parts = ("booked", "scratch", "unreturned", "fed", "object", "bound")
        for name, *asked in CASES:
            if options.only is None or name in options.only:
                rows.append({"model": name} | measure(*asked, options.steps))
                print(
                    name,
                    [megabytes(n) for n in rows[-1]["step_bytes"]],
                    file=sys.stderr,
                    flush=True,
                )
        cells = [
            [
                row["model"],
                f"{megabytes(min(row['step_bytes']))} to {megabytes(max(row['step_bytes']))}",
                *(megabytes(row[f"{part}_bytes"]) for part in parts),
            ]
            for row in rows
        ]
        print(table(["model", "added, MB", *parts], cells))
    if options.output is not None:
        document = {
            "benchmark": "heap_bound",
            "date": datetime.date.today().isoformat(),
            "num_cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg(),
            "versions": environment.versions(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(not all(row["is_within"] for row in rows))


if __name__ == "__main__":
    main()
