"""What ``capture report`` and ``capture explain`` say of a plan, alike for every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.report.needs import PlanNeeds


@dataclass(frozen=True, kw_only=True)
class PageReport:
    """The document of ``capture report``: a plan in words and numbers.

    Attributes:
        kind: Kind of the plan: stages, sharding, packs or array.
        title, summary: The plan in words.
        needs: Memory and seconds of the plan.
        stages: Peak, parts, headroom and waiting of each stage, of a plan of stages.
        operators: Mode, parameters and cost of each operator, of a plan by operator.
        schedule: Timing of the drawn step, of a plan of stages.
        front: The front that the plan is of; None where it is of none.
        written: Files that were written, by what they are.
    """

    kind: str
    title: str
    summary: str
    needs: PlanNeeds
    stages: Sequence[Mapping[str, Any]] = ()
    operators: Sequence[Mapping[str, Any]] = ()
    schedule: Mapping[str, Any] | None = None
    front: Mapping[str, Any] | None = None
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExplainReport:
    """The document of ``capture explain``: who needs the memory of a plan, and what changes save.

    Attributes:
        kind: Kind of the plan: stages, sharding, packs or array.
        needs: Memory and seconds of the plan.
        peak_bytes_per_device: Peak memory of every device, of a plan of stages.
        stages: Peak of each stage, its parts by category, layer and buffer, of a plan of stages.
        operators: Mode, parameters and cost of each operator, of a plan by operator.
        tasks: Tasks in the order of issue, of a plan of packs.
        bundles: Fate of every bundle of feature maps of an array, where its programs were looked
            at.
        source: Backend, target and versions of what was compiled.
        found: How the plan was found; None where nobody says.
        changes: Other plans, of one decision changed each, the most saving first.
        untried: Changes that were not tried, because the time was over.
        best_change: The one that saves most; None where none saves anything.
        warnings: Properties of the loss that make its step another than that of one device.
        written: Files that were written, by what they are.
    """

    kind: str
    needs: PlanNeeds
    peak_bytes_per_device: Sequence[int] = ()
    stages: Sequence[Mapping[str, Any]] = ()
    operators: Sequence[Mapping[str, Any]] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    bundles: Sequence[Sequence[str]] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    found: str | None = None
    changes: Sequence[Any] = ()
    untried: Sequence[str] = ()
    best_change: Any = None
    warnings: Sequence[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)
