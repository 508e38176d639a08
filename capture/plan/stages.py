"""A complete decision, enough to run: which layers on which devices, split how, in which schedule.

Frozen, validated, JSON with a schema version. A plan remembers its workload, so that ``run``,
``predict`` and ``explain`` need nothing else. The fields of the JSON document are those of the
classes below; ``stages[].layers`` is ``[first, last]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from capture import documents
from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.plan.choices import REMAT_TEXT, is_remat
from capture.plan.files import PlanFile
from capture.plan.headroom import Peaks
from capture.plan.prediction import Prediction, StepTime, Verified
from capture.plan.schedule import SCHEDULES, Schedule, make_schedule, schedule_violations
from capture.plan.stage import Stage, StageRow
from capture.plan.why import Why
from capture.quantities import counted

PLAN = documents.Format(
    "plan",
    PlanError,
    "plan",
    "correct it, or make the plan again with capture plan",
    versions=(1, 2),
    kind="stages",
    strict=True,
)

TensorParallelRule = Literal["auto", "largest"]
TENSOR_PARALLEL_RULES: tuple[TensorParallelRule, ...] = ("auto", "largest")


@dataclass(frozen=True)
class Plan(PlanFile):
    """A pipeline of stages over a cluster.

    Attributes:
        cluster: All devices.
        num_layers: Layers of the model.
        stages: Stages in pipeline order; they cover the layers once, and no device twice but where
            the schedule puts several stages on a group of devices: those have the same ``devices``
            and degrees.
        global_batch_size: Examples in a step.
        num_microbatches: Micro-batches that a step accumulates, M.
        schedule: Name of a schedule in ``capture.plan.schedule.SCHEDULES``.
        auto_layers: Layers were cut automatically into ``num_layers``; otherwise at the model's
            marks.
        tensor_parallel_rule: How parameters are split: ``"auto"`` or ``"largest"``.
        model_hash: Content hash of the traced program at the plan's micro-batch size; empty if
            never traced.
        prediction: Predicted bytes per device with their parts, if predicted.
        why: The search's reasons for its choice, if searched.
        verification: Peaks of the plan's own stages by the target's compiler, if verified.
        time: A step as it was simulated when the plan was made, where the target has rates.

    Raises:
        PlanError: every rule that is broken, with its code: ``plan-stages``, ``plan-layers``,
            ``plan-devices``, ``plan-degrees``, ``plan-batch``, ``plan-schedule``,
            ``plan-schedule-stages``, ``plan-schedule-microbatches``, ``plan-remat``,
            ``plan-offload``, ``plan-shard-params``, ``plan-rule``.
    """

    FORMAT = PLAN
    IN_FILES: ClassVar[Mapping[str, Any]] = {
        "stages": tuple[StageRow, ...],
        "microbatch_size": int | None,
        "tensor_parallel_rule": str,  # checked by the class
        **dict.fromkeys(("prediction", "why", "verification", "time"), Mapping[str, Any] | None),
    }

    cluster: Cluster
    num_layers: int
    stages: tuple[Stage, ...]
    global_batch_size: int
    num_microbatches: int
    schedule: str = "1f1b"
    auto_layers: bool = False
    tensor_parallel_rule: TensorParallelRule = "auto"
    prediction: Prediction | None = field(default=None, compare=False)
    why: Why | None = field(default=None, compare=False)
    verification: Verified | None = field(default=None, compare=False)
    time: StepTime | None = field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "stages", tuple(self.stages))
        PlanError.check(_violations(self))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def step_examples(self) -> int:
        return self.global_batch_size

    @property
    def device_groups(self) -> Sequence[Sequence[int]]:
        """The devices of each stage."""
        return [stage.devices for stage in self.stages]

    @property
    def microbatch_size(self) -> int:
        """Examples in a micro-batch, over all data-parallel replicas."""
        return self.global_batch_size // self.num_microbatches

    @cached_property
    def schedule_table(self) -> Schedule:
        num_groups = self.num_stages // SCHEDULES[self.schedule].stages_per_group
        return make_schedule(self.schedule, num_groups, self.num_microbatches)

    @property
    def peaks(self) -> Peaks | None:
        """The peak of every device: by the target's compiler if verified, else predicted."""
        if self.verification is not None:
            return Peaks.compiled(*self.verification.peak_bytes_per_device)
        return None if self.prediction is None else self.prediction.peaks

    @property
    def predicted_bytes_per_device(self) -> Sequence[int] | None:
        """The predicted peak bytes per device; the compiler's where the plan was only verified."""
        predicted = self.prediction or self.verification
        return None if predicted is None else predicted.peak_bytes_per_device

    @property
    def step_estimate(self) -> tuple[float, str] | None:
        """The seconds of a step, simulated when the plan was made; of a plan that was not compiled,
        those that its search estimated."""
        if self.time is not None:
            return self.time.step_seconds, "simulated"
        proven = None if self.why is None else self.why.proven
        if self.verification is not None or proven is None or not proven.trail:
            return None
        seconds = proven.trail[-1].expected_step_seconds
        return None if seconds is None else (seconds, "estimated")

    def host_of(self, stage: Stage) -> str:
        """Return the name of the host memory that a stage uses."""
        node = self.cluster.node_of_device[stage.devices[0]]
        return "host" if len(self.cluster.nodes) == 1 else f"host of node {node}"

    def with_(self, **changes: Any) -> Plan:
        """Return a copy with other fields, validated again."""
        return replace(self, **changes)

    @property
    def decisions(self) -> tuple[tuple[Stage, ...], int, str]:
        """The stages, the number of micro-batches and the schedule: what tells plans for the same
        cluster and batch apart."""
        return self.stages, self.num_microbatches, self.schedule

    def of_front(self, name: str) -> Plan:
        """Return a plan of the front that this one has (``why.front``), as compiled as it is known.

        Args:
            name: Of ``Front.names``; spaces may stand for dashes.

        Raises:
            PlanError: ``plan-front`` if there is no such point.
        """
        front = None if self.why is None else self.why.front
        point = None if front is None else front.names.get(name.replace(" ", "-"))
        if front is None or point is None:
            known = "it has no front" if front is None else f"it has {', '.join(front.names)}"
            raise PlanError.of(f"the plan has no plan {name!r} of a front: {known}.", "plan-front")
        notes = {
            **dict.fromkeys(_NOTES),
            "model_hash": "",
            **({} if point.notes is None else vars(point.notes)),
        }
        said = f"The plan {name!r} of a front of {counted(len(front.points), 'plan')}."
        why = Why(said, front=front, proven=None if self.why is None else self.why.proven)
        return replace(
            self,
            stages=point.stages,
            schedule=point.schedule or self.schedule,
            num_microbatches=point.num_microbatches or self.num_microbatches,
            **{**notes, "why": why},
        )

    @classmethod
    def out_of_file(cls, written: dict[str, Any]) -> Plan:
        del written["microbatch_size"]
        notes = {name: _note(written[name], name) for name in _NOTES}
        return cls(**{**written, "stages": [row.stage for row in written["stages"]], **notes})


