"""Make the paper's profiling runs: compiled and replayed, or executed with the backend ``run`` in
workers, or in this process, one after the other.

On CPU a few workers share the runs, and each keeps what it has compiled. On an accelerator every
run gets a fresh process, whose allocator's high-water marks are those of the run. This process owns
the store: a run is kept as soon as it arrives, so that the same command resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from capture import environment
from capture.errors import ProfileError
from capture.measured.profile import Profile, StageConfig
from capture.measured.store import Store
from capture.papers.capture.execution import ProfilingRun
from capture.papers.capture.profile import (
    PaperRuns,
    PaperStatistics,
    RunPeaks,
    form_statistics,
    most_run_devices,
    paper_runs,
    profile_batches,
    run_paper_profile,
)
from capture.registered import REGISTERED
from profiling_runs.batch import Progress, Watch
from profiling_runs.collect import PAPER_RUNS
from profiling_runs.jobs import Job, Setting
from profiling_runs.measurements import Measurements
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from profiling_runs.require import Measurer, machine_of_workers

if TYPE_CHECKING:
    from capture.papers.capture.run import RunBackend

PROFILING_RUNS = "profiling runs"


def compiled_profile(question: ProfileQuestion, measurements: Measurements) -> PaperStatistics:
    """Return statistics of a model's paper runs, replayed over their compiled stages."""
    assert question.paper is not None, "asked for"
    backend, size = measurements.backend, question.microbatch_size
    num_layers = backend.traced(size).graph.num_layers
    runs = paper_runs_of(question, num_layers)
    measurements.require({PAPER_RUNS: configs(question, num_layers)})
    param_bytes = {
        run.choice.param_split: backend.sharding(size).param_bytes(run.choice.param_split)
        for run in runs
    }
    graph = backend.sharding(size).graph(run.choice for run in runs)
    return run_paper_profile(runs, graph, param_bytes, *question.paper, measurements.costs.get)


def configs(question: ProfileQuestion, num_layers: int) -> list[StageConfig]:
    """Return the stages of the paper's profiling runs."""
    runs = paper_runs_of(question, num_layers)
    return [config for run in runs for config in run.configs(question.microbatch_size)]


