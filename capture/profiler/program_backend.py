"""The base of the backends of layers, of packs and of arrays of models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import jax

from capture import environment
from capture.machine.target import Target
from capture.measured.store import Store
from capture.profiler.compile import target_provenance
from capture.profiler.executing import ExecutingMachine
from capture.profiler.timing import machine_here, median_seconds, out_of_memory


class ProgramBackend:
    """A backend that measures single programs: compiled for a target that need not be there, or
    executed on the devices of this process.

    Args:
        store: Store of measurements.
        target: Target to compile for; None executes here.
        machine: Machine that executes, by default this process; another one only to know keys.

    Attributes:
        version: By its name in keys, a number to bump when the programs change for the same model,
            or what is counted of them.
        num_executions: Executions whose median counts, after one more.
        clock: Clock that times executions.
    """

    version: ClassVar[Mapping[str, int]]
    num_executions: ClassVar[int] = 5
    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        store: Store | None = None,
        *,
        target: Target | None = None,
        machine: ExecutingMachine | None = None,
    ):
        environment.warn()
        self.store = Store() if store is None else store
        self.target = target
        self.machine = None if target is not None else machine or machine_here()

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The facts beside the program that decide a measurement: backend, target, versions and
        flags."""
        if self.target is not None:
            return {**target_provenance(self.target), **self.version}
        assert self.machine is not None, "what is not compiled for a target is executed"
        return {**self.machine.provenance, **self.version}

    def median_seconds(self, call: Callable[..., object], *how: Callable[..., Any]) -> float:
        """Return the median seconds of a call; ``how`` prepares and ends each execution, as for
        ``capture.profiler.timing.median_seconds``."""
        return median_seconds(call, self.num_executions, self.clock, *how)

    @staticmethod
    def executed(timed: Callable[[], float]) -> tuple[float | None, str]:
        """Return the seconds that ``timed`` finds, or None and why the device had no room."""
        try:
            return timed(), ""
        except jax.errors.JaxRuntimeError as error:
            if said := out_of_memory(error):
                return None, said
            raise
