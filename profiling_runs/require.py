"""Measurements that are required of any kind: taken from the store, or else made by jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from capture.documents import read
from capture.errors import ProfileError, plain
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.profiler.executing import ExecutingMachine
from capture.registered import Registered
from profiling_runs.batch import Batch, Progress, Watch
from profiling_runs.jobs import Backend, Job, Outcome, Setting
from profiling_runs.pools.pool import Kept, Pool
from profiling_runs.pools.where import DEFAULT_LOCAL_WORKERS, Where, setting_of

B = TypeVar("B", bound=Backend)
C = TypeVar("C")


@dataclass
class Measurer(Generic[B]):
    """The measurer of a model's programs: what the store has is taken from it, and jobs make the
    rest, in this process or in workers.

    Attributes:
        backend: Knows keys and measures.
        asked: The workload by name, and what workers need beside it; None measures in this
            process.
        where: Jobs run.
        progress, watch: Told how far the jobs are.
        errors: Why jobs failed, by key; they are not tried again.
    """

    backend: B
    asked: Setting | None = None
    where: Where = Where()
    progress: Progress = lambda kind, done, total: None
    watch: Watch = lambda event: None
    errors: dict[str, str] = field(default_factory=dict)
    _read: dict[str, Any] = field(default_factory=dict)
    _kept: Kept | None = None
    _ahead: tuple[int, ...] = ()
    _started: Setting | None = None
    _live: tuple[Batch, Iterator[Outcome | None]] | None = None
    _most_jobs: int = DEFAULT_LOCAL_WORKERS

    @property
    def spec(self) -> WorkloadSpec | None:
        """The workload by name; None if it is an object of this process."""
        return None if self.asked is None else self.asked.workload

    @property
    def setting(self) -> Setting | None:
        """The setting that tells workers how to measure; None if it is done in this process."""
        if self.asked is None or self.where.here:
            return None
        kind, options = type(self.backend), self.backend.options
        made_by = Registered(f"{kind.__module__}:{kind.__qualname__}")
        return setting_of(replace(self.asked, backend=made_by, options=options, ahead=self._ahead))

    def measure(self, jobs: Iterable[Job]) -> dict[str, Any]:
        """Return the measurements of jobs as the store keeps them, by key: from the store, or made
        now. Failures are kept in ``errors``, not raised."""
        found, missing = self.missing_jobs(jobs)
        for outcome in self._run(missing):
            if outcome.value is None:
                self.errors[outcome.job.key] = outcome.error
            else:
                found[outcome.job.key] = outcome.value
        return found

    def measured(self, jobs: Sequence[Job], kind: type[C]) -> dict[str, C]:
        """Return the measurements of jobs by key, read as ``kind``; what was read before is kept.
        Failures are kept in ``errors``, not raised."""
        found = self.measure(job for job in jobs if job.key not in self._read)
        self._read |= {key: read(value, kind) for key, value in found.items()}
        return {job.key: self._read[job.key] for job in jobs if job.key in self._read}

    def missing_jobs(self, jobs: Iterable[Job]) -> tuple[dict[str, Any], list[Job]]:
        """Return what the store has of jobs, by key, and the different jobs that are left."""
        asked: dict[str, Job] = {}
        for job in jobs:
            if job.key not in self.errors:
                asked.setdefault(job.key, job)
        values = self.backend.store.get(asked)
        left = [job for key, job in asked.items() if key not in values]
        num_needing = Counter(job.needs for job in left)
        apart = {key for key, num in num_needing.items() if key in values or num > 1}
        needed = {job.needs for job in asked.values()}
        return values, [
            _prepared(job, apart, values)
            for job in left
            if job.key in apart or job.key not in needed
        ]

    def _run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Run jobs and yield their outcomes; jobs that were begun before go on beside them."""
        if self._kept is None or not self._in_workers:
            yield from self._batch(jobs).run(lambda: self._kept or self._open(len(jobs)))
            return
        wanted = {job.key for job in jobs}
        if jobs:
            self._add(jobs, first=True)
        for outcome in self._lively() if jobs else ():
            if outcome is not None and outcome.job.key in wanted:
                wanted.discard(outcome.job.key)
                yield outcome
            if not wanted:
                break
        if self._live is not None and self._live[0].is_done:
            self._end_live()

    @property
    def _in_workers(self) -> bool:
        return self.asked is not None and not self.where.here

    def _add(self, jobs: Sequence[Job], first: bool = False) -> Batch:
        """Add jobs to those that kept workers do."""
        if self._live is None:
            batch = self._batch(jobs)
            self._live = batch, batch.polled(lambda: self._kept or self._open(len(jobs)))
        else:
            self._live[0].add(jobs, first)
        return self._live[0]

    def _lively(self) -> Iterator[Outcome | None]:
        """Yield outcomes of the kept workers' jobs as they come, None between; nothing is ended
        where nobody asks for more."""
        assert self._live is not None, "jobs were added"
        live, self._live = self._live, None  # whatever is raised ends it
        for outcome in live[1]:
            self._live = live
            yield outcome
            self._live = None

    def _end_live(self) -> None:
        """End the jobs of kept workers for which nobody waits."""
        if self._live is not None:
            self._live[1].close()  # type: ignore[attr-defined]
        self._live = None

    def _batch(self, jobs: Sequence[Job]) -> Batch:
        backend, self._most_jobs = self.backend, max(self._most_jobs, len(jobs))
        return Batch(jobs, backend.store, backend.provenance, self.spec, self.progress, self.watch)

    def _open(self, num_jobs: int) -> Pool:
        return self.where.open(self.setting, self.backend, num_jobs)

    def end(self) -> None:
        """End the workers that are kept, and their jobs; later ones are started anew."""
        self._end_live()
        if self._kept is not None:
            self._kept.end()
        self._started = None

    @contextmanager
    def keeping_workers(self) -> Iterator[None]:
        """Keep the same workers for everything that is measured within the block, so that they
        trace the model once."""
        self._kept = Kept(lambda: self._open(self._most_jobs))
        try:
            yield
        finally:
            self.end()
            self._kept = None


def _prepared(job: Job, apart: Container[str | None], values: Mapping[str, object]) -> Job:
    """Return a job with what it needs, if the store has it. What one job alone needs is a part of
    it: nobody has to hear of it in between."""
    if job.needs is None:
        return job
    if job.needs not in apart:
        return replace(job, needs=None, also=(job.needs,))
    return replace(job, known={job.needs: values[job.needs]}) if job.needs in values else job


def machine_of_workers(setting: Setting, where: Where) -> ExecutingMachine:
    """Ask a worker which devices it has. This process stays away from accelerators itself: it would
    take memory of theirs.

    Raises:
        ProfileError: ``profile-worker`` if the worker cannot say.
    """
    batch = Batch([Job("machine", None, "machine", "devices of the workers")], Store(), {})
    (outcome,) = batch.run(lambda: where.open(setting_of(setting), None, 1))
    if outcome.value is None:
        raise ProfileError.of(
            f"a worker cannot say which devices it has: {plain(outcome.error)}", "profile-worker"
        )
    return ExecutingMachine(**outcome.value)
