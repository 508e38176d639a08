"""The fastest plan that fits, without a profile: lower bounds of seconds and bytes from tracing,
and compiles of the plan that is estimated to be fastest.

A lower bound of seconds counts large matrix products alone: it says what cannot be, and not which
of two plans is faster. So plans are chosen by estimates, which are those bounds times what compiled
stages with the same choice took beyond them; and are proven by the bounds. Each round compiles the
stages of the plan that is estimated to be fastest, until that plan is compiled already.

Seconds are those of the closed form without transfers (``pipeline_seconds``), as in the search over
a profile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.plan.why import Bracket, CompiledPlans, Proven, Why
from capture.predictor.times import TimePredictor
from capture.quantities import counted, format_seconds
from recommender.answer import Answer, StageAnswer
from recommender.capture.posed import search_problem
from recommender.capture.problem import SearchProblem
from recommender.capture.recommendation import plan_of, predict_plan
from recommender.capture.result import SearchResult
from recommender.capture.rounds import Effort, Rounds, StageCompiler
from recommender.capture.throughput import throughput
from recommender.capture.ticks import step_seconds
from recommender.capture.verified import of_compiler, same_model
from recommender.question import BOUNDS_FIRST, PlanQuestion


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


class _Search(Rounds[tuple[float, StageAnswer]]):
    def run(self, known: Profile) -> StageAnswer:
        """See ``fastest_first``."""
        self._refused_plans: set[Plan] = set()
        self._bounded = TimePredictor(known, max(self._question.cluster.nodes))
        return super().run(known)

    def _round(self) -> str:
        """Search, and compile what is estimated to be fastest; why that was the last round, or
        nothing."""
        problem = search_problem(self._known, self._question, with_times=True, least=True)
        bound = throughput(problem)
        if bound.status != "ok" or bound.step_seconds is None:
            self._found = self._predicted(bound)
            return "memory"
        estimated = self._estimated(problem)
        self._found = self._predicted(estimated)
        assert self._found.plan is not None and estimated.step_seconds is not None, "a plan fits"
        least = bound.step_seconds / (1 + bound.bound_fraction)
        self._trail.append(self._bracket(least))
        self._told(self._trail[-1])
        if ended := self._ended(self._trail[-1]):
            return ended
        if same_model(self._found.plan, self._known) in self._compiled_plans | self._refused_plans:
            return "search"
        said, self._known = self._compiler.attempt(self._found.plan, self._known)
        if said is None:
            self._refused_plans.add(same_model(self._found.plan, self._known))
            return ""
        self._num_compiled += said.num_stages_compiled
        answer = of_compiler(self._found, said, self._known)
        assert answer.plan is not None, "it was compiled"
        self._compiled_plans.add(answer.plan)
        compiled = search_problem(self._known, self._question, with_times=True, least=True)
        seconds = step_seconds(compiled, estimated.stages)
        if answer.status == "ok" and (self._best is None or seconds < self._best[0]):
            self._best = seconds, answer
        return ""

    def _estimated(self, problem: SearchProblem) -> SearchResult:
        """The plan that is estimated to be fastest: by bytes as expected, or by their bounds where
        nothing else is left."""
        ratios, size = self._ratios(), self._question.microbatch_size
        assert problem.seconds is not None, "it has times"
        seconds = {
            d: table * np.array([ratios(choice) for choice in problem.choices[d]])[:, None, None]
            for d, table in problem.seconds.items()
        }
        for config in self._known.verified:
            choice, d = config.choice, config.choice.num_devices
            if config.microbatch_size == size and choice in problem.choices.get(d, ()):
                at = problem.choices[d].index(choice), config.first, config.stop
                seconds[d][at] = problem.seconds[d][at]
        problem = replace(problem, seconds=seconds)
        known = self._known
        expected = replace(self._most, verified=known.verified, failures=known.failures)
        posed = search_problem(expected, self._question, with_times=True)
        found = throughput(replace(posed, seconds=seconds))
        return found if found.status == "ok" else throughput(problem)

    def _ratios(self) -> Callable[[StageChoice], float]:
        """Per choice, what its compiled stages take over what they are bounded by; what others are
        taken to be is the least of those with as many devices to a replica, or of all."""
        bounded, real = (
            defaultdict[StageChoice, float](float),
            defaultdict[StageChoice, float](float),
        )
        size = self._question.microbatch_size
        for config, cost in self._known.verified.items():
            times = self._bounded.model.stage_times(cost)
            if config.microbatch_size != size or times is None:
                continue
            table = self._bounded.table(config.choice, size)
            bounded[config.choice] += table.at(config.first, config.stop).microbatch_seconds
            real[config.choice] += times.microbatch_seconds
        known: Mapping[StageChoice, float] = {
            choice: real[choice] / seconds for choice, seconds in bounded.items() if seconds
        }

        def ratio(choice: StageChoice) -> float:
            if choice in known:
                return known[choice]
            alike = [r for c, r in known.items() if c.tensor_parallel == choice.tensor_parallel]
            return min(alike or known.values(), default=1.0)

        return ratio

    def _predicted(self, result: SearchResult) -> StageAnswer:
        """A plan with what it is expected to need."""
        if not result.stages:
            why = Why("" if result.why is None else result.why.message, code="memory-limit")
            return Answer("infeasible", None, result, why)
        plan = plan_of(self._known, self._question, result.stages)
        prediction = predict_plan(self._most, plan)
        memory = Target.load(plan.cluster.target).memory
        headroom = prediction.headroom(self._question.memory_limit_bytes, memory)
        why = Why(f"{counted(plan.num_stages, 'stage')}.")
        plan = plan.with_(prediction=prediction, why=why)
        return Answer(result.status, plan, result, why, headroom)

    def _bracket(self, least: float) -> Bracket:
        """What is known now of the fastest step."""
        most, answer = (None, self._found) if self._best is None else self._best
        seconds, peak = time.perf_counter() - self._start, answer.peak_bytes
        is_compiled = self._best is not None
        return Bracket(seconds, self._num_compiled, peak, peak, is_compiled, least, most)

    def _ended(self, bracket: Bracket) -> str:
        """Why the search is over (``Proven.ended``); nothing while it is not."""
        effort, best = self._effort, self._best
        assert bracket.least_step_seconds is not None, "it is of a step"
        near = bracket.least_step_seconds * (1 + effort.within_fraction)
        reasons = {
            "proven": best is not None and best[0] <= bracket.least_step_seconds,
            "within": best is not None and best[0] <= near,
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
        proven = Proven(within, tuple(self._trail), ended)
        best = self._found if self._best is None else self._best[1]
        assert best.plan is not None, "a plan was found"
        closed = "by the closed form, which leaves transfers out"
        if within is None:
            said = (
                "nothing that fits was compiled: a step takes at least "
                f"{format_seconds(least)}, {closed}."
            )
            why = Why(said, uncompiled=said, proven=proven)
        else:
            least_said = f"no plan that fits is faster by more than {within:.1%}"
            summary = (
                f"{counted(num_plans, 'plan')} with {counted(self._num_compiled, 'new stage')} "
                f"compiled; {least_said if within else 'proven: no plan that fits is faster'}, "
                f"{closed}."
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

    def _beyond(self, seconds: float) -> StageAnswer:
        found, limit = self._found, self._question.limit_bytes
        least = found.proof.peak_bytes
        why = Why(
            f"Every plan needs at least {least:,} bytes on a device, and memory_limit_bytes="
            f"{limit or 0:,}: proven with {counted(self._num_compiled, 'compiled stage')}. Raise "
            "the limit, or use more devices, more micro-batches of a smaller size, or "
            "rematerialisation. [memory-limit]",
            code="memory-limit",
            memory_limit_bytes=limit,
            proven=Proven(None, tuple(self._trail), "memory"),
        )
        proof = replace(found.proof, algorithm=BOUNDS_FIRST, seconds=seconds)
        return Answer("infeasible", found.plan and found.plan.with_(why=why), proof, why)
