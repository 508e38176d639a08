"""The figure of a front: peak memory against step time, and what no plan is faster than."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import Any

from capture.plan.stage import Stage
from capture.plan.strategy import strategy
from capture.plan.why import FrontPoint
from capture.quantities import counted, format_bytes, format_seconds
from capture.report.data import ReportFacts
from capture.report.figure import Figure, Trace, bytes_unit, limit_line, scatter, seconds_unit
from capture.report.palette import INK

#: Values that lie so many times apart are drawn along a logarithmic axis.
LOG_RATIO = 4


def front(facts: ReportFacts) -> Figure:
    """Return the figure of the plans between which one has to choose, with their names, this one,
    and lower bounds of the step time."""
    assert facts.front is not None, "drawn where there is one"
    points, step, bounds = facts.front.points, facts.schedule.step_seconds, _bounds(facts)
    unit = bytes_unit(max(point.peak_bytes for point in points))
    clock = seconds_unit(max(point.step_seconds for point in points))
    limit = facts.limit_bytes
    peaks = [point.peak_bytes / unit.scale for point in points]
    seconds = [point.step_seconds / clock.scale for point in points]
    line = limit_line("x", limit, unit.scale, max(point.peak_bytes for point in points))
    ends = [peaks[0], limit / unit.scale if line and limit else peaks[-1]]
    x_of, x_axis = _scaled(f"peak per device, {unit.name}", [*peaks, *ends])
    low = [value / clock.scale for _, _, values in bounds for value in values]
    y_of, y_axis = _scaled(f"step, {clock.name}", [*seconds, *low])
    if line:
        axis, at, words = line["limit"]
        line["limit"] = axis, x_of(at), words
    traces = [_line(points, list(map(x_of, peaks)), list(map(y_of, seconds)))]
    if step is not None:
        peak = facts.fullest.peak_bytes
        traces.append(
            scatter(
                "markers",
                "this plan (simulated)",
                [x_of(peak / unit.scale)],
                [y_of(step / clock.scale)],
                said=[f"this plan: {format_bytes(peak)}, {format_seconds(step)}"],
                marker={"symbol": "star", "size": 16, "color": "#D55E00"},
            )
        )
    # Within the peak of a point no plan is faster than the bound of that point.
    corners = [ends[0], *(x for peak in peaks for x in (peak, peak)), ends[1]]
    for name, color, values in bounds:
        x = list(map(x_of, corners if len(values) > 1 else ends))
        y = [y_of(value / clock.scale) for value in values for _ in range(2)]
        line_of = {"color": color, "width": 1.5, "dash": "dash"}
        traces.append(scatter("lines", name, x, y, line=line_of))
    layout = {"height": 400, "showlegend": True, "xaxis": x_axis, "yaxis": y_axis, **line}
    return Figure("front", "Peak memory against step time", _front_words(facts), traces, layout)


def _line(points: Sequence[FrontPoint], x: Sequence[float], y: Sequence[float]) -> Trace:
    """Return the trace of the plans of a front, with their names."""
    said = [
        f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}\n"
        f"{_stages_text(point.stages)}"
        for point in points
    ]
    return scatter(
        "lines+markers+text",
        "front",
        x,
        y,
        text=[point.name for point in points],
        said=said,
        line={"shape": "hv", "color": "#0072B2", "width": 1.5},
        marker={"size": 9, "color": "#0072B2"},
    )


def _bounds(facts: ReportFacts) -> list[tuple[str, str, list[float]]]:
    """Return the known lower bounds of step times: a line's name, its color, and its seconds. These
    are up to the peak of every point and beyond the last, or one number for everywhere."""
    why, front = facts.plan.why, facts.front
    if why is None or front is None or why.proven is None or not why.proven.trail:
        return []
    if not (least := why.proven.trail[-1].least_step_seconds):
        return []
    within = [point.step_seconds / (1 + point.bound_fraction) for point in front.points]
    found = [("no plan is faster (lower bound)", INK, [*within, least])]
    if (nearer := why.proven.by_layers) is not None:
        found.append(("nor than this, by estimates", "#009E73", [nearer.least_step_seconds]))
    return found


def _front_words(facts: ReportFacts) -> str:
    """Describe a front: what it is, its named plans, and what is proven of it."""
    assert facts.front is not None, "there is one"
    said = "a sample of those that no other plan beats both in memory and in time, with both ends"
    times = "Step times are estimates of the search; this plan's is that of the simulation."
    if facts.front.compiled:
        said = "compiled, and none beats another both in memory and in time"
        times = "Step times are simulated."
    if facts.front.complete:
        said = "no other plan of the search is both smaller and faster than one of them"
    named = [
        f"{p.name.capitalize()}: {format_bytes(p.peak_bytes)}, {format_seconds(p.step_seconds)}, "
        + f"{strategy(p.stages, p.schedule, p.num_microbatches)}."
        for p in facts.front.points
        if p.name
    ]
    said_of = (
        "No plan is faster than {}, transfers left out.",
        "By estimates that compiled layers correct none is faster than {}.",
    )
    for text, (*_, values) in zip(said_of, _bounds(facts), strict=False):
        named.append(text.format(format_seconds(values[-1])))
    return " ".join([f"{counted(len(facts.front.points), 'plan')}: {said}.", *named, times])


def _scaled(title: str, values: Sequence[float]) -> tuple[Callable[[float], float], dict[str, Any]]:
    """Return how values are placed along an axis, logarithmic if far apart, and the axis."""
    low, high = min(values), max(values)
    if low <= 0 or high < LOG_RATIO * low:
        return lambda value: value, {"title": title}
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [n * 10.0**power for power in powers for n in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    names = [(log10(tick), f"{tick:g}") for tick in shown]
    return log10, {"title": f"{title} (logarithmic)", "names": names}


def _stages_text(stages: Sequence[Stage]) -> str:
    """Return a line per stage: its layers and its dp x tp."""
    pairs = [(each, each.choice) for each in stages]
    return "\n".join(
        f"layers {each.first}-{each.stop - 1} ({c.data_parallel} x {c.tensor_parallel})"
        for each, c in pairs
    )
