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
        title, summary: In words.
        needs: What the plan needs.
        stages: Of a plan of stages: peak, parts, headroom and waiting of each.
        operators: Of a plan by operator: mode, parameters and cost of each.
        schedule: Of a plan of stages: how the drawn step is timed.
        front: The front that the plan is of; None where it is of none.
        written: By what it is, the files that were written.
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
        needs: What the plan needs.
        peak_bytes_per_device: Of a plan of stages, peak memory of every device.
        stages: Of a plan of stages: peak of each, its parts by category, layer and buffer.
        operators: Of a plan by operator: mode, parameters and cost of each.
        tasks: Of packs, in the order of issue.
        bundles: Of an array: what became of every bundle of feature maps, where its programs were
            looked at.
        source: Backend, target and versions of what was compiled.
        found: How the plan was found; None where nobody says.
        changes: Other plans, of one decision changed each, the most saving first.
        untried: Changes that were not tried, because the time was over.
        best_change: The one that saves most; None where none saves anything.
        warnings: What of the loss makes its step another than that of one device.
        written: By what it is, the files that were written.
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
