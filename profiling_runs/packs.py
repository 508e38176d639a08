"""The exact answer for a plan of packs: its programs, equal ones once, compiled for its target or
taken from the store, and its step replayed over the compiler's reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from capture.documents import read
from capture.errors import PlanError, ProfileError, plain
from capture.machine.target import Target
from capture.measured.store import Store
from capture.memo import memo
from capture.model.workload import WorkloadProtocol, WorkloadSpec, loaded, spec_of
from capture.plan.packs import PacksPlan
from capture.predictor.pack_step import step_bytes
from capture.profiler.asked import PackNeeds
from capture.step.ledger import Ledger
from profiling_runs.batch import Batch, Progress
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.pool import Runner
from profiling_runs.pools.where import Where, setting_of

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
    _known: dict[str, PackNeeds] = field(default_factory=dict)

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
        backend = self._backend(plan.cluster.target)
        programs = {what.name: what for what in backend.programs(plan)}
        keys = {name: backend.key(what) for name, what in programs.items()}
        # Of equal ones, the first.
        first = {key: programs[name] for name, key in reversed(keys.items())}
        missing = {key: what for key, what in first.items() if key not in self._known}
        values = backend.store.get(missing)
        self._known |= {key: read(value, PackNeeds) for key, value in values.items()}
        jobs = [
            Job(key, what, "pack", PROGRAMS) for key, what in missing.items() if key not in values
        ]
        if failed := self._run(plan, backend, jobs):
            raise ProfileError.of(
                f"programs of the plan do not compile: {'; '.join(failed)}. Plan with --no-verify "
                "to leave that out.",
                "packs-compile",
            )
        return backend.ledger(plan, {name: self._known[key] for name, key in keys.items()})

    def _run(self, plan: PacksPlan, backend: PackBackend, jobs: list[Job]) -> list[str]:
        """Compile the programs of jobs and return those that fail, each with the reason."""
        failed = []
        batch = Batch(jobs, backend.store, backend.provenance, self._spec, self.progress)
        for outcome in batch.run(lambda: self._open(plan, backend, len(jobs))):
            if outcome.value is None:
                failed.append(f"{outcome.job.what}: {plain(outcome.error)}")
            else:
                self._known[outcome.job.key] = read(outcome.value, PackNeeds)
        return failed

    @memo
    def _backend(self, target: str) -> PackBackend:
        """Return this process's backend for a target, which loads the model and knows keys."""
        from capture.profiler.packs import PackBackend

        return PackBackend(loaded(self.workload), Target.load(target), self.store)

    @property
    def _spec(self) -> WorkloadSpec | None:
        return spec_of(self.workload)

    def _open(self, plan: PacksPlan, backend: PackBackend, num_jobs: int) -> Runner:
        setting = None
        if self._spec is not None and not self.where.here:
            assert plan.cluster is not None, "asked before"
            setting = setting_of(
                Setting(
                    self._spec,
                    plan.num_layers,
                    num_devices=plan.machine.devices,
                    target=plan.cluster.target,
                    measures="packs",
                )
            )
        return self.where.open(setting, backend, num_jobs)
