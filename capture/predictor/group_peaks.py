"""Peaks of groups of devices with their parts: by the closed form, or by the replay where stages
keep something on their hosts, of which that knows nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from capture.plan.schedule import Schedule
from capture.predictor.formula import of_interfaces, peak_parts
from capture.step.interface import StageInterface
from capture.step.pipeline import StageCall, build_step
from capture.step.program import replay


def group_peaks(
    stages: Sequence[StageInterface], schedule: Schedule
) -> list[tuple[str, list[dict[str, int]]]]:
    """Return, per group of devices, the program that runs at its peak and the bytes by category at
    it, per stage of the group. All of them sum to the peak.

    Args:
        stages: The stages of a plan, in pipeline order.
        schedule: The plan's schedule.
    """
    if not any(stage.offload for stage in stages):
        memories = of_interfaces(stages)
        return [
            peak_parts([memories[s] for s in group], moments)
            for group, moments in zip(schedule.stages, schedule.moments, strict=True)
        ]
    step = build_step(stages, schedule)
    peaks, slots = replay(step, by_slot=True).peaks, {slot.name: slot for slot in step.slots}
    calls = {run.label: step.programs[run.program].call for run in step.runs}
    found = []
    for group in schedule.stages:
        peak = peaks[stages[group[0]].devices[0]]
        # What comes between programs does so for a backward pass.
        call = calls.get(peak.instant, StageCall("backward", group[0]))
        parts = {s: Counter[str]() for s in group}
        for name, nbytes in peak.parts.items():
            if name in slots:
                parts[step.places.index(slots[name].place)][slots[name].category] += nbytes
            else:
                parts[call.stage]["temporaries"] += nbytes
        found.append((call.kind, [dict(parts[s]) for s in group]))
    return found
