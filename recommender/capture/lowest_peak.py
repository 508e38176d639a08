"""The policy of ``refine`` for the lowest peak memory, and how answers of all policies are said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from capture.errors import ProfileError, said_once
from capture.measured.profile import REFUSED_BYTES, StageConfig
from capture.plan.stages import Plan
from capture.plan.why import PROVES_NOTHING, Bracket, CompiledPlans, Why
from capture.predictor.step_time import predicted_timeline
from capture.quantities import counted, format_bytes
from recommender.answer import Answer, StageAnswer
from recommender.capture.nearness import Corner, above
from recommender.capture.parts import Found, OpenPart, Part, posed, posed_at_most, posed_bounds
from recommender.capture.posed import plan_of, search_problem
from recommender.capture.problem import NEVER, SearchProblem, together
from recommender.capture.recommendation import (
    depends_on_cuts_behind,
    predict_plan,
    recommend,
)
from recommender.capture.refine import Look, Policy, Probe, Search
from recommender.capture.result import Proposal, SearchResult
from recommender.capture.search import search as search_plan
from recommender.capture.searched import searched
from recommender.capture.tables import TableSearch, several_groups
from recommender.question import BOUNDS_FIRST, PlanQuestion

#: How far the best compiled plan is above the lower bound where bounds say little.
LOOSE = 1.2
#: Where bounds say so little, no more are compiled after so many plans that were expected to be
#: smaller and are not, one after the other (``missed``), unless the best of all is asked for.
_MOST_MISSED = 12
#: On what rests that no plan fits, of the stages that were not compiled.
RESTS_ON = (
    "for all others, lower bounds from tracing, which count results and, on GPUs, what "
    "large matrix products read and make"
)


class LowestPeak(Policy):
    """The policy that finds the plan of least peak, in compiled bytes.

    What is proven is proven of plain schedules. Of the others, with micro-batches of the size that
    is best there, the plan that is expected to need least is compiled if that is less than is
    known; they are not looked at where the best plan is one stage, of which nothing waits.
    """

    objective = "memory"

    def __init__(self) -> None:
        #: The plan of another schedule to compile, once one was looked for; None if nothing.
        self._other: Found | None = None
        self._knows_others = False

    def corner(self, nbytes: int, seconds: float) -> Corner:
        return float(nbytes), 0.0

    def corners(self, search: Search, part: OpenPart) -> Sequence[Corner]:
        return [self.corner(part.once(_least_peak), 0.0)] if part.is_plain else []

    def is_bounded(self, part: Part) -> bool:
        return part.is_plain

    def _best(self, search: Search) -> Found | None:
        return min(search.compiled, key=lambda each: each.answer.peak_bytes, default=None)

    def look(self, search: Search) -> Look:
        part = min(search.plain_parts, key=lambda part: part.once(_least_peak))
        found, best = part.once(recommended), self._best(search)
        if found.plan is None:
            return Look(Found(part, found), None, {})  # no plan fills the cluster
        least = int(min(search.corners)[0])
        if least >= REFUSED_BYTES:
            raise ProfileError.of(
                f"every plan has a stage that does not compile: {said_once(part.known.failures)}.",
                "verify-stage",
            )
        peak = (best.answer if best else predict_plan(part.most, found.plan)).peak_bytes
        effort, limit = search.effort, part.question.limit_bytes
        fits = best is not None and best.answer.status == "ok"
        reasons = {
            "memory": limit is not None and least > limit and not fits,
            "proven": best is not None and peak <= least,
            "within": fits and peak <= least * (1 + effort.within_fraction),
            "fits": effort.any_that_fits and fits,
            "below": effort.below_bytes is not None and least >= effort.below_bytes,
        }
        may_look = not (self._knows_others or effort.any_that_fits or search.is_spent)
        if may_look and any(reasons.values()):
            self._other, self._knows_others = _smaller(search, best or Found(part, found)), True
            reasons = {} if self._other else reasons
        so_far = search.seconds, search.num_compiled
        bracket = Bracket(*so_far, least, max(least, peak), best is not None)
        return Look(Found(part, found), bracket, reasons)

    def next(self, search: Search, look: Look) -> Found | Probe | None:
        """Return the plan of least bounds; the one expected to be best where bounds are so far
        below compiled bytes that it hardly is; later the stages that decide."""
        best, bracket = self._best(search), look.bracket
        if self._other is not None and not search.is_asked(self._other):
            return self._other
        if best is None or bracket is None or search.is_asked(look.found):
            return None if search.is_asked(look.found) else look.found
        peak = best.answer.peak_bytes
        is_loose = peak > (1 + PROVES_NOTHING) * bracket.least_bytes
        if is_loose and self.gives_up(search, best, _MOST_MISSED):
            return None
        if peak > LOOSE * bracket.least_bytes:
            expected = [Found(part, part.once(_expected)) for part in search.plain_parts]
            for found in sorted(expected, key=lambda found: found.answer.proof.peak_bytes):
                if found.answer.proof.peak_bytes < peak and not search.is_asked(found):
                    return found
        enough = peak / (1 + search.effort.within_fraction)
        configs = _deciding(look.found, enough, search.effort.at_once)
        return Probe(look.found.part, configs) if configs else look.found

    def answer(self, search: Search, look: Look, ended: str) -> StageAnswer:
        bracket, best = look.bracket, self._best(search)
        if bracket is None:
            return look.found.answer
        within = finite(above(bracket.most_bytes, bracket.least_bytes))
        if ended == "memory":
            return beyond(search, best or look.found, bracket.least_bytes, within)
        proven = search.proven(within, ended)
        if best is None:
            said = (
                "the plan is predicted, not compiled: no plan needs less than "
                f"{format_bytes(bracket.least_bytes)}, and this one about "
                f"{format_bytes(bracket.most_bytes)}."
            )
            return answer(search, look.found, Why(said, uncompiled=said, proven=proven), within)
        if within is None or within > PROVES_NOTHING:
            least = format_bytes(bracket.least_bytes)
            proof = f"; not proven: no plan needs less than {least}"
        else:
            proof = "; proven optimal" + (f" within {within:.1%}" if within else "")
        proof += " of the plans of 1F1B" if self._other else ""
        summary = compiled(search, proof, [each for each in search.questions if each.is_plain])
        why, verified = best.answer.why, CompiledPlans(len(search.compiled), within == 0, summary)
        what = peak_of(best) if best.answer.status == "ok" else why.summary
        why = replace(why, summary=f"{what} {summary}", verified=verified, proven=proven)
        return answer(search, best, why, within)


def finite(within: float) -> float | None:
    return None if within == math.inf else within


def peak_of(found: Found) -> str:
    plan = found.answer.plan
    assert plan is not None, "it was compiled"
    return f"{counted(plan.num_stages, 'stage')}; the peak is {found.answer.peak_bytes:,} bytes."


def compiled(search: Search, proof: str, questions: Sequence[PlanQuestion]) -> str:
    """Return how an answer was found, and what is proven of which questions, as a sentence."""
    choices = {choice for part in search.parts.values() for choice in part.known.choices}
    return (
        f"{counted(len(search.compiled), 'plan')} with "
        f"{counted(search.num_compiled, 'new stage')} compiled{proof} "
        f"{searched(questions, choices)}."
    )


def expected(part: OpenPart, result: SearchResult, plan: Plan | None = None) -> StageAnswer:
    """Return a plan with what it is expected to need at most, as an answer."""
    if not result.stages:
        why = Why("" if result.why is None else result.why.summary, code="memory-limit")
        return Answer("infeasible", None, result, why)
    plan = plan_of(part.known, part.question, result.stages) if plan is None else plan
    if part.has_offload and result.step_seconds is not None:
        slow = max(result.step_seconds, part.once(_with_waits, plan))
        result = replace(result, step_seconds=slow)
    why = Why(f"{counted(plan.num_stages, 'stage')}.")
    plan = plan.with_(prediction=predict_plan(part.most, plan), why=why)
    return Answer(result.status, plan, result, why, plan.headroom(part.question.memory_limit_bytes))


def _with_waits(part: OpenPart, plan: Plan) -> float:
    """Return the seconds that a plan with offload takes with copies and waits, as expected."""
    return float(predicted_timeline(plan, part.most).step_seconds)


def answer(search: Search, best: Found, why: Why, within: float | None) -> StageAnswer:
    """Return the answer of a search, whose plan is proven as far as it is compiled."""
    part, found = best
    assert found.plan is not None, "a plan was found"
    prediction, headroom = predict_plan(part.known, found.plan), found.headroom
    if not found.compiled:
        told = expected(part, found.proof, found.plan)
        assert told.prediction is not None, "it has a plan"
        prediction, headroom = told.prediction, told.headroom
    proof = replace(
        found.proof,
        algorithm=BOUNDS_FIRST,
        optimal=found.compiled and within == 0,
        tie_break_columns=0,
        seconds=search.seconds,
        bound_fraction=within or 0.0,
    )
    plan = found.plan.with_(prediction=prediction, why=why)
    return Answer(found.status, plan, proof, why, headroom)


def beyond(search: Search, best: Found, least: int, within: float | None = None) -> StageAnswer:
    """Return the answer that nothing fits, with the least bytes that every plan needs."""
    limit, found = best.part.question.limit_bytes, best.answer
    are_plain = all(question.is_plain for question in search.questions)
    why = Why(
        f"Every plan{'' if are_plain else ' of 1F1B'} needs at least {least:,} bytes on a device, "
        f"and memory_limit_bytes={limit or 0:,}: proven with "
        f"{counted(search.num_compiled, 'compiled stage')} and, {RESTS_ON}. "
        "Raise the limit, or use more devices, more micro-batches of a smaller size, or "
        "rematerialisation. [memory-limit]",
        code="memory-limit",
        memory_limit_bytes=limit,
        proven=search.proven(within, "memory"),
    )
    proof = replace(found.proof, algorithm=BOUNDS_FIRST, seconds=search.seconds)
    plan = found.plan and found.plan.with_(why=why)
    return Answer("infeasible", plan, proof, why, found.headroom)


def _smaller(search: Search, best: Found) -> Found | None:
    """Return the plan of other schedules expected to need least at most, with micro-batches of the
    best one's size; None if that is not less, or does not fit where the best one does not."""
    if not open_others(search, best):
        return None
    enough, limit = best.answer.peak_bytes, best.part.question.limit_bytes
    if best.answer.status != "ok" and limit is not None:
        enough = min(enough, limit + 1)
    parts = [part for part in search.parts.values() if not part.is_plain]
    found = ((part, part.once(least_in_groups)) for part in parts)
    plans = (Found(part, expected(part, of.result, of.plan)) for part, of in found if of)
    smaller = (found for found in plans if found.answer.proof.peak_bytes < enough)
    return min(smaller, key=lambda found: found.answer.proof.peak_bytes, default=None)


