"""Parts of a search: plans of one number of micro-batches and one schedule, and what is known of
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, TypeVar

from capture.measured.bounds import Bounds
from capture.measured.profile import REFUSED_BYTES, Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.model.graph import agreed_value_dims
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.times import TimePredictor
from recommender.answer import StageAnswer
from recommender.capture.least_step import LeastStep
from recommender.capture.posed import search_problem
from recommender.capture.problem import SearchProblem
from recommender.capture.refuted import without_bounds
from recommender.capture.table_space import StageRows
from recommender.question import PlanQuestion

T = TypeVar("T")

#: A limit of memory that every stage is within, if it compiles.
ENDLESS_BYTES = REFUSED_BYTES - 1
#: Layers, or pairs of them, that occur so often are compiled alone, to know more of a long stage.
_OFTEN = 4


@dataclass(frozen=True)
class Part:
    """The plans of one number of micro-batches and one schedule, before their stages are bounded.

    Attributes:
        question: Names them.
        open: Bounds the stages, when that is first asked for.
        least_bytes, least_seconds: No plan of the part needs less, or is faster: known before.
        expected_seconds: The same of what plans are expected to take; 0 where that is not known.
    """

    question: PlanQuestion
    open: Callable[[], Bounds]
    least_bytes: int = 0
    least_seconds: float = 0.0
    expected_seconds: float = 0.0

    @property
    def may_fit(self) -> bool:
        limit = self.question.limit_bytes
        return limit is None or self.least_bytes <= limit

    @property
    def is_plain(self) -> bool:
        return self.question.is_plain

    @property
    def has_offload(self) -> bool:
        return bool(self.question.offload)

    @property
    def has_own_floor(self) -> bool:
        """Whether its floor is not that of other parts."""
        return self.is_plain and not self.has_offload

    @property
    def rank(self) -> tuple[bool, float]:
        """What decides which of several parts is opened first."""
        return self.has_offload, self.expected_seconds


class OpenPart:
    """The plans of one number of micro-batches and one schedule, with bounds of their stages.

    Attributes:
        question: Of its plans.
        known: Lower bounds that nothing has refuted, and the stages that are compiled.
        least_seconds: No plan of the part is faster; 0 once a bound was refuted.
        expected_seconds: The same of what plans are expected to take; 0 where that is not known.
        meanwhile: Called before anything is worked out, which may take seconds.
        rows: Of stages, by what is estimated; parts whose stages are the same share them.
    """

    def __init__(
        self,
        question: PlanQuestion,
        between: Bounds,
        least_seconds: float = 0.0,
        expected_seconds: float = 0.0,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self.question, self.known, self._most = question, between.least, between.most
        #: Layers that were compiled alone, and the choices of which they were asked for.
        self.alone: Mapping[StageConfig, StageCost] = {}
        self.rehearsed: Collection[StageChoice] = ()
        self.expected_seconds, self.meanwhile = expected_seconds, meanwhile
        self.least_seconds, self.rows = least_seconds, dict[Hashable, StageRows]()
        self._said: dict[tuple[Hashable, ...], object] = {}
        self._bases: dict[Callable[[OpenPart], SearchProblem], SearchProblem] = {}

    @property
    def is_plain(self) -> bool:
        return self.question.is_plain

    @property
    def has_offload(self) -> bool:
        return bool(self.question.offload)

    @property
    def size(self) -> int:
        return self.question.microbatch_size

    @property
    def most(self) -> Profile:
        """The profile of what stages need at most, as expected; of compiled ones, as compiled."""
        return replace(self._most, verified=self.known.verified, failures=self.known.failures)

    @cached_property
    def bounds(self) -> AdditivePredictor:
        """The predictor of lower bounds of bytes, without what is compiled."""
        return AdditivePredictor(replace(self.known, verified={}))

    @cached_property
    def bounded(self) -> TimePredictor:
        """The predictor of lower bounds of seconds, without what is compiled."""
        return TimePredictor(self.bounds.profile, self.question.cluster.layout, least=True)

    @cached_property
    def expected(self) -> TimePredictor:
        """The predictor of the seconds expected of stages, without what is compiled."""
        return TimePredictor(self._most, self.question.cluster.layout)

    def once(self, of: Callable[..., T], *given: Hashable) -> T:
        """Return a function's value for the part, kept until a compiled stage concerns it."""
        if (of, *given) not in self._said:
            self.meanwhile()
            self._said[of, *given] = of(self, *given)
        return self._said[of, *given]  # type: ignore[return-value]

    def basis(self, of: Callable[[OpenPart], SearchProblem]) -> SearchProblem:
        """Return the problem that a function poses without what is compiled, and keep it."""
        if of not in self._bases:
            self._bases[of] = of(self)
        return self._bases[of]

    def learn(self, said: Profile) -> Mapping[StageConfig, StageCost]:
        """Learn what was compiled at the part's micro-batch size, and return what of it is new."""
        known, size = self.known, self.size
        new = {
            config: cost
            for config, cost in said.verified.items()
            if config.microbatch_size == size and _is_new(cost, known.verified.get(config))
        }
        if new:
            dims = agreed_value_dims([known.graph, said.graph])
            if dims != known.graph.value_dims:
                self._bases.clear()
            self.known = replace(
                known,
                verified={**known.verified, **new},
                failures=tuple(dict.fromkeys((*known.failures, *said.failures))),
                model_hashes={**known.model_hashes, **said.model_hashes},
                graph=replace(known.graph, value_dims=dims),
            )
            self._said.clear()
            self.rows.clear()
        return new

    def windows(self, choices: Collection[StageChoice]) -> list[StageConfig]:
        """Return one of the windows of one or two layers of every kind that a model has often, with
        some choices: what most of a long stage is made of."""
        known = self._most.measurements
        some = [(id(cost), config) for config, cost in known.items() if config.choice in choices]
        counts = Counter(kind for kind, _ in some)
        return [*{kind: config for kind, config in some if counts[kind] >= _OFTEN}.values()]

    def rehearse(
        self, choices: Collection[StageChoice], alone: Mapping[StageConfig, StageCost]
    ) -> None:
        """Learn what layers with some choices take, compiled alone."""
        self.rehearsed, self.alone = frozenset(choices), alone
        self._said.clear()
        self.rows.clear()

    def trust_no(self, kinds: Collection[str]) -> None:
        """Drop bounds of some kinds: they are relied upon no longer."""
        if not kinds:
            return
        self.known, self.least_seconds = without_bounds(self.known, kinds), 0.0
        self._said.clear()
        self._bases.clear()
        for name in ("bounds", "bounded"):
            self.__dict__.pop(name, None)


