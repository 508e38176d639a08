"""The figures of a report of one plan, as plotly.js takes them: traces and layouts in plain data;
no plotting library is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from capture.plan.strategy import of_devices
from capture.quantities import counted, format_bytes, format_seconds, signed_bytes
from capture.report.data import ReportFacts, StageFacts, envelope, levels
from capture.report.figure import FAR_LIMIT, Figure, limit_line
from capture.report.front_figure import front
from capture.report.palette import INK, category_color, in_order, stage_colors, text_on
from capture.report.schedule_figure import schedule
from capture.report.units import Unit, bytes_unit, seconds_unit
from capture.report.words import CLOCKS

#: Points per stage of the memory over time: three per bucket at most.
MEMORY_BUCKETS = 400


def figures(facts: ReportFacts) -> list[Figure]:
    """Return the figures for which there are facts, in reading order."""
    made = [stage_map(facts), peaks(facts), treemap(facts)]
    # Where the prediction is what the compiler said, there is nothing to compare.
    predicted = any(stage.interval_bytes != (stage.peak_bytes,) * 2 for stage in facts.stages)
    made += [prediction_errors(facts)] if facts.verified and predicted else []
    made += [memory_over_time(facts)] if facts.schedule.memory else []
    traces, layout, note = schedule(facts.schedule)
    made.append(
        Figure(
            "schedule",
            "Schedule of a step",
            f"{CLOCKS[facts.schedule.clock]} {note}",
            traces,
            layout,
        )
    )
    return made + ([front(facts)] if facts.front and len(facts.front.points) > 1 else [])


def stage_map(facts: ReportFacts) -> Figure:
    """Return the figure of stages on devices: nodes as rows, devices as columns, a bar per stage
    and node."""
    cluster, traces = facts.plan.cluster, []
    first_device = [sum(cluster.nodes[:node]) for node in range(len(cluster.nodes))]
    for stage, color in zip(facts.stages, stage_colors(len(facts.stages)), strict=True):
        of_node: dict[int, list[int]] = {}
        for device in stage.stage.devices:
            node = cluster.node_of_device[device]
            of_node.setdefault(node, []).append(device - first_device[node])
        choice, split = stage.stage.choice, of_devices(stage.stage.choice)
        if len(facts.stages) > 1:
            split = f"dp {choice.replicas_text} x tp {choice.tensor_parallel}"
        about = f"layers {stage.layers_text}<br>{split}"
        hover = (
            f"<b>stage {stage.stage_id}</b><br>devices {stage.devices_text}<br>{about}<br>remat "
            f"{stage.stage.remat_text}<br>"
            f"{format_bytes(stage.peak_bytes)} per device<extra></extra>"
        )
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": list(of_node),
                "base": [min(places) - 0.5 for places in of_node.values()],
                "x": [max(places) - min(places) + 1 for places in of_node.values()],
                "text": [f"<b>stage {stage.stage_id}</b><br>{about}"] * len(of_node),
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"color": text_on(color), "size": 13},
                "marker": {"color": color, "line": {"color": "white", "width": 2}},
                "width": 0.9,
                "hovertemplate": hover,
            }
        )
    num_nodes, widest = len(cluster.nodes), max(cluster.nodes)
    layout = {
        "height": 90 + 70 * num_nodes,
        "barmode": "overlay",
        "showlegend": False,
        "xaxis": {
            "title": {"text": "device of its node"},
            "range": [-0.5, widest - 0.5],
            "dtick": max(1, widest // 16),
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {
            "tickvals": list(range(num_nodes)),
            "ticktext": [f"node {node}" for node in range(num_nodes)],
            "range": [num_nodes - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
    }
    caption = (
        f"Which devices of the {counted(num_nodes, 'node')} hold which layers; dp: replicas of the "
        "stage, tp: ways in which it is split."
    )
    return Figure("stages", "Stages on devices", caption, traces, layout)


def peaks(facts: ReportFacts) -> Figure:
    """Return the figure of memory at each stage's peak: its parts stacked, with the interval, the
    compiled peak and the limit."""
    stages, limit = facts.stages, None if facts.headroom is None else facts.headroom.limit_bytes
    unit = bytes_unit(max(stage.interval_bytes[1] for stage in stages))
    names = [_stage_name(stage) for stage in stages]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": category,
            "x": names,
            "y": [stage.parts.get(category, 0) / unit.scale for stage in stages],
            "customdata": [format_bytes(stage.parts.get(category, 0)) for stage in stages],
            "marker": {"color": category_color(category), "line": {"color": "white", "width": 0.5}},
            "hovertemplate": f"{category}: %{{customdata}}<extra>%{{x}}</extra>",
        }
        for category in in_order([category for stage in stages for category in stage.parts])
    ]
    traces.append(_predicted(stages, names, unit))
    if facts.verified:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "verified (compiled)",
                "x": names,
                "y": [stage.peak_bytes / unit.scale for stage in stages],
                "customdata": [format_bytes(stage.peak_bytes) for stage in stages],
                "marker": {
                    "symbol": "diamond-open",
                    "size": 12,
                    "color": INK,
                    "line": {"width": 2},
                },
                "hovertemplate": "verified %{customdata}<extra>%{x}</extra>",
            }
        )
    layout = {
        "height": 440,
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": f"{unit.name} per device"}, "rangemode": "tozero"},
        **limit_line("y", limit, unit.scale, max(stage.interval_bytes[1] for stage in stages)),
    }
    return Figure(
        "peaks",
        "Memory at the peak of each stage",
        f"What each device of a stage holds when it holds most. {_limit_words(facts)}",
        traces,
        layout,
    )


def _predicted(stages: Sequence[StageFacts], names: Sequence[str], unit: Unit) -> dict[str, Any]:
    """Return the marks of the predicted peaks, with their intervals."""
    top = [stage.predicted_bytes / unit.scale for stage in stages]
    low, high = zip(*(stage.interval_bytes for stage in stages), strict=True)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "predicted, with interval",
        "x": names,
        "y": top,
        "customdata": [_interval_text(stage) for stage in stages],
        "marker": {"color": INK, "size": 5},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [end / unit.scale - y for end, y in zip(high, top, strict=True)],
            "arrayminus": [y - end / unit.scale for end, y in zip(low, top, strict=True)],
            "color": INK,
            "width": 5,
        },
        "hovertemplate": "predicted %{customdata}<extra>%{x}</extra>",
    }


class _Area(NamedTuple):
    """A rectangle of a treemap, in another one or in none (``""``)."""

    parent: str
    name: str
    label: str
    nbytes: int
    color: str
    about: str

    @property
    def key(self) -> str:
        return f"{self.parent}/{self.name}"


def _areas(stage: StageFacts) -> Iterator[_Area]:
    """Yield the areas of a stage, its layers, and what each layer's bytes are for."""
    first, rest = stage.stage.first, dict[str, int]()
    for category, nbytes in stage.parts.items():
        if (left := nbytes - sum(layer.get(category, 0) for layer in stage.layers)) > 0:
            rest[category] = left
    groups = [(f"layer {layer}", parts) for layer, parts in enumerate(stage.layers, first)]
    groups.append(("of no one layer", rest))
    name, total = _stage_name(stage), sum(sum(parts.values()) for _, parts in groups)
    each = f"{name}: devices {stage.devices_text}, {format_bytes(stage.predicted_bytes)} each"
    yield (whole := _Area("", name, each, total, "#E4E7EB", f"{name}, per device"))
    for name, parts in groups:
        if not any(parts.values()):
            continue
        yield (inner := _Area(whole.key, name, name, sum(parts.values()), "#F5F7FA", name))
        for c in in_order([category for category, nbytes in parts.items() if nbytes]):
            yield _Area(inner.key, c, c, parts[c], category_color(c), f"{name}, {c}")