def open_others(search: Search, found: Found) -> bool:
    """Open the parts of other schedules with the micro-batches of a plan of several stages, whose
    devices may hold less by them. Return whether there are any."""
    if len(found.answer.proof.stages) == 1:
        return False
    others = {n: part for n, part in search.unopened.items() if not part.is_plain}
    numbers = [n for n, part in others.items() if part.question.microbatch_size == found.part.size]
    for number in numbers:
        search.open(number)
    return bool(numbers)


def least_in_groups(part: OpenPart) -> Proposal | None:
    """Return the plan of a part whose schedule is not plain that is expected to need least at
    most; None if there are no groups."""
    most, question = part.most, part.question
    usable = several_groups(question, most.graph.num_layers)
    choices = [choice for choice in most.choices if choice.num_devices in usable]
    return TableSearch(most, question, None, choices).least_peak()


def recommended(part: OpenPart) -> StageAnswer:
    """Return the plan of a part that is best by what is known."""
    return recommend(part.known, part.question)


def _least_peak(part: OpenPart) -> int:
    """Return a lower bound of the peak of every plan of a part."""
    found, known, question = part.once(recommended), part.known, part.question
    if found.plan is None:
        return NEVER
    if depends_on_cuts_behind(known, search_problem(known, question), part.size):
        problem = search_problem(known, question, least=True)
        return search_plan(problem, tie_break="none").peak_bytes
    return found.proof.peak_bytes


