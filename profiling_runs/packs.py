"""The exact answer for a plan of packs: its programs, equal ones once, compiled for its target or
taken from the store, and its step replayed over the compiler's reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from capture.errors import PlanError, ProfileError, plain
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.layer_profile import LayerProfile
from capture.measured.store import Store
from capture.memo import memo
from capture.model.workload import WorkloadProtocol, WorkloadSpec, loaded, spec_of
from capture.plan.packs import PacksPlan
from capture.predictor.pack_step import step_bytes
from capture.profiler.asked import ProgramCost
from capture.step.ledger import Ledger
from capture.step.pack_times import packs_seconds
from capture.step.program import Step, replay
from capture.step.timeline import simulate_step
from capture.step.times import TimeModel
from profiling_runs.batch import Progress
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where
from profiling_runs.require import Measurer

if TYPE_CHECKING:
    from capture.profiler.packs import PackBackend

#: Kind of jobs.
PROGRAMS = "programs of packs"


@dataclass(eq=False)
class PackCompiler:
    """A compiler of plans of packs (``recommender.harmony.within.Compile``); nothing is run.

    Attributes:
        workload: Of all of them, or its name; by name it is compiled in worker processes.
        profile: Layers, whose seconds count for what the host and the links do; None leaves seconds
            unknown.
        store, where, progress: As for ``profile``.
    """

    workload: WorkloadProtocol | WorkloadSpec
    profile: LayerProfile | None = None
    store: Store | None = None
    where: Where = Where()
    progress: Progress = lambda kind, done, total: None

    def __call__(self, plan: PacksPlan) -> PacksPlan:
        """Return the plan with a prediction that says what its packs compile to.

        Args:
            plan: With a prediction.

        Raises:
            As ``ledger``.
        """
        assert plan.prediction is not None, "what is chosen is predicted"
        step, costs = self._compiled(plan)
        seconds = None if self.profile is None else self._seconds(plan, step, costs)
        compiled = step_bytes(replay(step), seconds)
        return replace(plan, prediction=replace(plan.prediction, compiled=compiled))

    def _seconds(self, plan: PacksPlan, step: Step, costs: Mapping[str, ProgramCost]) -> float:
        """Simulate the compiled step, with the work of its programs at the rates of the target."""
        rates = Target.load(plan.known_cluster.target).rates
        assert self.profile is not None and rates is not None, "its layers have seconds"
        times = TimeModel(rates, Layout(1))
        known = {
            name: times.program_seconds(cost.work)
            for name, cost in costs.items()
            if cost.work is not None
        }
        layers = self.profile.as_streamed(plan.swaps.stream)
        seconds = packs_seconds(step, plan.tasks(), layers, plan.machine, known)
        return simulate_step(step, seconds).step_seconds

    def ledger(self, plan: PacksPlan) -> Ledger:
        """Return the replay of a plan's compiled step, as if its host had memory enough.

        Raises:
            As ``_compiled``.
        """
        return replay(self._compiled(plan)[0])

    def _compiled(self, plan: PacksPlan) -> tuple[Step, Mapping[str, ProgramCost]]:
        """Return a plan's compiled step, and what its programs need, by name.

        Raises:
            PlanError: ``packs-target`` for a plan of a server that is no target, and those of
                ``streamed``; WorkloadError: likewise;
            TargetError: as ``devices_of``; ProfileError: ``packs-compile`` naming the programs that
                do not compile.
        """
        if plan.cluster is None:
            raise PlanError.of(
                f"the plan's machine {plan.machine.name!r} says nothing of how to compile for it; "
                "plan with --cluster 1xG and --target.",
                "packs-target",
            )
        measurer = self._measurer(plan.cluster.target, plan.machine.devices)
        backend = measurer.backend
        jobs = [Job(backend.key(what), what, "pack", PROGRAMS) for what in backend.programs(plan)]
        costs = measurer.measured(jobs, ProgramCost)
        failed = {job.key: job.what for job in reversed(jobs) if job.key not in costs}
        if failed:
            said = [f"{what}: {plain(measurer.errors[key])}" for key, what in failed.items()]
            raise ProfileError.of(
                f"programs of the plan do not compile: {'; '.join(said)}. Plan with --no-verify "
                "to leave that out.",
                "packs-compile",
            )
        needs = {str(job.what): costs[job.key] for job in jobs}
        return backend.compiled(plan, needs), needs

    @memo
    def _measurer(self, target: str, num_devices: int) -> Measurer[PackBackend]:
        """Return what compiles for a target; its backend loads the model and knows keys."""
        from capture.profiler.packs import PackBackend

        spec = spec_of(self.workload)
        asked = None if spec is None else Setting(spec, num_devices, target)
        backend = PackBackend(loaded(self.workload), Target.load(target), self.store)
        return Measurer(backend, asked, self.where, self.progress)
