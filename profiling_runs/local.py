"""Measure in worker processes of this machine. The parent owns the store: a measurement is kept as soon as it arrives."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capture import environment
from capture.errors import CaptureError, ProfileError
from capture.plan import TensorParallelRule
from capture.profile import StageConfig
from capture.target import Target
from capture.workload import WorkloadSpec


@dataclass(frozen=True)
class Job:
    """One measurement to make.

    Attributes:
        key: Of the measurement.
        config: What is measured.
        part: All of a stage, the end of a step alone, or what the buffers of a stage are.
        known: Measurements that it builds on, by key.
    """

    key: str
    config: StageConfig
    part: Literal["stage", "update", "buffers"] = "stage"
    known: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> tuple[Any, ...]:
        """Jobs of a group share work when the same process does them one after the other."""
        return self.part, self.config.choice, self.config.microbatch_size


@dataclass(frozen=True)
class Measured:
    """What came of one job.

    Attributes:
        key: Of the measurement.
        value: As the store keeps it; None if it failed.
        seconds: It took.
        error: Why it failed.
    """

    key: str
    value: dict[str, Any] | None
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class WorkerModel:
    """How a worker rebuilds the model: everything is plain data."""

    workload: WorkloadSpec
    num_layers: int | None
    tensor_parallel_rule: TensorParallelRule
    num_devices: int
    target: str = "cpu"


#: What a worker was seen to need at most (0.9 GB: GPT, MoE and Wide-ResNet of Table I, 16 layers at once), with some room.
WORKER_BYTES = 1_200_000_000


def affordable_workers(num_workers: int, free_bytes: int | None = None) -> int:
    """As many of the workers as the free memory of this machine has room for, at least one.

    Args:
        num_workers: Wanted.
        free_bytes: Of the machine; read from it if None, and not limited where it does not say.

    Example:
        >>> affordable_workers(8, free_bytes=5_000_000_000)
        4
    """
    if free_bytes is None:
        found = re.search(r"^MemAvailable: +(\d+) kB", _text_of(Path("/proc/meminfo")), re.M)
        if found is None:
            return num_workers
        free_bytes = int(found[1]) * 1024
    return max(1, min(num_workers, free_bytes // WORKER_BYTES))


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def measure_in_processes(model: WorkerModel, jobs: Iterable[Job], num_workers: int) -> Iterator[Measured]:
    """Yield measurements as they finish, in any order. A worker stays with a group of jobs while it lasts.

    Raises:
        ProfileError: ``profile-worker`` if a worker process ended; what was yielded stands.
    """
    affordable = affordable_workers(num_workers)
    if affordable < num_workers:
        warnings.warn(f"{num_workers} workers were asked for; the free memory has room for {affordable}", stacklevel=2)
        num_workers = affordable
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=(model, os.getpid())) for _ in range(num_workers)]
    waiting = _Groups(jobs)
    running: dict[Future[Measured], tuple[int, tuple[Any, ...]]] = {}

    def start(worker: int, group: tuple[Any, ...] | None) -> None:
        job = waiting.take(group)
        if job is not None:
            running[pools[worker].submit(_measure_in_worker, job)] = worker, job.group

    try:
        for worker in range(num_workers):
            start(worker, None)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                start(*running.pop(future))
                yield future.result()
    except BrokenProcessPool as error:
        raise ProfileError.of(
            f"a worker process that compiles ended before it was done (out of memory?): {error} Finished measurements are kept: run the "
            f"same command again, with fewer than --workers {num_workers} or with --workers 0.",
            "profile-worker",
        ) from error
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


class _Groups:
    """Jobs that wait, by group."""

    def __init__(self, jobs: Iterable[Job]):
        self._groups: dict[tuple[Any, ...], deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault(job.group, deque()).append(job)
        self._taken: set[tuple[Any, ...]] = set()

    def take(self, group: tuple[Any, ...] | None) -> Job | None:
        """The next job: of this group if it has one, else of one that nobody has begun, else of the longest."""
        if group not in self._groups:
            if not self._groups:
                return None
            fresh = [name for name in self._groups if name not in self._taken]
            group = fresh[0] if fresh else max(self._groups, key=lambda name: len(self._groups[name]))
        self._taken.add(group)
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job


def measure_here(backend: Any, jobs: Iterable[Job]) -> Iterator[Measured]:
    """The same in this process, one after the other: for workloads that exist only as Python objects."""
    for job in jobs:
        yield _measure(backend, job)


_worker: dict[str, Any] = {}  # the backend of a worker process, set once by its initializer


def _start_worker(model: WorkerModel, parent: int) -> None:
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    target = Target.load(model.target)
    environment.prepare(num_devices=model.num_devices, platform=target.platform)
    from capture.profiler.compile import CompileBackend

    _worker["backend"] = CompileBackend(model.workload.load(), model.num_layers, model.tensor_parallel_rule, target=target)


def end_with(parent: int) -> None:
    """A worker whose parent was killed ends too."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _measure_in_worker(job: Job) -> Measured:
    return _measure(_worker["backend"], job)


def _measure(backend: Any, job: Job) -> Measured:
    """A job that fails is reported, not raised: a compiler or model error of one stage must not lose the others."""
    start = time.perf_counter()
    try:
        for key, value in job.known.items():
            backend.store.put(key, value, provenance={}, seconds=0)
        measure = {"stage": backend.measure, "update": backend.measure_update, "buffers": backend.measure_buffers}
        return Measured(job.key, measure[job.part](job.config).to_json(), time.perf_counter() - start)
    except CaptureError as error:
        return Measured(job.key, None, time.perf_counter() - start, str(error))
    except Exception as error:
        return Measured(job.key, None, time.perf_counter() - start, f"{type(error).__name__}: {error}")
