"""What compiles for a target, whatever the target is: its own compiler for devices that need not be
there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from capture import environment
from capture.compiler.assembler import write_assembler
from capture.compiler.executable import Compiler, Executable, LayerOf
from capture.compiler.report_compiler import ReportCompiler
from capture.compiler.target_devices import devices_of
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops
from capture.machine.target import Target


class TargetCompiler:
    """An ``AnyCompiler`` for a target.

    Args:
        target: To compile for.
        count_work: Also find out what programs compute, read and send.
        are_there: Whether the devices are in this process: programs are compiled for them as they
            are.

    Attributes:
        clears_apart: See ``AnyCompiler``.
    """

    def __init__(self, target: Target, count_work: bool = False, are_there: bool = False):
        self._target, self._count_work, self._are_there = target, count_work, are_there
        self._stops_at_report = bool(target.compiler.get("stop_at_report")) and not are_there
        self.clears_apart = target.platform == "cpu"

    def devices(self, count: int) -> Sequence[Any]:
        """Devices to compile for. A compiler that is stopped at its report is given programs for
        virtual CPU devices, which stand for the target's.

        Raises:
            TargetError: Those of ``devices_of``.
        """
        stands_for = Target.load("cpu") if self._stops_at_report else self._target
        return devices_of(stands_for, count)

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
        """See ``AnyCompiler``."""
        compiler = (
            ReportCompiler(self._target)
            if self._stops_at_report
            else Compiler(fast_compile=True, count_work=self._count_work, options=self._options)
        )
        return compiler(
            function,
            args,
            donate=donate,
            out_shardings=out_shardings,
            layer_of=layer_of,
            local_flops=local_flops,
        )

    @cached_property
    def _options(self) -> dict[str, Any]:
        if self._are_there:
            return {}
        options = dict(self._target.compiler_options)
        if self._target.platform == "cuda":
            # What a kernel is made into has no part in any measurement: it is not assembled.
            folder = Path(self._scratch.name)
            options["xla_gpu_cuda_data_dir"] = str(write_assembler(folder))
            options |= environment.kernel_cache_options(folder / "kernels")
        return options

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="capture-target-")
