"""The rounds of a search for speed on bounds: what the searches for the fastest step and for the
front have in common.

A lower bound of seconds counts large matrix products alone: it says what cannot be, and not which
of two plans is faster. So plans are chosen by estimates, which are those bounds times what compiled
stages with the same choice took beyond them; and are proven by the bounds.

Seconds are those of the closed form without transfers (``pipeline_seconds``), as in the search over
a profile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.plan.why import Why
from capture.predictor.times import TimePredictor
from capture.quantities import counted
from recommender.answer import Answer, StageAnswer
from recommender.capture.posed import search_problem
from recommender.capture.problem import SearchProblem
from recommender.capture.recommendation import plan_of, predict_plan
from recommender.capture.refuted import Refuted
from recommender.capture.result import SearchResult
from recommender.capture.rounds import RESTS_ON, Best, Rounds
from recommender.capture.ticks import step_seconds
from recommender.capture.verified import of_compiler, same_model
from recommender.question import BOUNDS_FIRST

#: Of every time that is said.
CLOSED_FORM = "by the closed form, which leaves transfers out"
#: Of two sums of the same times in another order, the larger is larger by less.
ROUNDING = 1e-9


@dataclass(frozen=True)
class CompiledPlan:
    """A plan whose stages are compiled.

    Attributes:
        seconds: Of its step by the closed form.
        answer: With the peaks of the compiler.
    """

    seconds: float
    answer: StageAnswer


class TimedRounds(Rounds[Best]):
    """See ``Rounds``."""

    def run(self, known: Profile) -> StageAnswer:
        self._refused_plans: set[Plan] = set()
        return super().run(known)

    def _bound_by(self, known: Profile) -> None:
        super()._bound_by(known)
        bounds = replace(known, verified={})
        self._bounded = TimePredictor(bounds, max(self._question.cluster.nodes))

    def _refuted_by(self, compiled: Mapping[StageConfig, StageCost]) -> Iterable[Refuted]:
        yield from super()._refuted_by(compiled)
        for config, cost in compiled.items():
            if (times := self._bounded.model.stage_times(cost)) is not None:
                table = self._bounded.table(config.choice, config.microbatch_size)
                least = table.at(config.first, config.stop).microbatch_seconds
                if least > times.microbatch_seconds * (1 + ROUNDING):
                    yield Refuted(config, "seconds", least, times.microbatch_seconds)

    def _problem(self) -> SearchProblem:
        """Bytes and seconds of the stages that are compiled, and lower bounds of the others."""
        return search_problem(self._known, self._question, with_times=True, least=True)

    def _is_asked(self, plan: Plan) -> bool:
        """Whether the compiler was asked for the plan."""
        return same_model(plan, self._known) in self._compiled_plans | self._refused_plans

    def _compiled(self, found: StageAnswer) -> CompiledPlan | None:
        """A plan that was found, compiled; None where a stage is refused."""
        assert found.plan is not None, "a plan was found"
        said = self._attempt(found.plan)
        if said is None:
            self._refused_plans.add(same_model(found.plan, self._known))
            return None
        self._num_compiled += said.num_stages_compiled
        answer = of_compiler(found, said, self._known)
        assert answer.plan is not None, "it was compiled"
        self._compiled_plans.add(answer.plan)
        return CompiledPlan(step_seconds(self._problem(), found.proof.stages), answer)

    def _estimated_seconds(self, problem: SearchProblem) -> Mapping[int, np.ndarray]:
        """What stages are estimated to take, as ``SearchProblem.seconds``; those that are compiled
        what they do."""
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
        return seconds

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

    def _beyond(self, seconds: float) -> StageAnswer:
        found, limit = self._found, self._question.limit_bytes
        least = found.proof.peak_bytes
        why = Why(
            f"Every plan needs at least {least:,} bytes on a device, and memory_limit_bytes="
            f"{limit or 0:,}: proven with {counted(self._num_compiled, 'compiled stage')} and, "
            f"{RESTS_ON}. Raise the limit, or use more devices, more micro-batches of a smaller "
            "size, or rematerialisation. [memory-limit]",
            code="memory-limit",
            memory_limit_bytes=limit,
            proven=self._proven(None, "memory"),
        )
        proof = replace(found.proof, algorithm=BOUNDS_FIRST, seconds=seconds)
        return Answer("infeasible", found.plan and found.plan.with_(why=why), proof, why)
