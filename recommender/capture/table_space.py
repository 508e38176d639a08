"""Plans of one number of groups, for a schedule whose stages share devices or whose backward passes
are split: where layers are cut, and what every stage chooses.

Given the cuts, what a group holds is its own alone: of all choices that its stages can have, it
takes those of least memory, or the fastest that fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, reduce
from itertools import combinations, pairwise
from math import comb, inf
from typing import Any

import numpy as np

from capture.memo import forget, memo
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES, Occupancy, Schedule, make_schedule
from capture.predictor import AdditivePredictor
from capture.predictor.alike import Kinds
from capture.predictor.formula import StageMemory
from capture.predictor.step_time import CountedSteps, send_seconds
from capture.predictor.times import StageTable
from capture.step.times import StageTimes, TableTimes
from recommender.capture.result import PlacedStage
from recommender.question import PlanQuestion

#: Up to so many ways to cut the layers, all are looked at.
MOST_ENUMERATED = 2000
#: Of one space, so many steps are counted by their table, and no more once there are; or as many
#: as have so many tasks.
MOST_TIMED, _MOST_TASKS = 400, 1_000_000
#: Micro-batches per group after which each takes as long as the one before.
_MICROBATCHES_PER_GROUP = 4

Cuts = tuple[int, ...]
"""First layer of every stage, and the number of layers."""
Ranges = tuple[tuple[int, int], ...]
"""Layers [first, stop) of the stages of a group."""


@dataclass(frozen=True)
class _Group:
    """The best choices for the stages of a group, given their layers, and what they need.

    Attributes:
        choices: Per stage, an index of those of the space.
        peak_bytes: Per device.
        seconds: Of a micro-batch, with its part of the update; 0 where times are not known.
    """

    choices: tuple[int, ...]
    peak_bytes: int
    seconds: float


class StageRows:
    """The bytes and seconds of all stages with some choices at a micro-batch size, which do not
    depend on the schedule.

    Args:
        predictor: Of bytes.
        steps: Of seconds; None for no times.
        microbatch_size: Over all replicas.
    """

    def __init__(
        self, predictor: AdditivePredictor, steps: CountedSteps | None, microbatch_size: int
    ):
        self.predictor, self.steps, self._size = predictor, steps, microbatch_size

    @memo
    def can_predict(self, choice: StageChoice) -> bool:
        """Return whether the profile can predict stages with a choice."""
        return self.predictor.can_predict(choice, self._size)

    @memo
    def of(
        self, choices: tuple[StageChoice, ...]
    ) -> tuple[Kinds, np.ndarray, Sequence[StageTable]]:
        """Return the kinds of stages, and of each its bytes by choice and part, int64 (num_choices,
        14, S), and its seconds by choice."""
        rows = [_rows(self.predictor.memory(choice, self._size)) for choice in choices]
        tables = []
        if self.steps is not None:
            tables = [self.steps.times.table(choice, self._size) for choice in choices]
        times = [np.stack([getattr(t, name) for name in _TIMES]) for t in tables]
        kinds = Kinds(np.zeros(rows[0].shape[1:]))
        kinds.look(*rows, *times)
        sums = np.stack([*map(kinds.once, rows)])
        return kinds, sums, [StageTable(*kinds.once(each)) for each in times]

    def forget_tables(self) -> None:
        """Drop the tables of all stages that rows were made from: of a deep model, hundreds of
        megabytes."""
        forget(self.predictor)
        if self.steps is not None:
            forget(self.steps.times)


class TableSpace:
    """The plans of one number of groups: cuts of the layers, and a choice for every stage.

    A limit of 0 asks for the least memory, none for the least time.

    Args:
        rows: Of bytes and seconds.
        choices: Of stages, all of as many devices; those of a group have the same degrees, and
            sequence parallelism all of them or none.
        question: That plans answer.
    """

    def __init__(self, rows: StageRows, choices: tuple[StageChoice, ...], question: PlanQuestion):
        self._choices, self._d = choices, choices[0].num_devices
        self.schedule = make_schedule(
            question.schedule, question.cluster.num_devices // self._d, question.num_microbatches
        )
        kinds, sums, self._times = rows.of(choices)
        #: The number of every stage in the tables, which hold stages that are alike once.
        self._of, self._num_layers = kinds.of, len(kinds.of)
        #: Per choice and part, of every stage.
        self._parts, self._losses, self._ends = sums[:, :-2], sums[:, -2], sums[:, -1]
        # Stages of a group share it.
        self._layout = np.array([2 * c.data_parallel + c.sequence_parallel for c in choices])
        predictor, steps = rows.predictor, rows.steps
        self._graph = graph = predictor.graph(question.microbatch_size)
        readers = [graph.param_readers(p) for p in range(len(graph.params))]
        self._shared = {p: layers for p, layers in enumerate(readers) if len(layers) > 1}
        self._param_bytes = np.array(
            [[predictor.param_bytes(c.param_split)[p] for p in self._shared] for c in choices]
        )
        #: Per group, and stage of it: how often each part is there, per moment.
        self._counts = [
            np.array([[_counts(o) for o in moment] for moment in moments]).swapaxes(0, 1)
            for moments in self.schedule.moments
        ]
        self._busy = np.zeros(self._ends.shape)
        if steps is not None:
            self._busy = np.stack(
                [
                    _busy(t, self.schedule) + t.update / question.num_microbatches
                    for t in self._times
                ]
            )
            self._links = steps.links
        self._groups: dict[Any, _Group] = {}

    def groups(self, cuts: Cuts, limit: int | None) -> list[_Group]:
        """Return the best choices of every group: the fastest that fit, else the smallest. Small
        values that stages send each other at the end of a step are left to the prediction."""
        found = []
        arriving = self._arriving(cuts)
        for g, stages in enumerate(self.schedule.stages):
            ranges = tuple((cuts[s], cuts[s + 1]) for s in stages)
            arrives = tuple(arriving[s] for s in stages)
            key = (limit, g, ranges, arrives)
            if key not in self._groups:
                self._groups[key] = self._group(g, ranges, arrives, limit)
            found.append(self._groups[key])
        return found

    def _arriving(self, cuts: Cuts) -> list[tuple[int, ...]]:
        """Return per stage how many gradients of each shared parameter come to it at the end of a
        step: one from every later stage that reads it, to the first."""
        counts = [[0] * len(self._shared) for _ in cuts[1:]]
        for i, layers in enumerate(self._shared.values()):
            owner, *others = sorted({bisect_right(cuts, layer) - 1 for layer in layers})
            counts[owner][i] = len(others)
        return list(map(tuple, counts))

    def _group(
        self, group: int, ranges: Ranges, arrives: Sequence[tuple[int, ...]], limit: int | None
    ) -> _Group:
        """Return the best of a group's combinations of choices; arrays have one axis per stage."""
        n, kinds = len(ranges), [self._of[first, stop] for first, stop in ranges]

        def along(of_stage: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [
                each.reshape(*each.shape[:-1], *(-1 if j == i else 1 for j in range(n)))
                for i, each in enumerate(of_stage)
            ]

        parts = [self._parts[:, :, kind].T for kind in kinds]
        instants = sum(along([c @ p for c, p in zip(self._counts[group], parts, strict=True)]))
        state = sum(along([p[-2:].sum(axis=0) for p in parts]))
        ends = [self._ends[:, kind] for kind in kinds]
        losses = along([self._losses[:, kind] for kind in kinds])[-1]
        end = state + losses * self.schedule.num_microbatches + reduce(np.maximum, along(ends))
        if self._shared:
            end = end + sum(along([self._param_bytes @ counts for counts in arrives]))
        peaks = np.maximum(np.asarray(instants).max(axis=0), end)
        seconds = sum(along([self._busy[:, kind] for kind in kinds]))
        layouts = along([self._layout] * n)
        alike = np.broadcast_to(
            reduce(np.logical_and, [each == layouts[0] for each in layouts]), peaks.shape
        )
        at = np.flatnonzero(alike)
        peak, busy = peaks.flat[at], np.broadcast_to(seconds, peaks.shape).flat[at]
        above = peak * 0 if limit is None else np.maximum(peak - limit, 0)
        best = np.lexsort((peak, busy, above))[0]
        chosen = np.unravel_index(at[best], peaks.shape)
        return _Group(tuple(map(int, chosen)), int(peak[best]), float(busy[best]))

    def peaks(self, cuts: Cuts, limit: int | None) -> tuple[int, ...]:
        """Return the peak bytes of the groups, the largest first."""
        return tuple(sorted((g.peak_bytes for g in self.groups(cuts, limit)), reverse=True))

    def busiest(self, cuts: Cuts, limit: int | None) -> tuple[float, ...]:
        """Return bytes above the limit, seconds of a micro-batch in the slowest group, and peak."""
        seconds = max(group.seconds for group in self.groups(cuts, limit))
        return self._with_peak(cuts, limit, seconds)

    def counted(self, cuts: Cuts, limit: int | None) -> tuple[float, ...]:
        """Return bytes above the limit, seconds of a step as its table counts them, and peak."""
        return self._with_peak(cuts, limit, self.seconds(cuts, limit))

    def _with_peak(self, cuts: Cuts, limit: int | None, seconds: float) -> tuple[float, ...]:
        peak = self.peaks(cuts, limit)[0]
        return 0 if limit is None else max(0, peak - limit), seconds, peak

    @cached_property
    def _table_times(self) -> TableTimes:
        """The times of the schedule's table, of its first micro-batches."""
        schedule = self.schedule
        few = min(schedule.num_microbatches, _MICROBATCHES_PER_GROUP * schedule.num_groups)
        return TableTimes(make_schedule(schedule.name, schedule.num_groups, few))

    @property
    def length(self) -> float:
        """The length of a step of equal stages, in micro-batches of a group."""
        known = self.schedule
        return step_of_equal_stages(known.name, known.num_groups, known.num_microbatches)

    def seconds(self, cuts: Cuts, limit: int | None) -> float:
        """Return the seconds of a step, or of as many first micro-batches as the table has."""
        assert self._times, "times are known"
        times = [
            self._times[i].at(int(self._of[place]))
            for i, place in zip(self._chosen(cuts, limit), pairwise(cuts), strict=True)
        ]
        sends = send_seconds(self.stages(cuts, limit), self._links, self._graph)
        return self._table_times.seconds(times, sends)

    def _chosen(self, cuts: Cuts, limit: int | None) -> list[int]:
        """Return the choice of every stage, as an index."""
        groups, schedule = self.groups(cuts, limit), self.schedule
        return [
            groups[g].choices[schedule.stages[g].index(s)] for s, g in enumerate(schedule.placement)
        ]

    def stages(self, cuts: Cuts, limit: int | None) -> list[PlacedStage]:
        """Return the stages of the cuts on their devices, each with its best choice."""
        chosen, placement = self._chosen(cuts, limit), self.schedule.placement
        return [
            PlacedStage.at(placement[s] * self._d, first, stop, self._choices[chosen[s]])
            for s, (first, stop) in enumerate(pairwise(cuts))
        ]

    def improved(self, cuts: Cuts, key: Callable[[Cuts], tuple[float, ...]]) -> Cuts:
        """Move borders, from cuts and from those that balance seconds, while that lowers a key that
        is slow to compute, until about ``MOST_TIMED`` cuts are looked at."""
        most = min(MOST_TIMED, _MOST_TASKS // self._table_times.num_tasks)
        return _climbed((cuts, *self.starts), key, most)[0]

    @property
    def is_small(self) -> bool:
        """Whether all ways to cut the layers are looked at."""
        num_borders = self.schedule.num_stages - 1
        return comb(self._num_layers - 1, num_borders) <= MOST_ENUMERATED

    def least(self, key: Callable[[Cuts], tuple[float, ...]]) -> tuple[Cuts, bool, int]:
        """Return the cuts of the least key, whether all were looked at, and how many were."""
        num_layers, num_stages = self._num_layers, self.schedule.num_stages
        if self.is_small:
            every = [
                (0, *borders, num_layers)
                for borders in combinations(range(1, num_layers), num_stages - 1)
            ]
            return min(every, key=key), True, len(every)
        best, num_seen = _climbed(self.starts, key)
        return best, False, num_seen

    @cached_property
    def starts(self) -> Sequence[Cuts]:
        """The cuts that balance layers, and of the first choice what is kept, state with gradients,
        and seconds."""
        num_layers, num_stages = self._num_layers, self.schedule.num_stages
        layers = np.arange(num_layers)
        rows = [np.ones(num_layers)]
        sizes = (self._parts[0, 0], self._parts[0, -2:].sum(axis=0), self._busy[0])
        rows += [each[self._of[layers, layers + 1]] for each in sizes]
        cuts = (balanced(np.asarray(weights, np.float64), num_stages) for weights in rows)
        return [*dict.fromkeys(cuts)]


#: Rows of ``_counts``; gradients and state are the last.
_PARTS = (
    "kept",
    "deferred",
    "received",
    "gradients_in",
    "losses",
    "batch",
    "forward",
    "backward",
    "backward_inputs",
    "backward_weights",
)


_TIMES = [field.name for field in fields(StageTable)]


def _rows(memory: StageMemory) -> np.ndarray:
    """Return the bytes of all stages with a choice: parts, losses, and what the end of a step needs
    beside gradients, (14, L, L + 1)."""
    parts = [*(getattr(memory, name) for name in _PARTS), memory.gradients, memory.state]
    parts += [memory.losses, memory.end - memory.gradients]
    return np.stack([np.broadcast_to(each, memory.kept.shape) for each in parts])


def _counts(o: Occupancy) -> list[int]:
    """Return how often each part of a stage's bytes is there at one instant."""
    running = [o.kind == name for name in _PARTS[-4:]]
    forward, gradients = running[0], running[1] or running[2]
    return [
        o.num_kept,
        o.num_deferred,
        o.num_waiting_inputs + forward,
        o.num_waiting_gradients + gradients,
        o.num_losses,
        forward,
        *map(int, running),
        int(o.accumulates),
        1,
    ]


def step_of_equal_stages(schedule: str, num_groups: int, num_microbatches: int) -> float:
    """Return the length of a step by the schedule's table, in micro-batches of a group: the passes
    of all stages take as long, and a backward pass as two forward passes.

    Example:
        >>> step_of_equal_stages("1f1b", 4, 8), step_of_equal_stages("zb-h2", 4, 8)
        (11.0, 9.0)
    """
    few = min(num_microbatches, _MICROBATCHES_PER_GROUP * num_groups)
    return _step_of_equal_stages(schedule, num_groups, few) + num_microbatches - few


@lru_cache(maxsize=256)
def _step_of_equal_stages(schedule: str, num_groups: int, num_microbatches: int) -> float:
    table = make_schedule(schedule, num_groups, num_microbatches)
    one = StageTimes(1, 2, 0, backward_inputs_seconds=1, backward_weights_seconds=1)
    seconds = TableTimes(table).seconds([one] * table.num_stages, [0.0] * (table.num_stages - 1))
    return seconds / (3 * SCHEDULES[schedule].stages_per_group)


def _busy(table: StageTable, schedule: Schedule) -> np.ndarray:
    if schedule.splits_backward:
        return table.forward + table.backward_inputs + table.backward_weights
    return table.forward + table.backward


def balanced(weights: np.ndarray, num_stages: int) -> Cuts:
    """Cut layers into stages of at least one layer and about equal weight.

    Example:
        >>> balanced(np.array([1.0, 1, 1, 3]), 2)
        (0, 3, 4)
    """
    total, num_layers = np.concatenate([[0], np.cumsum(np.maximum(weights, 0))]), len(weights)
    cuts = [0]
    for s in range(1, num_stages):
        first, last = cuts[-1] + 1, num_layers - (num_stages - s)
        wanted = total[-1] * s / num_stages
        cuts.append(first + int(np.abs(total[first : last + 1] - wanted).argmin()))
    return (*cuts, num_layers)


def _climbed(
    starts: Sequence[Cuts], key: Callable[[Cuts], tuple[float, ...]], most: float = inf
) -> tuple[Cuts, int]:
    """Return the cuts of the least key and how many were looked at: from each start, borders are
    moved as long as that lowers the key, until about ``most`` cuts are looked at."""
    seen: dict[Cuts, tuple[float, ...]] = {}
    for best in starts:
        seen.setdefault(best, key(best))
        while len(seen) < most:
            seen |= {moved: key(moved) for moved in _moved(best) if moved not in seen}
            better = min(_moved(best), key=seen.__getitem__)
            if seen[better] >= seen[best]:
                break
            best = better
    return min(seen, key=seen.__getitem__), len(seen)


def _moved(cuts: Cuts) -> list[Cuts]:
    """Return the cuts, and those with one border elsewhere, or a whole stage moved by one layer."""
    found = [cuts]
    for i in range(1, len(cuts) - 1):
        for step in (-4, -2, -1, 1, 2, 4):
            if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                found.append((*cuts[:i], cuts[i] + step, *cuts[i + 1 :]))
        for step in (-1, 1):  # with the border behind it
            if (
                i + 2 < len(cuts)
                and cuts[i - 1] < cuts[i] + step
                and cuts[i + 1] + step < cuts[i + 2]
            ):
                moved = (cuts[i] + step, cuts[i + 1] + step)
                found.append((*cuts[:i], *moved, *cuts[i + 2 :]))
    return found
