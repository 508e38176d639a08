"""The pools of workers that do jobs: this process, processes of this machine, or a Ray cluster.

A pool has as many workers as there is room for. Each measures one job at a time and is asked for
nothing before it has said that it is ready; one that ends, however, is replaced. With
``fresh_process`` a worker measures one job and ends.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from capture import environment
from capture.errors import ProfileError
from capture.measured.claims import name_of_process
from profiling_runs.jobs import Backend, Failure, Job, Outcome

#: What a worker was seen to need at most (0.9 GB: GPT, MoE and Wide-ResNet of Table I, 16 layers at
#: once), with some room.
WORKER_BYTES = 1_200_000_000
#: Workers that may end one after the other before any gets ready; then something is wrong that
#: starting more does not cure.
MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class Ready:
    """The message that a worker can take its first job."""

    name: str


@dataclass(frozen=True)
class Ended:
    """The message that a worker is gone.

    Attributes:
        failure: Whether that may be the fault of its job.
        why: In words.
    """

    failure: Failure
    why: str


class PoolWorker(ABC):
    """One worker of a pool, as its owner sees it."""

    def __init__(self) -> None:
        self.name, self.ready, self.started, self.deadline = "", False, 0.0, float("inf")
        self.job: Job | None = None
        self.group: tuple[Any, ...] | None = None

    @abstractmethod
    def send(self, job: Job) -> None:
        """Have the worker measure a job."""

    @abstractmethod
    def receive(self) -> Ready | Outcome | Ended:
        """Return the next message of the worker: that it is ready, an outcome, or its end.

        Raises:
            CaptureError: of a worker that could not be made, as no other can.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


class Pool(ABC):
    """A pool of workers. As a context it ends them all when it is left.

    Args:
        fresh_process: Whether a worker measures one job only.
        timeout_seconds: Most that a job may take on an idle machine (``environment.patience``);
            then its worker is ended.
    """

    def __init__(self, *, fresh_process: bool, timeout_seconds: float):
        self.fresh_process, self.timeout_seconds = fresh_process, timeout_seconds
        self._workers: list[Any] = []
        self._failed_starts = 0

    @abstractmethod
    def room(self) -> int:
        """Return how many workers there may be now."""

    @abstractmethod
    def launch(self) -> PoolWorker:
        """Begin to start a worker, without waiting for it."""

    @abstractmethod
    def news(self, workers: Sequence[Any], timeout_seconds: float) -> Sequence[Any]:
        """Return the workers that have a message; wait for the first, up to the timeout."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_busy(self) -> bool:
        """Whether a worker has a job."""
        return any(worker.job is not None for worker in self._workers)

    def idle(self, busy: int = 0) -> Sequence[PoolWorker]:
        """Return the workers that can take a job now, each with the group of its last job. For the
        ``busy`` processors that do something else no worker is started."""
        missing = max(self.room() - busy, 1) - len(self._workers) if self.room() else 0
        self._workers += [self.launch() for _ in range(missing)]
        return [worker for worker in self._workers if worker.ready and worker.job is None]

    def start(self, worker: PoolWorker, job: Job) -> None:
        """Give a job to an idle worker."""
        worker.job, worker.group, worker.started = job, job.group, time.monotonic()
        worker.deadline = 0.0
        worker.send(job)

    def finished(self, timeout_seconds: float) -> list[Outcome]:
        """Return the outcomes of ended jobs; wait for news, but not longer than the timeout."""
        outcomes = []
        for worker in self.news(self._workers, timeout_seconds):
            match worker.receive():
                case Ready(name):
                    worker.ready, worker.name, self._failed_starts = True, name, 0
                case Outcome() as outcome:
                    worker.job, worker.deadline = None, float("inf")
                    outcomes.append(outcome)
                    if self.fresh_process:
                        self._drop(worker)
                case Ended() as ended:
                    outcomes += self._gone(worker, ended)
        allowed = environment.patience(self.timeout_seconds)
        for worker in self._workers:
            # What a busy time has allowed, an idle one does not take away.
            worker.deadline = max(worker.deadline, worker.started + allowed)
        late = [worker for worker in self._workers if time.monotonic() > worker.deadline]
        for worker in late:
            outcomes += self._gone(
                worker, Ended("timed out", f"it was not done within {self.timeout_seconds:g} s")
            )
        return outcomes

    def _gone(self, worker: PoolWorker, ended: Ended) -> list[Outcome]:
        self._drop(worker)
        if worker.job is not None:
            return [
                Outcome(
                    worker.job, None, worker=worker.name, failure=ended.failure, error=ended.why
                )
            ]
        self._failed_starts += not worker.ready and ended.failure != "node lost"
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise ProfileError.of(
                f"{MAX_FAILED_STARTS} workers ended, one after the other, before they could take "
                f"a job: {ended.why}. "
                "Finished measurements are kept: run the same command again, with fewer "
                "--workers, or with --workers 0 to see the error.",
                "profile-worker",
            )
        return []

    def _drop(self, worker: PoolWorker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def close(self) -> None:
        """End every worker that was started."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class Here(Pool):
    """A pool whose one worker is this process: for workloads that exist only as Python objects. It
    cannot outlive a job that ends it.

    Args:
        backend: Knows the model.
    """

    def __init__(self, backend: Backend):
        super().__init__(fresh_process=False, timeout_seconds=float("inf"))
        self._backend = backend

    def room(self) -> int:
        return 1

    def launch(self) -> PoolWorker:
        return _Inline(self._backend)

    def news(self, workers: Sequence[_Inline], timeout_seconds: float) -> Sequence[_Inline]:
        return [worker for worker in workers if worker.job is not None]


class _Inline(PoolWorker):
    """A worker in this process, which measures when it is asked for the outcome."""

    def __init__(self, backend: Backend):
        super().__init__()
        self._backend, self.name, self.ready = backend, name_of_process(), True

    def send(self, job: Job) -> None:
        """Leave the job for ``receive``."""

    def receive(self) -> Outcome:
        from profiling_runs.pools.worker import measure_job

        assert self.job is not None, "there is news"
        return measure_job(self._backend, self.job)

    def kill(self) -> None:
        """Leave this process alone."""


class Kept:
    """A pool that several batches share. As a context it leaves the workers to the next batch,
    unless they still have jobs.

    Args:
        opened: Opens it, for the first batch.
    """

    def __init__(self, opened: Callable[[], Pool]):
        self._opened = opened
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        """The pool, opened now if it is not open."""
        if self._pool is None:
            self._pool = self._opened()
        return self._pool

    def __enter__(self) -> Pool:
        return self.pool

    def __exit__(self, *error: object) -> None:
        if self._pool is not None and self._pool.is_busy:
            self.end()  # what comes of the jobs is of a batch that is no more

    def end(self) -> None:
        """End every worker that was started."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
