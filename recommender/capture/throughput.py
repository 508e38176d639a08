"""Least step time under a memory limit, exactly or with a proven bound.

    step = sum over stages of t + (M - 1) x the slowest t + the longest update

For caps on the slowest stage and the longest update, ``LeastSum`` finds the least sum, the update
or most of it included. What is left to do is to choose the caps, by branch and bound over boxes
"slowest stage in [low, high], longest update in [shortest, longest]". A box can hold nothing better
than

    (least sum within its caps) + (M - 1) low

so the box of the least bound is looked at next. The least sum at a cap inside it gives a plan and
splits it into what is slower, what is faster, and, where the sum lacks a part of the plan's update,
shorter and longer updates. When no bound is below the best plan, that plan is proven; when the
search stops before, the least bound says how far it can be from the best. No enumeration.

Of plans of equal time, the one of least peak; of those, the one of fewest stages.

Source: the objective of Alpa (OSDI 2022), equation 2, whose search tries caps that are at least
1e-6 seconds apart.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from recommender.capture.least_sum import Caps, LeastSum, TimedPlan
from recommender.capture.minmax import least_largest, minmax
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.result import SearchResult, found
from recommender.capture.ticks import Ticks, step_seconds

#: Programmes per memory limit: more than 64 layers on 8x8 were seen to need.
MAX_PROGRAMMES = 1000


def throughput(
    problem: SearchProblem, *, gap_fraction: float = 0.0, max_programmes: int = MAX_PROGRAMMES
) -> SearchResult:
    """Find the plan of least step time that stays within the memory limit.

    Args:
        problem: With ``seconds``; ``update_seconds`` and ``memory_limit_bytes`` as wanted.
        gap_fraction: Stop once the step time is proven to be within this fraction of the least; 0
            for the least.
        max_programmes: Stop after so many once there is a plan; what is found depends on the
            problem only, never on the machine.

    Returns:
        ``optimal`` and ``bound_fraction`` say what is proven about ``step_seconds``. Infeasible for
        the same reasons as the search for least peak, whose plan is then there too.

    Raises:
        PlanError: ``search-seconds`` if the problem has no times.
    """
    start = time.perf_counter()
    fastest = Fastest(problem, gap_fraction, max_programmes)
    plan, lower = fastest.smallest_within(fastest.limit)
    result = fastest.why_none() if plan is None else fastest.result(plan, lower)
    return replace(result, seconds=time.perf_counter() - start)


class Fastest:
    """The search for the least step time of a problem under any memory limit.

    Args:
        problem, gap_fraction, max_programmes: See ``throughput``.
    """

    def __init__(
        self,
        problem: SearchProblem,
        gap_fraction: float = 0.0,
        max_programmes: int = MAX_PROGRAMMES,
    ):
        self.ticks = Ticks.of(problem)
        self.problem = _possible_in_time(problem, self.ticks.stage)
        self.limit = problem.limit_bytes
        self.gap_fraction, self.max_programmes = gap_fraction, max_programmes
        self.num_explored = 0
        stages = [np.unique(t[t < NEVER]) for t in self.ticks.stage.values()]
        self._values = np.unique(np.concatenate([*stages, np.empty(0, np.int64)]))
        updates = [np.unique(t[t < NEVER]) for t in self.ticks.update.values()]
        self._updates = np.unique(np.concatenate([*updates, np.empty(0, np.int64)]))
        self._least_update = least_largest(
            problem, {d: u.min(axis=0) for d, u in self.ticks.update.items()}
        )

    def smallest_within(self, limit: int) -> tuple[TimedPlan | None, int]:
        """Return the plan of least time within a memory limit, of these the one of least peak, and
        a proven lower bound as in ``within``."""
        plan, lower = self.within(limit)
        smaller = plan
        while smaller is not None:
            plan, next_time = smaller, (smaller.value // self.ticks.unit + 1) * self.ticks.unit
            smaller, _ = self.within(plan.peak_bytes - 1, below=next_time)
        return plan, lower

    def within(
        self, limit: int, *, below: int = NEVER, at_least: int = 0
    ) -> tuple[TimedPlan | None, int]:
        """Return the plan of least value within a memory limit, and a proven lower bound for the
        least value.

        Of plans with the same sum, slowest stage and update it is the one of least peak.

        Args:
            limit: Bytes per device.
            below: Only plans of a smaller value are of interest.
            at_least: A lower bound that is known.

        Returns:
            None if no such plan exists (proven unless the bound is below ``below``).
        """
        if self.problem.fewest_stages[0] > min(
            self.problem.num_layers, self.problem.cluster.num_devices
        ) or not len(self._values):
            return None, below
        programme = LeastSum(self.problem, self.ticks, limit)
        plan, lower = self._search(programme, below, at_least)
        if plan is not None:
            frugal = programme.frugal_plan(plan)
            assert frugal.value <= plan.value, "the frugal plan is no slower"
            plan = frugal
        self.num_explored += programme.num_explored
        return plan, lower

    def _search(
        self, programme: LeastSum, below: int, at_least: int
    ) -> tuple[TimedPlan | None, int]:
        """Return the fastest plan below a time, and a proven lower bound.

        A step takes the sum of the stages plus waits for the slowest one, so a box is a range of
        slowest stages and updates, and a programme gives the least sum under caps in its middle.
        Below the slowest stage of the plan found, that sum bounds the box; from there to the middle
        only another update could win. Boxes are taken least bound first, so the bound only rises.
        """
        plan: TimedPlan | None = None
        best, waits, values, updates = below, self.ticks.num_waits, self._values, self._updates
        slowest = programme.least_slowest()
        if slowest >= NEVER:
            return None, best
        # Boxes: (bound, low, high, shortest, longest, least sum); low and high are indices of
        # values, shortest and longest of updates.
        shortest = int(np.searchsorted(updates, self._least_update))
        low = int(np.searchsorted(values, slowest))
        boxes = [(at_least, low, len(values) - 1, shortest, len(updates) - 1, 0)]
        num_programmes = 0
        while boxes:
            bound, low, high, shortest, longest, least_sum = heapq.heappop(boxes)
            enough = num_programmes >= self.max_programmes and best < NEVER
            if best - bound <= self.gap_fraction * bound or enough:
                return plan, min(best, bound)
            middle = self._middle(low, high)
            num_programmes += 1
            caps = Caps(int(values[middle]), int(updates[shortest]), int(updates[longest]))
            here = programme.plan(caps, best - waits * (int(values[low]) - 1))
            parts = [(middle + 1, high, shortest, longest, least_sum)]
            if here is not None:
                if here.value < best:
                    plan, best = here, here.value
                reached = int(np.searchsorted(values, here.slowest))
                parts.append((low, reached - 1, shortest, longest, here.least_sum))
                # What is as slow as this plan can only be better by the part of its update that the
                # sum does not hold.
                unproven = here.value - here.least_sum - waits * (here.slowest - 1)
                if unproven > 0:
                    split = int(np.searchsorted(updates, here.update - unproven // 2))
                    parts.append((max(low, reached), middle, shortest, split - 1, here.least_sum))
                    parts.append((max(low, reached), middle, split, longest, here.least_sum))
            for box in parts:
                if box[0] <= box[1] and box[2] <= box[3]:
                    part_bound = max(bound, box[4] + waits * (int(values[box[0]]) - 1))
                    if part_bound < best:
                        heapq.heappush(boxes, (part_bound, *box))
        return plan, best

    def _middle(self, low: int, high: int) -> int:
        """Return the index of the cap on the slowest stage to try first in a box: the slowest stage
        of a good plan is seldom far above the least possible."""
        if self.ticks.num_waits == 0:
            return high
        least, most = int(self._values[low]), int(self._values[high])
        target = min((least + most) // 2, least + least // 8)
        return int(np.searchsorted(self._values, target, side="right")) - 1

    def result(self, plan: TimedPlan, lower: int) -> SearchResult:
        """Return a plan as a result, with what is proven about its step time."""
        optimal = lower // self.ticks.unit >= plan.value // self.ticks.unit
        explored = self.num_explored
        result = found(
            self.problem, plan.stages, "throughput", optimal=optimal, num_explored=explored
        )
        bound = 0.0 if optimal else plan.value / max(lower, 1) - 1
        return replace(
            result, step_seconds=step_seconds(self.problem, plan.stages), bound_fraction=bound
        )

    def why_none(self) -> SearchResult:
        """Return the infeasible result of the search for least peak, whose reason it gives."""
        result = minmax(self.problem, tie_break="none")
        assert result.why is not None, "both searches know the same plans"
        seconds = step_seconds(self.problem, result.stages) if result.stages else None
        return replace(result, algorithm="throughput", optimal=False, step_seconds=seconds)


def _possible_in_time(problem: SearchProblem, stage: Mapping[int, np.ndarray]) -> SearchProblem:
    """Return the problem in which stages without a time are impossible in bytes too, so that both
    searches know the same plans."""
    cost = dict(problem.cost)
    for d, values in stage.items():
        impossible = (values >= NEVER) & ~problem.empty
        if impossible.any():
            cost[d] = np.where(impossible[:, None], NEVER, cost[d])
    return replace(problem, cost=cost)