def treemap(facts: ReportFacts) -> Figure:
    """Return the figure of stages, their layers, and what each is for: areas are bytes of one
    device of each stage."""
    areas = [area for stage in facts.stages for area in _areas(stage)]
    colors = [area.color for area in areas]
    trace = {
        "type": "treemap",
        "ids": [area.key for area in areas],
        "labels": [area.label for area in areas],
        "parents": [area.parent for area in areas],
        "values": [area.nbytes for area in areas],
        "branchvalues": "total",
        "customdata": [f"{area.about}: {format_bytes(area.nbytes)}" for area in areas],
        "marker": {
            "colors": colors,
            "line": {"color": "white", "width": 1},
            "pad": {"t": 20, "l": 2, "r": 2, "b": 2},
        },
        "hovertemplate": "%{customdata}<extra></extra>",
        "insidetextfont": {"size": 12, "color": [text_on(color) for color in colors]},
        "pathbar": {"visible": True, "thickness": 22},
        "tiling": {"packing": "squarify", "pad": 1},
        "sort": False,
    }
    layout = {
        "height": 240 + 60 * min(8, len(facts.stages)),
        "margin": {"l": 4, "r": 4, "t": 26, "b": 4},
    }
    return Figure(
        "treemap",
        "Memory by layer and category",
        "One device of each stage at its predicted peak; areas are bytes. What passes between "
        "stages counts to the layer at the border.",
        [trace],
        layout,
    )


