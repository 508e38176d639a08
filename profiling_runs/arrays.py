"""Measure the programs of an array of models as jobs: in workers or in this process, each result
kept in the store as soon as it is there (``capture.profiler.array``).

Source: Purandare et al. 2023 (mu-TWO), 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from capture.documents import read
from capture.errors import ProfileError, plain
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.array import ArrayTask
from capture.profiler.asked import ArrayNeeds, ArrayShape
from profiling_runs.batch import Batch, Progress
from profiling_runs.jobs import Job, Setting
from profiling_runs.machine import machine_of_workers
from profiling_runs.pools.pool import Kept
from profiling_runs.pools.where import Where, setting_of

if TYPE_CHECKING:
    from capture.profiler.array import ArrayBackend, ArrayProfile, What


@contextmanager
def array_profiles(
    workload: WorkloadSpec,
    tasks: Iterable[ArrayTask],
    cluster: Cluster,
    shape: ArrayShape,
    *,
    executes: bool = False,
    store: Store | None = None,
    where: Where = Where(),
    progress: Progress = lambda kind, done, total: None,
) -> Iterator[dict[ArrayTask, ArrayProfile]]:
    """Yield one profile per task of an array of models (mu-TWO); their programs are measured as
    jobs when they are asked for, and the workers end with the block.

    Args:
        workload: Of the tasks that name no other.
        tasks: What models train, with their numbers of layers.
        cluster: One device.
        shape: Of the array, but for what a task says.
        executes: Whether programs are executed, for their seconds: by one worker at a time, whose
            clock no other job disturbs.
        store, where, progress: As for ``profile``.

    Raises:
        ProfileError: ``array-failed``, where it is asked for what cannot be measured; WorkloadError
            for a workload that cannot be loaded.
    """
    from capture.profiler.array import ArrayProfile

    where = replace(where, num_workers=1) if executes and not where.here else where
    store = Store() if store is None else store
    machine, jobs, found = None, list[_Jobs](), dict[ArrayTask, ArrayProfile]()
    for task in dict.fromkeys(tasks):
        spec = WorkloadSpec.parse(task.workload) if task.workload else workload
        own = replace(shape, batch_size=task.batch_size, num_layers=task.num_layers)
        setting = None if where.here else _setting(spec, own, cluster.target, executes)
        if executes and setting is not None and machine is None:
            machine = machine_of_workers(setting, where)
        backend = partial(_backend, found, task)
        jobs.append(_Jobs(backend, spec, setting, where, jobs if executes else ()))
        found[task] = ArrayProfile(
            spec.load(),
            cluster,
            own.batch_size,
            own.num_layers,
            own.shared,
            own.shared_batches,
            own.bundle_bytes,
            progress,
            executes,
            store,
            machine,
            jobs[-1].measure,
        )
    try:
        yield found
    finally:
        for one in jobs:
            one.close()


def _setting(spec: WorkloadSpec, shape: ArrayShape, target: str, executes: bool) -> Setting:
    """Return what all jobs of one task share: its workload, backend, target and array."""
    backend: Literal["run", "compile"] = "run" if executes else "compile"
    return setting_of(
        Setting(spec, shape.num_layers or None, backend=backend, target=target, array=shape)
    )


def _backend(profiles: Mapping[ArrayTask, ArrayProfile], task: ArrayTask) -> ArrayBackend:
    return profiles[task].backend


@dataclass(eq=False)
class _Jobs:
    """The measurements of one task of an array, made as jobs by workers that are kept. The workers
    of ``others`` are ended first, so that programs are timed alone."""

    backend: Callable[[], ArrayBackend]
    workload: WorkloadSpec
    setting: Setting | None
    where: Where
    others: Sequence[_Jobs] = ()
    _kept: Kept | None = field(default=None, init=False)

    def measure(
        self, wanted: Mapping[str, What], told: Callable[[int], None]
    ) -> dict[str, ArrayNeeds]:
        backend, count = self.backend(), len(wanted)
        for other in self.others:
            if other is not self:
                other.close()
        kept = self._kept = self._kept or Kept(
            lambda: self.where.open(self.setting, backend, count)
        )
        jobs = [Job(key, what, what.part, "segments") for key, what in wanted.items()]
        batch = Batch(
            jobs,
            backend.store,
            backend.provenance,
            self.workload,
            lambda kind, done, total: told(done),
        )
        found, failed = dict[str, ArrayNeeds](), dict[str, str]()
        for outcome in batch.run(lambda: kept):
            if outcome.value is None:
                failed[outcome.job.key] = plain(outcome.error)
            else:
                found[outcome.job.key] = read(outcome.value, ArrayNeeds)
        if failed:
            raise ProfileError.of(
                f"{len(failed)} of {count} programs of the array cannot be measured: "
                f"{next(iter(failed.values()))}. What was measured is kept; capture store shows "
                "the jobs.",
                "array-failed",
            )
        return found

    def close(self) -> None:
        if self._kept is not None:
            self._kept.end()