def executed_profile(
    question: ProfileQuestion, store: Store | None, where: Where, progress: Progress, watch: Watch
) -> Profile:
    """Return a profile for the paper's mode from executed runs alone; they have half and a quarter
    as many micro-batches as the target.

    Args:
        question: With a backend that executes.
        store: Where finished runs are kept; in memory if None.
        where: The runs of a workload by name are made. On accelerators every run gets a process of
            its own.
        progress, watch: Told how far the runs are (``profiling_runs.batch``).

    Returns:
        The profile; it holds no measurement of a layer window. Runs that failed are named in
        ``failures``.

    Raises:
        ProfileError: ``profile-runs`` if every run failed; ``profile-backend`` for Alpa and a
            workload without a name.
        ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    backend, asked, where = _opened(question, store, where)
    measurer = Measurer(backend, asked, where, progress, watch)
    size = question.microbatch_size
    graph = backend.compiler.traced(size).graph
    num_layers = backend.compiler.num_layers
    sets = paper_runs_of(question, graph.num_layers)
    jobs = profiling_jobs(backend, question, sets)
    measurer.measure(job for job, runs in jobs.items() if backend.find(runs[0]) is None)
    outcomes = _outcomes(backend, measurer.errors, jobs)
    _check_some(list(outcomes.values()))
    assert question.paper is not None, "checked"
    schedule, num_microbatches = question.paper
    statistics = form_statistics(
        sets,
        graph.num_layers,
        size,
        schedule,
        num_microbatches,
        lambda choice, p, m: outcomes[ProfilingRun(p, choice, size, m, schedule, question.repeats)],
    )
    sharding = backend.compiler.sharding(size)
    return Profile(
        graph=sharding.graph(one.choice for one in sets),
        measurements={},
        param_bytes={
            split: sharding.param_bytes(split)
            for split in sorted({one.choice.param_split for one in sets})
        },
        provenance={**backend.provenance, "created": environment.now()},
        workload=question.spec,
        auto_layers=num_layers is not None,
        tensor_parallel_rule=question.tensor_parallel_rule,
        microbatch_sizes=(size,),
        model_hashes={size: graph.model_hash},
        paper=statistics.to_json(),
        failures=statistics.failed,
    )


def _outcomes(
    backend: RunBackend, errors: Mapping[str, str], jobs: Mapping[Job, Sequence[ProfilingRun]]
) -> dict[ProfilingRun, RunPeaks]:
    """Return the result of every run of the jobs: what is stored, or its failure."""
    outcomes: dict[ProfilingRun, RunPeaks] = {}
    for job, runs in jobs.items():
        for run in runs:
            error = errors.get(job.key)
            found = backend.find(run) if error is None else run.failed(error)
            assert found is not None, "it has just been kept"
            outcomes[run] = found
    return outcomes


def _opened(
    question: ProfileQuestion, store: Store | None, where: Where
) -> tuple[RunBackend, Setting | None, Where]:
    """Return the backend of this process, what workers need for the runs, and where they are
    made."""
    spec, cluster = question.spec, question.cluster
    if question.backend == "alpa":
        if spec is None or question.alpa_python is None:
            raise ProfileError.of(
                "backend='alpa' needs a workload by name: another process imports it.",
                "profile-backend",
            )
        backend = REGISTERED["profiling runs"]["alpa"](
            spec, cluster, question.alpa_python, question.num_layers, store
        )
        assert backend.versions, "asked at once: a wrong interpreter would fail every run"
        return backend, Setting(spec), Where(0)
    asked, machine = None, None
    if spec is not None:
        devices = most_run_devices(cluster.num_devices)
        asked = Setting(spec, devices, cluster.target, executes=True)
    if asked is not None and not where.here:
        machine = machine_of_workers(asked, where)
        asked = replace(asked, fresh_process=machine.platform != "cpu")
    backend = REGISTERED["profiling runs"]["run"](
        question.task,
        question.num_layers,
        question.tensor_parallel_rule,
        store,
        memory_limit_bytes=question.memory_limit_bytes,
        machine=machine,
        fresh_process=asked is not None and asked.fresh_process,
        num_devices=cluster.num_devices,
    )
    return backend, asked, where


def paper_runs_of(question: ProfileQuestion, num_layers: int) -> list[PaperRuns]:
    """Return the sets of the paper's profiling runs."""
    return paper_runs(
        num_layers,
        question.cluster.num_devices,
        question.microbatch_size,
        question.remat[0],
        question.shard_optimizer,
    )


def profiling_jobs(
    backend: RunBackend, question: ProfileQuestion, sets: Sequence[PaperRuns]
) -> dict[Job, list[ProfilingRun]]:
    """Return the different runs of some sets, as jobs, each with the runs that it stands for."""
    assert question.paper is not None, "checked"
    schedule, num_microbatches = question.paper
    size, repeats = question.microbatch_size, question.repeats
    runs_of: dict[str, list[ProfilingRun]] = {}
    for one in sets:
        for m in profile_batches(num_microbatches):
            for partitioning in one.partitionings:
                run = ProfilingRun(partitioning, one.choice, size, m, schedule, repeats)
                runs_of.setdefault(backend.key(run), []).append(run)
    return {
        Job(key, same[0], "run", PROFILING_RUNS, method="execute"): same
        for key, same in runs_of.items()
    }


def _check_some(outcomes: list[RunPeaks]) -> None:
    if all(outcome.failures for outcome in outcomes):
        raise ProfileError.of(
            f"all {len(outcomes)} profiling runs failed; the first: {outcomes[0].failures[0]}. "
            "Raise --memory, set JAX_PLATFORMS=cpu to "
            "run on virtual CPU devices, or profile with --backend compile, which runs nothing.",
            "profile-runs",
        )
