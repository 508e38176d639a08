"""Exact least peak over all plans: bounds that ignore the position, then bisection over the costs
that occur.

1. With each stage at its best position, the programme over (devices used, next layer) bounds the
peak of every prefix and suffix from
   below, and the plan it finds bounds the least peak from above. With one position row (GPipe) the
   two meet and nothing is left to do.
2. Otherwise the least peak is one of the costs between the bounds. Each probe asks ``Reach``
whether a plan stays within a limit.
   A plan found lowers the upper bound to its own peak; none raises the lower bound.

No enumeration, and no monotonicity is assumed: costs may be negative, and a longer stage may need
less.

Source: replaces Algorithm 4 of CAPTURE III-C; same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from capture.errors import PlanError
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.reach import Reach
from recommender.capture.result import PlacedStage, SearchResult, found, nothing_found, place
from recommender.capture.tie_break import fairest_cuts

TieBreakOption = Literal["auto", "full", "none"] | int

#: Up to this many devices ``auto`` compares all of them.
FULL_TIE_BREAK_DEVICES = 64
#: Above, ``auto`` compares as many of the largest as keep states x columns below this: less than a
#: second.
AUTO_TIE_BREAK_CELLS = 1 << 20


def minmax(problem: SearchProblem, tie_break: TieBreakOption = "auto") -> SearchResult:
    """Find the plan of least peak, then of lexicographically least device bytes, largest first.

    Args:
        problem: What to place where.
        tie_break: ``full`` compares all devices, a number that many of the largest, ``none`` takes
            any plan of least peak. ``auto`` is full up to 64 devices and wherever that is cheap,
            else as many of the largest as take less than a second; it depends on the problem only,
            never on the machine.

    Returns:
        A result whose peak is proven least. Equal plans that remain: the smallest degree, then the
            fewest layers first.

    Raises:
        PlanError: ``search-tie-break`` for another word or a number below 1.
    """
    if tie_break not in ("auto", "full", "none") and not (
        isinstance(tie_break, int) and tie_break >= 1
    ):
        raise PlanError.of(
            f"tie_break={tie_break!r} is unknown; use auto, full, none, or how many of the "
            "largest devices to compare (1 or more).",
            "search-tie-break",
        )
    num_devices = problem.cluster.num_devices
    stages, reach, num_explored = least_peak(problem)
    if reach is None:
        return nothing_found(problem, algorithm="minmax", num_explored=num_explored)
    columns = 0
    if tie_break != "none":
        peak = max(stage.peak_bytes for stage in stages)
        live = reach.live(peak)
        if tie_break == "full" or (tie_break == "auto" and num_devices <= FULL_TIE_BREAK_DEVICES):
            columns = num_devices
        else:
            wanted = (
                AUTO_TIE_BREAK_CELLS // int(np.bitwise_count(live).sum())
                if tie_break == "auto"
                else int(tie_break)
            )
            columns = min(num_devices, max(1, wanted))
        stages = place(problem, fairest_cuts(reach, live, peak, columns))
    return found(
        problem,
        stages,
        "minmax",
        optimal=True,
        num_explored=num_explored,
        tie_break_columns=columns,
    )


def least_peak(problem: SearchProblem) -> tuple[tuple[PlacedStage, ...], Reach | None, int]:
    """Return a plan of least peak, the states for further questions about it, and the number of
    table entries looked at.

    The least peak is a cost that occurs, so the bisection is over the costs between the bounds and
    not over numbers: a probe at their median halves them, and a plan that it finds lowers the upper
    bound to its own peak, which is often much less than what was asked for.

    Returns:
        () and None where no plan exists.
    """
    if problem.fewest_stages[0] > min(problem.num_layers, problem.cluster.num_devices):
        return (), None, 0
    floors = {d: problem.floor(d) for d in problem.used_degrees}
    tail = suffix_floor(problem, floors)
    if tail[0, 0] >= NEVER:
        return (), None, 0
    head = _prefix_floor(problem.degrees, floors)
    best = place(problem, _read_floor(problem.degrees, floors, tail))
    lower, upper = int(tail[0, 0]), max(stage.peak_bytes for stage in best)
    reach = Reach(problem, floors, head, tail, min(upper, NEVER - 1))
    num_explored = sum(ranges.rows.size for ranges in reach.ranges.values())
    # The plan takes positions that are impossible: ask for any plan before bisecting.
    if upper >= NEVER:
        best = _probe(reach, NEVER - 1)
        if not best:
            return (), None, num_explored
        upper = max(stage.peak_bytes for stage in best)
    limit, values = lower, None
    while lower < upper:
        if plan := _probe(reach, limit):
            best, upper = plan, max(stage.peak_bytes for stage in plan)
        else:
            lower = limit + 1
        if values is None:
            values = np.concatenate([ranges.rows.ravel() for ranges in reach.ranges.values()])
        values = values[(values >= lower) & (values < upper)]
        if not len(values):
            break
        limit = int(np.partition(values, len(values) // 2)[len(values) // 2])
    return best, reach, num_explored


def _probe(reach: Reach, limit: int) -> tuple[PlacedStage, ...]:
    """Return a plan within the limit, or () if there is none."""
    return place(reach.problem, reach.plan(limit))


def suffix_floor(problem: SearchProblem, floors: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return tail[p, first]: the least that the largest value of the stages can be for layers
    [first, L) on devices p and on; (D + 1, L + 1).

    Args:
        problem: Devices and layers.
        floors: Per degree, a value of every stage at its best position, (L, L + 1).
    """
    tail = np.full((len(problem.degrees) + 1, problem.num_layers + 1), NEVER)
    tail[-1, -1] = -NEVER
    for p in reversed(range(len(problem.degrees))):
        for d in problem.degrees[p]:
            np.minimum(
                tail[p, :-1], np.maximum(floors[d], tail[p + d]).min(axis=1), out=tail[p, :-1]
            )
    return tail


def _prefix_floor(degrees: list[list[int]], floors: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return head[p, stop]: the least peak of layers [0, stop) on the devices before p, each stage
    at its best position; (D + 1, L + 1)."""
    num_layers = len(next(iter(floors.values())))
    head = np.full((len(degrees) + 1, num_layers + 1), NEVER)
    head[0, 0] = -NEVER
    for p, here in enumerate(degrees):
        for d in here:
            np.minimum(
                head[p + d], np.maximum(floors[d], head[p, :-1, None]).min(axis=0), out=head[p + d]
            )
    return head


def _read_floor(
    degrees: list[list[int]], floors: Mapping[int, np.ndarray], tail: np.ndarray
) -> list[tuple[int, int, int]]:
    """Return the plan behind ``tail[0, 0]`` as (first, stop, degree)."""
    cuts, p, first = [], 0, 0
    while p < len(degrees):
        d, stop = next(
            (d, int(stops[0]))
            for d in degrees[p]
            if len(
                stops := np.flatnonzero(np.maximum(floors[d][first], tail[p + d]) == tail[p, first])
            )
        )
        cuts.append((first, stop, d))
        p, first = p + d, stop
    return cuts
