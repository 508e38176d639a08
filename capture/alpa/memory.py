"""What a plan needs on every device when Alpa runs it: its placement, and the lifetimes of buffers in its runtime.

Four habits differ from the native runtime's: all micro-batches' inputs of a stage are on its devices from the start of the step, each
until its last use; a tensor between stages stays with the one that made it until the other is about to read it; it goes there past the
stages between; and stages stand where ``alpa_placement`` says.

Not booked: Alpa's copies of the optimizer's state for a parameter that several stages read, and what depends on parameters alone (weights
cast to float16) and the one-hot tokens of an embedding, which Alpa keeps once per micro-batch in flight where it does not rematerialise.

Source: Alpa 0.2.3, its emitted instructions (``tests/alpa_conformance`` replays them beside this).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.alpa.placement import alpa_placement
from capture.ledger import Peak
from capture.plan import Plan
from capture.predictor import AdditivePredictor
from capture.profile import Profile
from capture.step import StageInterface, build_step, replay


@dataclass(frozen=True)
class AlpaMemory:
    """Peaks of a step in Alpa's runtime.

    Attributes:
        placement: Device ids of every stage.
        stages: Peak of each stage's devices, with its parts.
    """

    placement: tuple[tuple[int, ...], ...]
    stages: tuple[Peak, ...]

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        """By device id."""
        of_device = {device: peak.peak_bytes for devices, peak in zip(self.placement, self.stages, strict=True) for device in devices}
        return tuple(of_device[device] for device in sorted(of_device))

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes_per_device": list(self.peak_bytes_per_device),
            "stages": [
                {"devices": list(devices), "peak_bytes": peak.peak_bytes, "parts_bytes": dict(peak.parts), "at": peak.instant}
                for devices, peak in zip(self.placement, self.stages, strict=True)
            ],
        }


def alpa_memory(plan: Plan, profile: Profile) -> AlpaMemory:
    """Predict the step of a plan in Alpa's runtime.

    Args:
        plan: That ``to_alpa`` takes.
        profile: Of the plan's model and target.

    Raises:
        PlanError: as ``alpa_placement``.
        ProfileError: as the predictor.
    """
    predictor = AdditivePredictor(profile)
    predictor.predict(plan)  # refuses a profile of another model or target
    return alpa_replay(plan, predictor.interfaces(plan))


def alpa_replay(plan: Plan, stages: Sequence[StageInterface]) -> AlpaMemory:
    """Book a step as Alpa runs it.

    Args:
        plan: Its cluster, schedule and numbers of devices.
        stages: What its stages hold and hand over.
    """
    placement = alpa_placement(plan.cluster, [stage.num_devices for stage in plan.stages])
    placed = [replace(stage, devices=devices) for stage, devices in zip(stages, placement, strict=True)]
    ledger = replay(build_step(placed, plan.schedule_table, as_alpa=True), plan.cluster.num_devices)
    return AlpaMemory(placement, tuple(ledger.peaks[devices[0]] for devices in placement))
