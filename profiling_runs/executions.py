"""Make the paper's profiling runs with the backend ``run``: in workers, or in this process, one
after the other.

On CPU a few workers share the runs, and each keeps what it has compiled. On an accelerator every
run gets a fresh process, whose allocator's high-water marks are those of the run. This process owns
the store: a run is kept as soon as it arrives, so that the same command resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from capture import environment
from capture.errors import ProfileError, plain
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.measured.store import Store
from capture.model.workload import WorkloadProtocol, WorkloadSpec
from capture.plan.choices import Remat
from capture.plan.stages import TensorParallelRule
from capture.profiler.execution import Machine, ProfilingRun
from capture.profiler.paper import (
    PaperRuns,
    PaperStatistics,
    RunPeaks,
    form_statistics,
    most_run_devices,
    paper_runs,
    profile_batches,
)
from profiling_runs.batch import Batch, Progress, Watch
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.where import Where, setting_of

if TYPE_CHECKING:
    from capture.profiler.run import RunBackend

PROFILING_RUNS = "profiling runs"


def executed_profile(
    workload: WorkloadProtocol | WorkloadSpec,
    cluster: Cluster,
    *,
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    num_layers: int | None = None,
    remat: Remat = "none",
    shard_optimizer: bool = False,
    tensor_parallel_rule: TensorParallelRule = "auto",
    memory_limit_bytes: int | None = None,
    store: Store | None = None,
    repeats: int = 1,
    where: Where = Where(),
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
    alpa_python: str | None = None,
) -> Profile:
    """A profile for the paper's mode from executed runs alone.

    Args:
        workload: The task, or its name; by name it is run in worker processes.
        cluster: Decides the numbers of stages and the degrees.
        microbatch_size, schedule, num_microbatches: Of the target; the runs have half and a quarter
            as many micro-batches.
        num_layers: None cuts at the model's marks; a number cuts automatically.
        remat, shard_optimizer: Of every stage.
        tensor_parallel_rule: ``"auto"`` or ``"largest"``.
        memory_limit_bytes: A run that needs more on a device is not made, and named as failed.
        store: Of finished runs; in memory if None.
        repeats: Steps that are measured in every run; the largest peaks count.
        where: The runs of a workload by name are made. On accelerators every run gets a process of
            its own.
        progress, watch: Told how far the runs are (``profiling_runs.batch``).
        alpa_python: Have the runs made by Alpa, with this interpreter of its environment, on its
            Ray cluster of these nodes.

    Returns:
        The profile; it holds no measurement of a layer window. Runs that failed are named in
        ``failures``.

    Raises:
        ProfileError: ``profile-runs`` if every run failed; ``profile-backend`` for Alpa and a
            workload without a name.
        ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    from capture.profiler.run import RunBackend

    spec = workload if isinstance(workload, WorkloadSpec) else None
    setting, machine = None, None
    backend: RunBackend | None = None
    if alpa_python is not None:
        from capture.profiler.alpa import AlpaBackend

        if spec is None:
            raise ProfileError.of(
                "backend='alpa' needs a workload by name: another process imports it.",
                "profile-backend",
            )
        backend = AlpaBackend(spec, cluster, alpa_python, num_layers, store)
        assert backend.versions, "asked at once: a wrong interpreter would fail every run"
    elif spec is not None and not where.here:
        num_devices = most_run_devices(cluster.num_devices)
        setting = Setting(
            spec,
            num_layers,
            tensor_parallel_rule,
            num_devices,
            "run",
            cluster.target,
            memory_limit_bytes,
        )
        machine = machine_of_workers(setting_of(setting), where)
        setting = setting_of(replace(setting, fresh_process=machine.platform != "cpu"))
    if backend is None:
        backend = RunBackend(
            workload.load() if isinstance(workload, WorkloadSpec) else workload,
            num_layers,
            tensor_parallel_rule,
            store,
            memory_limit_bytes=memory_limit_bytes,
            machine=machine,
            fresh_process=setting is not None and setting.fresh_process,
            num_devices=cluster.num_devices,
        )
    graph = backend.compiler.traced(microbatch_size).graph
    num_layers = backend.compiler.num_layers
    setting = setting and replace(setting, num_layers=num_layers)
    sets = paper_runs(
        graph.num_layers, cluster.num_devices, microbatch_size, remat, shard_optimizer
    )
    statistics = run_statistics(
        backend,
        setting,
        sets,
        microbatch_size,
        schedule,
        num_microbatches,
        repeats=repeats,
        workload=spec,
        where=where,
        progress=progress,
        watch=watch,
    )
    sharding = backend.compiler.sharding(microbatch_size)
    return Profile(
        graph=graph,
        measurements={},
        param_bytes={
            split: sharding.param_bytes(split)
            for split in sorted({one.choice.param_split for one in sets})
        },
        provenance={**backend.provenance, "created": environment.now()},
        workload=spec,
        auto_layers=num_layers is not None,
        tensor_parallel_rule=tensor_parallel_rule,
        microbatch_sizes=(microbatch_size,),
        model_hashes={microbatch_size: graph.model_hash},
        paper=statistics.to_json(),
        failures=statistics.failed,
    )


