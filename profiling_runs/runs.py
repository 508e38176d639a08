"""Make the paper's profiling runs with the backend ``run``: in worker processes, or in this one, one after the other.

On CPU a few workers share the runs, and each keeps what it has compiled. On an accelerator every run gets a fresh process, one at a
time. The parent owns the store: a run is kept as soon as it arrives, so that the same command resumes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from capture import environment
from capture.choices import StageChoice
from capture.cluster import Cluster
from capture.errors import ProfileError
from capture.plan import Remat, TensorParallelRule
from capture.profile import Profile
from capture.profiler.paper import (
    PaperRuns,
    PaperStatistics,
    RunPeaks,
    form_statistics,
    most_run_devices,
    paper_runs,
    profile_batches,
)
from capture.store import Store
from capture.workload import WorkloadProtocol, WorkloadSpec
from profiling_runs.local import WorkerModel, end_with

if TYPE_CHECKING:
    from capture.profiler.run import Executed, Machine, ProfilingRun, RunBackend

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunWorker:
    """How a worker rebuilds the backend."""

    model: WorkerModel
    memory_limit_bytes: int | None
    fresh_process: bool


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
    num_workers: int = 2,
    progress: Progress = lambda what, done, total: None,
    alpa_python: str | None = None,
) -> Profile:
    """A profile for the paper's mode from executed runs alone.

    Args:
        workload: The task, or its name; by name it is run in worker processes.
        cluster: Decides the numbers of stages and the degrees.
        microbatch_size, schedule, num_microbatches: Of the target; the runs have half and a quarter as many micro-batches.
        num_layers: None cuts at the model's marks; a number cuts automatically.
        remat, shard_optimizer: Of every stage.
        tensor_parallel_rule: ``"auto"`` or ``"largest"``.
        memory_limit_bytes: A run that needs more on a device is not made, and named as failed.
        store: Of finished runs; in memory if None.
        num_workers: Worker processes on CPU; 0 runs in this process. Accelerators take one at a time.
        progress: Called with (what, done, total).
        alpa_python: Have the runs made by Alpa, with this interpreter of its environment, on its Ray cluster of these nodes.

    Returns:
        The profile; it holds no measurement of a layer window. Runs that failed are named in ``failures``.

    Raises:
        ProfileError: ``profile-runs`` if every run failed; ``profile-backend`` for Alpa and a workload without a name.
        ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    from capture.profiler.run import RunBackend

    spec = workload if isinstance(workload, WorkloadSpec) else None
    worker, machine = None, None
    backend: RunBackend | None = None
    if alpa_python is not None:
        from capture.profiler.alpa import AlpaBackend

        if spec is None:
            raise ProfileError.of("backend='alpa' needs a workload by name: another process imports it.", "profile-backend")
        backend = AlpaBackend(spec, cluster, alpa_python, num_layers, store)
        assert backend.versions, "asked at once: a wrong interpreter would fail every run"
    elif spec is not None and num_workers:
        model = WorkerModel(spec, num_layers, tensor_parallel_rule, most_run_devices(cluster.num_devices))
        machine = _machine_of_workers(model)  # this process stays away from accelerators: it would take memory of theirs
        worker = RunWorker(model, memory_limit_bytes, machine.platform != "cpu")
    if backend is None:
        backend = RunBackend(
            workload.load() if isinstance(workload, WorkloadSpec) else workload,
            num_layers,
            tensor_parallel_rule,
            store,
            memory_limit_bytes=memory_limit_bytes,
            machine=machine,
            fresh_process=worker is not None and worker.fresh_process,
        )
    graph = backend.compiler.traced(microbatch_size).graph
    sets = paper_runs(graph.num_layers, cluster.num_devices, microbatch_size, remat, shard_optimizer)
    statistics = run_statistics(backend, worker, sets, microbatch_size, schedule, num_microbatches, num_workers, progress)
    sharding = backend.compiler.sharding(microbatch_size)
    return Profile(
        graph=graph,
        measurements={},
        param_bytes={tp: sharding.param_bytes(tp) for tp in sorted({one.choice.tensor_parallel for one in sets})},
        provenance={**backend.provenance, "created": datetime.now(UTC).isoformat(timespec="seconds")},
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
    worker: RunWorker | None,
    sets: Sequence[PaperRuns],
    microbatch_size: int,
    schedule: str,
    num_microbatches: int,
    num_workers: int,
    progress: Progress,
) -> PaperStatistics:
    """The statistics of executed runs: those that the store does not have are made.

    Args:
        backend: Knows keys and the store.
        worker: How workers rebuild it; None makes the runs in this process.
        sets: From ``paper_runs``.
        microbatch_size, schedule, num_microbatches: Of the target.
        num_workers: Processes that share the runs on CPU.
        progress: Called with (what, done, total).

    Raises:
        ProfileError: ``profile-runs`` if every run failed.
    """
    from capture.profiler.run import ProfilingRun

    def named(choice: StageChoice, partitioning: tuple[int, ...], m: int) -> ProfilingRun:
        return ProfilingRun(partitioning, choice, microbatch_size, m, schedule)

    every = [named(one.choice, p, m) for one in sets for m in profile_batches(num_microbatches) for p in one.partitionings]
    outcomes = {run: peaks for run in every if (peaks := backend.find(run)) is not None}
    missing: dict[str, list[ProfilingRun]] = {}
    for run in every:
        if run not in outcomes:
            missing.setdefault(backend.key(run), []).append(run)
    jobs = {key: same[0] for key, same in missing.items()}
    if jobs:
        progress("profiling runs", 0, len(jobs))
        made = _make_here(backend, jobs) if worker is None else _make_in_processes(worker, jobs, num_workers)
        for done, (key, executed, seconds) in enumerate(made, start=1):
            outcomes |= {run: backend.keep(run, executed, seconds) for run in missing[key]}
            progress("profiling runs", done, len(jobs))
    _check_some(list(outcomes.values()))
    num_layers = backend.compiler.traced(microbatch_size).graph.num_layers
    return form_statistics(
        sets, num_layers, microbatch_size, schedule, num_microbatches, lambda choice, p, m: outcomes[named(choice, p, m)]
    )


