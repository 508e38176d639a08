"""The jobs of a profile, counted, with what they are estimated to cost. Nothing is measured, and no
device is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.measured.store import Store
from capture.registered import REGISTERED
from profiling_runs.collect import wanted_configs
from profiling_runs.jobs import Job
from profiling_runs.measurements import Measurements, open_measurements
from profiling_runs.question import ProfileQuestion

#: Seconds of a job where the store knows none of its kind, by part; roughly those of a model of
#: some hundred million parameters.
GUESSED_SECONDS = {
    "stage": 2.0,
    "update": 1.0,
    "split": 2.0,
    "run": 10.0,
}


@dataclass(frozen=True)
class Listing:
    """The jobs of a profile, counted.

    Attributes:
        workload, cluster, target: What is profiled, and for which devices.
        kinds: Per kind of job: how many there are, how many the store has already, and the seconds
            that the others are estimated to take.
        guessed: Kinds whose seconds are a guess, because the store knows no job like them.
        output: The file of the profile; None where none is to be made.
        num_jobs, num_done: Jobs of all kinds.
        worker_seconds: Time of one worker for what is not done, estimated.
    """

    workload: str
    cluster: str
    target: str
    kinds: Mapping[str, Mapping[str, Any]]
    guessed: tuple[str, ...]
    output: str | None = None
    num_jobs: int = field(init=False)
    num_done: int = field(init=False)
    worker_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        for name, of_kind in (
            ("num_jobs", "num_jobs"),
            ("num_done", "num_done"),
            ("worker_seconds", "seconds"),
        ):
            total = sum(kind[of_kind] for kind in self.kinds.values())
            object.__setattr__(self, name, total)


def counted_jobs(
    jobs: Sequence[Job],
    done: Collection[str],
    typical_seconds: Mapping[tuple[str, str], float],
    backend: str,
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Count jobs by kind, done and left, and say whose seconds are guessed, as ``Listing`` has it.

    Args:
        jobs: Those of a profile.
        done: Keys that the store has.
        typical_seconds: What the store knows, by (backend, part).
        backend: Name of what the jobs are made by.

    Example:
        >>> from capture.plan.choices import StageChoice
        >>> from capture.measured.profile import StageConfig
        >>> config = StageConfig(0, 1, StageChoice(), 8)
        >>> jobs = [Job("a", config, kind="layer windows"), Job("b", config, kind="layer windows")]
        >>> counted_jobs(jobs, {"a"}, {("compile:cpu", "stage"): 0.5}, "compile:cpu")[0]
        {'layer windows': {'num_jobs': 2, 'num_done': 1, 'seconds': 0.5}}
    """
    kinds: dict[str, dict[str, Any]] = {}
    guessed: dict[str, None] = {}
    for job in jobs:
        kind = kinds.setdefault(job.kind, {"num_jobs": 0, "num_done": 0, "seconds": 0.0})
        kind["num_jobs"] += 1
        if job.key in done:
            kind["num_done"] += 1
            continue
        if (backend, job.part) not in typical_seconds:
            guessed[job.kind] = None
        kind["seconds"] += typical_seconds.get((backend, job.part), GUESSED_SECONDS[job.part])
    return kinds, tuple(guessed)


def list_jobs(
    question: ProfileQuestion, store: Store, measurements: Measurements | None = None
) -> Listing:
    """List the jobs of ``profile`` with the same question; the model is traced for it, unless the
    measurements have done so.

    Runs are listed as of the devices of the cluster's target, which may not be what the workers
    turn out to have.

    Raises:
        ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    cluster = question.cluster
    if question.backend == "compile":
        measurements = measurements or open_measurements(question, store=store)
        jobs = measurements.jobs(wanted_configs(question, measurements), question.splits_backward)
        name = f"compile:{cluster.target}"
    else:
        jobs = REGISTERED["profile of the paper"]["jobs"](question, store)
        name = question.backend
    done, seconds = store.get(job.key for job in jobs), store.typical_seconds()
    about = str(question.workload), str(cluster), cluster.target
    return Listing(*about, *counted_jobs(jobs, done, seconds, name))