def run_statistics(
    backend: RunBackend,
    setting: Setting | None,
    sets: Sequence[PaperRuns],
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    *,
    repeats: int,
    workload: WorkloadSpec | None,
    where: Where,
    progress: Progress,
    watch: Watch,
) -> PaperStatistics:
    """The statistics of executed runs: those that the store does not have are made.

    Args:
        backend: Knows keys and the store.
        setting: How workers rebuild it; None makes the runs in this process.
        sets: From ``paper_runs``.
        microbatch_size, schedule, num_microbatches: Of the target.
        repeats, where, progress, watch: As for ``executed_profile``.
        workload: By name, for the store's rows.

    Raises:
        ProfileError: ``profile-runs`` if every run failed.
    """
    jobs = profiling_jobs(backend, sets, microbatch_size, schedule, num_microbatches, repeats)
    outcomes = {
        run: peaks
        for runs in jobs.values()
        for run in runs
        if (peaks := backend.find(run)) is not None
    }
    missing = {job.key: job for job, runs in jobs.items() if runs[0] not in outcomes}
    batch = Batch(
        list(missing.values()), backend.store, backend.provenance, workload, progress, watch
    )
    for outcome in batch.run(lambda: where.open(setting, backend, len(missing))):
        for run in jobs[outcome.job]:
            found = run.failed(outcome.error) if outcome.value is None else backend.find(run)
            assert found is not None, "it has just been kept"
            outcomes[run] = found
    _check_some(list(outcomes.values()))
    num_layers = backend.compiler.traced(microbatch_size).graph.num_layers
    return form_statistics(
        sets,
        num_layers,
        microbatch_size,
        schedule,
        num_microbatches,
        lambda choice, p, m: outcomes[
            ProfilingRun(p, choice, microbatch_size, m, schedule, repeats)
        ],
    )


def profiling_jobs(
    backend: RunBackend,
    sets: Sequence[PaperRuns],
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    repeats: int,
) -> dict[Job, list[ProfilingRun]]:
    """The different runs of some sets, as jobs, each with the runs that it stands for."""
    runs_of: dict[str, list[ProfilingRun]] = {}
    for one in sets:
        for m in profile_batches(num_microbatches):
            for partitioning in one.partitionings:
                run = ProfilingRun(partitioning, one.choice, microbatch_size, m, schedule, repeats)
                runs_of.setdefault(backend.key(run), []).append(run)
    return {Job(key, same[0], "run", PROFILING_RUNS): same for key, same in runs_of.items()}


def _check_some(outcomes: list[RunPeaks]) -> None:
    if all(outcome.failures for outcome in outcomes):
        raise ProfileError.of(
            f"all {len(outcomes)} profiling runs failed; the first: {outcomes[0].failures[0]}. "
            "Raise --memory, set JAX_PLATFORMS=cpu to "
            "run on virtual CPU devices, or profile with --backend compile, which runs nothing.",
            "profile-runs",
        )


def machine_of_workers(setting: Setting, where: Where) -> Machine:
    """The devices that a worker has. This process asks, and stays away from accelerators itself: it
    would take memory of theirs.

    Raises:
        ProfileError: ``profile-worker`` if the worker cannot say.
    """
    batch = Batch([Job("machine", None, "machine", "devices of the workers")], Store(), {})
    (outcome,) = batch.run(lambda: where.open(setting, None, 1))
    if outcome.value is None:
        raise ProfileError.of(
            f"a worker cannot say which devices it has: {plain(outcome.error)}", "profile-worker"
        )
    return Machine(**outcome.value)
