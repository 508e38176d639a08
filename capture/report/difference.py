"""What differs between two plans, and what both need side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capture.documents import write
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.quantities import format_bytes, format_rate, format_seconds
from capture.report.data import ReportFacts
from capture.report.words import signed_bytes

#: Of a stage: its name in the document, and for people.
_STAGE_FIELDS = {
    "layers": "layers",
    "devices": "devices",
    "data_parallel": "data parallel",
    "tensor_parallel": "tensor parallel",
    "remat": "remat",
    "shard_optimizer": "shard optimizer",
    "shard_params": "shard parameters",
    "sequence_parallel": "sequence parallel",
}


@dataclass(frozen=True)
class Difference:
    """One decision, or one fact of the question, that is not the same in both plans.

    Attributes:
        name: A key of the plan's document (``"schedule"``), or ``"stages[2].remat"``.
        first, second: As in the document; None where a plan has no such stage.
    """

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class DeviceGroup:
    """Neighbouring devices that serve one stage in either plan.

    Attributes:
        devices: First and last id.
        stages: Stage that they serve in the first and in the second plan; None where a plan has no
            such device.
        peak_bytes: Per device, by the best that is known of each plan.
    """

    devices: tuple[int, int]
    stages: tuple[int | None, int | None]
    peak_bytes: tuple[int | None, int | None]

    @property
    def change_bytes(self) -> int | None:
        """Second less first; None where one of them is not known."""
        first, second = self.peak_bytes
        return None if first is None or second is None else second - first

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": list(self.devices),
            "stage_ids": list(self.stages),
            "peak_bytes": list(self.peak_bytes),
            "change_bytes": self.change_bytes,
        }


def differences(first: Plan, second: Plan) -> list[Difference]:
    """Every difference of the question and of the decision, those of the stages last; predictions
    and reasons do not count.

    Where the plans have different numbers of stages, those of a number are compared all the same,
    and the rest is only in one of them.
    """
    found = [
        Difference(name, a, b)
        for name, (a, b) in _paired(_question(first), _question(second)).items()
        if a != b
    ]
    for s in range(max(first.num_stages, second.num_stages)):
        a, b = (plan.stages[s] if s < plan.num_stages else None for plan in (first, second))
        if a is None or b is None:
            found.append(Difference(f"stages[{s}]", a and a.to_json(), b and b.to_json()))
            continue
        # Files leave out what is false.
        fields = _paired(*({"sequence_parallel": False, **stage.to_json()} for stage in (a, b)))
        found += [
            Difference(f"stages[{s}].{name}", *fields[name])
            for name in _STAGE_FIELDS
            if fields[name][0] != fields[name][1]
        ]
    return found


def _question(plan: Plan) -> dict[str, Any]:
    return {
        "workload": None if plan.workload is None else str(plan.workload),
        "model_hash": plan.model_hash,
        "target": plan.cluster.target,
        "cluster": str(plan.cluster),
        "num_layers": plan.num_layers,
        "auto_layers": plan.auto_layers,
        "global_batch_size": plan.global_batch_size,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "tensor_parallel_rule": plan.tensor_parallel_rule,
        "num_stages": plan.num_stages,
    }


def _paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a[name], b[name]) for name in a}


def device_groups(first: ReportFacts, second: ReportFacts) -> list[DeviceGroup]:
    """All devices of both clusters, neighbours of the same pair of stages together."""
    stage_of = [
        {d: stage for stage in facts.stages for d in stage.stage.devices}
        for facts in (first, second)
    ]
    groups: list[DeviceGroup] = []
    for device in range(max(first.plan.cluster.num_devices, second.plan.cluster.num_devices)):
        a, b = (of.get(device) for of in stage_of)
        stages = (a.stage_id if a else None, b.stage_id if b else None)
        begin = device
        if groups and groups[-1].stages == stages:
            begin = groups.pop().devices[0]
        groups.append(
            DeviceGroup(
                (begin, device), stages, (a.peak_bytes if a else None, b.peak_bytes if b else None)
            )
        )
    return groups


def describe_value(name: str, value: Any) -> str:
    """A side of a difference for people."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        stage = Stage.from_json(value)
        degrees = f"dp {stage.choice.data_parallel} x tp {stage.choice.tensor_parallel}"
        layers = _layers((stage.first, stage.stop - 1))
        return f"layers {layers} on devices {_ids(stage.devices)}, {degrees}"
    if isinstance(value, list):
        return _layers(value) if name.endswith(".layers") else _ids(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (value[:12] or "unknown") if name == "model_hash" else str(value)


def describe_name(name: str) -> str:
    """``stages[2].remat`` as ``stage 2 remat``, ``num_microbatches`` as ``num microbatches``."""
    where, dot, field = name.rpartition(".")
    if not dot:
        return name.replace("stages[", "stage ").replace("]", "").replace("_", " ")
    return f"{describe_name(where)} {_STAGE_FIELDS[field]}"


def _layers(layers: Sequence[int]) -> str:
    first, last = layers
    return _ids(range(first, last + 1))


def _ids(ids: Sequence[int]) -> str:
    if list(ids) != list(range(ids[0], ids[-1] + 1)):
        return ",".join(map(str, ids))
    return str(ids[0]) if ids[0] == ids[-1] else f"{ids[0]}-{ids[-1]}"


def compare(first: ReportFacts, second: ReportFacts) -> dict[str, Any]:
    """The document of ``capture diff --json``."""
    return {
        "same_decision": not differences(first.plan, second.plan),
        "differences": write(differences(first.plan, second.plan)),
        "devices": write(device_groups(first, second)),
        "plans": [
            {
                "peak_bytes": facts.fullest.peak_bytes,
                "verified": facts.verified,
                "headroom": write(facts.headroom),
                "step_seconds": facts.schedule.step_seconds,
                "simulated": True,
                "mean_waits_fraction": facts.mean_waits,
            }
            for facts in (first, second)
        ],
    }


def totals(first: ReportFacts, second: ReportFacts) -> list[list[str]]:
    """Rows of name, first, second: the fullest device, what is left of it, and the time of a
    step."""
    columns = [_totals(facts) for facts in (first, second)]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _totals(facts: ReportFacts) -> dict[str, str]:
    room, step = facts.headroom, facts.schedule.step_seconds
    peak = (
        f"{format_bytes(facts.fullest.peak_bytes)} "
        f"({'compiled' if facts.verified else 'predicted'})"
    )
    return {
        "peak per device": peak,
        "headroom": "-" if room is None else signed_bytes(room.limit_bytes - room.peak_bytes),
        "headroom at worst": "-"
        if room is None
        else signed_bytes(room.limit_bytes - room.high_bytes),
        "verdict": "-" if room is None else room.verdict,
        "step time (simulated)": "-" if step is None else format_seconds(step),
        "examples/s": "-" if step is None else format_rate(facts.plan.global_batch_size / step),
        "pipeline bubble": f"{facts.mean_waits:.0%}"
        + ("" if facts.schedule.in_seconds else " (unit times)"),
    }