#: What may be said of a plan, by field.
_NOTES: Mapping[str, type[Prediction | Why | Verified | StepTime]] = {
    "prediction": Prediction,
    "why": Why,
    "verification": Verified,
    "time": StepTime,
}


def _note(data: object, name: str) -> object:
    """Read a note on a plan (``_NOTES``) from its file; fields that are not known are ignored."""
    try:
        if data is None:
            return None
        return Why.read(data, name) if name == "why" else documents.read(data, _NOTES[name], name)
    except documents.FieldError as error:
        raise PLAN.corrupt(str(error)) from None


def batch_violations(global_batch_size: int, num_microbatches: int) -> Iterator[Violation]:
    """Yield the rule that a batch alone breaks, for callers that have no stages yet."""
    if num_microbatches < 1 or global_batch_size < 1:
        yield Violation(
            f"global_batch_size={global_batch_size} and num_microbatches={num_microbatches} "
            "must both be at least 1.",
            "plan-batch",
        )
    elif global_batch_size % num_microbatches:
        yield Violation(
            f"global_batch_size={global_batch_size} is not divisible by "
            f"num_microbatches={num_microbatches}; "
            f"{num_microbatches * (global_batch_size // num_microbatches or 1)} would be.",
            "plan-batch",
        )


def _violations(plan: Plan) -> Iterator[Violation]:
    wrong_batch = tuple(batch_violations(plan.global_batch_size, plan.num_microbatches))
    yield from wrong_batch
    yield from _schedule_violations(plan)
    if plan.tensor_parallel_rule not in TENSOR_PARALLEL_RULES:
        yield Violation(
            f"tensor_parallel_rule={plan.tensor_parallel_rule!r} is unknown; choose one of "
            f"{', '.join(TENSOR_PARALLEL_RULES)}.",
            "plan-rule",
        )
    yield from _layer_violations(plan.stages, plan.num_layers)
    yield from _device_violations(plan)
    yield from _offload_violations(plan)
    for s, stage in enumerate(plan.stages):
        choice = stage.choice
        dp, tp = choice.data_parallel, choice.tensor_parallel
        if choice.num_devices != stage.num_devices or min(dp, tp) < 1:
            yield Violation(
                f"stage {s} has data_parallel={dp} x tensor_parallel={tp} on {stage.num_devices} "
                "devices; the product must be the number of devices.",
                "plan-degrees",
            )
        elif not wrong_batch and plan.microbatch_size % dp:
            yield Violation(
                f"microbatch_size={plan.microbatch_size} (global batch {plan.global_batch_size} / "
                f"{plan.num_microbatches} micro-batches) is not divisible by data_parallel={dp} of "
                f"stage {s}; lower the degree or the number of micro-batches.",
                "plan-batch",
            )
        if not is_remat(choice.remat):
            yield Violation(
                f"stage {s} has remat={choice.remat!r}; choose one of {REMAT_TEXT}.", "plan-remat"
            )
        if choice.shard_params and not choice.shard_optimizer:
            yield Violation(
                f"stage {s} has shard_params without shard_optimizer; optimizer state is split "
                "with its parameters: set both.",
                "plan-shard-params",
            )


