"""The bounds of parts of a search for speed, and the plans that these do not rule out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from capture.plan.why import Why
from recommender.answer import Answer
from recommender.capture import grouped
from recommender.capture.least_step import LeastStep
from recommender.capture.lowest_peak import expected
from recommender.capture.nearness import ROUNDING, Corner, far
from recommender.capture.parts import Found, OpenPart, least_of_any_size, posed
from recommender.capture.posed import plan_of
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.refine import Search
from recommender.capture.result import PlacedStage
from recommender.capture.result import found as placed_plan


def corners(part: OpenPart) -> Sequence[Corner]:
    """Return lower bounds of a part: every plan of it that fits is at least as large and as slow as
    one of them."""
    if not part.is_plain:
        return [(0, max(part.least_seconds, grouped.least_seconds(part, part.question)))]
    step = LeastStep(part.once(posed))
    if part.question.objective == "pareto":
        return step.corners()
    limit = part.question.limit_bytes
    seconds, most = part.once(least_of_any_size) if part.question.may_rest else (inf, NEVER)
    if limit is not None and most > limit:
        seconds, _ = step.within(limit)
    return [(0, seconds)] if seconds < inf else []


def _least_seconds(part: OpenPart) -> float:
    return min((seconds for _, seconds in part.once(corners)), default=inf)


def next_possible(search: Search) -> Found | None:
    """Return a plan of a plain schedule that bounds do not rule out and that was not compiled;
    parts where one may be are opened."""
    while (found := next(_possible(search), None)) is None:
        floors, values = search.floors.items(), search.values
        left = [
            n
            for n, floor in floors
            if floor[1] < inf and far(floor, values) > 0 and search.unopened[n].is_plain
        ]
        if not left:
            break
        search.open(left[0])
    return found


def _possible(search: Search) -> Iterator[Found]:
    """Yield the plans of open parts of plain schedules that bounds do not rule out and that were
    not compiled, those of the least bounds first in each part."""
    known = sorted(search.values)
    limits = [*(nbytes - 1 for nbytes, _ in known), inf]
    may_be = [
        part
        for n, part in search.parts.items()
        if part.is_plain and far(search.floor(n), known) > 0
    ]
    for part in sorted(may_be, key=_least_seconds):
        problem, below = part.once(posed), inf
        for limit, slower in zip(limits, [*(seconds for _, seconds in known), 0.0], strict=True):
            most = int(min(limit, problem.limit_bytes))
            for seconds, stages in LeastStep(problem).plans(most, below):
                found = _bounded(part, problem, seconds, stages)
                if not search.is_asked(found):
                    yield found._replace(answer=expected(part, found.answer.proof))
            below = min(below, slower * (1 - ROUNDING))


def _bounded(
    part: OpenPart, problem: SearchProblem, seconds: float, stages: Sequence[PlacedStage]
) -> Found:
    """Return a plan with the bound of its step."""
    result = placed_plan(problem, tuple(stages), "throughput", optimal=False)
    plan = plan_of(part.known, part.question, stages)
    return Found(part, Answer("ok", plan, replace(result, step_seconds=seconds), Why()))
