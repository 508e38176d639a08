"""The exact memory and the work of plans of packs: their programs, compiled for the target that
they were made for, and the step with the compiler's reports. Nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from capture.compiler.target_compiler import TargetCompiler
from capture.compiler.target_devices import devices_of
from capture.machine.server import ENDLESS_BYTES
from capture.machine.target import Target
from capture.measured.store import Store
from capture.model.graph import content_hash
from capture.model.workload import WorkloadProtocol
from capture.plan.packs import PacksPlan
from capture.profiler.asked import PackProgram, ProgramCost
from capture.profiler.program_backend import ProgramBackend
from capture.runtime.streamed import StreamedStep
from capture.step.program import Step


class PackBackend(ProgramBackend):
    """The backend that compiles the programs of plans of packs of a model.

    Args:
        workload: The task.
        target: Target to compile for, beside the processor of the host.
        store: Store of measurements.
    """

    version: ClassVar[Mapping[str, int]] = {"packs_version": 1}

    def __init__(self, workload: WorkloadProtocol, target: Target, store: Store | None = None):
        super().__init__(store, target=target)
        self._workload, self._compiler = workload, TargetCompiler(target, count_work=True)
        self.options: dict[str, Any] = {}
        self._step: StreamedStep | None = None

    def step(self, plan: PacksPlan) -> StreamedStep:
        """Return the step of a plan, uncompiled; the last one is kept.

        Raises:
            PlanError, WorkloadError: those of ``streamed``; TargetError: as ``devices_of``.
        """
        machine = plan.machine.with_(host_memory_bytes=ENDLESS_BYTES)
        plan = replace(plan, machine=machine)
        if self._step is None or self._step.plan != plan:
            devices = list(self._compiler.devices(machine.devices))
            host = devices_of(Target.load("cpu"), 1)[0]
            compiler = self._compiler.compiler()
            self._step = StreamedStep(self._workload, plan, devices, compiler, host=host)
        return self._step

    def programs(self, plan: PacksPlan) -> list[PackProgram]:
        """Return all programs of a plan's step, to be measured."""
        # Nothing else of it is asked.
        bare = replace(plan, prediction=None, why=None, points=())
        return [PackProgram(bare, name) for name in self.step(plan).programs.runs]

    def key(self, what: PackProgram) -> str:
        """Return the content hash of everything that can change a measurement; equal for packs that
        do the same."""
        return content_hash([self.provenance, self.step(what.plan).programs.key(what.name)])

    def measure(self, what: PackProgram) -> ProgramCost:
        """Compile a program and return the bytes that it needs while it runs, and its work.

        Raises:
            TargetError: ``target-refused`` if the compiler does not take it, ``target-report``.
        """
        with self._compiler.refusing(f"program {what.name!r}"):
            executable = self.step(what.plan).programs.executable(what.name)
            return ProgramCost(executable.transient_bytes, work=executable.work)

    def compiled(self, plan: PacksPlan, needs: Mapping[str, ProgramCost]) -> Step:
        """Return a plan's step with the needs of its programs; the host is given enough memory for
        any plan.

        Args:
            plan: Plan of packs of the model.
            needs: Needs of all the plan's programs, by name.
        """
        return self.step(plan).given({name: need.transient_bytes for name, need in needs.items()})
