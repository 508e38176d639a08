"""A training over hosts that goes on when a process is lost: all are ended, started again from the
last complete checkpoint, and repeat the steps after it. Loads no JAX.

A run that breaks at one step again and again ends: restarts are counted from the last step that was
finished for the first time. A node that is lost every time, or that the starter misses, is gone;
with ``Restarts.replan`` the training then goes on without it, under another plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from capture.errors import ExecutionError
from capture.plan.files import PlanFile
from capture.runtime.hosts.documents import joined
from capture.runtime.hosts.process import Said
from capture.runtime.hosts.saved import complete_steps
from capture.runtime.hosts.watching import FOLLOWING, SILENT_SECONDS, HostError, Starter, watch
from capture.runtime.step_record import StepRecord

#: What may not be there the next time. A broken rule is broken again.
_PASSING = FOLLOWING | {"run-host-lost", "run-host-memory"}


@dataclass(frozen=True)
class Restarts:
    """The rules for an attempt that breaks: how often to restart, and how to plan without a node.

    Attributes:
        most: Restarts between two steps that are finished for the first time.
        replan: From a plan and the nodes of its cluster that are gone, the plan for the others;
            None: without them the run ends.
    """

    most: int = 0
    replan: Callable[[PlanFile, frozenset[int]], PlanFile] | None = None


#: The first that breaks ends the run.
NONE = Restarts()


def train_over_hosts(
    starter: Starter,
    plan: PlanFile,
    training: Mapping[str, object],
    restarts: Restarts = NONE,
    report: Callable[[str], None] = lambda text: None,
    silent_seconds: float = SILENT_SECONDS,
) -> dict[str, Any]:
    """Train a plan over hosts, with restarts, and return the document of ``capture run --json`` of
    all processes together. None of them is left.

    Args:
        plan: Of stages that are within nodes, or on whole ones.
        training: Fields of ``capture.runtime.training.Training``.
        silent_seconds: After which a process counts as frozen.

    Raises:
        ExecutionError: What broke the last attempt, as ``watch`` says it.
    """
    run = _Run(plan, dict(training), restarts, report)
    while True:
        try:
            processes = starter.start(run.plan, run.training)
            try:
                count = len(run.plan.known_cluster.nodes)
                return run.document(joined(watch(processes, count, run.note, silent_seconds)))
            finally:
                processes.end()
        except ExecutionError as error:
            run.go_on(error, starter)


@dataclass
class _Run:
    """A training and its attempts.

    Attributes:
        first: The first step that was ever finished; None before.
        steps: Loss and seconds of every step that was finished, as often as it was.
        breaks: What ended attempts, as the document has it.
        in_a_row: Per attempt since a step was finished for the first time, the host that was lost;
            None for other failures.
        broken_at: When, until the next step is finished.
        others: Checkpoints of other trainings where this one's go.
    """

    plan: PlanFile
    training: dict[str, Any]
    restarts: Restarts
    report: Callable[[str], None]
    first: int | None = None
    steps: dict[int, tuple[Any, float]] = field(default_factory=dict)
    breaks: list[dict[str, Any]] = field(default_factory=list)
    in_a_row: list[int | None] = field(default_factory=list)
    broken_at: float | None = None
    others: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        save, restore = self.training.get("save"), self.training.get("restore")
        if save is not None and save != restore:
            self.others = frozenset(complete_steps(save))

    def note(self, said: Said | StepRecord) -> None:
        if isinstance(said, Said):
            self.report(said.text)
            return
        if self.first is None:
            self.first = said.step
        if said.step not in self.steps:
            self.in_a_row.clear()
        self.steps[said.step] = said.loss, said.seconds
        if self.broken_at is not None:
            self.breaks[-1]["seconds_to_next_step"] = time.monotonic() - self.broken_at
            self.broken_at = None

    def go_on(self, error: ExecutionError, starter: Starter) -> None:
        """Make the next attempt ready.

        Raises:
            ExecutionError: What is given, if there is none.
        """
        if not _PASSING.issuperset(error.codes):
            raise error
        self.broken_at = time.monotonic()
        host = error.host if isinstance(error, HostError) else None
        self.in_a_row.append(host if "run-host-lost" in error.codes else None)
        gone = self._gone(starter) if self.restarts.replan is not None else frozenset[int]()
        if not gone and len(self.in_a_row) > self.restarts.most:
            raise error
        self._resume()
        self.breaks.append(
            {
                "host": host,
                "codes": list(error.codes),
                "said": error.violations[0].message.splitlines()[0],
                "finished_steps": max(self.steps, default=None),
                "resumed_from_step": self._saved,
                "nodes_gone": sorted(gone),
            }
        )
        self.report(str(error))
        where = "the beginning" if self._saved is None else f"the checkpoint of step {self._saved}"
        if gone and self.restarts.replan is not None:
            begin = time.monotonic()
            nodes = ", ".join(map(str, sorted(gone)))
            self.plan = self.restarts.replan(self.plan, gone)
            self.breaks[-1]["replan_seconds"] = time.monotonic() - begin
            self.in_a_row.clear()
            self.report(f"node {nodes} is gone: going on from {where} under a plan for the others")
        else:
            count = f"{len(self.in_a_row)} of {self.restarts.most} before the next new step"
            self.report(f"starting again from {where} (restart {count})")

    def document(self, document: dict[str, object]) -> dict[str, Any]:
        """Return the document of the last attempt with the losses, seconds and restarts of all."""
        if not self.breaks:
            return document
        done = sorted(self.steps)
        return document | {
            "losses": [self.steps[step][0] for step in done],
            "step_seconds": [self.steps[step][1] for step in done],
            "restarts": self.breaks,
        }

    @property
    def _saved(self) -> int | None:
        """The step of the last complete checkpoint of this run."""
        if self.first is None or self.training.get("save") is None:
            return None
        own = set(complete_steps(self.training["save"])) - self.others
        return max(own, default=None)

    def _gone(self, starter: Starter) -> frozenset[int]:
        """Return nodes that are missing or lost every time; none if no other node would be left."""
        found = starter.missing(self.plan)
        if len(self.in_a_row) > self.restarts.most and len(set(self.in_a_row)) == 1:
            found |= {host for host in self.in_a_row if host is not None}
        return found if len(found) < len(self.plan.known_cluster.nodes) else frozenset()

    def _resume(self) -> None:
        """Resume from the last complete checkpoint; end where the first attempt was to end."""
        if self.first is None:
            return
        if self.training.get("until") is None:
            self.training["until"] = self.first - 1 + self.training["num_steps"]
        if self._saved is not None:
            # What is restored is not compared with one device, which has no such beginning.
            self.training |= {"restore": self.training["save"], "check": False}
