"""A bound on the seconds of every plan, by estimates that layers compiled alone correct.

Bounds from tracing count what no compiler avoids: of the inner layer of GPT-3 1.3B, compiled for
H100, a fourth less than it takes. What stages are expected to take is nearer, but no bound. A layer
alone compiles in a second or two, and says by how much. So

    stage >= expected(stage) x least of compiled / expected

over what was compiled of the same kind: tensor and sequence parallelism, recomputation, and as many
examples of a replica; before any of these is compiled, with any number of examples. Layers alone
and whole stages count. Of a layer alone, what replicas send counts as hidden: in a
stage there is more to hide it behind. Of a kind of which nothing is compiled the bound from tracing
stays. This is no rule that every program obeys, as that bound is, and is said apart from it.

Of the plan that is least by what is known, a layer is compiled of each kind that is not known, with
every recomputation at once: until no plan is faster than the best one by more than is asked, or all
kinds of that plan are known.

Source: cutting planes (Kelley 1960): only what binds is looked at more closely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import inf

import numpy as np

from capture import interrupts
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.choices import REMAT_POLICIES, Remat, StageChoice
from capture.plan.why import ByLayers
from recommender.capture import grouped
from recommender.capture.least_step import LeastStep
from recommender.capture.parts import ENDLESS_BYTES, OpenPart, compiled_in, least_of_any_size
from recommender.capture.problem import SearchProblem, together
from recommender.capture.refine import Search
from recommender.question import PlanQuestion

Kind = tuple[int, bool, Remat]
"""Tensor parallelism, whether it goes along the sequence, and what is recomputed."""
_ANY_SIZE = 0
"""Of ratios over all numbers of examples."""
_ENOUGH_LAYERS = 24
"""After so many, a kind that was compiled is not compiled with another number of examples."""


class LayerProof:
    """A second proof of the best plan found, by estimates that layers compiled alone correct.

    Args:
        search: Whose parts are bounded; those that may matter are opened.
        problems: Of a part: bounds of its stages, and what is expected of them; and both with what
            is compiled.
        enough: Seconds of which no more need be proven.
    """

    def __init__(
        self,
        search: Search,
        problems: Callable[[OpenPart], tuple[SearchProblem, SearchProblem]],
        enough: float,
    ):
        self._search, self._problems, self._enough = search, problems, enough
        self._ratios, self._num_layers = _Ratios(), 0
        #: Per part, as it was last computed: what is compiled only makes it more.
        self._least = dict[int, float]()

    def run(self) -> ByLayers | None:
        """Compile layers until the bound is high enough, and return it. None where tracing alone is
        enough, or compiled layers say nothing."""
        search = self._search
        self._open_all()
        if min(map(self._bound, self._plain)) >= self._enough:
            return None
        self._learn_verified()
        try:
            while not search.is_spent and (wanted := self._next()):
                search.begin([*wanted[1], *self._likely_next(wanted[1])])
                self._compile(*wanted)
                interrupts.raise_noted()
        except KeyboardInterrupt:
            interrupts.forget()
        least = min([*map(self._bound, self._plain), *(seconds for seconds, _ in self._floors())])
        is_nearer = least and self._least
        return ByLayers(least, self._num_layers, self._ratios.error) if is_nearer else None

    def _open_all(self) -> None:
        """Open the parts of plain schedules that may have a plan that is fast enough."""
        while min(self._floors(), default=(inf, 0))[0] < self._enough:
            self._search.open(min(self._floors())[1])

    def ahead(self, begun: Sequence[StageConfig] = ()) -> Iterator[Sequence[StageConfig]]:
        """Yield, round by round, the layers that ``run`` will compile once the ``begun`` stages are
        compiled. Layers of unknown kinds are assumed to have the largest known ratio."""
        self._open_all()
        self._learn_verified()
        self._ratios.assume(begun)
        while (wanted := self._next()) is not None:
            yield wanted[1]
            self._ratios.assume(wanted[1])

    def _likely_next(self, layers: Sequence[StageConfig]) -> Sequence[StageConfig]:
        """Return what workers that a round of few layers leaves idle may compile beside it: the
        layers of the next round, if these have the largest known ratio."""
        if len(layers) >= self._search.effort.at_once:
            return ()
        other = copy(self)
        other._ratios, other._least = self._ratios.copy(), {**self._least}
        return next(other.ahead(layers), ())

    def _learn_verified(self) -> None:
        for part in self._search.plain_parts:
            self._ratios.learn(part, part.known.verified)

    def _floors(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, number) of unopened parts of plain schedules; parts of others have no
        less than the plain one with as many micro-batches. In the place of a part with offload it
        is that part, which counts as with endless memory, too."""
        search, numbers = self._search, dict[int, int]()
        for number, part in search.unopened.items():
            if part.is_plain and not part.has_offload:
                numbers[part.question.microbatch_size] = number
        for number, (_, seconds) in search.floors.items():
            part = search.unopened[number]
            if part.is_plain and search.sibling(part) is None:
                yield seconds, numbers.get(part.question.microbatch_size, number)

    @property
    def _plain(self) -> list[int]:
        return [number for number, part in self._search.parts.items() if part.is_plain]

    def _others(self, part: OpenPart) -> list[PlanQuestion]:
        """Return the questions of schedules that are not plain with as many micro-batches as a
        part; the part's bounds hold for their stages, too."""
        return [
            question
            for question in self._search.questions
            if question.microbatch_size == part.size and not (question.is_plain or part.has_offload)
        ]

    def _bound(self, number: int) -> float:
        """Return the known lower bound of a step with a part's micro-batches, in seconds."""
        part = self._search.parts[number]
        traced = [seconds for _, seconds in self._search.corners_of(number)]
        if part.question.is_beside_offload:
            traced.append(part.once(least_of_any_size)[0])
        traced += [grouped.least_seconds(part, each) for each in self._others(part)]
        return max(self._least.get(number, 0.0), min(traced, default=inf))

    def _next(self) -> tuple[OpenPart, Sequence[StageConfig]] | None:
        """Return the layers to compile next, of the plan that is least by what is known; None where
        that is enough, or all of its kinds are known."""
        while True:
            number = min(self._plain, key=self._bound)
            if (known := self._bound(number)) >= self._enough:
                return None
            part = self._search.parts[number]
            problem = self._ratios.applied(part, *self._problems(part))
            beside, limit = part.question.is_beside_offload, part.question.limit_bytes
            plans = [LeastStep(problem).plan(ENDLESS_BYTES if beside else limit)]
            plans += [grouped.least_plan(problem, each) for each in self._others(part)]
            seconds, stages = min(plans, key=lambda plan: plan[0])
            if seconds <= known * (1 + 1e-9):
                configs = [StageConfig(s.first, s.stop, s.choice, part.size) for s in stages]
                layers = [layer for config in configs for layer in self._unknown(part, config)]
                return (part, sorted({*layers})) if layers else None
            self._least[number] = seconds

    def _unknown(self, part: OpenPart, stage: StageConfig) -> Iterator[StageConfig]:
        """Yield a layer of each unknown kind of a stage; of one that is not known with any number
        of examples, once per recompute policy."""
        for choice in stage.choice.measured:
            own = replace(stage, choice=choice)
            is_near = self._ratios.is_known(own, _ANY_SIZE)
            if self._ratios.is_known(own) or (is_near and self._num_layers >= _ENOUGH_LAYERS):
                continue
            policies = [choice.remat] if is_near else REMAT_POLICIES
            layer = _largest(part, own)
            for remat in policies:
                config = replace(layer, choice=replace(choice, remat=remat))
                if config in part.most.measurements and not self._ratios.is_known(config):
                    yield config

    def _compile(self, part: OpenPart, layers: Sequence[StageConfig]) -> None:
        self._ratios.learn(part, self._search.layers(part, layers), layers)
        # Layers that are the same share what is known of them.
        self._num_layers += len({id(part.most.measurements[each]) for each in layers})


