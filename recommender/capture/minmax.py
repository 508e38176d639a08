"""Exact least peak over all plans: a bound that ignores the position, then a programme that does
not.

1. With each stage at its best position, a programme over (device, next layer) bounds the least peak
   from below. With one position row (GPipe) it is the least peak.
2. ``Reach`` finds the least peak of plans of stages within a limit, if there are any. Its limit
   goes up from the bound in steps that double, since few stages are within a low one.

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
from recommender.capture.result import SearchResult, found, nothing_found, place
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
    reach = _reach(problem)
    if reach is None:
        return nothing_found(problem, algorithm="minmax", num_explored=0)
    if tie_break == "none":
        columns, cuts = 0, reach.plan()
    else:
        stages, live = reach.on_plans()
        columns = num_devices if tie_break in ("auto", "full") else int(tie_break)
        if tie_break == "auto" and num_devices > FULL_TIE_BREAK_DEVICES:
            columns = max(1, AUTO_TIE_BREAK_CELLS // int(live.sum()))
        columns = min(num_devices, columns)
        cuts = fairest_cuts(problem, stages, live, columns)
    return found(
        problem,
        place(problem, cuts),
        "minmax",
        optimal=True,
        num_explored=sum(len(of.row) for of in reach.stages.values()),
        tie_break_columns=columns,
    )


def least_peak(problem: SearchProblem) -> int:
    """Return the least peak of all plans in bytes; ``NEVER`` where no plan exists."""
    reach = _reach(problem)
    return NEVER if reach is None else reach.peak


def _reach(problem: SearchProblem) -> Reach | None:
    """Return what the least peak is of, within a limit at which there are plans; None without
    any."""
    rows = {d: problem.cost[d].min(axis=0) for d in problem.used_degrees}
    lower = least_largest(problem, {d: table.min(axis=0) for d, table in rows.items()})
    if lower >= NEVER:
        return None
    largest = (table.max(where=table < NEVER, initial=lower) for table in rows.values())
    upper = int(max(largest))
    limit, step = lower, max(1, abs(lower) // 8, upper - lower >> 10)
    while (reach := Reach(problem, rows, min(limit, upper))).peak == NEVER and limit < upper:
        limit, step = limit + step, 2 * step
    return None if reach.peak == NEVER else reach


def least_largest(problem: SearchProblem, values: Mapping[int, np.ndarray]) -> int:
    """Return the least that the largest value of a plan's stages can be, from (S,) values per
    degree; ``NEVER`` without a plan."""
    tables = {d: problem.spread(np.where(problem.empty, NEVER, of)) for d, of in values.items()}
    tail = np.full((len(problem.degrees) + 1, problem.num_layers + 1), NEVER)
    tail[-1, -1] = -NEVER
    for p in reversed(range(len(problem.degrees))):
        for d in problem.degrees[p]:
            least = np.maximum(tables[d], tail[p + d]).min(axis=1)
            np.minimum(tail[p, :-1], least, out=tail[p, :-1])
    return int(tail[0, 0])
