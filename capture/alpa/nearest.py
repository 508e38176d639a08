"""The plan nearest to a given one that Alpa can express, and what the difference costs in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from capture.alpa.options import violations
from capture.alpa.placement import foreign_schedule
from capture.errors import PlanError
from capture.measured.profile import Profile
from capture.plan.choices import Remat, StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan
from capture.predictor.additive import AdditivePredictor

#: Parts of a prediction that replicas hold whole where Alpa does not split them.
_SPLIT = ("parameters", "gradients")


@dataclass(frozen=True)
class NearestPlan:
    """A plan that Alpa can express.

    Attributes:
        plan: The plan, with a prediction if a profile was given.
        state_bytes: Parameters, gradients and optimizer state of the device that holds most of
            them, of the given plan and of this one; None where the given plan has no prediction.
        peak_bytes: Peak of the device that needs most, of the given plan, by the best that is
            known, and of this one, predicted; None without a profile.
    """

    plan: Plan
    state_bytes: tuple[int, int] | None
    peak_bytes: tuple[int, int] | None


def nearest(plan: Plan, profile: Profile | None = None) -> NearestPlan:
    """Return the plan that differs least from a given one and that Alpa can express.

    Stages, devices, degrees and micro-batches stay. Where stages recompute in another way than all
    or nothing, all recompute everything, which keeps no more than before. Parameters that are split
    over replicas become whole, and so do activations that are split along the sequence. A schedule
    that splits backward passes becomes 1F1B, and what rests on hosts stays on devices.

    Args:
        plan: Of stages.
        profile: Measurements of its model, to predict the new peak.

    Raises:
        PlanError: What cannot be changed by these rules (``alpa-cluster``, ``alpa-submesh``,
            ``alpa-packing``, ``alpa-schedule`` for stages that share devices).
        ProfileError: The codes of the predictor.
    """
    if SCHEDULES[plan.schedule].stages_per_group > 1:
        raise PlanError(tuple(foreign_schedule(plan)))
    schedule = "1f1b" if foreign_schedule(plan) else plan.schedule
    modes = {stage.choice.remat for stage in plan.stages}
    remat: Remat = "none" if modes == {"none"} else "full"
    stages = tuple(
        replace(
            stage,
            offload=(),
            choice=replace(
                stage.choice,
                remat=remat,
                shard_params=False,
                shard_optimizer=stage.choice.shard_optimizer or stage.choice.shard_params,
                sequence_parallel=False,
            ),
        )
        for stage in plan.stages
    )
    notes = {"prediction": None, "verification": None, "why": None, "time": None}
    found = plan.with_(stages=stages, schedule=schedule, **notes)
    PlanError.check(violations(found))
    peaks = None
    if profile is not None:
        found = found.with_(prediction=AdditivePredictor(profile).predict(found))
        peaks = plan.known_peak_bytes, found.known_peak_bytes
    return NearestPlan(found, _state_bytes(plan), peaks)


def _state_bytes(plan: Plan) -> tuple[int, int] | None:
    """Return what the state of the fullest device takes as planned, and with whole parameters."""
    if plan.prediction is None:
        return None
    planned, whole = [], []
    for stage, predicted in zip(plan.stages, plan.prediction.stages, strict=True):
        parts = predicted.parts_bytes
        split = sum(parts.get(part, 0) for part in _SPLIT)
        rest = parts.get("optimizer", 0)
        planned.append(split + rest)
        whole.append(split * _ways(stage.choice) + rest)
    return max(planned), max(whole)


def _ways(choice: StageChoice) -> int:
    """Return over how many devices a stage's replicas split their parameters."""
    return choice.data_parallel if choice.shard_params else 1
