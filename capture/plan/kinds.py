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


def load_plan(path: Path | str) -> AnyPlan:
    """A plan of whichever kind, as ``save`` wrote it.

    Raises:
        PlanError: ``plan-file`` if it cannot be read, ``plan-corrupt`` if it is no JSON,
            ``plan-kind`` for an unknown kind, and those of ``from_json`` of the kind.
    """
    data = PLAN.load(path)
    kind = _kind_of(data)
    if kind not in KINDS:
        raise PlanError.of(
            f"plan {str(path)!r} has kind={kind!r}; this version of capture reads "
            f"{' and '.join(KINDS)}. Make the plan again with this version.",
            "plan-kind",
        )
    return resolved(KINDS[kind].from_json(data), path)


def load_stages(path: Path | str, instead: str) -> Plan:
    """A plan of stages, where nothing else has a meaning.

    Args:
        path: A plan file of any kind.
        instead: What to do with one of another kind, in a sentence.

    Raises:
        PlanError: ``plan-kind``, and those of ``load_plan``.
    """
    return of_stages(load_plan(path), instead)


def of_stages(plan: Any, instead: str) -> Plan:
    """The plan, if it is one of stages; see ``load_stages``."""
    other = {kind for kind, of in KINDS.items() if isinstance(plan, of)} - {"stages"}
    for kind in other:
        raise PlanError.of(
            f"the plan is of kind {kind!r}, and this is for plans of kind 'stages'. {instead}",
            "plan-kind",
        )
    return plan


def _kind_of(data: Any) -> Any:
    """That of a document; files of schema 1 do not say it."""
    if not isinstance(data, Mapping):
        return "stages"  # whose reader refuses it
    return data.get("kind", "sharding" if "operators" in data else "stages")