def _expected(part: OpenPart) -> StageAnswer:
    """Return the plan of a part that is expected to be the best."""
    known, question = part.known, part.question
    problem, other = search_problem(known, question), search_problem(part.most, question)
    result = search_plan(between(problem, other), tie_break="none")
    if result.status != "ok":
        return Answer("infeasible", None, result, Why())
    return expected(part, result)


def likely(part: OpenPart) -> SearchProblem:
    """Return the problem of a part with the bytes that stages are expected to need."""
    return between(part.once(posed), part.once(posed_at_most), part.once(nearness))


def between(problem: SearchProblem, other: SearchProblem, nearness: float = 0.5) -> SearchProblem:
    """Return a problem with bytes between two bounds: their geometric mean, weighted by how near
    it is to the second one, from 0 to 1."""
    problem, other = together(problem, other)
    cost = dict(problem.cost)
    for d in problem.used_degrees:
        least, most = problem.cost[d], other.cost[d]
        mean = np.maximum(least, 0.0) ** (1 - nearness) * np.maximum(most, 0.0) ** nearness
        cost[d] = np.where(np.maximum(least, most) < NEVER, mean, NEVER).astype(np.int64)
    return replace(problem, cost=cost)


def nearness(part: OpenPart) -> float:
    """Return how near to the most that is expected of them stages are taken to be, of a part's two
    bounds: in the middle, or nearer if all compiled stages are. What compilers add to every program
    is little of large ones, and most of small ones."""
    problems = posed_bounds(part)

    def place(config: StageConfig) -> float:
        choice, span = config.choice, (config.first, config.stop)
        known, least, most = (
            int(each.bytes_per_choice(choice.num_devices, 1, *span)[at])
            for each in (part.once(posed), *problems)
            for at in [each.choices[choice.num_devices].index(choice)]
        )
        if not 0 < least < most:
            return 0.0
        return math.log(max(known, least) / least) / math.log(most / least)

    compiled = [
        config
        for config in part.known.verified
        if config.microbatch_size == part.size
        and config.choice in problems[0].choices.get(config.choice.num_devices, ())
    ]
    return min(max(min(map(place, compiled), default=0.0), 0.5), 1.0)


