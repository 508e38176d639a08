"""The processes of a training, heard until all are done or one breaks. Who started them, and where,
is not known here: a driver of another kind gives another ``Starter``.

A process that dies, an exception in one and a process that freezes are one error, that of the host
in which it began; what others then say follows from it, and may be heard before it. So a failure
that may follow from another is the first only when every other host has failed or was alive after
it: a process that is killed gives no sign of life after what its end does to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from capture import environment
from capture.errors import ExecutionError, Violation, plain
from capture.plan.files import PlanFile
from capture.runtime.hosts.process import Alive, Done, Failed, Message, Said
from capture.runtime.step_record import StepRecord

#: Most that a process of an idle machine may give no sign of life.
SILENT_SECONDS = 10.0
#: What else is heard after the first failure, so that one that all hosts have is said of all.
GRACE_SECONDS = 0.5
_TURN_SECONDS = 0.1
#: What a host may say because another one was lost, or cannot be reached.
FOLLOWING = {
    "checkpoint-write",
    "exception",
    "run-hosts-cut",
    "run-hosts-silent",
    "run-hosts-start",
}


class Processes(Protocol):
    """The processes of one attempt at a training, one per node of its plan."""

    def hear(self, seconds: float) -> Sequence[tuple[int, Message]]:
        """Return what the processes have said, by host: at once if there is something, else what
        comes within so many seconds. A process that has ended says ``lost(...)``, once."""

    def end(self) -> None:
        """Kill all processes: none is left. Nothing happens the second time."""


class Starter(Protocol):
    """A way to start the processes of an attempt, on this machine or others."""

    def start(self, plan: PlanFile, training: Mapping[str, object]) -> Processes:
        """Start one process per node of the plan; if one cannot start, none of the others is left.

        Args:
            plan: Of stages that are within nodes, or on whole ones.

        Raises:
            ExecutionError: ``run-host-lost``, if trying again may help; all else ends the run.
        """

    def missing(self, plan: PlanFile) -> frozenset[int]:
        """Return the nodes of the plan that are gone, after what was waited for them."""


class HostError(ExecutionError):
    """The error that broke an attempt first."""

    def __init__(self, violations: Iterable[Violation], host: int = 0):
        super().__init__(violations)
        self.host = host


def lost(how: str, *, crashed: bool = False) -> Failed:
    """Return the failure of a process that can no longer speak."""
    return Failed((Violation(how, "run-host-lost"),), crashed=crashed)


def watch(
    processes: Processes,
    count: int,
    note: Callable[[Said | StepRecord], None] = lambda said: None,
    silent_seconds: float = SILENT_SECONDS,
) -> list[dict[str, Any]]:
    """Hear the processes until all are done, and return the document of each, by host.

    Args:
        processes: Of an attempt; the caller ends them.
        note: Takes what host 0 says of its progress.
        silent_seconds: After which a process counts as frozen.

    Raises:
        HostError: ``run-host-lost`` if a process ends or freezes; what broke in one, with the
            codes that it has, in front of it the host.
    """
    documents: dict[int, dict[str, Any]] = {}
    failures: dict[int, Failed] = {}
    heard = dict.fromkeys(range(count), time.monotonic())
    alive = dict.fromkeys(range(count), float("-inf"))
    since = float("inf")
    while len(documents) < count and not is_settled(failures, since, alive):
        for host, message in processes.hear(_TURN_SECONDS):
            heard[host] = time.monotonic()
            match message:
                case Said() | StepRecord() if host == 0:
                    note(message)
                case Alive(at):
                    alive[host] = at
                case Done(document):
                    documents[host] = document
                case Failed():
                    failures.setdefault(host, message)
                case _:
                    pass
        for host, last in heard.items():
            quiet = time.monotonic() - last
            if host not in failures and quiet > environment.patience(silent_seconds):
                failures[host] = lost(
                    f"its process gives no sign of life for {quiet:.0f} s (frozen?)"
                )
        if failures:
            since = min(since, time.monotonic())
    if failures:
        raise _error_of(failures)
    return [documents[host] for host in sorted(documents)]


def is_settled(failures: Mapping[int, Failed], since: float, alive: Mapping[int, float]) -> bool:
    """Return whether a failed host is sure to be the cause. Either one was killed or is frozen,
    which follows from nothing; or each has failed, or was alive a moment after the first was heard.

    Args:
        since: When the first was heard.
        alive: By host, when it gave its last sign of life.
    """
    if not failures:
        return False
    return any(map(_is_killed, failures.values())) or all(
        host in failures or at >= since + GRACE_SECONDS for host, at in alive.items()
    )


def first_cause(failures: Mapping[int, Failed]) -> int:
    """Return the host where the failure began.

    A process that was killed or is frozen before a broken rule, that before one that crashed, and
    that before what each may say because another is gone. Of those that crashed it is host 0, whose
    end ends the others (JAX's coordination service is there); else the one that was heard first.

    Args:
        failures: At least one, in the order in which they were heard.

    Example:
        >>> crashed = lost("signal 6", crashed=True)
        >>> cut = Failed((Violation("recv failed", "run-hosts-cut"),))
        >>> first_cause({1: cut, 2: crashed, 0: crashed})
        0
    """

    def rank(host: int) -> tuple[int, bool]:
        said = failures[host]
        codes = {violation.code for violation in said.violations}
        if _is_killed(said):
            return 0, False
        if said.crashed:
            return 2, host != 0
        return (3 if codes & FOLLOWING else 1), False

    return min(failures, key=rank)


def _is_killed(said: Failed) -> bool:
    return not said.crashed and "run-host-lost" in [each.code for each in said.violations]


def _error_of(failures: Mapping[int, Failed]) -> HostError:
    host = first_cause(failures)
    first = failures[host]
    same = [said for said in failures.values() if said.violations == first.violations]
    name = "every host" if len(same) == len(failures) > 1 else f"host {host}"
    traceback = f"\n{first.traceback.rstrip()}" if first.traceback else ""
    return HostError(
        (
            Violation(f"{name}: {plain(violation.message)}{traceback}", violation.code)
            for violation in first.violations
        ),
        host,
    )
