"""The report of ``capture plan``, alike for every kind of plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture.plan.why import Why
from capture.report.documents import PlanNeeds
from recommender.answer import Answer
from recommender.capture.changes import FittingChange


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The report of ``capture plan``: a plan, what it needs, and how it was found.

    Attributes:
        kind: Kind of the plan: stages, sharding, packs or array.
        status: ``"ok"``, or ``"infeasible"`` if nothing fits.
        compiled: Whether the peaks are the compiler's of the plan itself.
        extrapolated: Whether they are of a micro-batch size or degrees that were not profiled, and
            not compiled either.
        needs: What the plan needs; None without a plan.
        plan: As its file has it; of those that do not fit, the nearest. None where no plan exists.
        search: How it was found, and how far that is proven.
        why: The choice, or what is missing.
        cheapest_change: What to change for a plan to fit; None if one fits, or nothing was found.
        attempts: Searches of several extents, schedules or numbers of micro-batches: of each its
            cluster, batch and schedule, its status, peak and step.
        baselines: What other systems would do, where that was asked for.
        layers: Of packs, the layers that were measured for them.
        assumed: Of packs, what of the server was not given.
        warnings: What of the loss makes its step another than that of one device; bounds that
            compiled stages refute.
        failures: Programs that the compiler refused.
    """

    kind: str
    status: str
    compiled: bool
    extrapolated: bool
    needs: PlanNeeds | None
    plan: Mapping[str, Any] | None
    search: Mapping[str, Any]
    why: Why
    cheapest_change: FittingChange | None = None
    attempts: Sequence[Mapping[str, Any]] = ()
    baselines: Sequence[Any] = ()
    layers: Any = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    failures: Sequence[str] = ()

    @classmethod
    def of(cls, kind: str, answer: Answer[Any, Any], **beside: Any) -> PlanReport:
        """Return an answer as a report.

        Args:
            kind: Of its plan.
            answer: With a plan or without.
            **beside: What the answer does not know, by field.
        """
        plan = answer.plan
        needs = None if plan is None else replace(PlanNeeds.of(plan), headroom=answer.headroom)
        return cls(
            kind=kind,
            status=answer.status,
            compiled=answer.compiled,
            extrapolated=answer.extrapolated,
            needs=needs,
            plan=None if plan is None else plan.to_json(),
            search=answer.proof.to_json(),
            why=answer.why,
            **beside,
        )
