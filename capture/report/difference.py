"""What differs between two plans, and what both need side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from capture.documents import fields_of
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.quantities import ids_text
from capture.report.data import ReportFacts
from capture.report.documents import PlanNeeds

#: Fields of a stage that are compared.
_STAGE_FIELDS = ("layers", "devices", *(each.name for each in fields(StageChoice)), "offload")


@dataclass(frozen=True)
class Difference:
    """One decision, or one fact of the question, that is not the same in both plans.

    Attributes:
        name: A key of the plan's document (``"schedule"``), or ``"stages[2].remat"``.
        first, second: Values as in the document; None where a plan has no such stage.
    """

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class DeviceGroup:
    """A group of neighbouring devices that serve one stage in either plan.

    Attributes:
        devices: First and last id.
        stage_ids: Stage that they serve in the first and in the second plan; None where a plan has
            no such device.
        peak_bytes: Peak bytes per device, by the best that is known of each plan.
        change_bytes: Second less first; None where one of them is not known.
    """

    devices: tuple[int, int]
    stage_ids: tuple[int | None, int | None]
    peak_bytes: tuple[int | None, int | None]
    change_bytes: int | None = field(init=False)

    def __post_init__(self) -> None:
        first, second = self.peak_bytes
        change = None if first is None or second is None else second - first
        object.__setattr__(self, "change_bytes", change)


@dataclass(frozen=True)
class DiffReport:
    """The document of ``capture diff``: two plans of a kind compared.

    Attributes:
        kind: Kind of both plans.
        differences: Decisions that differ.
        plans: Needs of each plan.
        devices: Devices of both plans side by side, of plans of stages.
        same_decision: Whether nothing differs.
    """

    kind: str
    differences: tuple[Difference, ...]
    plans: tuple[PlanNeeds, PlanNeeds]
    devices: tuple[DeviceGroup, ...] = ()
    same_decision: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "same_decision", not self.differences)


def unequal(first: Mapping[str, object], second: Mapping[str, object]) -> tuple[Difference, ...]:
    """Return the differences of two decisions, by name."""
    return tuple(
        Difference(name, first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    )


def differences(first: Plan, second: Plan) -> list[Difference]:
    """Return every difference of the question and of the decision, those of the stages last;
    predictions and reasons do not count.

    Where the plans have different numbers of stages, those of a number are compared all the same,
    and the rest is only in one of them.
    """
    found = [*unequal(_question(first), _question(second))]
    for s in range(max(first.num_stages, second.num_stages)):
        a, b = (plan.stages[s] if s < plan.num_stages else None for plan in (first, second))
        if a is None or b is None:
            found.append(Difference(f"stages[{s}]", a and a.to_json(), b and b.to_json()))
            continue
        # Files leave out what is false.
        left_out = {"sequence_parallel": False, "offload": []}
        rows = (left_out | stage.to_json() for stage in (a, b))
        found += [
            replace(each, name=f"stages[{s}].{each.name}")
            for each in unequal(*({name: row[name] for name in _STAGE_FIELDS} for row in rows))
        ]
    return found


def _question(plan: Plan) -> dict[str, Any]:
    names: tuple[str, ...] = ("num_layers", "auto_layers", "global_batch_size", "num_microbatches")
    names += ("microbatch_size", "schedule", "tensor_parallel_rule", "num_stages")
    return {
        "workload": None if plan.workload is None else str(plan.workload),
        "model_hash": plan.model_hash,
        "target": plan.cluster.target,
        "cluster": str(plan.cluster),
        **fields_of(plan, *names),
    }


def device_groups(first: ReportFacts, second: ReportFacts) -> list[DeviceGroup]:
    """Return the devices of both clusters in groups, neighbours of the same pair of stages
    together."""
    stage_of = [
        {d: stage for stage in facts.stages for d in stage.stage.devices}
        for facts in (first, second)
    ]
    groups: list[DeviceGroup] = []
    for device in range(max(first.plan.cluster.num_devices, second.plan.cluster.num_devices)):
        a, b = (of.get(device) for of in stage_of)
        stages = (a.stage_id if a else None, b.stage_id if b else None)
        begin = device
        if groups and groups[-1].stage_ids == stages:
            begin = groups.pop().devices[0]
        groups.append(
            DeviceGroup(
                (begin, device), stages, (a.peak_bytes if a else None, b.peak_bytes if b else None)
            )
        )
    return groups


def describe_value(name: str, value: Any) -> str:
    """Describe one side of a difference for people."""
    match value:
        case None:
            return "none"
        case Mapping():
            stage = Stage.from_json(value)
            degrees = f"dp {stage.choice.data_parallel} x tp {stage.choice.tensor_parallel}"
            layers = ids_text(range(stage.first, stage.stop))
            return f"layers {layers} on devices {ids_text(stage.devices)}, {degrees}"
        case list() if name.endswith(".offload"):
            return ", ".join(value) or "nothing"
        case list():
            return ids_text(range(value[0], value[1] + 1) if name.endswith(".layers") else value)
        case bool():
            return "yes" if value else "no"
    return (value[:12] or "unknown") if name == "model_hash" else str(value)


def describe_name(name: str) -> str:
    """Describe the name of a difference: ``stages[2].remat`` as ``stage 2 remat``,
    ``num_microbatches`` as ``num microbatches``."""
    stage = re.fullmatch(r"stages\[(\d+)\](?:\.(\w+))?", name)
    if stage is None:
        return name if "[" in name else name.replace("_", " ")
    words = (stage[2] or "").replace("_params", "_parameters").replace("_", " ")
    return f"stage {stage[1]} {words}".rstrip()


def difference_rows(found: Iterable[Difference]) -> list[list[str]]:
    """Return a row per difference, for people: its name, and the value of each plan."""
    return [
        [describe_name(d.name), describe_value(d.name, d.first), describe_value(d.name, d.second)]
        for d in found
    ]


def needs_of(facts: ReportFacts) -> PlanNeeds:
    """Return what a plan of stages needs, with the step that is drawn; one that is drawn in units
    keeps the seconds that its search estimated."""
    seconds, needs = facts.schedule.step_seconds, PlanNeeds.of(facts.plan)
    if seconds is not None:
        needs = replace(
            needs,
            step_seconds=seconds,
            seconds_are="simulated",
            examples_per_second=facts.plan.global_batch_size / seconds,
        )
    return replace(needs, headroom=facts.headroom, bubble_fraction=facts.mean_waits)
