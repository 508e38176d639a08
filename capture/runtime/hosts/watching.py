"""The processes of a training, heard until all are done or one breaks. Who started them, and where,
is not known here: a driver of another kind gives another ``Starter``.

A process that dies, an exception in one and a process that freezes are one error, that of the host
in which it began; what others then say follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from capture import environment
from capture.errors import ExecutionError, Violation, plain
from capture.plan.stages import Plan
from capture.runtime.hosts.process import Done, Failed, Message, Said, Stepped

#: Most that a process of an idle machine may give no sign of life.
SILENT_SECONDS = 10.0
#: What else is heard after the first failure, to find the one that led to it.
_GRACE_SECONDS = 0.5
_TURN_SECONDS = 0.1


class Processes(Protocol):
    """Those of one attempt at a training, one per node of its plan."""

    def hear(self, seconds: float) -> Sequence[tuple[int, Message]]:
        """What they have said, by host: at once if there is something, else what comes within so
        long. A process that has ended says ``lost(...)``, once."""

    def end(self) -> None:
        """Kill them: none is left. Nothing happens the second time."""


class Starter(Protocol):
    """Where processes can be started."""

    def start(self, plan: Plan, training: Mapping[str, Any]) -> Processes:
        """One process per node of the plan; of those that it had started none is left.

        Args:
            plan: Of stages that are within nodes, or on whole ones.
            training: Fields of ``capture.runtime.training.Training``.

        Raises:
            ExecutionError: ``run-host-lost``, if trying again may help; all else ends the run.
        """

    def missing(self, plan: Plan) -> frozenset[int]:
        """Nodes of the plan that are gone, after what was waited for them."""


class HostError(ExecutionError):
    """What broke first in an attempt.

    Attributes:
        host: In which.
    """

    def __init__(self, violations: Iterable[Violation], host: int = 0):
        super().__init__(violations)
        self.host = host


def lost(how: str) -> Failed:
    """What is said for a process that can no longer speak."""
    return Failed((Violation(how, "run-host-lost"),))


def watch(
    processes: Processes,
    count: int,
    note: Callable[[Said | Stepped], None] = lambda said: None,
    silent_seconds: float = SILENT_SECONDS,
) -> list[dict[str, Any]]:
    """What each process has done, by host.

    Args:
        processes: Of an attempt; the caller ends them.
        count: How many there are.
        note: Takes what host 0 says of its progress.
        silent_seconds: After which a process counts as frozen.

    Raises:
        HostError: ``run-host-lost`` if a process ends or freezes; what broke in one, with the
            codes that it has, in front of it the host.
    """
    documents: dict[int, dict[str, Any]] = {}
    failures: dict[int, Failed] = {}
    heard = dict.fromkeys(range(count), time.monotonic())
    until = float("inf")
    while len(documents) < count and len(failures) < count and time.monotonic() < until:
        for host, message in processes.hear(_TURN_SECONDS):
            heard[host] = time.monotonic()
            match message:
                case Said() | Stepped() if host == 0:
                    note(message)
                case Done(document):
                    documents[host] = document
                case Failed():
                    failures.setdefault(host, message)
                case _:
                    pass
        for host, since in heard.items():
            quiet = time.monotonic() - since
            if host not in failures and quiet > environment.patience(silent_seconds):
                failures[host] = lost(
                    f"its process gives no sign of life for {quiet:.0f} s (frozen?)"
                )
        if failures and until == float("inf"):
            until = time.monotonic() + _GRACE_SECONDS
    if failures:
        raise _error_of(failures)
    return [documents[host] for host in sorted(documents)]


@dataclass(frozen=True)
class _First:
    host: int
    said: Failed


def _error_of(failures: Mapping[int, Failed]) -> HostError:
    """That of the host where it began: what others say of a process that is gone follows."""
    first = min(
        (_First(host, said) for host, said in failures.items()),
        key=lambda failure: "run-host-lost" not in [v.code for v in failure.said.violations],
    )
    same = [said for said in failures.values() if said.violations == first.said.violations]
    name = "every host" if len(same) == len(failures) > 1 else f"host {first.host}"
    traceback = f"\n{first.said.traceback.rstrip()}" if first.said.traceback else ""
    return HostError(
        (
            Violation(f"{name}: {plain(violation.message)}{traceback}", violation.code)
            for violation in first.said.violations
        ),
        first.host,
    )
