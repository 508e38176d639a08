"""Search on bounds, compile what decides: the plan of least peak in compiled bytes, proven, without
a profile.

Every stage has a lower bound from tracing, or what the compiler said of it. Each round searches for
the plan of least peak by these, which no plan of the space can be below, and compiles its stages.
Once the best compiled plan is not above what the search finds, no plan needs less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from capture.errors import ProfileError, said_once
from capture.machine.target import Target
from capture.measured.profile import REFUSED_BYTES, Profile, StageConfig
from capture.plan.why import Bracket, CompiledPlans, Proven, Why
from capture.predictor import AdditivePredictor
from capture.quantities import counted, format_bytes
from recommender.answer import Answer, StageAnswer
from recommender.capture.posed import search_problem
from recommender.capture.problem import NEVER
from recommender.capture.recommendation import (
    depends_on_cuts_behind,
    plan_of,
    predict_plan,
    recommend,
    with_best_choices,
)
from recommender.capture.rounds import RESTS_ON, Effort, Rounds, StageCompiler
from recommender.capture.search import search
from recommender.capture.searched import searched
from recommender.capture.verified import Knowledge, of_compiler, same_model
from recommender.question import BOUNDS_FIRST, PlanQuestion

#: How far the best compiled plan is above the lower bound where bounds say little.
LOOSE = 1.2


def bounds_first(
    least: Profile,
    most: Profile,
    question: PlanQuestion,
    compiler: StageCompiler,
    effort: Effort = Effort(),
    *,
    told: Callable[[Bracket], None] = lambda bracket: None,
) -> StageAnswer:
    """The plan of least peak, in compiled bytes.

    Args:
        least: Lower bounds of the stages of the space (``profiling_runs.bounds``).
        most: What they are expected to need at most.
        question: What is asked, for least memory.
        compiler: An interrupt meanwhile ends the search with what is known.
        effort: When to end.
        told: Every bracket, as it is known.

    Returns:
        The best plan that was compiled, and in ``why.proven`` how near it is to the least peak.
        Where nothing was compiled, the plan of least bounds, as it is expected to be at most:
        ``why.uncompiled`` says so. That nothing fits is proven by bounds alone where they are above
        the limit.
    """
    return _Search(most, replace(question, algorithm=None), compiler, effort, told).run(least)


@dataclass
class BoundedKnowledge(Knowledge):
    """What tracing says of a model: ``profile`` has lower bounds, and no answer is given before it
    is compiled.

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
        """The plan of least peak in compiled bytes; or the first that fits."""
        assert self.compiler is not None, "bounds alone are no answer"
        effort = Effort(any_that_fits=any_that_fits)
        return bounds_first(self.profile, self.profile, question, self.compiler, effort)


