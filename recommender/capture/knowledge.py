"""The knowledge of a model that grows while questions are asked about it, and answers that rest on
it.

A search over predictions may prefer a plan whose stages are predicted a little too low. Every round
compiles the stages of the plan that is best by everything known so far. Once the best plan is one
whose stages are all compiled, no other plan has a lower predicted peak, and the shown number is the
compiler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from capture.measured.bounds import Bounds
from capture.measured.profile import Profile
from capture.plan.prediction import Verified
from capture.plan.stages import Plan
from capture.plan.why import CompiledPlans
from capture.quantities import counted
from recommender.answer import StageAnswer
from recommender.capture.compiled import of_compiler, same_model
from recommender.capture.effort import Effort, StageCompiler
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.parts import Part
from recommender.capture.recommendation import recommend
from recommender.capture.refine import refine
from recommender.question import PlanQuestion

#: ``compiled(plan, profile)`` compiles a plan's stages: what the compiler says, and the profile
#: that knows it.
Compile = Callable[[Plan, Profile], tuple[Verified, Profile]]

#: Most plans that are compiled for one answer.
MOST_PLANS = 8


def recommend_verified(
    profile: Profile,
    question: PlanQuestion,
    compiled: Compile,
    max_plans: int,
    *,
    known: StageAnswer | None = None,
    any_that_fits: bool = False,
) -> StageAnswer:
    """Find the plan that is best by the question's objective among those whose stages are compiled.

    Each compiled plan makes the profile know its stages, so the same question, asked again, names
    it only if it still is the best; an answer that was compiled before ends the search. That is why
    plans are not compiled side by side: most of what would be is never asked for.

    Args:
        profile: Measurements of the model.
        question: What is asked.
        compiled: Compiles a plan.
        max_plans: Most plans to compile, at least 1.
        known: An answer to the same question that is compiled already.
        any_that_fits: End at the first plan that fits by the compiler, or when none is predicted
            to.

    Returns:
        Its ``plan.verification`` holds the compiler's peaks, which ``headroom`` and ``peak_bytes``
        are of. ``why.verified`` says how many plans were compiled, and whether another plan is
        still predicted to be better.
    """
    best = known if known is not None and known.compiled else None
    checked = {best.plan} if best is not None else set()
    num_compiled = 0
    result = recommend(profile, question)
    while (
        result.plan is not None
        and same_model(result.plan, profile) not in checked
        and num_compiled < max_plans
    ):
        if any_that_fits and best is not None and (best.status == "ok" or result.status != "ok"):
            break
        verification, profile = compiled(result.plan, profile)
        num_compiled += 1
        found = of_compiler(result, verification, profile)
        checked.add(found.plan)
        if best is None or _rank(found) < _rank(best):
            best = found
        result = recommend(profile, question)
    if best is None or best.plan is None:
        return result
    settled = result.plan is None or same_model(result.plan, profile) in checked
    note = (
        "no other plan is predicted to be better"
        if settled
        else "another plan, not compiled yet, is predicted to be better"
    )
    summary = f"{counted(len(checked), 'plan')} compiled; {note}."
    verified = CompiledPlans(len(checked), settled, summary)
    said = f"{best.why.summary} {summary}" if best.status == "ok" else best.why.summary
    why = replace(best.why, summary=said, verified=verified)
    return replace(best, why=why, plan=best.plan.with_(why=why))


@dataclass
class Knowledge:
    """The measurements of a model and the compiler of its plans, so that no answer rests on
    predictions: the plan that is predicted to be best of many is the one whose error is luckiest.

    Attributes:
        profile: Measurements of the model, with every stage that was compiled so far.
        compiled: Compiles plans; None leaves answers predicted, and they say so.
        max_plans: Most plans to compile for an answer.
    """

    profile: Profile
    compiled: Compile | None = None
    max_plans: int = MOST_PLANS

    def answer(
        self,
        question: PlanQuestion,
        *,
        known: StageAnswer | None = None,
        any_that_fits: bool = False,
    ) -> StageAnswer:
        """Return the answer to a question, compiled; arguments and value as of
        ``recommend_verified``.

        A plan is believed not to fit, without compiling, if the low end of its interval is above
        the limit.
        """
        result = recommend(self.profile, question)
        is_compiled = known is not None and known.compiled
        if self.compiled is None or (self.is_settled(result) and not is_compiled):
            return result
        return recommend_verified(
            self.profile,
            question,
            self._learn,
            self.max_plans,
            known=known,
            any_that_fits=any_that_fits,
        )

    def is_settled(self, result: StageAnswer) -> bool:
        """Return whether an answer stands as it is: it is compiled, nothing may be compiled, or no
        plan fits, even at the low ends of intervals."""
        prediction, limit = result.prediction, result.memory_limit_bytes
        if self.compiled is None or result.compiled or prediction is None:
            return True
        lowest = max(low for low, _ in prediction.interval_bytes_per_device)
        return limit is not None and lowest > limit

    def _learn(self, plan: Plan, profile: Profile) -> tuple[Verified, Profile]:
        assert self.compiled is not None, "asked before"
        verification, self.profile = self.compiled(plan, profile)
        return verification, self.profile


@dataclass
class BoundedKnowledge(Knowledge):
    """The bounds that tracing gives of a model: no answer is given before it is compiled, and all
    are for least peak.

    Attributes:
        compiler: Of its stages.
    """

    compiler: StageCompiler | None = None

    def answer(
        self,
        question: PlanQuestion,
        *,
        known: StageAnswer | None = None,
        any_that_fits: bool = False,
    ) -> StageAnswer:
        """Find the plan of least peak in compiled bytes; or the first plan that fits."""
        assert self.compiler is not None, "bounds alone are no answer"
        part = Part(question, lambda: Bounds(self.profile, self.profile))
        return refine(LowestPeak(), [part], self.compiler, Effort(any_that_fits=any_that_fits))


def _rank(result: StageAnswer) -> tuple[bool, float, int]:
    """Return the sort key of an answer: those that fit come first, then the faster where the search
    was for speed, then the smaller."""
    fits = result.status == "ok"
    return not fits, (result.proof.step_seconds or 0.0) if fits else 0.0, result.peak_bytes
