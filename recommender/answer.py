"""What a search for plans answers: one type for every objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capture.plan.headroom import Headroom
from capture.plan.prediction import Prediction
from capture.plan.stages import Plan
from recommender.capture.result import SearchResult


@dataclass(frozen=True)
class Answer:
    """A plan, what it is predicted to need, and why it was chosen.

    Attributes:
        status: ``"ok"``, or ``"infeasible"`` if nothing fits; the least-peak plan is there all the
            same where one exists.
        plan: None where no plan exists.
        prediction: Of the plan.
        search: How it was found, and how far that is proven.
        why: For people and scripts: the choice, the runner-up baselines, or what is missing and the
            cheapest change.
        headroom: What the plan leaves of the limit, or of the target's memory; None where neither
            is known.
    """

    status: str
    plan: Plan | None
    prediction: Prediction | None
    search: SearchResult
    why: Mapping[str, Any]
    headroom: Headroom | None = None

    @property
    def peak_bytes(self) -> int:
        """Of the device that needs most: the compiler's if the plan is verified, else predicted; 0
        without a plan."""
        if self.plan is not None and self.plan.verification is not None:
            return int(max(self.plan.verification["peak_bytes_per_device"]))
        return 0 if self.prediction is None else self.prediction.peak_bytes

    @property
    def extrapolated(self) -> bool:
        """Whether the numbers are of a micro-batch size or degrees that were not profiled, and the
        plan was not compiled either."""
        return self.prediction is not None and self.prediction.extrapolated and not self.compiled

    @property
    def compiled(self) -> bool:
        """Whether the peaks are the compiler's of the plan's own stages."""
        return self.plan is not None and self.plan.verification is not None

    @property
    def memory_limit_bytes(self) -> int | None:
        """That the plan was searched under."""
        return self.headroom.limit_bytes if self.headroom else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "extrapolated": self.extrapolated,
            "plan": None if self.plan is None else self.plan.to_json(),
            "prediction": None if self.prediction is None else self.prediction.to_json(),
            "search": {
                "seconds": self.search.seconds,
                "algorithm": self.search.algorithm,
                "optimal": self.search.optimal,
                "tie_break": self.search.tie_break,
                "tie_break_columns": self.search.tie_break_columns,
                "num_explored": self.search.num_explored,
                "step_seconds": self.search.step_seconds,
                "bound_fraction": self.search.bound_fraction,
            },
            "why": dict(self.why),
            "headroom": None if self.headroom is None else self.headroom.to_json(),
        }
