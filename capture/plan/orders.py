"""In which order the devices of each stage execute their tasks: one function per schedule, from
numbers of device groups and micro-batches to a list of tasks per group.

A group is the devices of one stage, or of several: then its stages share it, each with its own
layers. A *split* backward pass is two tasks, which compute the gradients of a stage's inputs (what
the stage before waits for) and of its weights (which nobody waits for).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TaskKind = Literal["forward", "backward", "backward_inputs", "backward_weights"]

#: As in tables: of a split backward pass, ``I`` and ``W``.
_LETTERS: Mapping[TaskKind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_inputs": "I",
    "backward_weights": "W",
}


@dataclass(frozen=True, order=True)
class StagePass:
    """One pass of one micro-batch through one stage."""

    stage_id: int
    kind: TaskKind
    microbatch: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.microbatch}@{self.stage_id}"


Orders = list[list[StagePass]]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule's rules, for any number of device groups and micro-batches.

    Attributes:
        orders: From numbers of groups and micro-batches to the tasks of each group.
        stages_per_group: Stages that share devices.
        turns: With several, the stages of each group are ``g`` and those behind it at equal
            distances; with ``turns`` the pipeline goes back through the groups instead, in the
            shape of a V.
        splits_backward: Whether backward passes are split.
        multiple: Micro-batches must be a multiple of the groups.
        least_per_group: Micro-batches must be so many times the groups, or more.
    """

    orders: Callable[[int, int], Orders]
    stages_per_group: int = 1
    turns: bool = False
    splits_backward: bool = False
    multiple: bool = False
    least_per_group: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether every stage has devices of its own and its backward pass is whole."""
        return self.stages_per_group == 1 and not self.splits_backward

    def placement(self, num_groups: int) -> tuple[int, ...]:
        """Return, per stage, its group of devices."""
        there = range(num_groups)
        ways = [
            there if not self.turns or i % 2 == 0 else reversed(there)
            for i in range(self.stages_per_group)
        ]
        return tuple(group for way in ways for group in way)

    def wrong(self, num_groups: int, num_microbatches: int) -> str | None:
        """Return, in words, the schedule's rule that the numbers break; None if they break none."""
        if self.multiple and num_microbatches % num_groups:
            return f"needs a multiple of {num_groups} micro-batches, one of its device groups"
        if num_microbatches < self.least_per_group * num_groups:
            return f"needs at least {self.least_per_group * num_groups} micro-batches"
        return None


def gpipe(num_groups: int, num_microbatches: int) -> Orders:
    """Return GPipe's orders: all forward passes, then all backward passes (CAPTURE Fig. 2a)."""
    return [
        [StagePass(s, "forward", m) for m in range(num_microbatches)]
        + [StagePass(s, "backward", m) for m in range(num_microbatches)]
        for s in range(num_groups)
    ]


def one_forward_one_backward(num_groups: int, num_microbatches: int) -> Orders:
    """Return the orders of 1F1B, where stage s keeps at most min(S - s, M) micro-batches in flight
    (PipeDream-Flush; CAPTURE Fig. 2b; READINGS.md, C-w)."""
    orders = []
    for s in range(num_groups):
        warmup = min(num_groups - s - 1, num_microbatches)
        order = [StagePass(s, "forward", m) for m in range(warmup)]
        for m in range(warmup, num_microbatches):
            order += [StagePass(s, "forward", m), StagePass(s, "backward", m - warmup)]
        order += [
            StagePass(s, "backward", m) for m in range(num_microbatches - warmup, num_microbatches)
        ]
        orders.append(order)
    return orders


