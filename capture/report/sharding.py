"""What is shown of a sharding plan: its operators with modes, bytes and seconds, and what differs
between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from capture.documents import write
from capture.plan.headroom import Headroom
from capture.plan.sharding import Mode, OperatorCost, ShardingPlan
from capture.quantities import counted, format_bytes, format_rate, format_seconds
from capture.report.figure import Figure, at_peak, bars, bytes_unit, seconds_unit
from capture.report.page import Page
from capture.report.palette import in_order

HEADER = ["operator", "mode", "parameters", "resident", "transient", "at the peak", "time"]
#: Of an operator, what is drawn, and what its axis is called.
_DRAWN = {
    "resident_bytes": "held for the whole step",
    "transient_bytes": "while it runs, beside that",
    "seconds": "forward and backward",
}


def operators_of(plan: ShardingPlan) -> list[tuple[str, Mode, OperatorCost | None]]:
    """Return the name, mode and cost of every operator; plans of schema 1 do not say what operators
    cost."""
    costs: Sequence[OperatorCost | None] = plan.costs or [None] * len(plan.modes)
    return list(zip(plan.names, plan.modes, costs, strict=True))


def title(plan: ShardingPlan) -> str:
    model = "a model without a name" if plan.workload is None else str(plan.workload)
    where = "" if plan.cluster is None else f" on {plan.cluster} {plan.cluster.target}"
    batch = f"{counted(plan.batch_size, 'example')} per device"
    return f"{model}{where}, operators sharded, {batch}"


def paragraph(plan: ShardingPlan, room: Headroom | None) -> str:
    """Describe a sharding plan: what a device needs and how that is known, the modes, and the
    speed."""
    how = "by the compiler of the target" if plan.compiled else plan.peaks.how
    modes = [f"{n} {mode}" for mode, n in plan.summary()["operators_by_mode"].items()]
    said = [
        f"A device needs {format_bytes(plan.known_peak_bytes)} at its peak ({how}).",
        f"{counted(len(plan.modes), 'operator')}: {', '.join(modes)}.",
        f"A step takes {format_seconds(plan.step_seconds)} by the model of costs, "
        f"{format_rate(plan.examples_per_second)} examples/s on all devices.",
    ]
    if parts := _parts_of_peak(plan):
        shares = (f"{part} {format_bytes(parts[part])}" for part in in_order(list(parts)))
        said.insert(1, f"At the estimated peak: {', '.join(shares)}.")
    if not plan.costs:
        said.append(
            "A dash is what operators cost, which plans of earlier versions do not say; make the "
            "plan again (capture osdp)."
        )
    if plan.compiled_peak_bytes is None:
        said.append("Verify the plan to be sure (capture verify).")
    return " ".join(said if room is None else [f"The plan {room.verdict}.", *said])


def rows(plan: ShardingPlan, *, heaviest_first: bool = False) -> list[list[str]]:
    """Return a line per operator, in program order or those that hold most first, and then the
    totals."""
    found = operators_of(plan)
    if heaviest_first:
        found.sort(key=lambda operator: -_held_bytes(operator[2]))
    return [[name, str(mode), *_cells(cost)] for name, mode, cost in found] + _totals_of(plan)


def _totals_of(plan: ShardingPlan) -> list[list[str]]:
    """Return lines of what the operators add up to, and of what else makes up the peak; empty where
    an operator does not say what it holds then."""
    if not plan.costs or not all(cost.at_peak for cost in plan.costs):
        return []
    held = sum(_parts_of_peak(plan).values())
    params, resident, seconds = (
        sum(getattr(cost, name) for cost in plan.costs)
        for name in ("parameter_bytes", "resident_bytes", "seconds")
    )
    together = [format_bytes(params), format_bytes(resident), "-", format_bytes(held)]
    beside, how = plan.known_peak_bytes - held, "estimated"
    if plan.compiled_peak_bytes is not None:
        how = "compiled"
    rows = [["all operators", "-", *together, format_seconds(seconds)]]
    rows += [["of none of them", *"----", format_bytes(beside), "-"]] if beside else []
    return [*rows, [f"peak per device ({how})", *"----", format_bytes(plan.known_peak_bytes), "-"]]


def _held_bytes(cost: OperatorCost | None) -> float:
    """Return an operator's bytes at the peak, or at any time if that was not looked at."""
    if cost is None:
        return 0.0
    return sum(cost.at_peak.values()) if cost.at_peak else cost.resident_bytes


def _parts_of_peak(plan: ShardingPlan) -> Counter[str]:
    """Return the bytes by category of all operators at the estimated peak."""
    parts = Counter[str]()
    for cost in plan.costs:
        parts.update(cost.at_peak)
    return parts


def _cells(cost: OperatorCost | None) -> list[str]:
    if cost is None:
        return ["-"] * (len(HEADER) - 2)
    sizes = (cost.parameter_bytes, cost.resident_bytes, cost.transient_bytes)
    at_peak = format_bytes(sum(cost.at_peak.values())) if cost.at_peak else "-"
    return [*map(format_bytes, sizes), at_peak, format_seconds(cost.seconds)]


def operator_rows(plan: ShardingPlan) -> list[dict[str, Any]]:
    """Return the rows of operators that ``--json`` prints."""
    return [
        {"name": name, "mode": str(mode), "params": list(params), "cost": write(cost)}
        for (name, mode, cost), params in zip(operators_of(plan), plan.params, strict=True)
    ]


def page(plan: ShardingPlan, room: Headroom | None) -> Page:
    """Return what is shown of a sharding plan."""
    below = "Bytes and times are those of one device, by the search's model of costs."
    footer = f"Sharding plan; {below[0].lower()}{below[1:]}"
    said, make = [paragraph(plan, room)], partial(_figures, plan)
    return Page(title(plan), HEADER, rows(plan), said, footer, below, make)


def _figures(plan: ShardingPlan) -> list[Figure]:
    names = [escape(f"{i} {name}") for i, name in enumerate(plan.names)]
    turned, found = {"xaxis": {"tickangle": -45}}, list[Figure]()
    if _parts_of_peak(plan):
        caption = (
            f"Per operator, its part of the {format_bytes(plan.peak_bytes)} that a device is "
            "estimated to need at the peak of the step."
        )
        parts = [cost.at_peak for cost in plan.costs]
        found.append(at_peak("Who holds the peak", caption, names, parts, **turned))
    for field, what in _DRAWN.items() if plan.costs else ():
        values = [getattr(cost, field) for cost in plan.costs]
        unit = (seconds_unit if field == "seconds" else bytes_unit)(max(values, default=0))
        sizes = [value / unit.scale for value in values]
        trace = bars("", names, sizes, text=[str(mode) for mode in plan.modes])
        axes = {**turned, "yaxis": {"title": unit.name}}
        words = field.replace("_", " ").capitalize()
        found.append(Figure(field, words, f"Per operator: {what}.", [trace], axes))
    return found


def decision(plan: ShardingPlan) -> Mapping[str, Any]:
    """Return a plan's decisions by name; numbers and reasons do not count."""
    where = plan.cluster
    return {
        "workload": None if plan.workload is None else str(plan.workload),
        "cluster": None if where is None else f"{where} {where.target}",
        "batch_size": plan.batch_size,
        "remat": plan.remat,
        "smallest_bytes": plan.smallest_bytes,
        "look_ahead": plan.look_ahead,
        **{
            f"operators[{i}] {name}": str(mode)
            for i, (name, mode) in enumerate(zip(plan.names, plan.modes, strict=True))
        },
    }
