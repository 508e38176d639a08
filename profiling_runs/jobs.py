"""Jobs, as pure data: a job is one measurement, and its key the content hash of everything that can
change the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from capture.machine.target import Target
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.registered import Registered


class Backend(Protocol):
    """A backend measures programs of a model in a process, and knows their keys in the store."""

    @property
    def store(self) -> Store:
        """The store of measurements."""
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The facts beside a program that decide a measurement."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments that make the same backend of a workload in another process."""
        ...

    @property
    def key(self) -> Callable[..., str]:
        """The function that returns the store's key of a measurement."""
        ...


@dataclass(frozen=True)
class Setting:
    """The facts that all jobs of a batch share: the model, and how a worker measures it. Plain
    data, to be sent between machines.

    Attributes:
        workload: By name; a worker imports it.
        num_devices: Virtual CPU devices of a worker; of runs on accelerators, those that a worker
            takes.
        target: Compiled for, or run on: a name or a file (``Target.load``).
        executes: Whether programs are executed on the devices of the workers.
        backend: The class that measures, and that is given the workload, the target if nothing is
            executed, and ``options``; None where only the worker's machine is asked for.
        options: Further arguments of the backend.
        fresh_process: Whether every job gets a process of its own, so that an allocator's
            high-water marks are the job's.
        flags: XLA flags of the driver, which a worker takes over: they are part of every key.
        ahead: Micro-batch sizes at which a local worker traces the model until it is asked for
            something.
        versions: The driver's; a worker with others is refused, because its results belong to other
            keys.
    """

    workload: WorkloadSpec
    num_devices: int = 1
    target: str = "cpu"
    executes: bool = False
    backend: Registered | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fresh_process: bool = False
    flags: tuple[str, ...] = ()
    ahead: tuple[int, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform(self) -> str:
        """The platform whose packages a worker needs."""
        return "cpu" if self.executes else Target.load(self.target).platform


class Described(Protocol):
    """A measurement that describes itself, such as ``StageConfig``."""

    @property
    def group(self) -> tuple[Any, ...]: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """A job: one measurement to make.

    Attributes:
        key: The measurement's, in the store.
        what: Is measured: layers at a degree and batch size, a partitioning of all layers, one
            layer in one direction, a program of a plan of packs or of an array, or a copy; None for
            the worker's machine.
        part: What is measured of it, in a word by which the store counts.
        kind: Jobs that are counted together, in words.
        needs: Key of a job whose measurement this one builds on; it is done first.
        known: Measurements that it builds on, by key.
        method: The backend's method that measures it, or a function of the backend and ``what``.
        also: Keys of measurements that are made for it.
    """

    key: str
    what: Described | None
    part: str = "stage"
    kind: str = ""
    needs: str | None = None
    known: Mapping[str, Any] = field(default_factory=dict, hash=False)
    method: str | Registered = "measure"
    also: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[Any, ...]:
        """A key, equal for jobs that share work if one process does them one after the other."""
        return (self.part,) if self.what is None else (self.part, *self.what.group)

    def to_json(self, workload: WorkloadSpec | None, backend: str) -> dict[str, Any]:
        """Return a description of the job for people and the store: the measured part, its
        workload, and the backend (``compile:h100``)."""
        facts: dict[str, Any] = {
            "workload": None if workload is None else str(workload),
            "backend": backend,
            "part": self.part,
        }
        if self.what is not None:
            facts |= self.what.to_json()
        return {**facts, "kind": self.kind}


Failure = Literal["refused", "raised", "bug", "lost", "node lost", "timed out"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt at a job: its value, or why it failed.

    Attributes:
        job: That was tried.
        value: As the store keeps it; None if the attempt failed.
        seconds: It took the worker.
        worker: Host and process.
        failure: ``"refused"`` if the library itself said no, which it will again; ``"bug"`` for an
            exception that is the library's own fault (``capture.errors.is_bug``); ``"raised"`` for
            any other; ``"lost"`` if the worker ended, ``"node lost"`` if that was no
            fault of the job; ``"timed out"``.
        error: Why it failed, in a line.
        traceback: Where the exception was raised.
        stored_key: The measurement's, where it is another than the job's.
        others: Measurements that were made for it, by key.
    """

    job: Job
    value: Any
    seconds: float = 0.0
    worker: str = ""
    failure: Failure | None = None
    error: str = ""
    traceback: str = ""
    stored_key: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)


class Queue:
    """A queue of jobs: by group, behind the jobs that they need, and at the end those that have
    failed before."""

    def __init__(self, jobs: Iterable[Job]):
        self._groups: dict[tuple[Any, ...], deque[Job]] = {}
        self._blocked: dict[str, list[Job]] = {}
        self._again: deque[Job] = deque()
        self._taken: set[tuple[Any, ...]] = set()
        self._unsettled: set[str] = set()
        self.extend(jobs)

    def extend(self, jobs: Iterable[Job], first: bool = False) -> None:
        """Add jobs, each behind the one that it needs; those that come ``first``, before all that
        wait."""
        jobs = list(jobs)[:: -1 if first else 1]
        self._unsettled |= {job.key for job in jobs}
        for job in jobs:
            if job.needs in self._unsettled:
                assert job.needs is not None
                self._blocked.setdefault(job.needs, []).append(job)
            else:
                self.add(job, first)

    def __bool__(self) -> bool:
        return bool(self._groups or self._blocked or self._again)

    def add(self, job: Job, first: bool = False) -> None:
        """Add a job that waits like any other, or that comes ``first``."""
        if not first:
            self._groups.setdefault(job.group, deque()).append(job)
        else:
            group = self._groups.pop(job.group, deque())
            group.appendleft(job)
            self._groups = {job.group: group, **self._groups}

    def add_last(self, job: Job) -> None:
        """Add a job that is tried again when nothing else is left, and alone: so that it takes no
        others with it."""
        self._again.append(job)

    def settle(self, key: str, value: object) -> None:
        """Note that a job was done, or given up (None): those that need it come next, so that what
        was begun first ends first."""
        self._unsettled.discard(key)
        for job in reversed(self._blocked.pop(key, ())):
            known = job.known if value is None else {**job.known, key: value}
            self.add(replace(job, known=known), first=True)

    def take(self, group: tuple[object, ...] | None, *, alone: bool = True) -> Job | None:
        """Take the next job: of this group if it has one, else of a group that nobody has begun,
        else of the longest.

        Args:
            group: What the worker's last job shares with others.
            alone: Whether no other job is running.
        """
        if group not in self._groups:
            if not self._groups:
                return self._again.popleft() if self._again and alone else None
            fresh = (name for name in self._groups if name not in self._taken)
            group = next(fresh, max(self._groups, key=lambda name: len(self._groups[name])))
        self._taken.add(group)
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job