def interleaved(num_groups: int, num_microbatches: int) -> Orders:
    """Return the orders of 1F1B over two stages per group: as many micro-batches as groups go
    through the first stages, then through the second.

    The bubble is (D - 1) / 2 passes instead of D - 1; group g keeps up to 2 (D - g - 1) + D + 1
    passes of its stages.

    Source: Narayanan et al. 2021 (Megatron-LM), 2.2, with v = 2; M is a multiple of D there, too.
    """
    stages = 2

    def pass_of(i: int, g: int, kind: TaskKind) -> StagePass:
        """Return the i-th forward or backward pass of a group."""
        round_id, within = divmod(i, num_groups * stages)
        chunk, m = divmod(within, num_groups)
        chunk = chunk if kind == "forward" else stages - 1 - chunk
        return StagePass(chunk * num_groups + g, kind, round_id * num_groups + m)

    orders, total = [], stages * num_microbatches
    for g in range(num_groups):
        warmup = min((num_groups - g - 1) * 2 + (stages - 1) * num_groups, total)
        order = [pass_of(i, g, "forward") for i in range(warmup)]
        for i in range(warmup, total):
            order += [pass_of(i, g, "forward"), pass_of(i - warmup, g, "backward")]
        order += [pass_of(i, g, "backward") for i in range(total - warmup, total)]
        orders.append(order)
    return orders


def zb_h1(num_groups: int, num_microbatches: int) -> Orders:
    """Return the orders of 1F1B whose stage s does the weights of a micro-batch s backward passes
    later: every stage keeps as much as the first of 1F1B, and the bubble is (D - 1) (F + I - W).

    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), 2.1.
    """
    orders = []
    for s in range(num_groups):
        warmup, order = min(num_groups - s - 1, num_microbatches), list[StagePass]()
        order += [StagePass(s, "forward", m) for m in range(warmup)]
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                order.append(StagePass(s, "forward", m + warmup))
            order.append(StagePass(s, "backward_inputs", m))
            if m >= s:
                order.append(StagePass(s, "backward_weights", m - s))
        rest = range(max(0, num_microbatches - s), num_microbatches)
        orders.append(order + [StagePass(s, "backward_weights", m) for m in rest])
    return orders


def dualpipev(num_groups: int, num_microbatches: int) -> Orders:
    """Return the orders of DualPipe's V: from both of its ends at once, forward passes beside
    backward passes, split at the beginning and the end.

    A backward pass that is not split there is two tasks one after the other here. Every group keeps
    up to 2 D + 1 passes of its stages.

    Source: DeepSeek-AI 2025, the eight steps of DualPipeV.
    """
    last_stage, orders = 2 * num_groups - 1, []
    for g in range(num_groups):
        builder = _VBuilder((g, last_stage - g))
        for _ in range(2 * (num_groups - g - 1)):
            builder.forward(0)
        for _ in range(g + 1):
            builder.forward(0)
            builder.forward(1)
        for _ in range(num_groups - g - 1):
            builder.backward(1, split=True)
            builder.weights()
            builder.forward(1)
        for _ in range(num_microbatches - 2 * num_groups + g + 1):
            builder.forward(0)
            builder.backward(1)
            builder.forward(1)
            builder.backward(0)
        for _ in range(num_groups - g - 1):
            builder.backward(1)
            builder.forward(1)
            builder.backward(0)
        split = False
        for i in range(g + 1):
            half = i == (g + 1) // 2
            split |= half and g % 2 == 1
            builder.backward(1, split=split)
            split |= half and g % 2 == 0
            builder.backward(0, split=split)
        for _ in range(num_groups - g - 1):
            builder.weights()
            builder.backward(0, split=True)
        while builder.waiting:
            builder.weights()
        orders.append(builder.order)
    return orders


class _VBuilder:
    """The order of a group's two stages so far; counts their passes, and which weights wait."""

    def __init__(self, stages: tuple[int, int]):
        self.stages, self.order, self.waiting = stages, list[StagePass](), list[StagePass]()
        self._done = {("forward", 0): 0, ("forward", 1): 0, ("backward", 0): 0, ("backward", 1): 0}

    def _next(self, way: str, chunk: int) -> int:
        self._done[way, chunk] += 1
        return self._done[way, chunk] - 1

    def forward(self, chunk: int) -> None:
        self.order.append(StagePass(self.stages[chunk], "forward", self._next("forward", chunk)))

    def backward(self, chunk: int, split: bool = False) -> None:
        s, m = self.stages[chunk], self._next("backward", chunk)
        self.order.append(StagePass(s, "backward_inputs", m))
        self.waiting.append(StagePass(s, "backward_weights", m))
        if not split:
            self.order.append(self.waiting.pop())

    def weights(self) -> None:
        self.order.append(self.waiting.pop(0))