def _deciding(found: Found, enough: float, num: int) -> list[StageConfig]:
    """Return the stages to compile next, at most so many: the largest of the plan that was found,
    and those that would decide next if it were too large; if they are, the others need not be
    compiled."""
    others, known = _uncompiled(found), found.part.known
    decide = others[:1]
    while 0 < len(decide) < num:
        known = known.without_stages({decide[-1]: ""})
        other = recommend(known, found.part.question)
        if other.plan is None or other.peak_bytes >= enough:
            break
        unknown = [each for each in _uncompiled(Found(found.part, other)) if each not in decide]
        if not unknown:
            break
        decide.append(unknown[0])
    rest = [config for config in others if config not in decide]
    return [*decide, *rest[: num - len(decide)]]


def _uncompiled(found: Found) -> list[StageConfig]:
    """Return the stages of a plan that are not compiled, the largest first."""
    plan, prediction = found.answer.plan, found.answer.prediction
    assert plan is not None and prediction is not None, "a plan was found"
    peaks = {
        StageConfig.of(stage, found.part.size): predicted.peak_bytes
        for stage, predicted in zip(plan.stages, prediction.stages, strict=True)
    }
    unknown = [config for config in peaks if config not in found.part.known.verified]
    return sorted(unknown, key=lambda config: -peaks[config])
