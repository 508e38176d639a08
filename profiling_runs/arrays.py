"""Measure the programs of an array of models as jobs: in workers or in this process, each result
kept in the store as soon as it is there (``capture.profiler.array``).

Source: Purandare et al. 2023 (mu-TWO), 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from capture.errors import ProfileError, plain
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.array import ArrayTask
from capture.profiler.asked import ArrayShape, ProgramCost
from profiling_runs.batch import Progress
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where
from profiling_runs.require import Measurer, machine_of_workers

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
    measurers: dict[ArrayTask, Measurer[ArrayBackend]] = {}
    found: dict[ArrayTask, ArrayProfile] = {}
    machine = None
    with ExitStack() as kept:
        for task in dict.fromkeys(tasks):
            spec = WorkloadSpec.parse(task.workload) if task.workload else workload
            asked = Setting(spec, target=cluster.target, executes=executes)
            if executes and not where.here and machine is None:
                machine = machine_of_workers(asked, where)
            found[task] = ArrayProfile(
                spec.load(),
                cluster,
                replace(shape, batch_size=task.batch_size, num_layers=task.num_layers),
                progress,
                executes,
                store,
                machine,
                partial(_measured, measurers, task),
            )
            measurers[task] = Measurer(found[task].backend, asked, where)
            kept.enter_context(measurers[task].keeping_workers())
        yield found


def _measured(
    measurers: Mapping[ArrayTask, Measurer[ArrayBackend]],
    task: ArrayTask,
    kind: str,
    wanted: Mapping[str, What],
    progress: Progress,
) -> dict[str, ProgramCost]:
    """Measure programs of a task. What is executed is timed alone: the workers of other tasks are
    ended first."""
    measurer = measurers[task]
    for other in measurers.values():
        if other is not measurer and other.backend.machine is not None:
            other.end()
    measurer.progress = progress
    jobs = [Job(key, what, what.part, kind) for key, what in wanted.items()]
    found = measurer.measured(jobs, ProgramCost)
    if failed := [key for key in wanted if key not in found]:
        raise ProfileError.of(
            f"{len(failed)} of {len(wanted)} programs of the array cannot be measured: "
            f"{plain(measurer.errors[failed[0]])}. What was measured is kept; capture store shows "
            "the jobs.",
            "array-failed",
        )
    return found