#: What a group that is free does first, as (kind, is of its last stage).
_ZB_H2: tuple[tuple[TaskKind, bool], ...] = (
    ("backward_inputs", True),
    ("forward", True),
    ("backward_weights", True),
)
_V: tuple[tuple[TaskKind, bool], ...] = (
    ("forward", True),
    ("forward", False),
    ("backward_inputs", True),
    ("backward_inputs", False),
    ("backward_weights", True),
    ("backward_weights", False),
)


def fill(
    placement: Sequence[int],
    num_microbatches: int,
    most_kept: int,
    priority: Sequence[tuple[TaskKind, bool]],
) -> Orders:
    """Return orders of split passes of equal length, filled one after the other: whoever is free
    takes the first task of its priority that is ready.

    Args:
        placement: Per stage, its group.
        num_microbatches: M.
        most_kept: Passes that a group keeps at most, from their forward pass to their weights; of
            these, one is for its last stage, so that what is begun can end.
        priority: Kinds of tasks, each of the last stage of a group or of those before.
    """
    last = {group: s for s, group in enumerate(placement)}
    groups = [[s for s, g in enumerate(placement) if g == group] for group in sorted(last)]
    wanted: list[list[tuple[int, TaskKind]]] = [
        [(s, kind) for kind, is_last in priority for s in stages if (s == stages[-1]) == is_last]
        for stages in groups
    ]
    counts = {(s, kind): 0 for kinds in wanted for s, kind in kinds}
    ended: dict[StagePass, int] = {}
    kept, orders = [0] * len(groups), [list[StagePass]() for _ in groups]
    clock, num_left = 0, len(counts) * num_microbatches

    def ready(g: int, s: int, kind: TaskKind) -> bool:
        m, needed = counts[s, kind], list[StagePass]()
        if m == num_microbatches:
            return False
        if kind == "forward":
            if kept[g] + (s != last[g]) >= most_kept:
                return False
            needed += [StagePass(s - 1, kind, m)] * (s > 0)
        elif kind == "backward_inputs":
            needed += [StagePass(s, "forward", m)]
            needed += [StagePass(s + 1, kind, m)] * (s + 1 < len(placement))
        else:
            needed += [StagePass(s, "backward_inputs", m)]
        return all(ended.get(task, clock + 1) <= clock for task in needed)

    while num_left:
        chosen = [
            next((each for each in kinds if ready(g, *each)), None)
            for g, kinds in enumerate(wanted)
        ]
        for g, each in enumerate(chosen):
            if each is not None:
                task = StagePass(*each, counts[each])
                counts[each] += 1
                ended[task] = clock + 1
                kept[g] += {"forward": 1, "backward_weights": -1}.get(task.kind, 0)
                orders[g].append(task)
                num_left -= 1
        clock += 1
        assert any(chosen), "a group that keeps too little to go on"
    return orders


def _v(num_groups: int) -> tuple[int, ...]:
    """Return the groups of two stages per group in the shape of a V."""
    return (*range(num_groups), *reversed(range(num_groups)))


SCHEDULES: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_forward_one_backward),
    "interleaved": ScheduleKind(interleaved, stages_per_group=2, multiple=True),
    "zb-h1": ScheduleKind(zb_h1, splits_backward=True),
    # Three are found by filling time, as the papers' are. This one has as many forward passes ahead
    # as fill the bubble: with equal passes no group waits between its first and its last (Qi et al.
    # 2023, 2.2).
    "zb-h2": ScheduleKind(lambda D, M: fill(range(D), M, 2 * D - 1, _ZB_H2), splits_backward=True),
    # Every group keeps as many micro-batches as the first of 1F1B (the same, 6).
    "zb-v": ScheduleKind(
        lambda D, M: fill(_v(D), M, 2 * D, _V), 2, turns=True, splits_backward=True
    ),
    "dualpipev": ScheduleKind(dualpipev, 2, turns=True, splits_backward=True, least_per_group=2),
    # Half as many, floor(D / 2) + 1 (Qi et al. 2024, Controllable Memory, V-Half).
    "v-half": ScheduleKind(
        lambda D, M: fill(_v(D), M, 2 * (D // 2 + 1), _V), 2, turns=True, splits_backward=True
    ),
}
