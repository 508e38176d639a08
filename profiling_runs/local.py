"""Measure in worker processes of this machine. The parent owns the store: a measurement is kept as soon as it arrives."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from capture import environment
from capture.errors import ProfileError
from capture.interface import StageCost
from capture.plan import TensorParallelRule
from capture.profile import StageConfig
from capture.target import Target
from capture.workload import WorkloadSpec


@dataclass(frozen=True)
class Measured:
    """What came of one job.

    Attributes:
        key: Of the measurement.
        cost: None if it failed.
        seconds: It took.
        error: Why it failed.
    """

    key: str
    cost: StageCost | None
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


def measure_in_processes(model: WorkerModel, jobs: Mapping[str, StageConfig], num_workers: int) -> Iterator[Measured]:
    """Yield measurements as they finish, in any order.

    Raises:
        ProfileError: ``profile-worker`` if a worker process ended; what was yielded stands.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(model, os.getpid()))
    try:
        futures = [pool.submit(_measure, key, config) for key, config in jobs.items()]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise ProfileError.of(
            f"a worker process that compiles ended before it was done (out of memory?): {error} Finished measurements are kept: run the "
            f"same command again, with fewer than --workers {num_workers} or with --workers 0.",
            "profile-worker",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def measure_here(backend: Any, jobs: Mapping[str, StageConfig]) -> Iterator[Measured]:
    """The same in this process, one after the other: for workloads that exist only as Python objects."""
    for key, config in jobs.items():
        yield _timed(key, partial(backend.try_measure, config))


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


def _measure(key: str, config: StageConfig) -> Measured:
    return _timed(key, partial(_worker["backend"].try_measure, config))


def _timed(key: str, measure: Callable[[], Any]) -> Measured:
    start = time.perf_counter()
    result = measure()
    seconds = time.perf_counter() - start
    return Measured(key, result, seconds) if isinstance(result, StageCost) else Measured(key, None, seconds, result.message)
