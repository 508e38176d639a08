"""What is shown of a plan of an array: its step over time with both streams of copies, memory
against the limit, what became of every bundle of feature maps, and what fusing is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from capture.machine.rates import HostLink
from capture.plan.array import ArrayPlan
from capture.quantities import counted, format_bytes, format_seconds
from capture.report.figure import Figure, at_peak, bytes_unit, lanes, scatter, seconds_unit
from capture.report.page import Page
from capture.report.palette import INK, KINDS, LIMIT, OTHER
from capture.report.schedule_figure import Row, by_kind
from capture.step.multiplexed import ArraySteps, array_seconds, build_array, lifetimes
from capture.step.simulator import Work
from capture.step.sub_array import Lifetimes, Programs, SubArray, movable
from capture.step.timeline import StepTimeline, simulate_step

HEADER = ["sub-array", "bundle", "bytes", "is", "rests", "why"]
#: Rows of the figure of a step, from the top.
LANES = ("programs", "copies to the device", "copies to the host")
#: Of programs that models are of.
CURVES = tuple(KINDS[name] for name in ("backward", "recompute", "update", "forward"))
SWATCHES = {"forward": "F", "backward": "B", "recompute": "R"}


@dataclass(frozen=True)
class ArrayFacts:
    """The facts of an array's plan: its decisions and its simulated step.

    Attributes:
        plan: Plan with its prediction.
        arrays: Sub-arrays with their decisions.
        steps: Instructions of the sub-arrays.
        timeline: Timeline of the step's body.
        host: Link of the copies to and from the host.
    """

    plan: ArrayPlan
    arrays: tuple[Lifetimes, ...]
    steps: ArraySteps
    timeline: StepTimeline
    host: HostLink


def array_facts(
    plan: ArrayPlan, programs: Programs, sub_arrays: Sequence[SubArray], host: HostLink
) -> ArrayFacts:
    """Build and simulate the step of a plan.

    Args:
        plan: Plan whose step is built.
        programs: Programs of its sub-arrays.
        sub_arrays: Sub-arrays in the order of the partition.
        host: Link of the copies to and from the host.
    """
    arrays = tuple(
        lifetimes(array, own) for array, own in zip(sub_arrays, plan.decisions, strict=True)
    )
    steps = build_array(arrays, plan.order, programs, plan.memory_limit_bytes)
    timeline = simulate_step(steps.body, array_seconds(steps.body, host), feeds_ahead=0)
    return ArrayFacts(plan, arrays, steps, timeline, host)


def rows(facts: ArrayFacts) -> list[list[str]]:
    """Return a line per bundle of feature maps that could have been moved: what it is, for how long
    the device has no use for it, and what that choice costs."""
    ends, begins, again = _times(facts)
    step, found = facts.timeline.step_seconds, []
    for a, life in enumerate(facts.arrays):
        for n in movable(life.sub_array):
            bundle = life.sub_array.bundles[n]
            rest = begins[a, life.first_backward(n)] - ends[a, life.last_forward(n)]
            rest += step if rest < 0 else 0  # its backward pass is of the step that follows
            out, back = (
                way.seconds(bundle.nbytes) for way in (facts.host.to_host, facts.host.to_device)
            )
            if n in life.swapped:
                choice = "swapped"
                why = f"{format_seconds(out)} out and {format_seconds(back)} back"
                why += " within its rest" if out + back <= rest else ", longer than its rest"
            elif n in life.recomputed:
                choice, made = "recomputed", again[a, life.first_backward(n)]
                why = f"made again in {format_seconds(made)}, with what its layer makes again"
                why += f"; a swap takes {format_seconds(out + back)}"
            else:
                choice, why = "retained", "there is room"
            rest_text = format_seconds(max(0.0, rest))
            found.append([str(a), bundle.name, format_bytes(bundle.nbytes), choice, rest_text, why])
    return found


_At = dict[tuple[int, int], float]


def _times(facts: ArrayFacts) -> tuple[_At, _At, _At]:
    """Return, by sub-array and segment, its end and begin and the seconds of recomputing before."""
    runs = facts.steps.body.runs
    simulation = facts.timeline.simulation
    items = [
        (item, float(start))
        for item, start in zip(simulation.work, simulation.starts, strict=True)
        if item.kind in SWATCHES
    ]
    ends, begins, again = _At(), _At(), _At()
    waiting: dict[int, float] = {}
    for run, (item, start) in zip(runs, items, strict=True):
        a = facts.steps.body.slots[run.outputs[0]].holds.array
        call = facts.steps.body.programs[run.program].call.call
        if call.kind == "recompute":
            waiting[a] = waiting.get(a, 0.0) + float(item.seconds)
            continue
        # Equal segments are one program: the label of a run has the number of its layer.
        layer, layers = int(run.label.split()[1]), facts.arrays[a].sub_array.num_layers
        at = a, layer if call.kind == "forward" else 2 * layers - 1 - layer
        again[at] = waiting.pop(a, 0.0)
        begins[at], ends[at] = start, start + float(item.seconds)
    return ends, begins, again


def title(plan: ArrayPlan) -> str:
    model = "a model without a name" if plan.workload is None else str(plan.workload)
    sizes = " + ".join(str(len(group)) for group in plan.partition)
    others = len({task.workload for task in plan.trained}) - 1
    model += f" and {counted(others, 'other')}" if others else ""
    return f"{counted(len(plan.models), 'model')} of {model}, {plan.order} {sizes}"


def page(facts: ArrayFacts, lines: Sequence[str]) -> Page:
    """Return what is shown of an array's plan and of its simulated step; ``lines`` say what is
    predicted."""
    below = (
        "rests: from the end of its last use forward to the begin of its first use backward; "
        "feature maps of equal lifetime are one bundle"
    )
    figures = partial(_figures, facts.plan, facts)
    return Page(title(facts.plan), HEADER, rows(facts), lines, _footer(facts.plan), below, figures)


def plan_page(plan: ArrayPlan, lines: Sequence[str]) -> Page:
    """Return what is shown of what an array's plan itself says: no step over time, which is of
    programs."""
    header, found = ["sub-array", "bundle", "is", "fetched ahead"], decision_rows(plan)
    below = "capture explain PLAN -o FILE has the step over time, and why each bundle is moved"
    found = found or [["all", "all", "retained", "-"]]
    return Page(
        title(plan), header, found, lines, _footer(plan), below, partial(_figures, plan, None)
    )


def decision_rows(plan: ArrayPlan) -> list[list[str]]:
    """Return a line per bundle of feature maps that is not retained: what becomes of it, and how
    far ahead it is fetched."""
    return [
        [str(a), each.bundle, each.choice, str(each.ahead) if each.choice == "swap" else "-"]
        for a, own in enumerate(plan.decisions)
        for each in own
    ]


def _footer(plan: ArrayPlan) -> str:
    where = f"Seconds are simulated for {plan.cluster.target} by {plan.seconds_from or 'its rates'}"
    return f"{where}; never measured."


def _figures(plan: ArrayPlan, facts: ArrayFacts | None) -> list[Figure]:
    found = [] if facts is None else [_step(facts), _memory(facts)]
    if facts is None and plan.prediction is not None:
        parts, caption = [plan.prediction.parts_bytes], "Of the device, as predicted."
        found.append(at_peak("Who holds the peak", caption, ["the device"], parts))
    return [*found, *([_saturation(plan)] if plan.saturation else [])]


def _lane(item: Work) -> int:
    if item.kind in SWATCHES:
        return 0
    return 2 if "to host" in item.label or "swap out" in item.label else 1


def _step(facts: ArrayFacts) -> Figure:
    simulation, unit = facts.timeline.simulation, seconds_unit(facts.timeline.step_seconds)
    shown = [
        (_lane(item), item, float(start), float(item.seconds))
        for item, start in zip(simulation.work, simulation.starts, strict=True)
        if item.seconds and item.streams
    ]

    def said(row: Row) -> str:
        return f"{row[1].label}: {format_seconds(row[3])}"

    kinds = dict.fromkeys(item.kind for _, item, *_ in shown)
    traces = list(by_kind(shown, kinds, unit, said))
    for trace in traces:
        words = [_short(item) for _, item, *_ in shown if item.kind == trace["name"]]
        trace.update(width=0.7, text=words)
    layout = {
        "height": 300,
        "xaxis": {"title": f"{unit.name} into the step", "from_zero": True},
        "yaxis": lanes(LANES),
    }
    caption = (
        f"One update of every model, simulated: {facts.plan.order}. F, B and R with the sub-array: "
        "forward and backward passes of a layer, and what is made again. Gaps are waiting."
    )
    return Figure("step", "A step over time", caption, traces, layout)


def _short(item: Work) -> str:
    """Return the short name of a program, such as ``B1`` for a backward program of sub-array 1;
    empty for copies."""
    if item.kind not in SWATCHES:
        return ""
    return SWATCHES[item.kind] + item.label.partition("sub-array ")[2].partition(" ")[0]


def _memory(facts: ArrayFacts) -> Figure:
    use, limit = facts.timeline.memory_of(0), facts.plan.memory_limit_bytes
    unit, clock = bytes_unit(use.peak.peak_bytes), seconds_unit(facts.timeline.step_seconds)
    peak = facts.timeline.program_order.peak_of(0).peak_bytes
    traces = [
        scatter(
            "lines",
            "device",
            [float(seconds) / clock.scale for seconds, _ in use.samples],
            [nbytes / unit.scale for _, nbytes in use.samples],
            line={"shape": "hv", "color": INK, "width": 1.5},
            fill="rgba(86, 180, 233, 0.35)",
        )
    ]
    lines = [("peak of the plan", peak, INK)]
    lines += [("limit", limit, LIMIT)] if limit is not None and limit <= 3 * peak else []
    end = facts.timeline.step_seconds / clock.scale
    for name, nbytes, color in lines:
        dashed, y = {"color": color, "dash": "dash", "width": 1.5}, [nbytes / unit.scale] * 2
        named = f"{name}: {format_bytes(nbytes)}"
        traces.append(scatter("lines", named, [0, end], y, line=dashed))
    layout = {
        "height": 320,
        "xaxis": {"title": f"{clock.name} into the step"},
        "yaxis": {"title": f"{unit.name} of the device", "from_zero": True},
    }
    caption = (
        "What the device holds at each time. The plan's peak is that of its instructions, which no "
        "speed of the link exceeds."
    )
    return Figure("memory", "Memory over time", caption, traces, layout)


def _saturation(plan: ArrayPlan) -> Figure:
    """Return the figure of throughput against the degree of fusion."""
    tasks, traces = list(dict.fromkeys(plan.trained)), []
    largest = max(one.models for one in plan.saturation)
    for n, (task, color) in enumerate(zip(tasks, cycle(CURVES), strict=False)):
        own = [one for one in plan.saturation if one.task == n]
        sizes = [one.models for one in own]
        rates = [one.models * task.batch_size / one.seconds if one.seconds else 0.0 for one in own]
        of = f" of {task}" if len(tasks) > 1 else ""
        said = [f"{x} fused: {y:.4g} examples/s" for x, y in zip(sizes, rates, strict=True)]
        every, alone = f"all models of a sub-array{of}", f"one alone{of}"
        ends, dashed = [sizes[0], sizes[-1]], {"color": OTHER, "dash": "dash"}
        traces += [
            scatter("lines+markers", every, sizes, rates, line={"color": color}, said=said),
            scatter("lines", alone, ends, [rates[0]] * 2, line=dashed),
        ]
    layout = {
        "height": 320,
        "xaxis": {"title": "models that are fused", "dtick": max(1, largest // 16)},
        "yaxis": {"title": "examples per second", "from_zero": True},
    }
    caption = (
        "Where the curve is flat, the device is full, and fusing more is worth nothing: by "
        "programs one after the other, everything retained."
    )
    return Figure("saturation", "What fusing is worth", caption, traces, layout)
