"""What is shown of a plan of packs: its packs, and who holds the peaks of a device and the host."""

from __future__ import annotations

from collections.abc import Sequence

from capture.plan.packs import PacksPlan
from capture.quantities import counted
from capture.report.figure import Figure, at_peak
from capture.report.page import Page

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
    found = []
    for name, packs in directions.items():
        listed = " ".join(map(str, packs.lengths[:_LISTED]))
        listed += " ..." * (len(packs.lengths) > _LISTED)
        found.append([name, str(packs.microbatch_size), str(len(packs.packs)), listed])
    return found


def page(plan: PacksPlan, lines: Sequence[str]) -> Page:
    """Return what is shown of a plan of packs; ``lines`` say what is predicted."""
    compiled = None if plan.prediction is None else plan.prediction.compiled
    is_timed = compiled is not None and compiled.step_seconds is not None
    footer = "Seconds are simulated from measurements of single layers"
    footer += ", those as compiled instructions from compiled packs." if is_timed else "."
    return Page(title(plan), HEADER, rows(plan), lines, footer, figures=lambda: _figures(plan))


def _figures(plan: PacksPlan) -> list[Figure]:
    """Return the figure of how the peaks divide over categories; nothing where nobody says."""
    memory = plan.prediction and plan.prediction.memory
    if not memory:
        return []
    known = "as compiled" if plan.compiled else "from layers alone"
    caption = f"Of the fullest device and of the host, {known}."
    parts = memory.device_parts_bytes, memory.host_parts_bytes
    return [at_peak("Who holds the peaks", caption, ["a device", "the host"], parts)]
