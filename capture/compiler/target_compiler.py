"""What compiles for a target, whatever the target is: its own compiler for devices that need not be
there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from capture import environment
from capture.compiler.assembler import write_assembler
from capture.compiler.executable import AnyCompiler, Compiler
from capture.compiler.report_compiler import ReportCompiler
from capture.compiler.target_devices import devices_of
from capture.errors import TargetError
from capture.machine.target import Target


class TargetCompiler:
    """The maker of compilers for a target, and of the devices that they compile for.

    Args:
        target: Target to compile for.
        count_work: Also find out what programs compute, read and send.
        are_there: Whether the devices are in this process: programs are compiled for them as they
            are.
    """

    def __init__(self, target: Target, count_work: bool = False, are_there: bool = False):
        self._target, self._count_work, self._are_there = target, count_work, are_there
        self._stops_at_report = bool(target.compiler.get("stop_at_report")) and not are_there

    def devices(self, count: int) -> Sequence[Any]:
        """Return devices to compile for. A compiler that is stopped at its report is given programs
        for virtual CPU devices, which stand for the target's.

        Raises:
            TargetError: Those of ``devices_of``.
        """
        stands_for = Target.load("cpu") if self._stops_at_report else self._target
        return devices_of(stands_for, count)

    def compiler(self, kernels: str = "kernels", *, name_buffers: bool = False) -> AnyCompiler:
        """Return a compiler for programs of the target.

        Args:
            kernels: Programs that are given one name share the kernels that are alike.
            name_buffers: Also find out what buffers a program holds at its peak.
        """
        if self._stops_at_report:
            return ReportCompiler(self._target, name_buffers=name_buffers)
        target = self._target
        options = target.run_options if self._are_there else target.compiler_options
        folder = None
        if self._target.platform == "cuda" and not self._are_there:
            # What a kernel is made into has no part in any measurement: it is not assembled.
            folder = self._scratch
            options["xla_gpu_cuda_data_dir"] = str(self._toolkit)
            options |= environment.kernel_cache_options(Path(folder.name, kernels))
        return Compiler(
            fast_compile=True,
            count_work=self._count_work,
            name_buffers=name_buffers,
            options=options,
            folder=folder,
        )

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Name in the error what is compiled in this context, if the compiler does not take it.

        Raises:
            TargetError: ``target-refused``.
        """
        try:
            yield
        except RuntimeError as error:  # JAX's, where it lowers for a device, and XLA's
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TargetError.of(
                f"{what} cannot be compiled for target={self._target.name!r}: {said}",
                "target-refused",
            ) from error

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="capture-kernels-")

    @cached_property
    def _toolkit(self) -> Path:
        return write_assembler(Path(self._scratch.name))
