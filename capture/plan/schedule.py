"""Pipeline schedules as data: a table of tasks per group of devices, which simulator, predictor and
runtime only interpret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from capture.errors import PlanError, Violation
from capture.plan.orders import SCHEDULES, StagePass, TaskKind

__all__ = ["PLAIN_SCHEDULES", "SCHEDULES", "Moment", "Occupancy", "Schedule", "StagePass"]

#: Those whose stages have devices of their own and whole backward passes.
PLAIN_SCHEDULES = tuple(name for name, kind in SCHEDULES.items() if kind.is_plain)


@dataclass(frozen=True, order=True)
class Occupancy:
    """The micro-batches that a stage holds, beside its own state, while it or another stage on its
    devices executes one task.

    Attributes:
        kind: The pass being executed; its own input (forward) or gradient (backward) is not counted
            as waiting. ``"idle"`` if another stage executes.
        num_kept: Micro-batches whose activations are kept for their backward pass; the executing
            backward pass included.
        num_waiting_inputs: Micro-batches received from the stage before, whose forward pass has not
            begun.
        num_waiting_gradients: Micro-batches whose gradient came from the stage after, whose
            backward pass has not begun.
        num_losses: On the last stage, micro-batches whose loss is there; they stay until the end of
            the step.
        num_deferred: Micro-batches of which the gradients of the weights are still to come; those
            being executed included.
        accumulates: Whether the stage has accumulators for the gradients of its parameters: from
            the first such gradients of a step to the update.
    """

    kind: TaskKind | Literal["idle"]
    num_kept: int
    num_waiting_inputs: int
    num_waiting_gradients: int
    num_losses: int = 0
    num_deferred: int = 0
    accumulates: bool = True

    @property
    def counts(self) -> tuple[int, ...]:
        """All but the kind; of two occupancies of one kind, one with more of each needs more."""
        return tuple(vars(self).values())[1:]


Moment = tuple[Occupancy, ...]
"""What the stages of a group of devices hold while one of them executes, in pipeline order."""


@dataclass(frozen=True)
class Schedule:
    """An order of tasks for each group of devices.

    Attributes:
        name: As in ``SCHEDULES``.
        num_microbatches: Micro-batches in a step, M.
        orders: ``orders[g]`` is the order in which group g executes its tasks: for each of its
            stages and every micro-batch a forward pass, and a backward pass, whole or split.
        placement: Per stage, its group; () where stage s is on group s.

    Example:
        >>> print(make_schedule("1f1b", 2, 3).as_text())
        0: F0 F1 B0 F2 B1 B2
        1: F0 B0 F1 B1 F2 B2
    """

    name: str
    num_microbatches: int
    orders: tuple[tuple[StagePass, ...], ...]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.orders))))

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_groups(self) -> int:
        return len(self.orders)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each group, in pipeline order."""
        return tuple(
            tuple(s for s, group in enumerate(self.placement) if group == g)
            for g in range(self.num_groups)
        )

    @property
    def is_plain(self) -> bool:
        """Whether every stage has devices of its own and its backward pass is whole."""
        return self.num_stages == self.num_groups and not self.splits_backward

    @cached_property
    def splits_backward(self) -> bool:
        return any(task.kind == "backward_weights" for order in self.orders for task in order)

    @cached_property
    def clocks(self) -> tuple[tuple[StagePass, ...], ...]:
        """The lock-step execution: per clock, the tasks that run at the same time, at most one per
        group.

        A group runs its next task as soon as what it needs was finished in an earlier clock;
        transfers happen between clocks. Flattened, it is a valid order of dispatch for a single
        controller.
        """
        wrong = next(self.violations(), None)
        assert wrong is None, wrong
        position, done, clocks = [0] * self.num_groups, set[StagePass](), []
        while len(done) < sum(map(len, self.orders)):
            ready = []
            for order, at in zip(self.orders, position, strict=True):
                if at < len(order) and (
                    (needed := self.requirement(order[at])) is None or needed in done
                ):
                    ready.append(order[at])
            assert ready, f"schedule {self.name} has a dependency cycle"
            for task in ready:
                position[self.placement[task.stage_id]] += 1
            done.update(ready)
            clocks.append(tuple(ready))
        return tuple(clocks)

    def violations(self) -> Iterator[str]:
        """Yield the rules of any table that this one breaks: every task once, where its stage is,
        and a split pass whole. (A cycle shows in ``clocks``.)"""
        tasks = [task for order in self.orders for task in order]
        if len(set(tasks)) < len(tasks):
            yield f"schedule {self.name} does a task twice"
        for g, order in enumerate(self.orders):
            if any(self.placement[task.stage_id] != g for task in order):
                yield f"schedule {self.name} does a task on a group that has not its stage"
        split = ("backward_inputs", "backward_weights") if self.splits_backward else ("backward",)
        if len(set(tasks)) != self.num_stages * self.num_microbatches * (1 + len(split)) or {
            task.kind for task in tasks
        } != {"forward", *split}:
            yield f"schedule {self.name} leaves a task out"

    @property
    def rounds(self) -> tuple[tuple[StagePass, ...], ...]:
        """The tasks in order of dispatch, in groups: what a group has made is sent after all of it.

        Where each stage has devices of its own, those of a clock. Else one task, so that nothing is
        received by devices that have not yet sent what they made before.
        """
        return (
            self.clocks
            if self.is_plain
            else tuple((task,) for clock in self.clocks for task in clock)
        )

    @cached_property
    def forward_clocks(self) -> tuple[tuple[StagePass, ...], ...]:
        """The clocks of forward passes alone. Each micro-batch enters as soon as it goes from stage
        to stage without waiting, so that no group holds the input of a second one. In a clock the
        last stage comes first."""
        taken, clocks = set[tuple[int, int]](), dict[int, list[StagePass]]()
        start = 0
        for m in range(self.num_microbatches):
            while any((group, start + s) in taken for s, group in enumerate(self.placement)):
                start += 1
            for s, group in enumerate(self.placement):
                taken.add((group, start + s))
                clocks.setdefault(start + s, []).append(StagePass(s, "forward", m))
        return tuple(
            tuple(sorted(tasks, key=lambda task: -task.stage_id))
            for _, tasks in sorted(clocks.items())
        )

    def requirement(self, task: StagePass) -> StagePass | None:
        """Return the task of another group, or of the same, that must have ended before; None for
        the first of a micro-batch."""
        s, m = task.stage_id, task.microbatch
        if task.kind == "forward":
            return None if s == 0 else replace(task, stage_id=s - 1)
        if task.kind == "backward_weights":
            return StagePass(s, "backward_inputs", m)
        if s == self.num_stages - 1:
            return StagePass(s, "forward", m)
        return replace(task, stage_id=s + 1)

    @cached_property
    def resting(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """The places, in the order of its group, of the two passes of each (stage, micro-batch)
        whose activations can rest on a host: they are away for a pass at least, after one during
        which they go and before one during which they come."""
        found = dict[tuple[int, int], tuple[int, int]]()
        for order in self.orders:
            made = dict[tuple[int, int], int]()
            for number, task in enumerate(order):
                key = task.stage_id, task.microbatch
                if task.kind == "forward":
                    made[key] = number
                elif number - (forward := made.pop(key, number)) > 3:
                    found[key] = forward, number
        return found

    @cached_property
    def moments(self) -> tuple[tuple[Moment, ...], ...]:
        """The undominated states of each group's stages over all its tasks: a prediction of its
        peak is a maximum over them."""
        return self._moments(Counter())

    @property
    def moments_without_resting(self) -> tuple[tuple[Moment, ...], ...]:
        """The moments of a plain schedule whose activations rest on hosts where they can."""
        return self._moments(self.away(2, 1))

    def away(self, after: int = 0, before: int = 0) -> Counter[tuple[int, int]]:
        """Count the micro-batches that rest on a host, by stage and number of a task of its group:
        from so many tasks after their forward pass until so many before their backward pass."""
        return Counter(
            (s, number)
            for (s, _), (forward, backward) in self.resting.items()
            for number in range(forward + after, backward - before)
        )

    def _moments(self, away: Counter[tuple[int, int]]) -> tuple[tuple[Moment, ...], ...]:
        """Return the moments, where ``away`` counts micro-batches of a stage that are on a host
        while a task of the stage runs, given by its number."""
        number = Counter[int]()
        kept, inputs, gradients, deferred = ([0] * (self.num_stages + 1) for _ in range(4))
        accumulates = [False] * self.num_stages
        last, losses = self.num_stages - 1, 0
        # Per state but for the losses, the most of them.
        seen = [dict[Moment, int]() for _ in range(self.num_groups)]
        for tasks in self.rounds:
            for task in tasks:
                s, group = task.stage_id, self.placement[task.stage_id]
                if task.kind == "forward" and s > 0:
                    inputs[s] -= 1
                if task.kind in ("backward", "backward_inputs") and s < last:
                    gradients[s] -= 1
                accumulates[s] |= task.kind in ("backward", "backward_weights")
                moment = tuple(
                    Occupancy(
                        task.kind if i == s else "idle",
                        kept[i] - away[i, number[group]],
                        inputs[i],
                        gradients[i],
                        0,
                        deferred[i],
                        accumulates[i],
                    )
                    for i in self.stages[group]
                )
                seen[group][moment] = max(losses, seen[group].get(moment, 0))
                number[group] += 1
                losses += task.kind == "forward" and s == last
                kept[s] += {"forward": 1, "backward_weights": 0}.get(task.kind, -1)
                deferred[s] += {"backward_inputs": 1, "backward_weights": -1}.get(task.kind, 0)
            for task in tasks:
                if task.kind == "forward":
                    inputs[task.stage_id + 1] += 1
                elif task.kind != "backward_weights" and task.stage_id > 0:
                    gradients[task.stage_id - 1] += 1
        group = self.placement[last]
        seen[group] = {
            (*moment[:-1], replace(moment[-1], num_losses=most)): most
            for moment, most in seen[group].items()
        }
        return tuple(_undominated(list(moments)) for moments in seen)

    @cached_property
    def occupancies(self) -> tuple[tuple[Occupancy, ...], ...]:
        """The undominated states of each stage, whatever other stages on its devices hold."""
        return self.occupancies_of(self.moments)

    def occupancies_of(
        self, moments: Sequence[Sequence[Moment]]
    ) -> tuple[tuple[Occupancy, ...], ...]:
        """Return the undominated states of each stage from the moments of its group."""
        found = []
        for s, group in enumerate(self.placement):
            at = self.stages[group].index(s)
            states = _undominated([(moment[at],) for moment in moments[group]])
            found.append(tuple(state for (state,) in states if state.kind != "idle"))
        return tuple(found)

    def as_text(self) -> str:
        """Return one line per group, for golden tests and people."""
        return "\n".join(
            f"{g}: "
            + " ".join(
                str(task) if len(self.stages[g]) > 1 else str(task).partition("@")[0]
                for task in order
            )
            for g, order in enumerate(self.orders)
        )


def _undominated(moments: list[Moment]) -> tuple[Moment, ...]:
    by_kinds: dict[tuple[str, ...], list[Moment]] = {}
    for moment in set(moments):
        by_kinds.setdefault(tuple(o.kind for o in moment), []).append(moment)
    found: list[Moment] = []
    for alike in by_kinds.values():
        counts = np.array([[n for o in moment for n in o.counts] for moment in alike])
        # Another row that is nowhere smaller has a larger sum, and so comes before.
        order = np.argsort(-counts.sum(axis=1), kind="stable")
        kept = np.empty((0, counts.shape[1]), counts.dtype)
        for i in order:
            if not (kept >= counts[i]).all(axis=1).any():
                kept = np.vstack([kept, counts[i]])
                found.append(alike[i])
    return tuple(sorted(found))


def schedule_violations(name: str, num_groups: int, num_microbatches: int) -> Iterator[Violation]:
    """Yield the rule that a schedule's name or numbers break, with its code: ``plan-schedule``,
    ``plan-schedule-microbatches``."""
    if name not in SCHEDULES:
        yield Violation(
            f"schedule={name!r} is unknown; choose one of {', '.join(SCHEDULES)}.", "plan-schedule"
        )
    elif num_groups and (wrong := SCHEDULES[name].wrong(num_groups, num_microbatches)):
        yield Violation(
            f"schedule={name!r} {wrong}, and num_microbatches={num_microbatches}; give others, or "
            "another schedule.",
            "plan-schedule-microbatches",
        )


@lru_cache(maxsize=256)
def make_schedule(name: str, num_groups: int, num_microbatches: int) -> Schedule:
    """Return the schedule of that name.

    Args:
        name: Of ``SCHEDULES``.
        num_groups: Of devices: as many as stages, unless stages share devices.
        num_microbatches: M.

    Raises:
        PlanError: the codes of ``schedule_violations``.
    """
    PlanError.check(schedule_violations(name, num_groups, num_microbatches))
    kind = SCHEDULES[name]
    orders = kind.orders(num_groups, num_microbatches)
    return Schedule(name, num_microbatches, tuple(map(tuple, orders)), kind.placement(num_groups))


@lru_cache(maxsize=64)
def occupancy_by_position(
    name: str, num_microbatches: int, max_stages: int, rests: bool = False
) -> tuple[tuple[Occupancy, ...], ...]:
    """Return the occupancies of a plain schedule by position: entry j - 1 is that of a stage with j
    stages from itself to the end, itself included.

    The last entry stands for every longer distance too: GPipe keeps all M micro-batches anywhere,
    and under 1F1B at most min(j, M) are in flight. The first stage of a pipeline differs only in
    that nothing is ever received for it, and every stage but the last in that no loss is: their
    bytes of these are zero.

    With ``rests``, activations rest on hosts where they can (``Schedule.resting``).
    """
    num_positions = 1 if name == "gpipe" else min(num_microbatches, max_stages)
    schedule = make_schedule(name, num_positions + 1, num_microbatches)
    moments = schedule.moments_without_resting if rests else schedule.moments
    return schedule.occupancies_of(moments)[:0:-1]


@lru_cache(maxsize=64)
def on_host_by_position(name: str, num_microbatches: int, max_stages: int) -> tuple[int, ...]:
    """Return by position, as ``occupancy_by_position`` has them, how many micro-batches are on the
    host at most whose activations rest there where they can."""
    num_positions = len(occupancy_by_position(name, num_microbatches, max_stages))
    schedule = make_schedule(name, num_positions + 1, num_microbatches)
    most = Counter[int]()
    for (s, _), number in schedule.away().items():
        most[s] = max(most[s], number)
    return tuple(most[s] for s in range(num_positions, 0, -1))
