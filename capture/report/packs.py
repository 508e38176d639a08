"""What is shown of a plan of packs: its packs, and who holds the peaks of a device and the host."""

from __future__ import annotations

from collections.abc import Sequence

from capture.plan.headroom import Headroom
from capture.plan.packs import PacksPlan
from capture.quantities import counted
from capture.report.figure import Figure, bars, bytes_unit
from capture.report.page import html_table, render
from capture.report.palette import category_color, in_order

HEADER = ["pass", "examples", "packs", "layers of each"]
#: Packs whose layers are listed.
_LISTED = 16


def title(plan: PacksPlan) -> str:
    model = plan.model if plan.workload is None else str(plan.workload)
    examples = counted(plan.minibatch_size, "example")
    return f"{model} on {plan.machine.name}, {plan.mode}, packs of layers, {examples} a step"


def rows(plan: PacksPlan) -> list[list[str]]:
    """Return a line per direction: the examples of a micro-batch, and the layers of each pack."""
    directions = {"forward": plan.configuration.forward, "backward": plan.configuration.backward}
    return [
        [
            name,
            str(packs.microbatch_size),
            str(len(packs.packs)),
            " ".join(map(str, packs.lengths[:_LISTED])) + " ..." * (len(packs.lengths) > _LISTED),
        ]
        for name, packs in directions.items()
    ]


def page(plan: PacksPlan, lines: Sequence[str], room: Headroom | None) -> str:
    """Return the report of a plan of packs as one HTML file; ``lines`` say what is predicted."""
    lead = "".join(f"{line[0].upper()}{line[1:]}. " for line in lines)
    footer = "Seconds are simulated from measurements of single layers."
    return render(title(plan), lead, room, html_table(HEADER, rows(plan)), _figures(plan), footer)


def _figures(plan: PacksPlan) -> list[Figure]:
    """Return the figure of how the peaks divide over categories; nothing where nobody says."""
    memory = plan.prediction and plan.prediction.memory
    if not memory:
        return []
    places = {"a device": memory.device_parts_bytes, "the host": memory.host_parts_bytes}
    unit = bytes_unit(max(sum(parts.values()) for parts in places.values()))
    traces = [
        bars(
            part,
            list(places),
            [of.get(part, 0) / unit.scale for of in places.values()],
            marker={"color": category_color(part)},
        )
        for part in in_order(list(dict.fromkeys(name for of in places.values() for name in of)))
    ]
    known = "as compiled" if plan.compiled else "from layers alone"
    caption = f"Of the fullest device and of the host, {known}."
    layout = {"stacked": True, "yaxis": {"title": unit.name}}
    return [Figure("at_peak", "Who holds the peaks", caption, traces, layout)]
