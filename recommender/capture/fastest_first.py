"""The fastest plan that fits, without a profile: lower bounds of seconds and bytes from tracing,
and compiles of the plan that is estimated to be fastest (``timed_rounds``), until that plan is
compiled already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from capture.measured.profile import Profile
from capture.plan.why import Bracket, CompiledPlans, Why
from capture.quantities import counted, format_seconds
from recommender.answer import StageAnswer
from recommender.capture.posed import search_problem
from recommender.capture.problem import SearchProblem
from recommender.capture.result import SearchResult
from recommender.capture.rounds import Effort, StageCompiler
from recommender.capture.searched import searched
from recommender.capture.throughput import throughput
from recommender.capture.timed_rounds import CLOSED_FORM, CompiledPlan, TimedRounds
from recommender.question import BOUNDS_FIRST, PlanQuestion

#: A plan that may be slower by this part than another one is not called proven.
_PROVES_NOTHING = 1.0


def fastest_first(
    least: Profile,
    most: Profile,
    question: PlanQuestion,
    compiler: StageCompiler,
    effort: Effort = Effort(),
    *,
    told: Callable[[Bracket], None] = lambda bracket: None,
) -> StageAnswer:
    """The fastest plan that fits, of compiled stages; arguments as of ``bounds_first``.

    Returns:
        ``why.proven`` says by how much another plan may be faster. That nothing fits is proven by
        bounds alone where they are above the limit.
    """
    asked = replace(question, algorithm=None, objective="throughput")
    return _Search(most, asked, compiler, effort, told).run(least)


class _Search(TimedRounds[CompiledPlan]):
    def _round(self) -> str:
        """Search, and compile what is estimated to be fastest; why that was the last round, or
        nothing."""
        problem = self._problem()
        bound = throughput(problem)
        if bound.status != "ok" or bound.step_seconds is None:
            self._found = self._predicted(bound)
            return "memory"
        self._found = self._predicted(self._estimated(problem))
        assert self._found.plan is not None, "a plan fits"
        least = bound.step_seconds / (1 + bound.bound_fraction)
        self._trail.append(self._bracket(least))
        self._told(self._trail[-1])
        if ended := self._ended(self._trail[-1]):
            return ended
        if self._is_asked(self._found.plan):
            return "search"
        compiled = self._compiled(self._found)
        if compiled is not None and compiled.answer.status == "ok":
            best = self._best
            self._best = compiled if best is None or compiled.seconds < best.seconds else best
        return ""

    def _estimated(self, problem: SearchProblem) -> SearchResult:
        """The plan that is estimated to be fastest: by bytes as expected, or by their bounds where
        nothing else is left."""
        seconds, known = self._estimated_seconds(problem), self._known
        expected = replace(self._most, verified=known.verified, failures=known.failures)
        posed = search_problem(expected, self._question, with_times=True)
        found = throughput(replace(posed, seconds=seconds))
        return found if found.status == "ok" else throughput(replace(problem, seconds=seconds))

    def _bracket(self, least: float) -> Bracket:
        """What is known now of the fastest step."""
        best = self._best
        peak = (self._found if best is None else best.answer).peak_bytes
        most = None if best is None else best.seconds
        seconds = time.perf_counter() - self._start
        return Bracket(seconds, self._num_compiled, peak, peak, best is not None, least, most)

    def _ended(self, bracket: Bracket) -> str:
        """Why the search is over (``Proven.ended``); nothing while it is not."""
        effort, best = self._effort, self._best
        assert bracket.least_step_seconds is not None, "it is of a step"
        near = bracket.least_step_seconds * (1 + effort.within_fraction)
        reasons = {
            "proven": best is not None and best.seconds <= bracket.least_step_seconds,
            "within": best is not None and best.seconds <= near,
        }
        return self._first_of(reasons, bracket)

    def _answer(self, ended: str) -> StageAnswer:
        seconds = time.perf_counter() - self._start
        if ended == "memory" or not self._trail:
            return self._beyond(seconds)
        bracket, num_plans = self._trail[-1], len(self._compiled_plans)
        least, most = bracket.least_step_seconds, bracket.most_step_seconds
        assert least is not None, "it is of a step"
        within = None if most is None else most / least - 1
        proven = self._proven(within, ended)
        best = self._found if self._best is None else self._best.answer
        assert best.plan is not None, "a plan was found"
        if within is None:
            said = (
                "nothing that fits was compiled: a step takes at least "
                f"{format_seconds(least)}, {CLOSED_FORM}."
            )
            why = Why(said, uncompiled=said, proven=proven)
        else:
            said = f"proven fastest within {within:.1%}" if within else "proven fastest"
            said += " of the plans that fit"
            if within > _PROVES_NOTHING:
                said = (
                    "the fastest of these, not proven: no plan that fits takes less than "
                    f"{format_seconds(least)}"
                )
            summary = (
                f"{counted(num_plans, 'plan')} with {counted(self._num_compiled, 'new stage')} "
                f"compiled; {said}, {CLOSED_FORM}, "
                f"{searched(self._question, self._known.choices)}."
            )
            what = (
                f"{counted(best.plan.num_stages, 'stage')}; the peak is {best.peak_bytes:,} bytes."
            )
            verified = CompiledPlans(num_plans, ended == "search" or within == 0, summary)
            why = Why(f"{what} {summary}", verified=verified, proven=proven)
        proof = replace(
            best.proof,
            algorithm=BOUNDS_FIRST,
            optimal=within == 0,
            tie_break="none",
            seconds=seconds,
            bound_fraction=within or 0.0,
        )
        return replace(best, plan=best.plan.with_(why=why), proof=proof, why=why)
