"""Pipeline schedules as data: a table of tasks per stage, which simulator, predictor and runtime
only interpret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from capture.errors import PlanError

TaskKind = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class Task:
    """One pass of one micro-batch through one stage."""

    stage_id: int
    kind: TaskKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}@{self.stage_id}"


@dataclass(frozen=True, order=True)
class Occupancy:
    """What a stage holds beside its own state while it executes one task.

    Attributes:
        kind: The pass being executed; its own input (forward) or gradient (backward) is not counted
            as waiting.
        num_kept: Micro-batches whose activations are kept for their backward pass; the executing
            backward pass included.
        num_waiting_inputs: Micro-batches received from the stage before, whose forward pass has not
            begun.
        num_waiting_gradients: Micro-batches whose gradient came from the stage after, whose
            backward pass has not begun.
        num_losses: On the last stage, micro-batches whose loss is there; they stay until the end of
            the step.
    """

    kind: TaskKind
    num_kept: int
    num_waiting_inputs: int
    num_waiting_gradients: int
    num_losses: int = 0

    def dominates(self, other: Occupancy) -> bool:
        return self.kind == other.kind and all(
            mine >= theirs
            for mine, theirs in (
                (self.num_kept, other.num_kept),
                (self.num_waiting_inputs, other.num_waiting_inputs),
                (self.num_waiting_gradients, other.num_waiting_gradients),
                (self.num_losses, other.num_losses),
            )
        )


@dataclass(frozen=True)
class Schedule:
    """An order of tasks for each stage.

    Attributes:
        name: ``"gpipe"`` or ``"1f1b"``.
        num_microbatches: Micro-batches in a step, M.
        orders: ``orders[s]`` is the order in which stage s executes its 2 M tasks.

    Example:
        >>> print(make_schedule("1f1b", 2, 3).as_text())
        0: F0 F1 B0 F2 B1 B2
        1: F0 B0 F1 B1 F2 B2
    """

    name: str
    num_microbatches: int
    orders: tuple[tuple[Task, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.orders)

    @cached_property
    def clocks(self) -> tuple[tuple[Task, ...], ...]:
        """The lock-step execution: per clock, the tasks that run at the same time, at most one per
        stage.

        A stage runs its next task as soon as what it needs was finished in an earlier clock;
        transfers happen between clocks. Flattened, it is a valid order of dispatch for a single
        controller.
        """
        position, done, clocks = [0] * self.num_stages, set[Task](), []
        while len(done) < sum(map(len, self.orders)):
            ready = []
            for order, at in zip(self.orders, position, strict=True):
                if at < len(order) and (
                    (needed := self._requirement(order[at])) is None or needed in done
                ):
                    ready.append(order[at])
            assert ready, f"schedule {self.name} has a dependency cycle"
            for task in ready:
                position[task.stage_id] += 1
            done.update(ready)
            clocks.append(tuple(ready))
        return tuple(clocks)

    def _requirement(self, task: Task) -> Task | None:
        if task.kind == "forward":
            return (
                None if task.stage_id == 0 else Task(task.stage_id - 1, "forward", task.microbatch)
            )
        if task.stage_id == self.num_stages - 1:
            return Task(task.stage_id, "forward", task.microbatch)
        return Task(task.stage_id + 1, "backward", task.microbatch)

    @cached_property
    def occupancies(self) -> tuple[tuple[Occupancy, ...], ...]:
        """Per stage, its undominated states over all its tasks: a prediction of its peak is a
        maximum over them."""
        kept, inputs, gradients = ([0] * (self.num_stages + 1) for _ in range(3))
        last, losses = self.num_stages - 1, 0
        states = [set[Occupancy]() for _ in range(self.num_stages)]
        for clock in self.clocks:
            for task in clock:
                s, forward = task.stage_id, task.kind == "forward"
                if forward and s > 0:
                    inputs[s] -= 1
                if not forward and s < self.num_stages - 1:
                    gradients[s] -= 1
                states[s].add(
                    Occupancy(
                        task.kind, kept[s], inputs[s], gradients[s], losses if s == last else 0
                    )
                )
                kept[s] += 1 if forward else -1
                losses += forward and s == last
            for task in clock:
                if task.kind == "forward":
                    inputs[task.stage_id + 1] += 1
                elif task.stage_id > 0:
                    gradients[task.stage_id - 1] += 1
        return tuple(
            tuple(sorted(s for s in seen if not any(o != s and o.dominates(s) for o in seen)))
            for seen in states
        )

    def as_text(self) -> str:
        """One line per stage, for golden tests and people."""
        return "\n".join(
            f"{s}: " + " ".join(str(task).partition("@")[0] for task in order)
            for s, order in enumerate(self.orders)
        )


def _gpipe(num_stages: int, num_microbatches: int) -> list[list[Task]]:
    """All forward passes, then all backward passes (GPipe; CAPTURE Fig. 2a)."""
    return [
        [Task(s, "forward", m) for m in range(num_microbatches)]
        + [Task(s, "backward", m) for m in range(num_microbatches)]
        for s in range(num_stages)
    ]


def _one_forward_one_backward(num_stages: int, num_microbatches: int) -> list[list[Task]]:
    """Stage s keeps at most min(S - s, M) micro-batches in flight (PipeDream-Flush; CAPTURE Fig.
    2b; READINGS.md, C-w)."""
    orders = []
    for s in range(num_stages):
        warmup = min(num_stages - s - 1, num_microbatches)
        order = [Task(s, "forward", m) for m in range(warmup)]
        for m in range(warmup, num_microbatches):
            order += [Task(s, "forward", m), Task(s, "backward", m - warmup)]
        order += [
            Task(s, "backward", m) for m in range(num_microbatches - warmup, num_microbatches)
        ]
        orders.append(order)
    return orders


SCHEDULES: Mapping[str, Callable[[int, int], list[list[Task]]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
}


@lru_cache(maxsize=256)
def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        PlanError: ``plan-schedule`` for an unknown name.
    """
    if name not in SCHEDULES:
        raise PlanError.of(
            f"schedule={name!r} is unknown; choose one of {', '.join(SCHEDULES)}.", "plan-schedule"
        )
    return Schedule(
        name, num_microbatches, tuple(map(tuple, SCHEDULES[name](num_stages, num_microbatches)))
    )


@lru_cache(maxsize=64)
def occupancy_by_position(
    name: str, num_microbatches: int, max_stages: int
) -> tuple[tuple[Occupancy, ...], ...]:
    """Occupancies by position: entry j - 1 is that of a stage with j stages from itself to the end,
    itself included.

    The last entry stands for every longer distance too: GPipe keeps all M micro-batches anywhere,
    and under 1F1B at most min(j, M) are in flight. The first stage of a pipeline differs only in
    that nothing is ever received for it, and every stage but the last in that no loss is: their
    bytes of these are zero.
    """
    num_positions = 1 if name == "gpipe" else min(num_microbatches, max_stages)
    schedule = make_schedule(name, num_positions + 1, num_microbatches)
    return schedule.occupancies[:0:-1]
