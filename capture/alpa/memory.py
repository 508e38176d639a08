"""What a plan needs on every device when Alpa runs it: its placement, and the lifetimes of buffers
in its runtime.

Four habits differ from the native runtime's: all micro-batches' inputs of a stage are on its
devices from the start of the step, each until its last use; a tensor between stages stays with the
one that made it until the other is about to read it; it goes there past the stages between; and
stages stand where ``alpa_placement`` says.

What replicas split. ``prefer_reduce_scatter``, the default, splits over them what only the update
reads. Gradients stay whole: the solver leaves accumulators alone when there is more than one
micro-batch. What only the update reads is the optimizer's state and, where Alpa's suites train in
16 bits (GPT, mixture of experts), a float32 *master copy* of the parameters; parameters and
gradients then have 16 bits. Where the optimizer has s bytes per parameter, that is 4 + (4 + s) / dp
bytes on each of dp replicas; the native runtime, whose parameters are of float32, needs 8 + s / dp.
A plan that is exported with such a workload is run without a master copy.

Not booked: Alpa's copies of the optimizer's state for a parameter that several stages read, and
what depends on parameters alone (weights cast to float16) and the one-hot tokens of an embedding,
which Alpa keeps once per micro-batch in flight where it does not rematerialise.

Source: Alpa 0.2.3, its emitted instructions (``tests/alpa_conformance`` replays them beside this);
of what is split, ``reduce_scatter_grad_acc_friendly`` in its auto-sharding pass
(``UseAllReduceForGradAcc``); of 16 bits, ``TrainState`` in its models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.alpa.options import violations
from capture.alpa.placement import alpa_placement, foreign_schedule, on_hosts
from capture.alpa.step import build_alpa_step
from capture.errors import PlanError, ProfileError
from capture.measured.profile import Profile
from capture.model.graph import LayerGraph
from capture.plan.choices import StageChoice
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.step.interface import StageInterface
from capture.step.ledger import Peak
from capture.step.program import replay


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
        """The peak memory of each device in bytes, in order of device ids."""
        of_device = {
            device: peak.peak_bytes
            for devices, peak in zip(self.placement, self.stages, strict=True)
            for device in devices
        }
        return tuple(of_device[device] for device in sorted(of_device))

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes_per_device": list(self.peak_bytes_per_device),
            "stages": [
                {
                    "devices": list(devices),
                    "peak_bytes": peak.peak_bytes,
                    "parts_bytes": dict(peak.parts),
                    "at": peak.instant,
                }
                for devices, peak in zip(self.placement, self.stages, strict=True)
            ],
        }


def alpa_memory(plan: Plan, profile: Profile, *, master_copy: bool = False) -> AlpaMemory:
    """Predict the step of a plan in Alpa's runtime.

    Args:
        plan: A plan that ``to_alpa`` takes.
        profile: Measurements of the plan's model on its target.
        master_copy: Whether the model is trained in 16 bits as in Alpa's suites; the profile has
            its parameters in float32.

    Raises:
        PlanError: as ``to_alpa``.
        ProfileError: ``alpa-master-copy``, and as the predictor.
    """
    PlanError.check(violations(plan))
    if master_copy:
        require_float32(profile.graph)
    predictor = AdditivePredictor(profile)
    predictor.predict(plan)  # refuses a profile of another model or target
    return alpa_replay(plan, predictor.interfaces(plan), master_copy=master_copy)


def alpa_replay(
    plan: Plan, stages: Sequence[StageInterface], *, master_copy: bool = False
) -> AlpaMemory:
    """Return the peaks of a step as Alpa runs it, from a replay of its instructions.

    Args:
        plan: Its cluster, schedule, and numbers of devices and replicas.
        stages: What its stages hold and hand over in the native runtime.
        master_copy: As ``alpa_memory``; all parameters of the stages are of float32.

    Raises:
        PlanError: as ``alpa_placement``, ``alpa-schedule`` and ``alpa-offload``.
    """
    PlanError.check([*foreign_schedule(plan), *on_hosts(plan)])
    placement = alpa_placement(plan.cluster, [stage.num_devices for stage in plan.stages])
    placed = [
        replace(stage, devices=devices) for stage, devices in zip(stages, placement, strict=True)
    ]
    if master_copy:
        placed = [
            _in_16_bits(stage, of_plan.choice)
            for stage, of_plan in zip(placed, plan.stages, strict=True)
        ]
    ledger = replay(build_alpa_step(placed, plan.schedule_table))
    return AlpaMemory(placement, tuple(ledger.peaks[devices[0]] for devices in placement))


def with_master_copy(
    params_bytes: Any, optimizer_bytes: Any, choice: StageChoice
) -> tuple[Any, Any]:
    """Return the bytes per device of parameters and optimizer state of a stage that trains in 16
    bits with a float32 master copy; integers or arrays of them.

    Args:
        params_bytes: In float32; accumulated gradients take as much as parameters, before and
            after.
        optimizer_bytes: The optimizer's own state.
        choice: What the stage does with its devices.

    Example:
        >>> sharded, whole = StageChoice(4, 1, shard_optimizer=True), StageChoice(4, 1)
        >>> with_master_copy(400, 200, sharded), with_master_copy(400, 800, whole)
        ((200, 300), (200, 1200))
    """
    replicas = choice.data_parallel if choice.shard_optimizer else 1
    return params_bytes // 2, optimizer_bytes + -(-params_bytes // replicas)


def require_float32(graph: LayerGraph) -> None:
    """Refuse a model whose parameters are not what master copies are made of.

    Raises:
        ProfileError: ``alpa-master-copy``.
    """
    others = [param for param in graph.params if param.dtype != "float32"]
    if others:
        raise ProfileError.of(
            f"parameter {others[0].name} is of {others[0].dtype}, and Alpa's master copies are "
            "the float32 parameters of a model that "
            "computes in 16 bits; leave out master_copy.",
            "alpa-master-copy",
        )


def _in_16_bits(stage: StageInterface, choice: StageChoice) -> StageInterface:
    _, optimizer_bytes = with_master_copy(stage.params_bytes, stage.optimizer_bytes, choice)
    halves = {p: with_master_copy(nbytes, 0, choice)[0] for p, nbytes in stage.param_bytes.items()}
    return replace(stage, param_bytes=halves, optimizer_bytes=optimizer_bytes)
