"""The rounds of a search on bounds: what the searches for the least peak and for the fastest step
have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.prediction import Verified
from capture.plan.stages import Plan
from capture.plan.why import Bracket, Proven
from capture.predictor import AdditivePredictor
from recommender.answer import StageAnswer
from recommender.capture.refuted import Refuted, refuted, without_bounds
from recommender.question import PlanQuestion

#: On what rests that no plan fits, of the stages that were not compiled.
RESTS_ON = (
    "for all others, lower bounds from tracing, which count results and, on GPUs, what "
    "large matrix products read and make"
)
#: The best that was compiled.
Best = TypeVar("Best")


class StageCompiler(Protocol):
    """Compiles stages, and knows them from then on; of one that is refused, that no memory
    suffices for it."""

    def attempt(self, plan: Plan, known: Profile) -> tuple[Verified | None, Profile]:
        """Of a whole plan: what the compiler says, None where it refuses a stage."""
        ...

    def probe(self, configs: Sequence[StageConfig], known: Profile) -> tuple[int, Profile]:
        """Of some: how many of them were not known."""
        ...


@dataclass(frozen=True)
class Effort:
    """When a search on bounds may end before it has proven the least peak.

    Attributes:
        within_fraction: Once no plan needs less than the best one by more than this part of it.
        compiles: Once so many stages were compiled; 0 compiles nothing.
        seconds: Once so many have passed, and no compile is under way. None for no limit.
        below_bytes: Once no plan needs less than so much.
        any_that_fits: Once a compiled plan fits.
        at_once: Stages that are compiled side by side: as many as there are workers.
    """

    within_fraction: float = 0.0
    compiles: int | None = None
    seconds: float | None = None
    below_bytes: int | None = None
    any_that_fits: bool = False
    at_once: int = 2


class Rounds(ABC, Generic[Best]):
    """Rounds of searching and compiling, until the answer is near enough or the effort spent.

    Args:
        most: What the stages are expected to need at most.
        question: What is asked; the algorithm is chosen here.
        compiler: An interrupt meanwhile ends the search with what is known.
        effort: When to end.
        told: Every bracket, as it is known.
    """

    _known: Profile
    _found: StageAnswer

    def __init__(
        self,
        most: Profile,
        question: PlanQuestion,
        compiler: StageCompiler,
        effort: Effort,
        told: Callable[[Bracket], None],
    ):
        self._most, self._question, self._compiler = most, question, compiler
        self._effort, self._told, self._start = effort, told, time.perf_counter()
        self._trail: list[Bracket] = []
        self._num_compiled = 0
        self._compiled_plans: set[Plan] = set()
        self._best: Best | None = None
        self._refuted: list[Refuted] = []

    def run(self, known: Profile) -> StageAnswer:
        """From lower bounds to the answer.

        Raises:
            KeyboardInterrupt: While nothing is known yet.
        """
        ended = ""
        self._bound_by(known)
        while not ended:
            try:
                ended = self._round()
            except KeyboardInterrupt:
                if not self._trail:
                    raise
                ended = "interrupted"
        return self._answer(ended)

    def _bound_by(self, known: Profile) -> None:
        """Take what is known, with lower bounds that nothing has refuted."""
        self._known, self._bounds = known, AdditivePredictor(replace(known, verified={}))

    def _attempt(self, plan: Plan) -> Verified | None:
        """Compile a plan; None where the compiler refuses a stage."""
        said, known = self._compiler.attempt(plan, self._known)
        self._learn(known)
        return said

    def _learn(self, known: Profile) -> None:
        """Take what was compiled. A kind of bound that it refutes is used no longer, and nothing is
        said to be proven that rests on it."""
        new = {c: cost for c, cost in known.verified.items() if c not in self._known.verified}
        self._known = known
        if found := [*self._refuted_by(new)]:
            self._refuted += found
            self._bound_by(without_bounds(known, {each.part for each in found}))
            self._trail.clear()

    def _refuted_by(self, compiled: Mapping[StageConfig, StageCost]) -> Iterable[Refuted]:
        """The bounds that compiled stages are below."""
        return refuted(self._bounds, compiled)

    def _proven(self, within: float | None, ended: str) -> Proven:
        return Proven(within, tuple(self._trail), ended, tuple(map(str, self._refuted)))

    @abstractmethod
    def _round(self) -> str:
        """Search, and compile what it finds; why that was the last round, or nothing."""

    @abstractmethod
    def _answer(self, ended: str) -> StageAnswer: ...

    def _first_of(self, reasons: Mapping[str, bool], bracket: Bracket) -> str:
        """Why the search is over (``Proven.ended``): the first reason that holds, or that the
        effort is spent; nothing while it goes on."""
        effort = self._effort
        spent = {
            "compiles": effort.compiles is not None and self._num_compiled >= effort.compiles,
            "seconds": effort.seconds is not None and bracket.seconds >= effort.seconds,
        }
        return next((reason for reason, holds in {**reasons, **spent}.items() if holds), "")
