"""Compile for a target in a child process that is stopped at the memory report.

A TPU compiler knows the memory of a program after one to three seconds and makes its machine code
for minutes. A compile cannot be cancelled inside a process, so every program gets a child of its
own, which ends when the report is there.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.sharding import NamedSharding

from capture import environment
from capture.compiler.buffers import read_buffers
from capture.compiler.executable import Compiler, Executable, LayerOf
from capture.compiler.report import MemoryReport, read_program, read_report
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops, work_of_text
from capture.errors import TargetError
from capture.machine.target import Target
from capture.measured.work import ProgramWork
from capture.step.attribution import Buffer
from capture.tracing.flops import kernel_flops

#: Between two looks at the dump.
_PAUSE_SECONDS = 0.02
#: After which a program without a report is given up, on an idle machine.
_TIMEOUT_SECONDS = 600.0


class ReportCompiler:
    """The compiler (``AnyCompiler``) for a target whose devices are not there, stopped at its
    memory report.

    Args:
        target: Target with ``stop_at_report`` in its compiler settings.
        name_buffers: Also find out what buffers a program holds at its peak.
    """

    def __init__(self, target: Target, *, name_buffers: bool = False):
        self.target, self._names_buffers = target, name_buffers

    def __call__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
        layer_of: LayerOf | None = None,
        local_flops: LocalFlops = NO_LOCAL_FLOPS,
    ) -> Executable:
        """Compile for abstract arguments on a mesh of virtual CPU devices, which stand for the
        target's.

        Where the compiler is to choose the shardings of results, those that it chooses for the CPU
        are taken: they are propagated before anything depends on the target.

        Raises:
            TargetError: ``target-report`` if the compiler ends without a report; its last words are
                in the message; ``target-flags`` if it does so over flags of the user's.
        """
        on_cpu = Compiler(fast_compile=True)(
            function, args, donate=donate, out_shardings=out_shardings
        )
        outputs = on_cpu.outputs
        if not jax.tree.leaves(outputs):  # computes nothing on any target, and would be the CPU's
            return replace(on_cpu, work=ProgramWork(0, "float32", 0, 0))
        chosen = jax.tree.map(lambda struct: struct.sharding, outputs)
        jitted = jax.jit(function, donate_argnums=tuple(donate), out_shardings=chosen)
        with warnings.catch_warnings():
            # As in ``Compiler``.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            exported = jax.export.export(jitted, platforms=(self.target.platform,))(*args)
            if local_flops == NO_LOCAL_FLOPS:
                traced = jitted.trace(*args).jaxpr.jaxpr
                local_flops = LocalFlops(kernels=kernel_flops(traced, exported.nr_devices))
        leaves = jax.tree.leaves(tuple(args))
        positions = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        mesh = jax.tree.leaves((tuple(args), outputs))[0].sharding.mesh
        job = {
            "program": bytes(exported.serialize()),
            "target": self.target.name,
            "mesh_shape": tuple(mesh.devices.shape),
            "axis_names": tuple(mesh.axis_names),
            "arguments": [(leaf.shape, leaf.dtype, _spec(leaf.sharding)) for leaf in leaves],
            "results": [_spec(sharding) for sharding in jax.tree.leaves(chosen)],
            "options": self.target.compiler_options,
            "donated": [i for i, position in enumerate(positions) if position in donate],
        }
        report, program, buffers = self._run(job, layer_of if self._names_buffers else None)
        work = work_of_text(program, local_flops) if program is not None else None
        return Executable(
            _cannot_run, outputs, report.transient_bytes, work, report.output_bytes, buffers
        )

    def _run(
        self, job: dict[str, Any], layer_of: LayerOf | None
    ) -> tuple[MemoryReport, str | None, tuple[Buffer, ...]]:
        with tempfile.TemporaryDirectory(prefix="capture-report-") as name:
            folder = Path(name)
            (folder / "job").write_bytes(pickle.dumps(job))
            command = [
                sys.executable,
                "-m",
                "capture.compiler.child",
                str(folder / "job"),
                str(folder / "dump"),
            ]
            with open(folder / "errors", "wb") as errors:
                child = subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment.of_child(self.target.platform),
                )
            try:
                report = self._wait(child, folder / "dump")
                program = read_program(folder / "dump") if report else None
                buffers = read_buffers(folder / "dump", layer_of) if report and layer_of else ()
            finally:
                child.kill()
                child.wait()
            if report is None:
                text = (folder / "errors").read_text(errors="replace")
                TargetError.check(environment.refused_flags(text))
                said = text.strip().splitlines()
                raise TargetError.of(
                    f"the compiler of target={self.target.name!r} ended without a memory report: "
                    f"{said[-1] if said else 'no message'}.",
                    "target-report",
                )
            return report, program, buffers

    def _wait(self, child: subprocess.Popen[bytes], folder: Path) -> MemoryReport | None:
        start, allowed = time.monotonic(), _TIMEOUT_SECONDS
        while time.monotonic() - start < (
            allowed := max(allowed, environment.patience(_TIMEOUT_SECONDS))
        ):
            # Before the look: the report may be written in between.
            ended = child.poll() is not None
            report = read_report(folder)
            if report is not None or ended:
                return report
            time.sleep(_PAUSE_SECONDS)
        return None


def _spec(sharding: object) -> tuple[Any, ...]:
    assert isinstance(sharding, NamedSharding), f"programs are sharded by names, not {sharding}"
    return tuple(sharding.spec)


def _cannot_run(*args: Any) -> Any:
    raise AssertionError("a program that was compiled for its report alone cannot run")
