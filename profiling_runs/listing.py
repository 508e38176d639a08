"""The jobs of a profile, counted, with what they are estimated to cost. Nothing is measured, and no
device is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.plan.choices import Remat
from capture.plan.space import StageSpace
from capture.plan.stages import TensorParallelRule
from capture.profiler.execution import Machine
from capture.profiler.paper import most_run_devices, paper_runs
from profiling_runs.collect import Question, check_backend, open_measurements, wanted_configs
from profiling_runs.executions import profiling_jobs
from profiling_runs.jobs import Job

#: Seconds of a job where the store knows none of its kind, by part; roughly those of a model of
#: some hundred million parameters.
GUESSED_SECONDS = {"stage": 2.0, "update": 1.0, "buffers": 4.0, "run": 10.0, "machine": 1.0}


@dataclass(frozen=True)
class Listing:
    """The jobs of a profile, counted.

    Attributes:
        kinds: Per kind of job: how many there are, how many the store has already, and the seconds
            that the others are estimated to take.
        guessed: Kinds whose seconds are a guess, because the store knows no job like them.
    """

    kinds: Mapping[str, Mapping[str, Any]]
    guessed: tuple[str, ...]

    @property
    def num_jobs(self) -> int:
        return sum(kind["num_jobs"] for kind in self.kinds.values())

    @property
    def num_done(self) -> int:
        return sum(kind["num_done"] for kind in self.kinds.values())

    @property
    def seconds(self) -> float:
        """Of one worker, for what is not done."""
        return sum(kind["seconds"] for kind in self.kinds.values())

    def to_json(self) -> dict[str, Any]:
        counts = {
            "num_jobs": self.num_jobs,
            "num_done": self.num_done,
            "worker_seconds": self.seconds,
        }
        return {
            **counts,
            "kinds": {name: dict(kind) for name, kind in self.kinds.items()},
            "guessed": list(self.guessed),
        }


def listing(
    jobs: Sequence[Job],
    done: Collection[str],
    typical_seconds: Mapping[tuple[str, str], float],
    backend: str,
) -> Listing:
    """Count jobs and estimate what they cost.

    Args:
        jobs: Of a profile.
        done: Keys that the store has.
        typical_seconds: What the store knows, by (backend, part).
        backend: Of the jobs.

    Example:
        >>> from capture.plan.choices import StageChoice
        >>> from capture.measured.profile import StageConfig
        >>> config = StageConfig(0, 1, StageChoice(), 8)
        >>> jobs = [Job("a", config, kind="layer windows"), Job("b", config, kind="layer windows")]
        >>> listing(jobs, {"a"}, {("compile:cpu", "stage"): 0.5}, "compile:cpu").kinds
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
    return Listing(kinds, tuple(guessed))


def list_jobs(
    workload: WorkloadSpec,
    cluster: Cluster,
    store: Store,
    *,
    microbatch_size: int,
    backend: str,
    num_layers: int | None,
    remat: Sequence[Remat],
    shard_optimizer: bool,
    shard_params: bool,
    space: StageSpace,
    num_neighbours: int,
    tensor_parallel_rule: TensorParallelRule,
    calibration_plans: int,
    paper: tuple[str, int] | None,
    repeats: int,
    alpa_python: str | None,
) -> Listing:
    """The jobs of ``profile`` with the same arguments; the model is traced for it.

    Runs are listed as of the devices of the cluster's target, which may not be what the workers
    turn out to have.

    Raises:
        ProfileError: ``profile-backend``, as of ``profile``.
        ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    check_backend(
        backend, paper, None, repeats, alpa_python, tensor_parallel_rule, shard_params or None
    )
    if backend == "compile":
        measurements = open_measurements(
            workload,
            num_devices=cluster.num_devices,
            target=cluster.target,
            num_layers=num_layers,
            tensor_parallel_rule=tensor_parallel_rule,
            store=store,
        )
        question = Question.of(
            cluster,
            microbatch_size,
            remat,
            shard_optimizer,
            num_neighbours=num_neighbours,
            calibration_plans=calibration_plans,
            space=space,
            shard_params=shard_params,
            paper=paper,
        )
        jobs, name = (
            measurements.jobs(wanted_configs(question, measurements)),
            f"compile:{cluster.target}",
        )
    else:
        from capture.profiler.run import RunBackend

        assert paper is not None, "checked"
        if alpa_python is not None:
            from capture.profiler.alpa import AlpaBackend

            runs: RunBackend = AlpaBackend(workload, cluster, alpa_python, num_layers, store)
        else:
            platform = Target.load(cluster.target).platform
            machine = Machine(platform, cluster.target, most_run_devices(cluster.num_devices))
            runs = RunBackend(
                workload.load(),
                num_layers,
                tensor_parallel_rule,
                store,
                machine=machine,
                num_devices=cluster.num_devices,
            )
        layers = runs.compiler.traced(microbatch_size).graph.num_layers
        sets = paper_runs(layers, cluster.num_devices, microbatch_size, remat[0], shard_optimizer)
        jobs, name = list(profiling_jobs(runs, sets, microbatch_size, *paper, repeats)), backend
    return listing(jobs, store.get(job.key for job in jobs), store.typical_seconds(), name)
