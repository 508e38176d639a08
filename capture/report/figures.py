"""The figures of a report of one plan, as plain data (``capture.report.figure``)."""

from __future__ import annotations

from collections.abc import Iterator

from capture.plan.strategy import of_devices
from capture.quantities import counted, format_bytes
from capture.report.data import ReportFacts, StageFacts, envelope, levels
from capture.report.figure import (
    FAR_LIMIT,
    Figure,
    bytes_unit,
    edged,
    lanes,
    limit_line,
    scatter,
    seconds_unit,
    spans,
    stacked,
)
from capture.report.front_figure import front
from capture.report.palette import INK, category_color, in_order, stage_colors
from capture.report.schedule_figure import schedule
from capture.report.treemap import Area
from capture.report.words import CLOCKS

#: Points per stage of the memory over time: three per bucket at most.
MEMORY_BUCKETS = 400


def figures(facts: ReportFacts) -> list[Figure]:
    """Return the figures for which there are facts, in reading order."""
    made = [stage_map(facts), peaks(facts), treemap(facts)]
    made += [memory_over_time(facts)] if facts.schedule.memory else []
    traces, layout, note = schedule(facts.schedule)
    caption = f"{CLOCKS[facts.schedule.clock]} {note}"
    made.append(Figure("schedule", "Schedule of a step", caption, traces, layout))
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
        said = (
            f"stage {stage.stage_id}\ndevices {stage.devices_text}\nlayers {stage.layers_text}\n"
            f"{split}\nremat {stage.stage.remat_text}\n{format_bytes(stage.peak_bytes)} per device"
        )
        traces.append(
            spans(
                list(of_node),
                [min(places) - 0.5 for places in of_node.values()],
                [max(places) - min(places) + 1 for places in of_node.values()],
                text=[f"stage {stage.stage_id}\nlayers {stage.layers_text}\n{split}"]
                * len(of_node),
                marker=edged(color, 2),
                width=0.9,
                said=[said] * len(of_node),
            )
        )
    num_nodes, widest = len(cluster.nodes), max(cluster.nodes)
    layout = {
        "height": 90 + 70 * num_nodes,
        "xaxis": {
            "title": "device of its node",
            "range": (-0.5, widest - 0.5),
            "dtick": max(1, widest // 16),
            "showgrid": False,
        },
        "yaxis": lanes([f"node {node}" for node in range(num_nodes)]),
    }
    caption = (
        f"Which devices of the {counted(num_nodes, 'node')} hold which layers; dp: replicas of the "
        "stage, tp: ways in which it is split."
    )
    return Figure("stages", "Stages on devices", caption, traces, layout)


def peaks(facts: ReportFacts) -> Figure:
    """Return the figure of memory at each stage's peak: its parts stacked, with the interval, the
    compiled peak and the limit."""
    stages, high = facts.stages, facts.high_bytes
    unit = bytes_unit(high)
    names = [f"stage {stage.stage_id}" for stage in stages]
    notes = [stage.predicted for stage in stages]
    ends = [" to ".join(map(format_bytes, note.interval_bytes)) for note in notes]
    sizes = [format_bytes(note.peak_bytes) for note in notes]
    predicted = scatter(
        "markers",
        "predicted, with interval",
        names,
        [note.peak_bytes / unit.scale for note in notes],
        said=[f"predicted {nbytes} ({of})" for nbytes, of in zip(sizes, ends, strict=True)],
        marker={"color": INK, "size": 5},
        intervals=[[end / unit.scale for end in note.interval_bytes] for note in notes],
    )
    traces = [*stacked(names, [note.parts_bytes for note in notes], unit), predicted]
    if facts.verified:
        marker = {"symbol": "diamond-open", "size": 12, "color": INK}
        y = [stage.peak_bytes / unit.scale for stage in stages]
        said = [f"verified {format_bytes(stage.peak_bytes)}" for stage in stages]
        traces.append(scatter("markers", "verified (compiled)", names, y, said=said, marker=marker))
    layout = {
        "height": 440,
        "stacked": True,
        "bargap": 0.35,
        "yaxis": {"title": f"{unit.name} per device", "from_zero": True},
        **limit_line("y", facts.limit_bytes, unit.scale, high),
    }
    return Figure(
        "peaks",
        "Memory at the peak of each stage",
        f"What each device of a stage holds when it holds most. {_limit_words(facts)}",
        traces,
        layout,
    )


def _areas(stage: StageFacts) -> Iterator[Area]:
    """Yield the areas of a stage, its layers, and what each layer's bytes are for."""
    first, rest = stage.stage.first, dict[str, int]()
    for category, nbytes in stage.predicted.parts_bytes.items():
        if (
            left := nbytes - sum(layer.get(category, 0) for layer in stage.predicted.layers_bytes)
        ) > 0:
            rest[category] = left
    groups = [
        (f"layer {layer}", parts) for layer, parts in enumerate(stage.predicted.layers_bytes, first)
    ]
    groups.append(("of no one layer", rest))
    name, total = f"stage {stage.stage_id}", sum(sum(parts.values()) for _, parts in groups)
    each = f"{name}: devices {stage.devices_text}, {format_bytes(stage.predicted.peak_bytes)} each"
    yield (whole := Area("", name, each, total, "#E4E7EB", f"{name}, per device"))
    for name, parts in groups:
        if not any(parts.values()):
            continue
        yield (inner := Area(whole.key, name, name, sum(parts.values()), "#F5F7FA", name))
        for c in in_order([category for category, nbytes in parts.items() if nbytes]):
            yield Area(inner.key, c, c, parts[c], category_color(c), f"{name}, {c}")


def treemap(facts: ReportFacts) -> Figure:
    """Return the figure of stages, their layers, and what each is for: areas are bytes of one
    device of each stage."""
    areas = [area for stage in facts.stages for area in _areas(stage)]
    layout = {"height": 240 + 60 * min(8, len(facts.stages))}
    return Figure(
        "treemap",
        "Memory by layer and category",
        "One device of each stage at its predicted peak; areas are bytes. What passes between "
        "stages counts to the layer at the border.",
        [{"type": "treemap", "areas": areas}],
        layout,
    )


def memory_over_time(facts: ReportFacts) -> Figure:
    """Return the figure of simulated memory over time, a line per stage, with the limit."""
    held = [levels(use.samples, facts.schedule.simulation.seconds) for use in facts.schedule.memory]
    shown = [envelope(samples, MEMORY_BUCKETS) for samples in held]
    thinned = any(len(points) < len(samples) for points, samples in zip(shown, held, strict=True))
    largest = max(nbytes for points in shown for _, nbytes in points)
    unit, clock = bytes_unit(largest), seconds_unit(float(facts.schedule.simulation.seconds))
    in_seconds = facts.schedule.in_seconds
    scale = clock.scale if in_seconds else 1.0
    traces = [
        scatter(
            "lines",
            f"stage {s}",
            [float(seconds) / scale for seconds, _ in points],
            [nbytes / unit.scale for _, nbytes in points],
            line={"shape": "hv", "width": 1.5, "color": color},
        )
        for s, (points, color) in enumerate(zip(shown, stage_colors(len(shown)), strict=True))
    ]
    layout = {
        "height": 420,
        "xaxis": {"title": f"{clock.name} into the step" if in_seconds else "unit times"},
        "yaxis": {"title": f"{unit.name} per device", "from_zero": True},
        **limit_line("y", facts.limit_bytes, unit.scale, largest),
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
    source = "" if room.source == "given" else f" ({room.source})"
    far = (
        " It lies far above and is not drawn."
        if room.limit_bytes > FAR_LIMIT * facts.high_bytes
        else ""
    )
    return (
        f"The limit is {format_bytes(room.limit_bytes)}{source}; "
        f"{format_bytes(room.spare_bytes)} are left.{far}"
    )
