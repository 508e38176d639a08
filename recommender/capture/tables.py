"""Plans for schedules whose stages share devices or whose backward passes are split.

What a device of such a schedule holds depends on all of its stages, and on how many groups there
are, so the searches over tables of single stages do not apply. The space is smaller: groups of the
same number of consecutive devices, all stages with the same choice, layers cut anywhere. Of every
number of devices and every choice the cuts are enumerated where they are few; else they are
improved from balanced ones by moving one border at a time until none is better, which proves
nothing. For speed, those of the least busy groups are improved so by what their step counts.

Peaks are those of the predictor's formula; a step is counted by the table of the schedule, with
what it sends (``capture.predictor.step_time.CountedSteps``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from math import comb

import numpy as np

from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction
from capture.plan.schedule import SCHEDULES, Occupancy, Schedule, make_schedule
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import CountedSteps, send_seconds
from capture.predictor.times import StageTable
from capture.step.times import TableTimes
from recommender.capture.result import Infeasible, PlacedStage, SearchResult, within_limit
from recommender.question import PlanQuestion

#: Up to so many ways to cut the layers, all are looked at.
MOST_ENUMERATED = 2000
#: Of one space, so many steps are counted by their table, and no more once there are.
MOST_TIMED = 400
#: Memory limits at which a front is looked for, its two ends included.
NUM_FRONT_LIMITS = 8

Cuts = tuple[int, ...]
"""First layer of every stage, and the number of layers."""


@dataclass(frozen=True)
class TablePlan:
    """A plan of the space, with what is predicted of it.

    Attributes:
        plan: With its prediction.
        result: As a search says it.
    """

    plan: Plan
    result: SearchResult


class TableSearch:
    """Plans of one schedule.

    Args:
        profile: Measurements of the model.
        question: With a schedule that is not plain.
        with_times: Whether the profile must know times.

    Raises:
        ProfileError: ``profile-split`` if the schedule splits backward passes and the profile was
            made without; ``profile-no-times``.
    """

    def __init__(self, profile: Profile, question: PlanQuestion, with_times: bool):
        self.profile, self.question = profile, question
        self.kind = SCHEDULES[question.schedule]
        self.predictor = AdditivePredictor(profile)
        self.predictor.check_split(question.schedule)
        self.steps = CountedSteps(profile, question.cluster) if with_times else None
        self.num_explored, self._complete = 0, True

    @cached_property
    def spaces(self) -> list[_Space]:
        """Every number of groups with every choice that they can have."""
        cluster, size = self.question.cluster, self.question.microbatch_size
        degrees, found = self.question.space.degrees(cluster), []
        for choice in self.profile.choices:
            d = choice.num_devices
            num_groups, rest = divmod(cluster.num_devices, d)
            if (
                rest
                or size % choice.data_parallel
                or num_groups * self.kind.stages_per_group > self.profile.graph.num_layers
                or self.kind.wrong(num_groups, self.question.num_microbatches)
                or any(d not in degrees[p] for p in range(0, cluster.num_devices, d))
                or not self.predictor.can_predict(choice, size)
            ):
                continue
            schedule = make_schedule(
                self.question.schedule, num_groups, self.question.num_microbatches
            )
            found.append(_Space(self.predictor, self.steps, schedule, choice, self.question))
        return found

    def least_peak(self) -> TablePlan | None:
        """The plan of least peak; of equal ones, that of the least peaks of the other devices."""
        return self._best(lambda space, cuts: space.peaks(cuts), _peak)

    def fastest(self, limit: int | None) -> TablePlan | None:
        """The plan of least step time within a limit; the smallest one where none is."""

        def key(space: _Space, cuts: Cuts) -> tuple[float, ...]:
            above = 0 if limit is None else max(0, space.peaks(cuts)[0] - limit)
            return above, space.busiest_seconds(cuts), space.peaks(cuts)[0]

        def timed(space: _Space, cuts: Cuts) -> tuple[float, ...]:
            above = 0 if limit is None else max(0, space.peaks(cuts)[0] - limit)
            return above, space.seconds(cuts), space.peaks(cuts)[0]

        def rank(found: TablePlan) -> tuple[float, ...]:
            above = 0 if limit is None else max(0, found.result.peak_bytes - limit)
            assert found.result.step_seconds is not None, "times are known"
            return above, found.result.step_seconds, found.result.peak_bytes

        return self._best(key, rank, timed)

    def front(self) -> list[TablePlan]:
        """A sample of the plans of which none is both smaller and faster than another, with both
        ends; smallest first."""
        top, bottom = self.fastest(self.question.limit_bytes), self.least_peak()
        if top is None or bottom is None:
            return []
        least, most = bottom.result.peak_bytes, top.result.peak_bytes
        between = [
            self.fastest(least + (most - least) * i // (NUM_FRONT_LIMITS - 1))
            for i in range(NUM_FRONT_LIMITS - 1)
        ]
        points: list[TablePlan] = []
        for found in sorted([*filter(None, between), top], key=lambda f: (_peak(f), _seconds(f))):
            if not points or _seconds(found) < _seconds(points[-1]):
                points.append(found)
        return points

    def _best(
        self,
        key: Callable[[_Space, Cuts], tuple[float, ...]],
        rank: Callable[[TablePlan], tuple[float, ...]],
        then: Callable[[_Space, Cuts], tuple[float, ...]] | None = None,
    ) -> TablePlan | None:
        """The best plan of all spaces by ``rank``, of each the cuts of least ``key``; these are
        improved by a slower key, if there is one."""
        start, found = time.perf_counter(), list[TablePlan]()
        self.num_explored, self._complete = 0, True
        for space in self.spaces:
            cuts, complete, explored = space.least(partial(key, space))
            if then is not None:
                cuts = space.improved(cuts, partial(then, space))
            self.num_explored += explored
            self._complete &= complete
            found.append(self._planned(space, cuts))
        if not found:
            return None
        best = min(found, key=rank)
        result = replace(
            best.result,
            optimal=self._complete and rank is _peak,
            num_explored=self.num_explored,
            seconds=time.perf_counter() - start,
        )
        return replace(best, result=within_limit(result, self.question.limit_bytes))

    def _planned(self, space: _Space, cuts: Cuts) -> TablePlan:
        question, stages = self.question, space.stages(cuts)
        plan = self.profile.plan(
            question.cluster,
            stages,
            global_batch_size=question.global_batch_size,
            num_microbatches=question.num_microbatches,
            schedule=question.schedule,
        )
        prediction = self.predictor.predict(plan)
        seconds = None if self.steps is None else self.steps.seconds(plan)
        return TablePlan(plan.with_(prediction=prediction), _result(stages, prediction, seconds))


def _result(
    stages: Sequence[PlacedStage], prediction: Prediction, seconds: float | None
) -> SearchResult:
    peaks = prediction.peak_bytes_per_device
    placed = tuple(
        replace(stage, peak_bytes=of.peak_bytes)
        for stage, of in zip(stages, prediction.stages, strict=True)
    )
    return SearchResult(
        "ok",
        placed,
        max(peaks),
        peaks,
        "table",
        optimal=False,
        tie_break="none",
        tie_break_columns=0,
        seconds=0.0,
        num_explored=0,
        step_seconds=seconds,
    )


def _peak(found: TablePlan) -> tuple[float, ...]:
    return found.result.sorted_peaks


def _seconds(found: TablePlan) -> float:
    assert found.result.step_seconds is not None, "times are known"
    return found.result.step_seconds


def nothing_fits(question: PlanQuestion, num_layers: int) -> SearchResult:
    """Where the space of a schedule is empty."""
    kind = SCHEDULES[question.schedule]
    per_group = f"{kind.stages_per_group} stages" if kind.stages_per_group > 1 else "a stage"
    message = (
        f"schedule={question.schedule!r} takes groups of equally many devices of cluster "
        f"{question.cluster}, each with {per_group} of at least one of num_layers={num_layers}; no "
        f"profiled choice makes groups for num_microbatches={question.num_microbatches}. "
        f"{_rules(question)}Give other numbers, or another schedule. [no-possible-groups]"
    )
    why = Infeasible("no-possible-groups", message, question.limit_bytes)
    empty = SearchResult("infeasible", (), 0, (), "table", True, "none", 0, 0.0, 0)
    return replace(empty, why=why)


def _rules(question: PlanQuestion) -> str:
    kind, num_devices = SCHEDULES[question.schedule], question.cluster.num_devices
    wrong = kind.wrong(num_devices, question.num_microbatches)
    return f"With {num_devices} groups it {wrong}. " if wrong else ""


class _Space:
    """The plans of one number of groups and one choice: cuts of the layers.

    Args:
        predictor: Of bytes.
        steps: Of seconds; None for no times.
        schedule: Its table.
        choice: Of all stages.
        question: That plans answer.
    """

    def __init__(
        self,
        predictor: AdditivePredictor,
        steps: CountedSteps | None,
        schedule: Schedule,
        choice: StageChoice,
        question: PlanQuestion,
    ):
        self.schedule, self.choice = schedule, choice
        microbatch_size = question.microbatch_size
        memory = predictor.memory(choice, microbatch_size)
        parts = [np.broadcast_to(getattr(memory, name), memory.kept.shape) for name in _PARTS]
        self._parts = np.stack([*parts, memory.gradients, memory.state])
        self._losses, self._end = memory.losses, memory.end - memory.gradients
        self._counts = [
            np.array([[n for o in moment for n in _counts(o)] for moment in moments])
            for moments in schedule.moments
        ]
        self._busy = self._stage_times = None
        if steps is not None:
            self._stage_times = steps.times.table(choice, microbatch_size)
            self._busy = _busy(self._stage_times, schedule)
            self._links = steps.links
            self._graph = predictor.graph(microbatch_size)
        self._peaks: dict[tuple[int, ...], int] = {}

    def peaks(self, cuts: Cuts) -> tuple[int, ...]:
        """Per group, the largest first. Gradients of shared parameters and small values that stages
        send each other at the end of a step are left to the prediction."""
        peaks = []
        for g, stages in enumerate(self.schedule.stages):
            key = (g, *(cut for s in stages for cut in (cuts[s], cuts[s + 1])))
            if key not in self._peaks:
                self._peaks[key] = self._peak(g, [(cuts[s], cuts[s + 1]) for s in stages])
            peaks.append(self._peaks[key])
        return tuple(sorted(peaks, reverse=True))

    def _peak(self, group: int, ranges: Sequence[tuple[int, int]]) -> int:
        held = np.concatenate([self._parts[:, first, stop] for first, stop in ranges])
        state = sum(int(self._parts[-2:, first, stop].sum()) for first, stop in ranges)
        losses = int(self._losses[ranges[-1]]) * self.schedule.num_microbatches
        end = state + losses + max(int(self._end[each]) for each in ranges)
        return max(int((self._counts[group] @ held).max()), end)

    def busiest_seconds(self, cuts: Cuts) -> float:
        """Of a micro-batch, the group that computes longest."""
        busy = self._busy
        assert busy is not None, "times are known"
        return max(
            sum(float(busy[cuts[s], cuts[s + 1]]) for s in stages)
            for stages in self.schedule.stages
        )

    @cached_property
    def _table_times(self) -> TableTimes:
        """Of as many micro-batches as show how the schedule goes."""
        schedule = self.schedule
        num_microbatches = min(schedule.num_microbatches, 4 * schedule.num_groups)
        return TableTimes(make_schedule(schedule.name, schedule.num_groups, num_microbatches))

    def seconds(self, cuts: Cuts) -> float:
        """Of a step, or of its first micro-batches."""
        table = self._stage_times
        assert table is not None, "times are known"
        times = [table.at(first, stop) for first, stop in pairwise(cuts)]
        return self._table_times.seconds(
            times, send_seconds(self.stages(cuts), self._links, self._graph)
        )

    def stages(self, cuts: Cuts) -> list[PlacedStage]:
        """On their devices."""
        d = self.choice.num_devices
        return [
            PlacedStage.at(self.schedule.placement[s] * d, first, stop, self.choice)
            for s, (first, stop) in enumerate(pairwise(cuts))
        ]

    def improved(self, cuts: Cuts, key: Callable[[Cuts], tuple[float, ...]]) -> Cuts:
        """From cuts, and from those that balance seconds, moves of one border that make a slow key
        less, as many as are looked at."""
        seen: dict[Cuts, tuple[float, ...]] = {}
        for start in (cuts, *self._starts()):
            best = start
            seen.setdefault(best, key(best))
            while len(seen) < MOST_TIMED:
                seen |= {moved: key(moved) for moved in _moved(best) if moved not in seen}
                better = min(_moved(best), key=lambda moved: seen[moved])
                if seen[better] >= seen[best]:
                    break
                best = better
        return min(seen, key=lambda one: seen[one])

    def least(self, key: Callable[[Cuts], tuple[float, ...]]) -> tuple[Cuts, bool, int]:
        """The cuts of the least key, whether all were looked at, and how many were."""
        num_layers, num_stages = self._parts.shape[1], self.schedule.num_stages
        if comb(num_layers - 1, num_stages - 1) <= MOST_ENUMERATED:
            every = [
                (0, *borders, num_layers)
                for borders in combinations(range(1, num_layers), num_stages - 1)
            ]
            return min(every, key=key), True, len(every)
        seen: dict[Cuts, tuple[float, ...]] = {}

        def value(cuts: Cuts) -> tuple[float, ...]:
            if cuts not in seen:
                seen[cuts] = key(cuts)
            return seen[cuts]

        for cuts in self._starts():
            while (better := min(_moved(cuts), key=value)) and value(better) < value(cuts):
                cuts = better
        return min(seen, key=lambda cuts: seen[cuts]), False, len(seen)

    def _starts(self) -> Iterator[Cuts]:
        """Cuts that balance layers, what is kept, state with gradients, and seconds."""
        num_layers, num_stages = self._parts.shape[1], self.schedule.num_stages
        layers = np.arange(num_layers)
        rows = [np.ones(num_layers)]
        sizes = (self._parts[0], self._parts[-2:].sum(axis=0))
        rows += [nbytes[layers, layers + 1] for nbytes in sizes]
        rows += [] if self._busy is None else [self._busy[layers, layers + 1]]
        for weights in rows:
            yield balanced(np.asarray(weights, np.float64), num_stages)


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


def _counts(o: Occupancy) -> list[int]:
    """How often each part of a stage is there."""
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


def _busy(table: StageTable, schedule: Schedule) -> np.ndarray:
    if schedule.splits_backward:
        return table.forward + table.backward_inputs + table.backward_weights
    return table.forward + table.backward


def balanced(weights: np.ndarray, num_stages: int) -> Cuts:
    """Cuts into stages of at least one layer and about equal weight.

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


def _moved(cuts: Cuts) -> list[Cuts]:
    """With one border elsewhere, or a stage with all of its borders one layer on."""
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