def _offload_violations(plan: Plan) -> Iterator[Violation]:
    nodes = plan.cluster.node_of_device
    for s, stage in enumerate(plan.stages):
        if stage.offload and len({nodes[d] for d in stage.devices if d < len(nodes)}) > 1:
            yield Violation(
                f"stage {s} has offload={list(stage.offload)} on devices of several nodes, and "
                "what rests is in the memory of one host; give it devices of one node.",
                "plan-offload",
            )


def _layer_violations(stages: Sequence[Stage], num_layers: int) -> Iterator[Violation]:
    if len(stages) > num_layers:
        yield Violation(
            f"num_stages={len(stages)} is more than num_layers={num_layers}; every stage needs a "
            "layer: use fewer stages or cut the model into more layers (--num-layers).",
            "plan-stages",
        )
        return
    expected = 0
    for s, stage in enumerate(stages):
        if stage.first != expected or stage.stop <= stage.first:
            yield Violation(
                f"stage {s} has layers={[stage.first, stage.stop - 1]} but must begin at layer "
                f"{expected} and hold at least one layer; stages cover the layers once, in order.",
                "plan-layers",
            )
        expected = stage.stop
    if expected != num_layers:
        yield Violation(
            f"stages end before layer {expected} of num_layers={num_layers}; they must cover "
            "every layer.",
            "plan-layers",
        )


def _schedule_violations(plan: Plan) -> Iterator[Violation]:
    kind, num_stages = SCHEDULES.get(plan.schedule), plan.num_stages
    per_group = 1 if kind is None else kind.stages_per_group
    if num_stages % per_group:
        yield Violation(
            f"schedule={plan.schedule!r} puts {per_group} stages on every group of devices, and "
            f"the plan has {num_stages}; give a multiple of {per_group}.",
            "plan-schedule-stages",
        )
        return
    num_groups = num_stages // per_group
    yield from schedule_violations(plan.schedule, num_groups, max(1, plan.num_microbatches))
    first: dict[int, int] = {}
    for s, group in enumerate(() if kind is None else kind.placement(num_groups)):
        other = first.setdefault(group, s)
        if _placed(plan.stages[s]) != _placed(plan.stages[other]):
            yield Violation(
                f"schedule={plan.schedule!r} puts stage {other} and stage {s} on the same devices; "
                "give them the same devices, data_parallel, tensor_parallel and "
                "sequence_parallel.",
                "plan-schedule-stages",
            )


def _placed(stage: Stage) -> tuple[object, ...]:
    """Return what stages on the same devices must share: they hand over values as they lie."""
    choice = stage.choice
    return stage.devices, choice.data_parallel, choice.tensor_parallel, choice.sequence_parallel


def _device_violations(plan: Plan) -> Iterator[Violation]:
    stages, cluster = plan.stages, plan.cluster
    kind, user, is_wrong = SCHEDULES.get(plan.schedule), dict[int, int](), False
    placement: Sequence[int] = range(len(stages))
    if kind is not None and len(stages) % kind.stages_per_group == 0:
        placement = kind.placement(len(stages) // kind.stages_per_group)
    for s, stage in enumerate(stages):
        if placement[s] in placement[:s]:
            continue  # on the devices of another stage, by the rule of the schedule
        for device in stage.devices:
            if not 0 <= device < cluster.num_devices:
                is_wrong = True
                yield Violation(
                    f"stage {s} uses device {device}; a cluster {cluster} has devices 0 to "
                    f"{cluster.num_devices - 1}.",
                    "plan-devices",
                )
            elif device in user:
                is_wrong = True
                yield Violation(
                    f"device {device} is used by stage {user[device]} and stage {s}; once is "
                    "allowed.",
                    "plan-devices",
                )
            else:
                user[device] = s
    idle = sorted(set(range(cluster.num_devices)) - set(user))
    if idle and not is_wrong:
        yield Violation(
            f"devices {idle} of the cluster {cluster} are not used; every device must hold a "
            "stage.",
            "plan-devices",
        )
