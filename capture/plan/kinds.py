"""Plans of several kinds in one kind of file; ``kind`` says which. A new kind of plan is a row of
``KINDS``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.errors import PlanError
from capture.plan.array import ArrayPlan
from capture.plan.files import resolved
from capture.plan.packs import PacksPlan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import PLAN, Plan

AnyPlan = Plan | ShardingPlan | PacksPlan | ArrayPlan

KINDS: Mapping[str, type[AnyPlan]] = {
    "stages": Plan,
    "sharding": ShardingPlan,
    "packs": PacksPlan,
    "array": ArrayPlan,
}

#: What takes plans of each kind but stages, in a sentence.
READ_BY: Mapping[str, str] = {
    "sharding": "capture verify, run, explain, report and diff take it, and in Python "
    "capture.shard.",
    "packs": "capture verify, run, explain, report and diff take it, and in Python "
    "capture.streamed.",
    "array": "capture run, explain, report and diff take it, and in Python capture.train_array.",
}


def load_plan(path: Path | str) -> AnyPlan:
    """A plan of whichever kind, as ``save`` wrote it.

    Args:
        path: Of a file; ``plan.json:knee`` is a plan of its front (``Plan.of_front``).

    Raises:
        PlanError: ``plan-file`` if it cannot be read, ``plan-corrupt`` if it is no JSON,
            ``plan-kind`` for an unknown kind, and those of ``from_json`` of the kind and of
            ``of_front``.
    """
    file, colon, name = str(path).rpartition(":")
    if colon and not Path(path).exists() and Path(file).exists():
        return of_stages(load_plan(file)).of_front(name)
    return resolved(PLAN.load(path, _read), path)


def _read(data: Any) -> AnyPlan:
    kind = _kind_of(data)
    if kind not in KINDS:
        raise PlanError.of(
            f"the plan has kind={kind!r}; this version of capture reads {' and '.join(KINDS)}. "
            "Make the plan again with this version.",
            "plan-kind",
        )
    return KINDS[kind].from_json(data)


def kind_of(plan: AnyPlan) -> str:
    """The name of a plan's kind."""
    return next(kind for kind, of in KINDS.items() if isinstance(plan, of))


def of_stages(plan: Any) -> Plan:
    """The plan, if it is one of stages, where nothing else has a meaning.

    Raises:
        PlanError: ``plan-kind``.
    """
    if isinstance(plan, ShardingPlan | PacksPlan | ArrayPlan):
        kind = kind_of(plan)
        raise PlanError.of(
            f"the plan is of kind {kind!r}, and this is for plans of kind 'stages'. "
            f"{READ_BY[kind]}",
            "plan-kind",
        )
    return plan


def _kind_of(data: Any) -> Any:
    """That of a document; files of schema 1 do not say it."""
    if not isinstance(data, Mapping):
        return "stages"  # whose reader refuses it
    return data.get("kind", "sharding" if "operators" in data else "stages")
