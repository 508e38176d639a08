"""Plans for schedules whose stages share devices or whose backward passes are split.

What a device of such a schedule holds depends on all of its stages, and on how many groups there
are, so the searches over tables of single stages do not apply. The space is smaller: groups of the
same number of consecutive devices, layers cut anywhere. Of every number of devices, and of every
pair of degrees that all stages have, the cuts are enumerated where they are few; else they are
improved from balanced ones by moving one border at a time until none is better, which proves
nothing. For speed, the cuts of the least busy groups are improved so by what their step counts.

Peaks are those of the predictor's formula; a step is counted by the table of the schedule, with
what it sends (``capture.predictor.step_time.CountedSteps``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

from capture.measured.profile import Profile
from capture.plan.choices import StageChoice, by_degree
from capture.plan.schedule import SCHEDULES
from capture.plan.why import Why
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import CountedSteps
from recommender.capture.pareto import undominated
from recommender.capture.posed import plan_of, stage_choices
from recommender.capture.result import PlacedStage, Proposal, SearchResult, within_limit
from recommender.capture.table_space import Cuts, StageRows, TableSpace
from recommender.question import PlanQuestion

#: The best cuts are taken to be better than balanced ones by no more than so many times.
_GAIN = 1.25
#: Memory limits at which a front is looked for, its two ends included.
NUM_FRONT_LIMITS = 8


@dataclass(frozen=True)
class _Begun:
    """The cuts of a space from which its best plan is looked for.

    Attributes:
        space: Is searched.
        cuts: The best ones, by what is quick to compute.
        complete: Whether all cuts were looked at.
        num_explored: Cuts that were looked at.
        floor: Of these cuts, what ranks plans first, as far as it is quick to compute.
    """

    space: TableSpace
    cuts: Cuts
    complete: bool
    num_explored: int
    floor: tuple[float, ...] = ()


class TableSearch:
    """The search for plans of one schedule that is not plain.

    Args:
        profile: Measurements of the model.
        question: With a schedule that is not plain.
        steps: Counts those of plans; None searches for least peak alone.
        of: Choices of stages; None for whatever the profile knows.
        rows: Of the stages, as another schedule with such micro-batches has them; None makes them.

    Raises:
        ProfileError: ``profile-split`` if the schedule splits backward passes and the profile was
            made without.
    """

    def __init__(
        self,
        profile: Profile,
        question: PlanQuestion,
        steps: CountedSteps | None,
        of: Sequence[StageChoice] | None = None,
        rows: StageRows | None = None,
    ):
        self.profile, self.question, self.steps = profile, question, steps
        self.predictor = AdditivePredictor(profile)
        self._rows = rows or StageRows(self.predictor, steps, question.microbatch_size)
        self.predictor.check_split(question.schedule)
        self._of = stage_choices(profile, question.remat) if of is None else of
        #: By what ``fastest`` was asked, the least seconds of plans that fit and that it gave up,
        #: if their stages are equal.
        self.given_up = defaultdict[tuple[int | None, float], float](lambda: inf)

    @cached_property
    def choices(self) -> tuple[StageChoice, ...]:
        """The choices that stages of groups can have and that the profile can predict."""
        size = self.question.microbatch_size
        degrees = group_sizes(self.question, self.profile.graph.num_layers)
        return tuple(
            choice
            for choice in self._of
            if choice.num_devices in degrees
            and size % choice.data_parallel == 0
            and self._rows.can_predict(choice)
        )

    @cached_property
    def spaces(self) -> list[TableSpace]:
        """The spaces to search: per number of groups, stages of the same degrees, and of any."""
        alike: dict[tuple[int, int], list[StageChoice]] = {}
        for choice in self.choices:
            alike.setdefault((choice.data_parallel, choice.tensor_parallel), []).append(choice)
        alternatives = [*map(tuple, alike.values()), *by_degree(self.choices).values()]
        spaces = [
            TableSpace(self._rows, choices, self.question)
            for choices in dict.fromkeys(alternatives)
        ]
        self._rows.forget_tables()
        return spaces

    def least_peak(self) -> Proposal | None:
        """Find the plan of least peak; of equal ones, that of least peaks of other devices."""

        def hoped(space: TableSpace) -> tuple[float, ...]:
            return (min(space.peaks(cuts, 0)[0] for cuts in space.starts) / _GAIN,)

        def begin(space: TableSpace) -> _Begun:
            found = space.least(lambda cuts: space.peaks(cuts, 0))
            return _Begun(space, *found, floor=space.peaks(found[0], 0)[:1])

        def end(begun: _Begun) -> Proposal:
            return self._planned(begun, begun.space.stages(begun.cuts, 0), begun.complete)

        return self._best(hoped, begin, end, _peak)

    def fastest(self, limit: int | None, enough: float = inf) -> Proposal | None:
        """Find the plan of least step time within a limit; the smallest one where none is. None
        where no plan fits that may be faster than ``enough`` seconds, if its stages are equal
        (``given_up``)."""
        num_microbatches, asked = self.question.num_microbatches, (limit, enough)

        def floor(known: tuple[float, ...], gain: float = 1.0) -> tuple[float, ...]:
            above, seconds, peak = known
            above = max(0.0, peak / gain - limit) if limit is not None and above else 0.0
            return above, seconds * num_microbatches / gain

        def hoped(space: TableSpace) -> tuple[float, ...]:
            return floor(min(space.busiest(cuts, limit) for cuts in space.starts), _GAIN)

        def begin(space: TableSpace) -> _Begun:
            found = space.least(lambda cuts: space.busiest(cuts, limit))
            return _Begun(space, *found, floor=floor(space.busiest(found[0], limit)))

        def rank(found: Proposal) -> tuple[float, ...]:
            return _above(found, limit), found.seconds, found.result.peak_bytes

        def is_hopeless(begun: _Begun) -> bool:
            above, seconds = begun.floor
            step = seconds * begun.space.length / num_microbatches
            if (above, step) < (0, enough):
                return False
            if not above:
                self.given_up[asked] = min(self.given_up[asked], step)
            return True

        end = partial(self._improved, limit=limit)
        return self._best(hoped, begin, end, rank, is_hopeless if enough < inf else None)

    def front(self) -> list[Proposal]:
        """Return a sample of the plans of which none is both smaller and faster than another, with
        both ends; smallest first."""
        top, bottom = self.fastest(self.question.limit_bytes), self.least_peak()
        if top is None or bottom is None:
            return []
        least, most = bottom.result.peak_bytes, top.result.peak_bytes
        between = [
            self.fastest(least + (most - least) * i // (NUM_FRONT_LIMITS - 1))
            for i in range(NUM_FRONT_LIMITS - 1)
        ]
        return undominated(
            [*filter(None, between), top], lambda found: (*_peak(found), found.seconds)
        )

    def _improved(self, begun: _Begun, limit: int | None, tries: int = 2) -> Proposal:
        """Return the fastest plan of one space within a limit; search again under a lower limit
        where the prediction is above it by what the space leaves out."""
        space = begun.space
        cuts = space.improved(begun.cuts, lambda cuts: space.counted(cuts, limit))
        found = self._planned(begun, space.stages(cuts, limit))
        left_out = found.result.peak_bytes - space.peaks(cuts, limit)[0]
        if limit is not None and 0 < _above(found, limit) <= left_out and tries > 1:
            lower = limit - left_out
            again = _Begun(space, *space.least(lambda cuts: space.busiest(cuts, lower)))
            return self._improved(again, lower, tries - 1)
        return found

    def _best(
        self,
        hoped: Callable[[TableSpace], tuple[float, ...]],
        begin: Callable[[TableSpace], _Begun],
        end: Callable[[_Begun], Proposal],
        rank: Callable[[Proposal], tuple[float, ...]],
        is_hopeless: Callable[[_Begun], bool] | None = None,
    ) -> Proposal | None:
        """Return the best plan over all spaces. A space is left out where balanced cuts are far
        above the best plan, and not searched to the end where its floor is above it."""
        start, best, begun = time.perf_counter(), list[Proposal](), list[_Begun]()
        values = {space: () if space.is_small else hoped(space) for space in self.spaces}
        for space in sorted(values, key=lambda each: values[each]):
            if best and values[space] > rank(best[0]):
                break
            begun.append(begin(space))
            if is_hopeless is not None and is_hopeless(begun[-1]):
                continue
            if not best or begun[-1].floor <= rank(best[0]):
                best = [min([*best, end(begun[-1])], key=rank)]
        if not best:
            return None
        result = replace(
            best[0].result,
            optimal=best[0].result.optimal
            and len(begun) == len(values)
            and all(each.complete for each in begun),
            num_explored=sum(each.num_explored for each in begun),
            seconds=time.perf_counter() - start,
        )
        return replace(best[0], result=within_limit(result, self.question.limit_bytes))

    def _planned(
        self, begun: _Begun, stages: Sequence[PlacedStage], is_proven: bool = False
    ) -> Proposal:
        plan = plan_of(self.profile, self.question, stages)
        prediction = self.predictor.predict(plan)
        seconds = None if self.steps is None else self.steps.seconds(plan)
        peaks, found = prediction.peak_bytes_per_device, zip(stages, prediction.stages, strict=True)
        placed = tuple(replace(stage, peak_bytes=of.peak_bytes) for stage, of in found)
        result = SearchResult("ok", placed, peaks, "table", is_proven, begun.num_explored)
        result = replace(result, step_seconds=seconds)
        return Proposal(result, plan.with_(prediction=prediction))


def group_sizes(question: PlanQuestion, num_layers: int) -> Sequence[int]:
    """Return the numbers of devices that all groups of a schedule may have."""
    cluster, kind = question.cluster, SCHEDULES[question.schedule]
    degrees, found = question.space.degrees(cluster), []
    for d in question.space.all_degrees(cluster):
        num_groups, rest = divmod(cluster.num_devices, d)
        if (
            not rest
            and num_groups * kind.stages_per_group <= num_layers
            and not kind.wrong(num_groups, question.num_microbatches)
            and all(d in degrees[p] for p in range(0, cluster.num_devices, d))
        ):
            found.append(d)
    return found


def _above(found: Proposal, limit: int | None) -> int:
    return 0 if limit is None else max(0, found.result.peak_bytes - limit)


def _peak(found: Proposal) -> tuple[float, ...]:
    return found.result.sorted_peaks


def nothing_fits(question: PlanQuestion, num_layers: int) -> SearchResult:
    """Return the infeasible result for a schedule that no profiled choice makes groups for."""
    kind = SCHEDULES[question.schedule]
    per_group = f"{kind.stages_per_group} stages" if kind.stages_per_group > 1 else "a stage"
    message = (
        f"schedule={question.schedule!r} takes groups of equally many devices of cluster "
        f"{question.cluster}, each with {per_group} of at least one of num_layers={num_layers}; no "
        f"profiled choice makes groups for num_microbatches={question.num_microbatches}. "
        f"{_rules(question)}Give other numbers, or another schedule. [no-possible-groups]"
    )
    why = Why(message, code="no-possible-groups", memory_limit_bytes=question.limit_bytes)
    return SearchResult("infeasible", (), (), "table", True, why=why)


def _rules(question: PlanQuestion) -> str:
    kind, num_devices = SCHEDULES[question.schedule], question.cluster.num_devices
    wrong = kind.wrong(num_devices, question.num_microbatches)
    return f"With {num_devices} groups it {wrong}. " if wrong else ""


def several_groups(question: PlanQuestion, num_layers: int) -> Sequence[int]:
    """Return the numbers of devices per group that make several groups, and no more groups than
    micro-batches. Of one group nothing waits; with fewer micro-batches some group always does."""
    num_devices, num_microbatches = question.cluster.num_devices, question.num_microbatches
    return [
        d for d in group_sizes(question, num_layers) if 1 < num_devices // d <= num_microbatches
    ]
