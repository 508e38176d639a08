"""The front of memory against time, without a profile: lower bounds of both from tracing, and
compiles of the plans of the front as it is estimated (``timed_rounds``).

Each round compiles the plan of the estimated front that is farthest from all compiled ones, the
fastest first, until every plan of that front is near enough to one of them. What is proven follows
from the corners of the front by lower bounds: every plan is at least as large and as slow as one of
them.

Source of the measure of nearness: Papadimitriou and Yannakakis, On the approximability of
trade-offs (FOCS 2000), section 2: of an approximate front some plan is at most 1 + x times as large
and as slow as any given plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from capture.measured.profile import Profile
from capture.plan.why import Bracket, CompiledPlans, Front, FrontPoint, Why
from capture.quantities import counted, format_bytes, format_seconds
from recommender.answer import StageAnswer
from recommender.capture.pareto import pareto
from recommender.capture.rounds import Effort, StageCompiler
from recommender.capture.searched import searched
from recommender.capture.throughput import throughput
from recommender.capture.timed_rounds import CLOSED_FORM, ROUNDING, CompiledPlan, TimedRounds
from recommender.question import BOUNDS_FIRST, PlanQuestion

#: Bytes and seconds of a plan, or least ones of several.
Corner = tuple[int, float]


def front_first(
    least: Profile,
    most: Profile,
    question: PlanQuestion,
    compiler: StageCompiler,
    effort: Effort = Effort(),
    *,
    told: Callable[[Bracket], None] = lambda bracket: None,
) -> StageAnswer:
    """The front of compiled plans that fit, and the fastest of them; arguments as of
    ``bounds_first``.

    Returns:
        ``why.front`` has the plans, each with how far it is proven; ``why.proven`` says how near
        they are to all plans. That nothing fits is proven by bounds alone where they are above the
        limit.
    """
    asked = replace(question, algorithm=None, objective="pareto")
    return _Search(most, asked, compiler, effort, told).run(least)


class _Search(TimedRounds[tuple[CompiledPlan, ...]]):
    _corners: tuple[Corner, ...]

    def _round(self) -> str:
        """Search, and compile what is farthest from what is compiled; why that was the last round,
        or nothing."""
        problem = self._problem()
        self._corners = pareto(problem).corners
        if not self._corners:
            self._found = self._predicted(throughput(problem))
            return "memory"
        estimated = pareto(replace(problem, seconds=self._estimated_seconds(problem))).points
        self._found = self._predicted(estimated[-1])
        smallest = self._predicted(estimated[0])
        self._trail.append(self._bracket(smallest.peak_bytes))
        self._told(self._trail[-1])
        if ended := self._ended(self._trail[-1]):
            return ended
        far, next_plan = 0.0, None
        for point in reversed(estimated):
            found = self._predicted(point)
            assert found.plan is not None and point.step_seconds is not None, "a plan was found"
            short = _short((point.peak_bytes, point.step_seconds), self._values)
            if short > max(far, self._effort.within_fraction) and not self._is_asked(found.plan):
                far, next_plan = short, found
        if next_plan is None:
            return "search"
        compiled = self._compiled(next_plan)
        if compiled is not None and compiled.answer.status == "ok":
            self._best = (*(self._best or ()), compiled)
        return ""

    @property
    def _values(self) -> list[Corner]:
        return [(each.answer.peak_bytes, each.seconds) for each in self._best or ()]

    def _within(self) -> float | None:
        """How near compiled plans are to all (``Proven.within_fraction``)."""
        values = self._values
        return max(_short(corner, values) for corner in self._corners) if values else None

    def _bracket(self, expected_bytes: int) -> Bracket:
        """What is known now of the front; its smallest plan is expected to need so much."""
        values, num_points = self._values, len(_front(self._best or ()))
        least_bytes = min(peak for peak, _ in self._corners)
        return Bracket(
            time.perf_counter() - self._start,
            self._num_compiled,
            least_bytes,
            max(least_bytes, min((peak for peak, _ in values), default=expected_bytes)),
            bool(values),
            min(seconds for _, seconds in self._corners),
            min((seconds for _, seconds in values), default=None),
            num_points,
            self._within(),
        )

    def _ended(self, bracket: Bracket) -> str:
        """Why the search is over (``Proven.ended``); nothing while it is not."""
        within = bracket.within_fraction
        reasons = {
            "proven": within == 0,
            "within": within is not None and within <= self._effort.within_fraction,
        }
        return self._first_of(reasons, bracket)

    def _answer(self, ended: str) -> StageAnswer:
        seconds = time.perf_counter() - self._start
        if ended == "memory" or not self._trail:
            return self._beyond(seconds)
        within, num_plans = self._within(), len(self._compiled_plans)
        proven = self._proven(within, ended)
        if within is None:
            said = (
                "nothing that fits was compiled: every plan needs at least "
                f"{format_bytes(min(self._corners)[0])}, and a step takes at least "
                f"{format_seconds(min(each for _, each in self._corners))}, {CLOSED_FORM}."
            )
            why = Why(said, uncompiled=said, proven=proven)
            return self._said(self._found, why, 0.0, seconds)
        plans = _front(self._best or ())
        best = plans[-1].answer
        assert best.plan is not None, "it was compiled"
        points = tuple(map(self._point, plans))
        is_whole = within == 0 and all(point.within_fraction == 0 for point in points)
        summary = (
            f"{counted(num_plans, 'plan')} with {counted(self._num_compiled, 'new stage')} "
            f"compiled, {len(points)} of them on the front; "
            f"{'proven' if within == 0 else f'proven within {within:.1%}'}: whichever plan fits, "
            f"one of them needs no more bytes and seconds{' by more' * (within > 0)}, "
            f"{CLOSED_FORM}, {searched(self._question, self._known.choices)}."
        )
        why = Why(
            f"{counted(best.plan.num_stages, 'stage')}; the peak is {best.peak_bytes:,} bytes. "
            f"{summary}",
            front=Front(points, is_whole, False, seconds),
            verified=CompiledPlans(num_plans, ended == "search" or within == 0, summary),
            proven=proven,
        )
        fastest = min(each for _, each in self._corners)
        return self._said(best, why, _above(plans[-1].seconds, fastest), seconds)

    def _said(
        self, best: StageAnswer, why: Why, bound_fraction: float, seconds: float
    ) -> StageAnswer:
        assert best.plan is not None, "a plan was found"
        proof = replace(
            best.proof,
            algorithm=BOUNDS_FIRST,
            optimal=why.uncompiled is None and bound_fraction == 0,
            tie_break="none",
            seconds=seconds,
            bound_fraction=bound_fraction,
        )
        return replace(best, plan=best.plan.with_(why=why), proof=proof, why=why)

    def _point(self, compiled: CompiledPlan) -> FrontPoint:
        """A compiled plan, with what the corners say of it."""
        answer, seconds = compiled.answer, compiled.seconds
        assert answer.plan is not None and answer.proof.step_seconds is not None, "it was compiled"
        peak = answer.peak_bytes
        within = max(min(_above(peak, p), _above(seconds, s)) for p, s in self._corners)
        as_large = min(s for p, s in self._corners if p <= peak)
        return FrontPoint(
            peak,
            answer.proof.step_seconds,
            _above(seconds, as_large),
            answer.plan.stages,
            within_fraction=within,
        )


def _front(plans: Iterable[CompiledPlan]) -> list[CompiledPlan]:
    """Those of which none is both smaller and faster than another, by ascending peak; transfers
    included, as seconds of plans are said."""
    found: list[tuple[float, CompiledPlan]] = []
    for plan in plans:
        seconds = plan.answer.proof.step_seconds
        assert seconds is not None, "it was compiled"
        found.append((seconds, plan))
    left: list[tuple[float, CompiledPlan]] = []
    for seconds, plan in sorted(found, key=lambda each: (each[1].answer.peak_bytes, each[0])):
        if not left or seconds < left[-1][0]:
            left.append((seconds, plan))
    return [plan for _, plan in left]


def _short(corner: Corner, values: Iterable[Corner]) -> float:
    """By how much the nearest plan is larger or slower than a corner; infinite without a plan."""
    nearest = (max(_above(p, corner[0]), _above(s, corner[1])) for p, s in values)
    return min(nearest, default=float("inf"))


def _above(value: float, least: float) -> float:
    """By which part of ``least`` a value is above it; 0 where it is not."""
    return 0.0 if value <= least * (1 + ROUNDING) else value / least - 1
