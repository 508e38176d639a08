"""What is said of a plan of packs, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from capture.cli.output import parts_text, table
from capture.plan.packs import PacksPlan
from capture.quantities import format_bytes, format_rate, format_seconds
from capture.report.packs import HEADER, rows
from recommender.harmony.result import Baseline


def baseline_table(found: Sequence[Baseline]) -> str:
    """Return a table of baselines, one line per system."""
    rows = [
        [
            row.name,
            "-" if row.seconds is None else format_seconds(row.seconds),
            "-" if row.seconds is None else format_bytes(row.swap_bytes),
            format_bytes(row.device_bytes) if row.device_bytes else "-",
            format_bytes(row.host_bytes) if row.host_bytes else "-",
            row.reason or "-",
        ]
        for row in found
    ]
    return table(["beside it", "a step", "swapped", "device", "host", "cannot run because"], rows)


def pack_table(plan: PacksPlan) -> str:
    """Return a table of the packs, one line per direction."""
    return table(HEADER, rows(plan))


def prediction_lines(plan: PacksPlan) -> list[str]:
    """Return the lines of both estimates of a step, the paper's and that of our instructions."""
    if plan.prediction is None:
        return []
    paper, dtype = plan.prediction.paper, plan.swaps.stream
    return [
        *([f"parameters that layers read as {dtype} alone are streamed so"] if dtype else []),
        *(["every device swaps its share of weights and gradients"] if plan.swaps.sharded else []),
        f"by the paper's rules: {format_seconds(paper.step_seconds)} a step, "
        f"{format_rate(plan.minibatch_size / paper.step_seconds)} examples/s, tasks of "
        f"{format_bytes(max(paper.task_bytes))} at most, devices compute nothing for "
        f"{min(paper.gap_fractions):.0%} to {max(paper.gap_fractions):.0%} of it",
        *_step_lines(plan),
    ]


def _step_lines(plan: PacksPlan) -> list[str]:
    step = plan.prediction and plan.prediction.step
    if not step:
        return []
    moved = ", ".join(f"{name} {format_bytes(n)}" for name, n in step.volumes_bytes.items() if n)
    rate, idle = plan.machine.swap_bytes_per_second.value, step.idle_fractions
    ways = {
        way: sum(n for name, n in step.volumes_bytes.items() if name.endswith(f" {way}")) / rate
        for way in ("in", "out")
    }
    least, most = (format_seconds(of(idle) * step.step_seconds) for of in (min, max))
    assert plan.step_estimate is not None, "predicted"
    seconds, _ = plan.step_estimate
    how = "" if seconds == step.step_seconds else "compiled "
    from_layers = f"; {format_seconds(step.step_seconds)} from layers alone" * bool(how)
    return [
        f"as {how}instructions: {format_seconds(seconds)} a step, "
        f"{format_rate(plan.minibatch_size / seconds)} examples/s{from_layers}",
        f"not hidden: devices compute nothing for {least} to {most} of it, beside "
        f"{format_seconds(ways['in'])} of copies in and {format_seconds(ways['out'])} out",
        *_memory_lines(plan),
        f"moved in a step: {moved}",
    ]


def _memory_lines(plan: PacksPlan) -> list[str]:
    """Return the lines of what a device and the host hold at their peaks, and by what that is
    known."""
    assert plan.prediction is not None and plan.prediction.step is not None, "predicted"
    alone, memory = plan.prediction.step, plan.prediction.compiled or plan.prediction.step
    known = "from layers alone: an upper bound; capture verify compiles the packs"
    if plan.compiled:
        target = plan.cluster.target if plan.cluster else plan.machine.name
        known = (
            f"as compiled for {Path(target).stem}; {format_bytes(max(alone.device_peak_bytes))} "
            "from layers alone"
        )
    fullest, host = (parts_text(of) for of in (memory.device_parts_bytes, memory.host_parts_bytes))
    return [
        f"device: {format_bytes(max(memory.device_peak_bytes))} at its peak ({fullest}), {known}",
        f"host: {format_bytes(memory.host_peak_bytes)} at its peak ({host})",
    ]
