"""The Gantt chart of a step: a bar per program while they can be told apart, else an image of what
each stage mostly does when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from capture.quantities import format_seconds
from capture.report.data import ScheduleFacts
from capture.report.figure import Trace, Unit, edged, lanes, scatter, seconds_unit, spans
from capture.report.palette import KINDS, OTHER
from capture.step.simulator import Work
from capture.step.timeline import compute_stream

#: More programs and transfers than these are drawn as an image.
MAX_BARS = 1500
#: Columns of the image.
NUM_SLOTS = 1200

_COMPUTES = ("forward", "backward", "backward_inputs", "backward_weights", "summarize", "update")


def schedule(facts: ScheduleFacts) -> tuple[list[Trace], dict[str, Any], str]:
    """Return (traces, layout, what the caption must say of them) of a schedule: a row per group of
    devices, that of the first stage on top."""
    num_stages = len(facts.lanes)
    step = float(facts.simulation.seconds)
    unit = seconds_unit(step) if facts.in_seconds else Unit("unit times", 1.0)
    layout: dict[str, Any] = {
        "height": 130 + max(26, 60 - 2 * num_stages) * num_stages,
        "showlegend": True,
        "xaxis": {
            "title": f"{unit.name} into the step" if facts.in_seconds else unit.name,
            "range": (0, step / unit.scale),
        },
        "yaxis": lanes(list(facts.lanes.values())),
    }
    rows = _rows(facts)
    if len(rows) <= MAX_BARS:
        is_sending = any(item.kind == "transfer" for _, item, *_ in rows)
        sends = " The thin bars below a stage are what it sends." * is_sending
        return _bars(rows, facts, unit), layout, f"Gaps are waiting.{sends}"
    note = (
        f"{len(rows):,} programs and transfers are too many for bars: drawn are {NUM_SLOTS:,} "
        "slots of time, each with the program that "
        "takes most of it; transfers are left out. The trace (--trace) has every one."
    )
    return _image(facts, unit), layout, note


#: (lane, item, start, seconds)
Row = tuple[int, Work, float, float]


def _rows(facts: ScheduleFacts) -> list[Row]:
    """Return the programs of compute streams and the transfers that leave a stage."""
    row_of = {lane: row for row, lane in enumerate(facts.lanes)}
    stage_of = {compute_stream(lane): row for lane, row in row_of.items()}
    found = []
    for item, start in zip(facts.simulation.work, facts.simulation.starts, strict=True):
        if item.seconds and item.streams:
            stage = stage_of.get(item.streams[0])
            if stage is None and item.kind == "transfer":
                stage = row_of[item.streams[0].partition(" -> ")[0]]
            if stage is not None:
                found.append((stage, item, float(start), float(item.seconds)))
    return found


def by_kind(
    rows: Sequence[Row], kinds: Iterable[str], unit: Unit, said: Callable[[Row], str]
) -> Iterator[Trace]:
    """Yield the bars of programs and transfers in their lanes, a trace per kind that there is."""
    for kind in kinds:
        if mine := [row for row in rows if row[1].kind == kind]:
            yield spans(
                [lane for lane, *_ in mine],
                [start / unit.scale for *_, start, _ in mine],
                [seconds / unit.scale for *_, seconds in mine],
                name=kind,
                said=list(map(said, mine)),
                marker=edged(KINDS.get(kind, OTHER)),
            )


def _bars(rows: list[Row], facts: ScheduleFacts, unit: Unit) -> list[Trace]:
    def said(row: Row) -> str:
        return f"{row[1].label}\n{_span(facts, *row[2:])}"

    traces = list(by_kind(rows, (*_COMPUTES, "transfer"), unit, said))
    for trace in traces:
        below = trace["name"] == "transfer"
        trace["y"] = [lane + (0.38 if below else -0.05) for lane in trace["y"]]
        trace["width"] = 0.14 if below else 0.66
        if below:
            trace["marker"] = edged(KINDS["transfer"], 0)
    return traces


def _image(facts: ScheduleFacts, unit: Unit) -> list[Trace]:
    """Return a heat map of kinds of programs; ``None`` where a stage mostly waits."""
    grid, labels = slots(facts, NUM_SLOTS)
    width = float(facts.simulation.seconds) / NUM_SLOTS / unit.scale
    image = {"type": "heatmap", "kinds": grid, "dx": width, "text": labels}
    used = {kind for row in grid for kind in row if kind is not None}
    square = {"symbol": "square", "size": 12}
    legend = [
        scatter("markers", kind, [None], [None], marker={**square, "color": KINDS[kind]})
        for kind in _COMPUTES
        if kind in used
    ]
    return [image, *legend]


def slots(facts: ScheduleFacts, num_slots: int) -> tuple[list[list[str | None]], list[list[str]]]:
    """Return, per row and slot of time, the kind of the program that takes most of the slot, and
    its label; None where waiting does."""
    shape = (len(facts.lanes), num_slots)
    kinds, labels = np.full(shape, None, object), np.full(shape, "", object)
    waited, most = np.ones(shape), np.zeros(shape)
    length = float(facts.simulation.seconds) / num_slots
    for stage, item, start, seconds in _rows(facts):
        if item.kind == "transfer":
            continue
        first, last = int(start / length), min(num_slots - 1, int((start + seconds) / length))
        for at in ((stage, slot) for slot in range(first, last + 1)):
            begin = max(start, at[1] * length)
            share = (min(start + seconds, (at[1] + 1) * length) - begin) / length
            waited[at] -= share
            if share > most[at]:
                most[at], kinds[at], labels[at] = share, item.kind, item.label
    kinds[waited > most], labels[waited > most] = None, ""
    return kinds.tolist(), labels.tolist()


def _span(facts: ScheduleFacts, start: float, seconds: float) -> str:
    if facts.in_seconds:
        return f"{format_seconds(seconds)} from {format_seconds(start)} on"
    return f"unit {start:g}"
