"""The report of ``capture plan``, alike for every kind of plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capture.plan.why import Why
from capture.report.documents import PlanNeeds
from recommender.answer import Answer
from recommender.capture.changes import FittingChange
from recommender.capture.extent import Attempt
from recommender.money import Account


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
        written: Other plans that were saved, by what they are.
        account: Of stages whose step has known seconds, its tokens, use of devices, cost and saves.
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
    written: Mapping[str, str] = field(default_factory=dict)
    account: Account | None = None

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


@dataclass(frozen=True, kw_only=True)
class TargetAnswer:
    """The answers for one of several targets.

    Attributes:
        target: Name of the target.
        smallest: On the smallest cluster on which a plan fits; None where none fits on the cluster.
        asked: On the cluster that was asked for, or its cheapest part; None if that failed.
        failure: What went wrong, with its code; empty if nothing did.
        parts: Answers on all parts of the cluster, where the cheapest was asked for.
    """

    target: str
    smallest: Attempt | None = None
    asked: Attempt | None = None
    failure: str = ""
    parts: Sequence[Attempt] = ()

    @property
    def attempts(self) -> Sequence[Attempt]:
        """The answers by ascending number of devices, one per cluster."""
        known = self.parts or [each for each in (self.smallest, self.asked) if each is not None]
        return [*{each.question.cluster: each for each in known}.values()]

    @property
    def account(self) -> Account | None:
        """The account on the cluster that was asked for; None where no plan fits."""
        fits = self.asked is not None and self.asked.result.status == "ok"
        return self.asked.account if self.asked is not None and fits else None


@dataclass(frozen=True, kw_only=True)
class TargetsReport:
    """The report of ``capture plan --targets``: several targets side by side.

    Attributes:
        targets: Answers by target, as they were asked.
        written: Plans that were saved, by target.
        best: The target with the cheapest plan, without prices with the fastest; None where no plan
            fits.
    """

    targets: Sequence[TargetAnswer]
    written: Mapping[str, str] = field(default_factory=dict)
    best: str | None = field(init=False)

    def __post_init__(self) -> None:
        ranks = {each.target: each.account.rank for each in self.targets if each.account}
        object.__setattr__(self, "best", min(ranks, key=ranks.__getitem__, default=None))