class _Search(Rounds[StageAnswer]):
    def _round(self) -> str:
        """Search, and compile what it finds; why that was the last round, or nothing."""
        found = recommend(self._known, self._question)
        if found.plan is not None:
            self._trail.append(self._bracket(found))
            self._told(self._trail[-1])
        self._found = found
        if found.plan is None:
            return "search"  # no plan fills the cluster
        if ended := self._ended(self._trail[-1]):
            return ended
        if same_model(found.plan, self._known) in self._compiled_plans:
            return "search"
        if self._is_loose and (expected := self._expected()):
            found = expected
        elif configs := self._deciding(found):
            count, known = self._compiler.probe(configs, self._known)
            self._num_compiled += count
            self._learn(known)
            return ""
        assert found.plan is not None, "a plan was found"
        said = self._attempt(found.plan)
        if said is None:
            return ""
        self._num_compiled += said.num_stages_compiled
        answer = of_compiler(found, said, self._known)
        assert answer.plan is not None, "it was compiled"
        self._compiled_plans.add(answer.plan)
        if self._best is None or answer.peak_bytes < self._best.peak_bytes:
            self._best = answer
        return ""

    @property
    def _is_loose(self) -> bool:
        """Whether bounds are so far below what compilers say that the plan of the lowest bound is
        hardly the best one."""
        best = self._best
        return best is not None and best.peak_bytes > LOOSE * self._trail[-1].least_bytes

    def _expected(self) -> StageAnswer | None:
        """Return the plan that is expected to be the best, where it is not compiled and better than
        the best compiled one; a stage is expected to need the geometric mean of its two bounds."""
        known, question, best = self._known, self._question, self._best
        most = replace(self._most, verified=known.verified, failures=known.failures)
        problem, other = search_problem(known, question), search_problem(most, question)
        cost = dict[int, np.ndarray]()
        for d in problem.used_degrees:
            least, mine = problem.cost[d], other.cost[d]
            if not (isinstance(least, np.ndarray) and isinstance(mine, np.ndarray)):
                return None  # only as many micro-batches as in a schedule of many stages
            mean = np.sqrt(np.maximum(least, 0.0) * np.maximum(mine, 0.0))
            cost[d] = np.where(np.maximum(least, mine) < NEVER, mean, NEVER).astype(np.int64)
        result = search(replace(problem, cost={**problem.cost, **cost}), tie_break="none")
        if result.status != "ok" or (best is not None and result.peak_bytes >= best.peak_bytes):
            return None
        plan = plan_of(known, question, result.stages)
        stages = with_best_choices(
            result.stages, problem, AdditivePredictor(known), plan, question.remat
        )
        plan = plan.with_(stages=stages)
        if same_model(plan, known) in self._compiled_plans:
            return None
        prediction = predict_plan(known, plan)
        memory = Target.load(plan.cluster.target).memory
        headroom = prediction.headroom(question.memory_limit_bytes, memory)
        return Answer("ok", plan.with_(prediction=prediction), result, Why(), headroom)

    def _deciding(self, found: StageAnswer) -> list[StageConfig]:
        """Return the stages to compile next: the largest of the plan that was found, and those that
        would decide next if it were too large; if they are, the others need not be compiled. None
        of the first plan, which is compiled to have one."""
        if self._best is None:
            return []
        enough = self._best.peak_bytes / (1 + self._effort.within_fraction)
        others, num, known = self._uncompiled(found), self._effort.at_once, self._known
        decide = others[:1]
        while 0 < len(decide) < num:
            known = known.without_stages({decide[-1]: ""})
            found = recommend(known, self._question)
            if found.plan is None or found.peak_bytes >= enough:
                break
            unknown = [config for config in self._uncompiled(found) if config not in decide]
            if not unknown:
                break
            decide.append(unknown[0])
        rest = [config for config in others if config not in decide]
        return [*decide, *rest[: num - len(decide)]]

    def _uncompiled(self, found: StageAnswer) -> list[StageConfig]:
        """Return the stages of a plan that are not compiled, the largest first."""
        assert found.plan is not None and found.prediction is not None, "a plan was found"
        size, stages = found.plan.microbatch_size, found.prediction.stages
        peaks = {
            StageConfig.of(stage, size): predicted.peak_bytes
            for stage, predicted in zip(found.plan.stages, stages, strict=True)
        }
        unknown = [config for config in peaks if config not in self._known.verified]
        return sorted(unknown, key=lambda config: -peaks[config])

    def _bracket(self, found: StageAnswer) -> Bracket:
        """What is known now of the least peak.

        Raises:
            ProfileError: ``verify-stage`` if every plan has a stage that does not compile.
        """
        least, question, known = found.proof.peak_bytes, self._question, self._known
        problem = search_problem(known, question)
        if depends_on_cuts_behind(known, problem, question.microbatch_size):
            least = search(search_problem(known, question, least=True), tie_break="none").peak_bytes
        if least >= REFUSED_BYTES:
            raise ProfileError.of(
                f"every plan has a stage that does not compile: {said_once(known.failures)}.",
                "verify-stage",
            )
        assert found.plan is not None, "a plan was found"
        best = self._best
        most = predict_plan(self._most, found.plan).peak_bytes if best is None else best.peak_bytes
        seconds = time.perf_counter() - self._start
        return Bracket(seconds, self._num_compiled, least, max(least, most), best is not None)

    def _ended(self, bracket: Bracket) -> str:
        """Why the search is over (``Proven.ended``); nothing while it is not."""
        effort, limit, best = self._effort, self._found.memory_limit_bytes, self._best
        near = bracket.least_bytes * (1 + effort.within_fraction)
        reasons = {
            "memory": limit is not None and bracket.least_bytes > limit,
            "proven": best is not None and best.peak_bytes <= bracket.least_bytes,
            "within": best is not None and best.status == "ok" and best.peak_bytes <= near,
            "fits": effort.any_that_fits and best is not None and best.status == "ok",
            "below": effort.below_bytes is not None and bracket.least_bytes >= effort.below_bytes,
        }
        return self._first_of(reasons, bracket)

    def _answer(self, ended: str) -> StageAnswer:
        found, num_plans = self._found, len(self._compiled_plans)
        if found.plan is None:
            return found
        bracket = self._trail[-1]
        within = bracket.most_bytes / bracket.least_bytes - 1
        proven, limit = self._proven(within, ended), found.memory_limit_bytes
        if ended == "memory":
            assert limit is not None, "it is missed"
            return self._beyond(found, bracket, proven, limit)
        best, predicted = (found, self._most) if self._best is None else (self._best, self._known)
        assert best.plan is not None, "a plan was found"
        prediction, headroom = predict_plan(predicted, best.plan), best.headroom
        if self._best is None:
            memory = Target.load(best.plan.cluster.target).memory
            headroom = prediction.headroom(self._question.memory_limit_bytes, memory)
            why = Why(_uncompiled(bracket), uncompiled=_uncompiled(bracket), proven=proven)
        else:
            summary = (
                f"{counted(num_plans, 'plan')} with {counted(self._num_compiled, 'new stage')} "
                f"compiled; {_in_words(within)} {searched(self._question, self._known.choices)}."
            )
            what = best.why.summary
            if best.status == "ok":
                what = (
                    f"{counted(best.plan.num_stages, 'stage')}; the peak is "
                    f"{best.peak_bytes:,} bytes."
                )
            why = replace(
                best.why,
                summary=f"{what} {summary}",
                verified=CompiledPlans(num_plans, within == 0, summary),
                proven=proven,
            )
        proof = replace(
            best.proof,
            algorithm=BOUNDS_FIRST,
            optimal=bracket.compiled and within == 0,
            tie_break="none",
            tie_break_columns=0,
            seconds=bracket.seconds,
            bound_fraction=within,
        )
        plan = best.plan.with_(prediction=prediction, why=why)
        return Answer(best.status, plan, proof, why, headroom)

    def _beyond(
        self, found: StageAnswer, bracket: Bracket, proven: Proven, limit: int
    ) -> StageAnswer:
        why = Why(
            f"Every plan needs at least {bracket.least_bytes:,} bytes on a device, and "
            f"memory_limit_bytes={limit:,}: proven with "
            f"{counted(bracket.num_compiled, 'compiled stage')} and, {RESTS_ON}. "
            "Raise the limit, or use more devices, more micro-batches of a smaller size, or "
            "rematerialisation. [memory-limit]",
            code="memory-limit",
            memory_limit_bytes=limit,
            proven=proven,
        )
        best = found if self._best is None else self._best
        proof = replace(best.proof, algorithm=BOUNDS_FIRST, seconds=bracket.seconds)
        plan = best.plan and best.plan.with_(why=why)
        return Answer("infeasible", plan, proof, why, best.headroom)


def _in_words(within: float) -> str:
    return "proven optimal" + (f" within {within:.1%}" if within else "")


def _uncompiled(bracket: Bracket) -> str:
    return (
        f"the plan is predicted, not compiled: no plan needs less than "
        f"{format_bytes(bracket.least_bytes)}, and this one about "
        f"{format_bytes(bracket.most_bytes)}."
    )