def prediction_errors(facts: ReportFacts) -> Figure:
    """Return the figure of compiled peaks around predicted ones, in percent, with the interval that
    was promised."""
    names = [_stage_name(stage) for stage in facts.stages]
    low = [100 * (stage.interval_bytes[0] / stage.predicted_bytes - 1) for stage in facts.stages]
    high = [100 * (stage.interval_bytes[1] / stage.predicted_bytes - 1) for stage in facts.stages]
    band = {
        "type": "bar",
        "name": "interval of the prediction",
        "x": names,
        "base": low,
        "y": [top - bottom for top, bottom in zip(high, low, strict=True)],
        "marker": {"color": "#D9E2EC"},
        "customdata": [_interval_text(stage) for stage in facts.stages],
        "hovertemplate": "predicted %{customdata}<extra>%{x}</extra>",
    }
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "verified (compiled)",
        "x": names,
        "y": [100 * (stage.peak_bytes / stage.predicted_bytes - 1) for stage in facts.stages],
        "marker": {"symbol": "diamond-open", "size": 12, "color": INK, "line": {"width": 2}},
        "customdata": [
            f"{format_bytes(stage.peak_bytes)}, predicted {format_bytes(stage.predicted_bytes)}"
            for stage in facts.stages
        ],
        "hovertemplate": "verified %{customdata}: %{y:+.2f} %<extra>%{x}</extra>",
    }
    inside = sum(
        stage.interval_bytes[0] <= stage.peak_bytes <= stage.interval_bytes[1]
        for stage in facts.stages
    )
    coverage = (
        "not calibrated"
        if facts.coverage is None
        else f"calibrated to hold {facts.coverage:.0%} of devices"
    )
    layout = {
        "height": 320,
        "bargap": 0.35,
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {
            "title": {"text": "% of the predicted peak"},
            "zeroline": True,
            "zerolinecolor": INK,
        },
    }
    caption = (
        f"{inside} of {counted(len(facts.stages), 'stage')} lie within the interval of the "
        f"prediction ({coverage})."
    )
    return Figure("errors", "Predicted against verified", caption, [band, dots], layout)


def memory_over_time(facts: ReportFacts) -> Figure:
    """Return the figure of simulated memory over time, a line per stage, with the limit."""
    held = [levels(use.samples, facts.schedule.simulation.seconds) for use in facts.schedule.memory]
    shown = [envelope(samples, MEMORY_BUCKETS) for samples in held]
    thinned = any(len(points) < len(samples) for points, samples in zip(shown, held, strict=True))
    largest = max(nbytes for points in shown for _, nbytes in points)
    unit, clock = bytes_unit(largest), seconds_unit(float(facts.schedule.simulation.seconds))
    in_seconds = facts.schedule.in_seconds
    scale, time_of = (clock.scale, format_seconds) if in_seconds else (1.0, _units)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"stage {s}",
            "x": [float(seconds) / scale for seconds, _ in points],
            "y": [nbytes / unit.scale for _, nbytes in points],
            "customdata": [
                f"{format_bytes(nbytes)} at {time_of(float(seconds))}" for seconds, nbytes in points
            ],
            "line": {"shape": "hv", "width": 1.5, "color": color},
            "hovertemplate": f"%{{customdata}}<extra>stage {s}</extra>",
        }
        for s, (points, color) in enumerate(zip(shown, stage_colors(len(shown)), strict=True))
    ]
    limit = None if facts.headroom is None else facts.headroom.limit_bytes
    layout = {
        "height": 420,
        "xaxis": {"title": {"text": f"{clock.name} into the step" if in_seconds else "unit times"}},
        "yaxis": {"title": {"text": f"{unit.name} per device"}, "rangemode": "tozero"},
        **limit_line("y", limit, unit.scale, largest),
    }
    note = " Thinned out; highs and lows are kept." if thinned else ""
    caption = (
        f"{CLOCKS[facts.schedule.clock]} On streams that run beside each other, peaks may lie "
        "above or below those of the program order, "
        f"which are predicted and verified: at most {format_bytes(largest)} here.{note}"
    )
    return Figure("memory", "Memory over time, per device of each stage", caption, traces, layout)


def _limit_words(facts: ReportFacts) -> str:
    room = facts.headroom
    if room is None:
        return "No limit is known."
    high = max(stage.interval_bytes[1] for stage in facts.stages)
    source = "" if room.source == "given" else f" ({room.source})"
    far = " It lies far above and is not drawn." if room.limit_bytes > FAR_LIMIT * high else ""
    return (
        f"The limit is {format_bytes(room.limit_bytes)}{source}; "
        f"{signed_bytes(room.spare_bytes)} are left.{far}"
    )


def _stage_name(stage: StageFacts) -> str:
    return f"stage {stage.stage_id}"


def _interval_text(stage: StageFacts) -> str:
    low, high = map(format_bytes, stage.interval_bytes)
    return f"{format_bytes(stage.predicted_bytes)} ({low} to {high})"


def _units(number: float) -> str:
    return f"unit time {number:g}"