def _check_some(outcomes: list[RunPeaks]) -> None:
    if all(outcome.failures for outcome in outcomes):
        raise ProfileError.of(
            f"all {len(outcomes)} profiling runs failed; the first: {outcomes[0].failures[0]}. Raise --memory, set JAX_PLATFORMS=cpu to "
            "run on virtual CPU devices, or profile with --backend compile, which runs nothing.",
            "profile-runs",
        )


# ---- where runs are made ---------------------------------------------------------------------------------------------

Made = tuple[str, "Executed", float]


def _make_here(backend: RunBackend, jobs: Mapping[str, ProfilingRun]) -> Iterator[Made]:
    for key, run in jobs.items():
        yield _timed(backend, key, run)


def _make_in_processes(worker: RunWorker, jobs: Mapping[str, ProfilingRun], num_workers: int) -> Iterator[Made]:
    """Yield runs as they finish.

    Where memory runs out on CPU, the system may kill a worker, and it cannot be told which run did it. Those that are left are then
    made one at a time; one that ends its process again has failed.
    """
    pending = dict(jobs)
    if num_workers > 1 and not worker.fresh_process:
        try:
            with _Pool(worker, min(num_workers, len(pending))) as pool:
                for future in as_completed([pool.submit(_make, key, run) for key, run in pending.items()]):
                    made = future.result()
                    del pending[made[0]]
                    yield made
        except BrokenProcessPool:
            pass
    while pending:
        with _Pool(worker, 1) as pool:
            for key, run in list(pending.items()):
                del pending[key]
                start = time.perf_counter()
                try:
                    yield pool.submit(_make, key, run).result()
                except BrokenProcessPool:
                    yield _killed(key, time.perf_counter() - start)
                    break


def _killed(key: str, seconds: float) -> Made:
    from capture.profiler.run import Executed

    return key, Executed(None, "", "out of memory? Its process was killed"), seconds


class _Pool(ProcessPoolExecutor):
    """Workers with a backend each; what has not begun is given up at the end."""

    def __init__(self, worker: RunWorker, num_workers: int):
        context = multiprocessing.get_context("spawn")
        one_run = 1 if worker.fresh_process else None
        super().__init__(num_workers, context, initializer=_start_worker, initargs=(worker, os.getpid()), max_tasks_per_child=one_run)

    def __exit__(self, *error: Any) -> None:
        self.shutdown(wait=True, cancel_futures=True)


def _machine_of_workers(model: WorkerModel) -> Machine:
    with _Pool(RunWorker(model, None, fresh_process=False), 1) as pool:
        return pool.submit(_machine).result()


_worker: dict[str, Any] = {}  # of a worker process, set by its initializer


def _start_worker(worker: RunWorker, parent: int) -> None:
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    environment.prepare(num_devices=worker.model.num_devices)
    _worker["worker"] = worker


def _machine() -> Machine:
    from capture.profiler.run import Machine

    return Machine.here()


def _make(key: str, run: ProfilingRun) -> Made:
    if "backend" not in _worker:
        from capture.profiler.run import RunBackend

        worker: RunWorker = _worker["worker"]
        model = worker.model
        _worker["backend"] = RunBackend(
            model.workload.load(),
            model.num_layers,
            model.tensor_parallel_rule,
            memory_limit_bytes=worker.memory_limit_bytes,
            fresh_process=worker.fresh_process,
        )
    return _timed(_worker["backend"], key, run)


def _timed(backend: RunBackend, key: str, run: ProfilingRun) -> Made:
    start = time.perf_counter()
    executed = backend.execute(run)
    return key, executed, time.perf_counter() - start
