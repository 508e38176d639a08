"""The exact answer for a plan of packs: its programs, equal ones once, compiled for its target or
taken from the store, and its step replayed over the compiler's reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from capture.errors import PlanError, ProfileError, plain
from capture.machine.target import Target
from capture.measured.store import Store
from capture.memo import memo
from capture.model.workload import WorkloadProtocol, WorkloadSpec, loaded, spec_of
from capture.plan.packs import PacksPlan
from capture.predictor.pack_step import step_bytes
from capture.profiler.asked import ProgramCost
from capture.step.ledger import Ledger
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
        store, where, progress: As for ``profile``.
    """

    workload: WorkloadProtocol | WorkloadSpec
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
        compiled = step_bytes(self.ledger(plan))
        return replace(plan, prediction=replace(plan.prediction, compiled=compiled))

    def ledger(self, plan: PacksPlan) -> Ledger:
        """Return the replay of a plan's compiled step, as if its host had memory enough.

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
        return backend.ledger(plan, {str(job.what): costs[job.key] for job in jobs})

    @memo
    def _measurer(self, target: str, num_devices: int) -> Measurer[PackBackend]:
        """Return what compiles for a target; its backend loads the model and knows keys."""
        from capture.profiler.packs import PackBackend

        spec = spec_of(self.workload)
        asked = None if spec is None else Setting(spec, num_devices, target)
        backend = PackBackend(loaded(self.workload), Target.load(target), self.store)
        return Measurer(backend, asked, self.where, self.progress)
