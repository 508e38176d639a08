"""The front of peak memory against step time: every plan for which no other one is both smaller and
faster.

Every point is the fastest plan within a memory limit. A plan of peak P, found within a limit of Q,
proves that no other point lies between P and Q. The front is complete when the limits so covered
leave no gap between the fastest plan and the least peak:

1. the two ends: the fastest plan of all, and the fastest one of least peak;
2. a few limits at equal distances, so that a front that is cut off is spread out;
3. in the gap of the largest difference in time, the limit one byte below its faster end: a new
point, or proof that there is none.

Source: the epsilon-constraint method (Haimes, Lasdon and Wismer, IEEE Trans. SMC 1971), with a peak
as the constraint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from capture.plan.why import Why
from recommender.capture.least_sum import TimedPlan
from recommender.capture.minmax import least_peak
from recommender.capture.problem import SearchProblem
from recommender.capture.result import SearchResult
from recommender.capture.throughput import Fastest

T = TypeVar("T")

#: Searches per front; each is one memory limit.
MAX_SEARCHES = 32

#: Programmes per search, so that a front takes seconds; a point that needs more says how far it is
#: proven.
MAX_PROGRAMMES = 50


@dataclass(frozen=True)
class TimedFront:
    """The front of a search: plans of which none is both smaller and faster than another.

    Attributes:
        points: By ascending ``peak_bytes`` and descending ``step_seconds``; () if no plan exists or
            fits.
        complete: Whether every point of the front is there; else it is a sample that has both ends.
            Between them, a sample may hold a point that a plan of exactly the same time and a
            smaller peak would replace.
        optimal: Whether every point's step time is proven to be the least within its peak.
        num_searches: Memory limits that were looked at, those that break ties at the fastest end
            aside.
        seconds: Wall time.
        why: Set exactly if there are no points.
    """

    points: tuple[SearchResult, ...]
    complete: bool
    optimal: bool
    num_searches: int
    seconds: float
    why: Why | None = None


def pareto(
    problem: SearchProblem,
    *,
    max_searches: int = MAX_SEARCHES,
    gap_fraction: float = 0.0,
    max_programmes: int = MAX_PROGRAMMES,
) -> TimedFront:
    """Find the front of peak memory against step time, within the memory limit.

    Args:
        problem: With ``seconds``.
        max_searches: How many memory limits to look at; 2 give the ends alone. What is not looked
            at makes ``complete`` False.
        gap_fraction, max_programmes: How long each search goes on; see ``throughput``.

    Raises:
        PlanError: ``search-seconds`` if the problem has no times.
    """
    start = time.perf_counter()
    search = _FrontSearch(Fastest(problem, gap_fraction, max_programmes), max_searches)
    search.run()
    results = [search.fastest.result(point.plan, point.lower) for point in search.points]
    points = undominated(results, _values)
    return TimedFront(
        tuple(points),
        complete=search.complete and all(point.optimal for point in points),
        optimal=all(point.optimal for point in points),
        num_searches=search.num_searches,
        seconds=time.perf_counter() - start,
        why=None if points else search.fastest.why_none().why,
    )


@dataclass
class _TimedPoint:
    """A plan, the largest limit within which nothing is faster, and a lower bound for its value."""

    plan: TimedPlan
    limit: int
    lower: int


class _FrontSearch:
    def __init__(self, fastest: Fastest, max_searches: int):
        self.fastest, self.max_searches = fastest, max_searches
        self.num_searches, self.complete = 0, True
        self.points: list[_TimedPoint] = []  # by ascending peak

    def run(self) -> None:
        fastest = self.fastest
        top, lower = fastest.smallest_within(fastest.limit)
        self.num_searches += 1
        if top is None:
            return
        self.points = [_TimedPoint(top, fastest.limit, lower)]
        least = least_peak(fastest.problem)
        if least < top.peak_bytes:
            self.num_searches += 1
            bottom, lower = fastest.within(least, at_least=lower)
            assert bottom is not None, "the least peak has a plan"
            self.points.insert(0, _TimedPoint(bottom, least, lower))
        num_even = self.max_searches // 4
        for i in range(num_even, 0, -1):
            self._look(least + (top.peak_bytes - least) * i // (num_even + 1))
        while gaps := [
            (below.plan.value - above.plan.value, above.plan.peak_bytes - 1)
            for below, above in zip(self.points, self.points[1:], strict=False)
            if below.limit < above.plan.peak_bytes - 1
        ]:
            if self.num_searches >= self.max_searches:
                self.complete = False
                return
            self._look(max(gaps)[1])

    def _look(self, limit: int) -> None:
        """Search for the fastest plan within a limit that no point covers yet: it becomes a new
        point, or more of the gap above the point below it is covered."""
        i = sum(point.plan.peak_bytes <= limit for point in self.points) - 1
        if i < 0 or i + 1 == len(self.points) or limit <= self.points[i].limit:
            return
        below, above = self.points[i], self.points[i + 1]
        self.num_searches += 1
        unit = self.fastest.ticks.unit
        sooner = below.plan.value // unit * unit
        plan, lower = self.fastest.within(limit, below=sooner, at_least=above.lower)
        if plan is None:
            if lower < sooner:
                self.complete = False
            below.limit = limit
            return
        # Only where times are not proven.
        while i >= 0 and self.points[i].plan.peak_bytes >= plan.peak_bytes:
            del self.points[i]
            i -= 1
        self.points.insert(i + 1, _TimedPoint(plan, limit, lower))


def undominated(plans: Iterable[T], values: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the plans that are faster than every smaller one, by ascending peak; ``values`` gives
    the bytes of a plan, then its seconds."""
    points = list[T]()
    for plan in sorted(plans, key=values):
        if not points or values(plan)[-1] < values(points[-1])[-1]:
            points.append(plan)
    return points


def _values(result: SearchResult) -> tuple[int, float]:
    assert result.step_seconds is not None, "a search for speed gives the time of every plan"
    return result.peak_bytes, result.step_seconds