class Found(NamedTuple):
    """A plan that was found in a part, as an answer."""

    part: OpenPart
    answer: StageAnswer

    @property
    def configs(self) -> list[StageConfig]:
        """The stages of the plan, as the store keys them; none without a plan."""
        plan = self.answer.plan
        return [StageConfig.of(stage, self.part.size) for stage in (plan.stages if plan else ())]


def since(plans: Sequence[Found], best: Found | None) -> Sequence[Found]:
    """Return the compiled plans from the best one on; none before one is the best."""
    later = [*takewhile(lambda each: each is not best, reversed(plans))]
    return [] if best is None else [best, *reversed(later)]


def num_missed(plans: Sequence[Found], best: Found | None) -> int:
    """Count the compiled plans since the best one for which a stage was compiled; all, before one
    is the best."""
    later = since(plans, best)
    if not later:
        return len(plans)
    before = plans[: len(plans) - len(later) + 1]
    known = {config for each in before for config in each.configs}
    num = 0
    for each in later[1:]:
        num += not known.issuperset(each.configs)
        known.update(each.configs)
    return num


def _is_new(cost: StageCost, known: StageCost | None) -> bool:
    """Return whether a compiled stage, or its split backward pass, was not known."""
    return known is None or (known.split is None and cost.split is not None)


def compiled_in(problem: SearchProblem, part: OpenPart) -> Iterator[tuple[int, int, int]]:
    """Yield the place in a problem's tables of each compiled stage of a part: degree, choice,
    number."""
    for config in part.known.verified:
        choice, d = config.choice, config.choice.num_devices
        if config.microbatch_size == part.size and choice in problem.choices.get(d, ()):
            number = problem.kinds[config.first, config.stop]
            yield d, problem.choices[d].index(choice), int(number)


def posed(part: OpenPart) -> SearchProblem:
    """Return the problem with bytes and seconds of compiled stages, and lower bounds of others."""
    return _posed(part, part.known, part.basis(_bounds))


def posed_at_most(part: OpenPart) -> SearchProblem:
    """Return the problem of compiled stages, and of the most that others are expected to need."""
    return _posed(part, part.most, part.basis(_expectations))


def least_of_any_size(part: OpenPart) -> tuple[float, int]:
    """Return a lower bound of the step of a part's plans with endless memory, and the least limit
    for which it is known to be the same."""
    return LeastStep(part.once(posed)).within(ENDLESS_BYTES)


def posed_both(part: OpenPart) -> tuple[SearchProblem, SearchProblem]:
    """Return the problems of ``posed`` and of ``posed_at_most``."""
    return part.once(posed), part.once(posed_at_most)


def posed_bounds(part: OpenPart) -> tuple[SearchProblem, SearchProblem]:
    """Return the problems of ``posed`` and of ``posed_at_most``, without what is compiled."""
    return part.basis(_bounds), part.basis(_expectations)


def _bounds(part: OpenPart) -> SearchProblem:
    return _posed(part, replace(part.known, verified={}))


def _expectations(part: OpenPart) -> SearchProblem:
    return _posed(part, replace(part.most, verified={}))


def _posed(part: OpenPart, known: Profile, like: SearchProblem | None = None) -> SearchProblem:
    if like is not None and not any(each.microbatch_size == part.size for each in known.verified):
        return like
    return search_problem(known, part.question, with_times=True, least=True, like=like)