class _Ratios:
    """The least compiled over expected seconds, by kind and by the examples of a replica."""

    def __init__(self) -> None:
        self._least = dict[tuple[Kind, int], float]()

    def copy(self) -> _Ratios:
        """Return ratios that can be changed apart from these."""
        other = _Ratios()
        other._least = {**self._least}
        return other

    @property
    def error(self) -> float:
        """The largest part by which estimates were above what compiled; 0 if none was."""
        return max([0.0, *(1 / ratio - 1 for ratio in self._least.values() if ratio)])

    def is_known(self, config: StageConfig, num_examples: int | None = None) -> bool:
        """Return whether a stage's kind, which is no mixture, was compiled with as many examples of
        a replica, by default those of the stage."""
        size = _examples(config) if num_examples is None else num_examples
        return (_kind(config.choice), size) in self._least

    def learn(
        self,
        part: OpenPart,
        compiled: Mapping[StageConfig, StageCost],
        asked: Sequence[StageConfig] = (),
    ) -> None:
        """Learn ratios of compiled stages, or of the layers that were ``asked`` for alone: kinds of
        them that did not compile get 0."""
        model = part.expected.model
        for config, cost in compiled.items():
            among = model.hiding_replicas(config.choice.tensor_parallel) if asked else model
            times = among.stage_times(cost)
            if config.microbatch_size == part.size and times is not None:
                ratio = times.microbatch_seconds / part.expected.microbatch_seconds(config)
                self._note(config, ratio)
        for config in asked:
            if not self.is_known(config):
                self._note(config, 0.0)

    def assume(self, stages: Sequence[StageConfig]) -> None:
        """Assume the largest known ratio for kinds of stages that are not known: if they take less,
        they often are the last."""
        largest = max(self._least.values(), default=0.0)
        for each in (replace(s, choice=choice) for s in stages for choice in s.choice.measured):
            if not self.is_known(each):
                self._note(each, largest)

    def _note(self, config: StageConfig, ratio: float) -> None:
        for kind in map(_kind, config.choice.measured):
            for size in (_ANY_SIZE, _examples(config)):
                self._least[kind, size] = min(ratio, self._least.get((kind, size), inf))

    def applied(
        self, part: OpenPart, problem: SearchProblem, expected: SearchProblem
    ) -> SearchProblem:
        """Return the problem in which stages take at least the ratio of their kind times the
        expected seconds; compiled stages keep theirs."""
        problem, expected = together(problem, expected)
        assert problem.seconds is not None and expected.seconds is not None, "they have times"
        seconds = {
            d: np.maximum(
                problem.seconds[d],
                np.array([self._of(choice, part.size) for choice in choices])[:, None]
                * expected.seconds[d],
            )
            for d, choices in problem.choices.items()
        }
        for d, choice, kind in compiled_in(problem, part):
            seconds[d][choice, kind] = problem.seconds[d][choice, kind]
        return replace(problem, seconds=seconds)

    def _of(self, choice: StageChoice, microbatch_size: int) -> float:
        """Return the part of the expected seconds that stages take at least; 0 if unknown."""
        sizes = microbatch_size // choice.data_parallel, _ANY_SIZE
        return min(
            next((known[each, size] for size in sizes if (each, size) in known), 0.0)
            for known, each in ((self._least, _kind(part)) for part in choice.measured)
        )


def _kind(choice: StageChoice) -> Kind:
    return choice.tensor_parallel, choice.sequence_parallel, choice.remat


def _examples(config: StageConfig) -> int:
    return config.microbatch_size // config.choice.data_parallel


def _largest(part: OpenPart, stage: StageConfig) -> StageConfig:
    """Return the layer of a stage that takes most of its time together with all layers that are the
    same: these share what is known of them."""
    known, seconds = part.most.measurements, part.expected.microbatch_seconds
    layers = [replace(stage, first=n, stop=n + 1) for n in range(stage.first, stage.stop)]
    counts = Counter(id(known[each]) for each in layers)
    return max(layers, key=lambda each: (counts[id(known[each])] * seconds(each), -each.first))
