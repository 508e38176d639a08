"""The loop that has jobs done, wherever, between the queue, the pool and the store: nothing that
was finished is lost.

The process that runs this loop owns the store. A result is committed before anything else is done
with it, so whatever ends the process (a signal, a full disk, the loss of the cluster), finished
measurements stay, and the same jobs resume where they stopped.

A job that fails is tried again; one that fails again and again is set aside with its traceback, and
its batch goes on without it:

    refused by the library itself       at once: it will say the same again
    failed by a fault of the library    at once, and not set aside: when all others are done, the
                                        batch raises what is to be reported
    raised an exception                 after 2 attempts
    its worker ended, or it timed out   after 5 and 2 attempts; from the second on it is tried
                                        alone, when all others are done
    its node was lost                   after 20: that is no fault of the job, and its worker's
                                        sudden silence most likely none
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from capture import interrupts
from capture.errors import CaptureError, ProfileError, plain
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from profiling_runs.jobs import Failure, Job, Outcome, Queue
from profiling_runs.pools.pool import Pool

#: After so many a job is set aside. Workers are also killed from outside, so a single loss says
#: little.
MAX_ATTEMPTS: dict[Failure, int] = {
    "refused": 1,
    "bug": 1,
    "raised": 2,
    "timed out": 2,
    "lost": 5,
    "node lost": 20,
}
#: Called with (kind of jobs, done, total).
Progress = Callable[[str, int, int], None]
#: Called with what happened to a job, as plain data for a line of JSON.
Watch = Callable[[Mapping[str, Any]], None]
#: Opens the pool for a batch, as a context that the batch leaves when it ends.
Opened = Callable[[], AbstractContextManager[Pool]]


class Batch:
    """A batch of jobs of one model, and the store that keeps their results.

    Args:
        jobs: With different keys.
        store: Owned by this process.
        provenance: Where the measurements are from: backend, target, versions, flags.
        workload: By name, for the store's rows.
        progress: Told of every kind of job as it grows.
        watch: Told of every start and end of a job.

    Attributes:
        poll_seconds: So long news of workers are waited for before anything else is looked at.
    """

    poll_seconds = 1.0

    def __init__(
        self,
        jobs: Sequence[Job],
        store: Store,
        provenance: Mapping[str, object],
        workload: WorkloadSpec | None = None,
        progress: Progress = lambda what, done, total: None,
        watch: Watch = lambda event: None,
    ):
        self._store, self._provenance = store, provenance
        self._progress, self._watch = progress, watch
        self._totals, self._done = Counter[str](), Counter[str]()
        self._failures: dict[str, Counter[Failure]] = {}
        self._bugs: list[Outcome] = []
        self._workload, self._backend = workload, str(provenance.get("backend", ""))
        self._set_aside: list[Outcome] = []
        self._queue, self._keys, self._running = Queue([]), set[str](), set[str]()
        self.add(jobs)

    def add(self, jobs: Sequence[Job], first: bool = False) -> None:
        """Add jobs, behind those that wait or before them; a job that waits or runs already is not
        done twice."""
        jobs = [job for job in jobs if job.key not in self._keys]
        self._totals.update(job.kind for job in jobs)
        self._keys |= {job.key for job in jobs}
        set_aside = self._store.enqueue(
            {job.key: job.to_json(self._workload, self._backend) for job in jobs}
        )
        self._queue.extend((job for job in jobs if job.key not in set_aside), first)
        self._set_aside += [
            Outcome(job, None, error=_known(set_aside[job.key]))
            for job in jobs
            if job.key in set_aside
        ]
        for kind in dict.fromkeys(job.kind for job in jobs):
            self._progress(kind, self._done[kind], self._totals[kind])

    @property
    def is_done(self) -> bool:
        """Whether no job of the batch waits or runs."""
        return not (self._queue or self._running or self._set_aside)

    def run(self, opened: Opened) -> Iterator[Outcome]:
        """Have the jobs done, and yield the last outcome of each: a value that is in the store, or
        why it was set aside. Takes arguments and raises as ``polled``."""
        return (outcome for outcome in self.polled(opened) if outcome is not None)

    def polled(self, opened: Opened) -> Iterator[Outcome | None]:
        """Have the jobs done as ``run``, and yield None as well whenever workers were given jobs
        and asked for news, for ``poll_seconds`` at most.

        Args:
            opened: Called if there is anything to do; the pool's context is left at the end, also
                by an exception.

        Raises:
            ProfileError: ``store-write`` if the disk does not take a result; ``internal-error``,
                when all other jobs are done, for a fault of the library; what the pool raises
                when nothing can run at all.
        """
        yield from self._known_to_fail()
        if not self._queue:
            return
        running = self._running
        with opened() as pool:
            try:
                while self._queue or running:
                    interrupts.raise_noted()
                    yield from self._known_to_fail()
                    self.hand_out(pool)
                    outcomes = pool.finished(self.poll_seconds)
                    # All are kept before anybody hears of one.
                    last = [outcome for outcome in outcomes if self._judge(outcome)]
                    running -= {outcome.job.key for outcome in outcomes}
                    for outcome in last:
                        if outcome.failure != "bug":
                            yield self._settled(outcome)
                    yield None
            finally:
                # A store that cannot be written has raised already; the next batch frees them too.
                with suppress(ProfileError):
                    self._store.release(running)
        if self._bugs:
            raise _to_report(self._bugs)

    def _known_to_fail(self) -> Iterator[Outcome]:
        """Yield the outcomes of jobs that an earlier command has set aside."""
        while self._set_aside:
            outcome = self._set_aside.pop(0)
            self._say(outcome.job, "set aside", error=outcome.error)
            self._queue.settle(outcome.job.key, None)
            yield self._settled(outcome)

    def hand_out(self, pool: Pool) -> None:
        """Give jobs to workers that have none."""
        for worker in pool.idle():
            job = self._queue.take(worker.group, alone=not self._running)
            if job is None:
                return
            pool.start(worker, job)
            self._running.add(job.key)
            self._store.start(job.key, worker.name)
            self._say(job, "running", worker=worker.name)

    def _judge(self, outcome: Outcome) -> bool:
        """Keep the result of an attempt at a job. Return whether it was the job's last attempt."""
        job, failure = outcome.job, outcome.failure
        facts = {"seconds": round(outcome.seconds, 6), "worker": outcome.worker}
        if failure is None:
            # Under another key it is of no job.
            kind = {"kind": job.kind} if outcome.stored_key else {}
            self._store.finish(
                job.key,
                outcome.value,
                provenance={**self._provenance, **kind},
                seconds=outcome.seconds,
                worker=outcome.worker,
                stored_key=outcome.stored_key,
            )
            for key, value in outcome.others.items():
                self._store.put(key, value, provenance=self._provenance, seconds=0)
            self._say(job, "done", **facts)
            self._queue.settle(job.key, outcome.value)
            return True
        if failure == "bug":
            self._bugs.append(outcome)
        seen = self._failures.setdefault(job.key, Counter())
        seen[failure] += 1
        given_up = seen[failure] >= MAX_ATTEMPTS[failure]
        blameless = failure == "node lost" and not given_up
        set_aside = given_up and failure != "bug"
        if blameless:
            self._store.release([job.key])
        else:
            self._store.fail(job.key, outcome.error, outcome.traceback, set_aside=set_aside)
        self._say(
            job,
            "set aside" if set_aside else "pending" if blameless else "failed",
            **facts,
            error=outcome.error,
        )
        if given_up:
            self._queue.settle(job.key, None)
        elif seen.total() > seen["node lost"] + 1:
            self._queue.add_last(job)
        else:
            self._queue.add(job)
        return given_up

    def _settled(self, outcome: Outcome) -> Outcome:
        kind = outcome.job.kind
        self._keys.discard(outcome.job.key)
        self._done[kind] += 1
        self._progress(kind, self._done[kind], self._totals[kind])
        return outcome

    def _say(self, job: Job, state: str, **facts: Any) -> None:
        about = {"key": job.key, "kind": job.kind, "state": state}
        self._watch({"event": "job", "time": time.time(), **about, **facts})


def _to_report(bugs: Sequence[Outcome]) -> CaptureError:
    """Return the error that tells a user which faults of the library to report."""
    first = bugs[0]
    of_others = f" (and of {len(bugs) - 1} others)" if len(bugs) > 1 else ""
    return ProfileError.of(
        f"a measurement of {first.job.what}{of_others} failed by a fault of CAPTURE, not of the "
        f"model: {plain(first.error)}. All other measurements are kept. Please report the "
        f"command, the versions of jax and optax, and this traceback:\n{first.traceback.rstrip()}",
        "internal-error",
    )


def _known(error: str) -> str:
    return (
        f"{plain(error)} (set aside by an earlier command; capture store retry lets it be tried "
        "again)"
    )
