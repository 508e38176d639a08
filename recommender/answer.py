"""The answer of a search for a plan: one type for plans of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from capture.plan.files import PlanFile
from capture.plan.headroom import Headroom
from capture.plan.prediction import Prediction
from capture.plan.stages import Plan
from capture.plan.why import Why
from recommender.capture.result import SearchResult

P = TypeVar("P", bound=PlanFile)
S = TypeVar("S", bound="Proof")


class Proof(Protocol):
    """The proof of an answer: how a plan was found, and how far it is proven to be the best."""

    @property
    def algorithm(self) -> str: ...

    @property
    def optimal(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Answer(Generic[P, S]):
    """The answer of a search: a plan, why it was chosen, and what it leaves of the memory.

    Attributes:
        status: ``"ok"``, or ``"infeasible"`` if nothing fits; the least-peak plan is there all the
            same where one exists.
        plan: With its prediction; None where no plan exists.
        proof: How it was found, and how far that is proven.
        why: The choice, or what is missing.
        headroom: What the plan leaves of the limit, or of the target's memory; None where neither
            is known.
    """

    status: str
    plan: P | None
    proof: S
    why: Why
    headroom: Headroom | None = None

    @property
    def prediction(self) -> Prediction | None:
        """The prediction of a plan of stages; None for plans of other kinds."""
        return self.plan.prediction if isinstance(self.plan, Plan) else None

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return self.status == "ok" and self.plan is not None

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of the device that needs most: the compiler's if the plan is compiled,
        else predicted; 0 without a plan."""
        return 0 if self.plan is None else self.plan.known_peak_bytes

    @property
    def compiled(self) -> bool:
        """Whether the peaks are what the compiler says of the plan itself."""
        return self.plan is not None and self.plan.compiled

    @property
    def extrapolated(self) -> bool:
        """Whether the numbers are of a micro-batch size or degrees that were not profiled, and the
        plan was not compiled either."""
        return self.prediction is not None and self.prediction.extrapolated and not self.compiled

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit per device that the plan was searched under; None without one."""
        return self.headroom.limit_bytes if self.headroom else None

    def __str__(self) -> str:
        said = self.why.summary
        return said if self.status == "ok" else f"{self.status}: {said}"


#: Of plans of stages.
StageAnswer = Answer[Plan, SearchResult]
