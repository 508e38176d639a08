"""What a search for an array of models decides, in plain data: which models are one program, in
which order their passes are issued, and what becomes of each feature map until it is read again.

Its JSON has the fields of the classes below.

Source: Purandare et al. 2023 (mu-TWO), 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from capture import documents
from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadProtocol, WorkloadSpec, named_workload
from capture.plan.choices import Remat, layer_remat_violations
from capture.plan.files import PlanFile
from capture.plan.headroom import Peaks
from capture.plan.why import Why

ARRAY_PLAN = documents.Format(
    "plan of an array",
    PlanError,
    "array-plan",
    "see capture/plan/array.py, which says what it holds",
    kind="array",
    not_json="file",
    strict=True,
)

Order = Literal["multiplexed", "in turn"]
ORDERS: tuple[Order, ...] = ("multiplexed", "in turn")
#: Patterns of the paths of parameters, or a predicate on these.
Shared = Sequence[str] | Callable[[str], bool]
#: Of equal lifetime, smaller feature maps travel together.
BUNDLE_BYTES = 2**20


@dataclass(frozen=True)
class Member:
    """One model of an array.

    Attributes:
        seed: Its parameters are drawn with it.
        hyperparameters: Values that its optimizer gets in the place of those of the workload.
        batch_size: Examples of a step; None for those of the plan.
        workload: Name of what it trains; empty for the workload of the plan.
    """

    seed: int = 0
    hyperparameters: Mapping[str, float] = field(default_factory=dict, hash=False)
    batch_size: int | None = None
    workload: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Member:
        """Read a model from its row: ``{"learning_rate": 1e-3, "seed": 0, "batch_size": 8}``."""
        own = ("seed", "batch_size", "workload")
        return cls(
            int(row.get("seed", 0)),
            {name: float(value) for name, value in row.items() if name not in own},
            row.get("batch_size"),
            row.get("workload", ""),
        )

    def to_json(self) -> dict[str, Any]:
        return documents.but_empty(self, "batch_size", "workload")


@dataclass(frozen=True)
class ArrayTask:
    """A workload and batch size that models train: models of one task may be one program.

    Attributes:
        batch_size: Examples of a step.
        workload: Name of the workload; empty for that of the plan.
        num_layers, model_hash: As traced; 0 and empty where nobody has yet.
    """

    batch_size: int
    workload: str = ""
    num_layers: int = field(default=0, compare=False)
    model_hash: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.workload or 'the workload'} with batch_size={self.batch_size}"


def tasks_of(
    models: Sequence[Member], batch_size: int, workload: WorkloadSpec | None, num_layers: int = 0
) -> tuple[ArrayTask, ...]:
    """Return the task that each model trains, in the order of the models.

    Args:
        models: Of an array.
        batch_size, workload: Of those that have none of their own.
        num_layers: Of that workload, whatever the batch.
    """
    same = "" if workload is None else str(workload)

    def task(model: Member) -> ArrayTask:
        size = batch_size if model.batch_size is None else model.batch_size
        if model.workload in ("", same):
            return ArrayTask(size, "", num_layers)
        return ArrayTask(size, model.workload)

    return tuple(map(task, models))


def sharing_violations(shared: Shared, tasks: Sequence[ArrayTask]) -> Iterator[Violation]:
    """Yield a violation if models of several workloads are to share parameters."""
    names = dict.fromkeys(task.workload or "the plan's" for task in tasks)
    if shared and len(names) > 1:
        what = "a predicate" if callable(shared) else list(shared)
        yield Violation(
            f"shared={what}, and the models are of {len(names)} workloads ({', '.join(names)}); "
            "parameters are shared by models of one.",
            "array-tasks",
        )


def member_violations(models: Sequence[Member]) -> Iterator[Violation]:
    """Yield a violation for models that cannot be of any array, or if there are none."""
    if not models:
        yield Violation("models is empty; an array has one model at least.", "array-models")
    for n, model in enumerate(models):
        size, name = model.batch_size, model.workload
        if size is not None and (type(size) is not int or size < 1):
            yield Violation(
                f"model {n} has batch_size={size!r}; give a whole number of at least 1.",
                "array-size",
            )
        if not isinstance(name, str):
            yield Violation(
                f"model {n} has workload={name!r}; give its name, as the command line has it.",
                "array-models",
            )


@dataclass(frozen=True)
class Decision:
    """The fate of a bundle between its last use forward and its first use backward.

    Attributes:
        bundle: Name of the bundle.
        choice: ``"swap"``: copied to the host and back; ``"recompute"``: made again.
        ahead: How many of its sub-array's segments before its first use a swapped bundle is
            fetched, if there is room by then.
        behind: After how many segments of all sub-arrays the step waits for a swapped bundle's copy
            where something else could come early in its place; None if only when something needs
            the room.
    """

    bundle: str
    choice: Literal["swap", "recompute"]
    ahead: int = 1
    behind: int | None = None


@dataclass(frozen=True)
class ArrayPrediction:
    """The bytes and seconds of a step by the plan's instructions, replayed and simulated.

    Attributes:
        peak_bytes: Peak memory of the device.
        parts_bytes: Bytes at the peak, by category.
        host_peak_bytes: Peak memory of the host, which holds what is swapped.
        step_seconds: Seconds of an update of every model.
        retained_bytes, swapped_bytes, recomputed_bytes: Bytes of feature maps in a step; of those
            that are swapped in one direction.
    """

    peak_bytes: int
    parts_bytes: Mapping[str, int]
    host_peak_bytes: int
    step_seconds: float
    retained_bytes: int
    swapped_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True)
class Saturation:
    """The seconds of one sub-array, by how many models are fused: what fusing so many is worth.

    Attributes:
        models: Models of the sub-array.
        seconds: Seconds of its programs, one after the other, with everything retained.
        task: Number of the models' task, from 0 in the order of the models.
    """

    models: int
    seconds: float
    task: int = 0

    def to_json(self) -> dict[str, Any]:
        return documents.but_empty(self, "task")


@dataclass(frozen=True, kw_only=True)
class ArrayPlan(PlanFile):
    """Models that are trained together on one device.

    Attributes:
        cluster: The one device.
        workload: What models train that name none of their own.
        batch_size: Examples of a step of models that have no other.
        model_hash, num_layers: Of that workload, as traced.
        models: The seed and hyperparameters of each, by the names with which
            optax.inject_hyperparams knows them.
        tasks: What was traced of models with a batch_size or workload of their own; left out where
            there are none.
        shared: Patterns of the paths of parameters that all models have alike, as ``"base/*"``:
            there once, read by all, updated by none.
        shared_batches: Whether all models read the same batch.
        partition: Sub-arrays: the models (from 0) that are one program, all of one batch_size and
            workload.
        order: ``"multiplexed"``: the backward pass of each sub-array beside the forward pass of the
            next; ``"in turn"``: one after the other.
        decisions: Per sub-array, the bundles of feature maps that are not retained.
        remat: What the backward pass of every layer recomputes of it, whatever is decided of
            bundles (``"full"``, ``"dots"``, or a policy of an installed package); None, and left
            out, where all that is retained is kept.
        bundle_bytes: Feature maps of equal lifetime are one bundle until it has so many bytes.
        memory_limit_bytes: Up to which the step lets copies go on before it waits for them; None
            for no limit.
        prediction: Bytes and seconds of a step.
        seconds_from: Where the seconds of programs and copies are from, of which a step is
            simulated: ``"rates of h200"``, or what they were executed on; empty if nothing is
            predicted.
        saturation: What fusing models is worth, of sub-arrays of some sizes.
        why, candidates: What the search says of its choice, and the others that it weighed.
        named_by: The file that names the workloads of its models (``WorkloadSpec.named_by``);
            empty for a plan that a program makes.

    Raises:
        PlanError: every rule that is broken, with its code: ``array-models`` for none,
            ``array-partition`` unless every model is in one sub-array, ``array-tasks`` for a
            sub-array of several programs, or parameters that several workloads share,
            ``array-order`` for an
            unknown order, or multiplexing of less than two sub-arrays, ``array-decisions`` for a
            bundle that is decided twice, or a sub-array without a list, ``array-size`` for a number
            that must be positive, ``array-remat``.
    """

    FORMAT = ARRAY_PLAN
    IN_FILES: ClassVar[Mapping[str, Any]] = {"named_by": None}
    REQUIRED = ("num_layers", "order")
    LEFT_OUT = ("tasks", "remat", "asked")

    cluster: Cluster
    batch_size: int
    models: tuple[Member, ...]
    partition: tuple[tuple[int, ...], ...]
    order: Order = "in turn"
    decisions: tuple[tuple[Decision, ...], ...] = ()
    shared: tuple[str, ...] = ()
    shared_batches: bool = False
    bundle_bytes: int = BUNDLE_BYTES
    memory_limit_bytes: int | None = None
    remat: Remat | None = None
    num_layers: int = 0
    tasks: tuple[ArrayTask, ...] = ()
    prediction: ArrayPrediction | None = field(default=None, compare=False)
    seconds_from: str = field(default="", compare=False)
    saturation: tuple[Saturation, ...] = field(default=(), compare=False)
    why: Why | None = field(default=None, compare=False)
    candidates: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    named_by: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.decisions:
            object.__setattr__(self, "decisions", ((),) * len(self.partition))
        PlanError.check(self._violations())

    @cached_property
    def trained(self) -> tuple[ArrayTask, ...]:
        """The task that each model trains, in the order of the models."""
        own = ArrayTask(self.batch_size, "", self.num_layers, self.model_hash)
        known = {task: task for task in (*self.tasks, own)}
        tasks = tasks_of(self.models, self.batch_size, self.workload, self.num_layers)
        return tuple(known.get(task, task) for task in tasks)

    @property
    def step_examples(self) -> int:
        """The number of examples of one model in a step."""
        return self.batch_size

    @property
    def num_models(self) -> int:
        return len(self.models)

    @property
    def host_memory_bytes(self) -> int:
        """The bytes that a step may hold in the memory of the host: its host's peak."""
        return 0 if self.prediction is None else self.prediction.host_peak_bytes

    @property
    def peaks(self) -> Peaks | None:
        """The peak of the device, replayed with compiled programs; None if not predicted."""
        return None if self.prediction is None else Peaks.compiled(self.prediction.peak_bytes)

    @property
    def host_peak_bytes(self) -> int | None:
        """The peak memory of the host, where what is swapped rests."""
        return None if self.prediction is None else self.prediction.host_peak_bytes

    @property
    def own_limit_bytes(self) -> int | None:
        """The limit of the device's memory that the plan was made for; None if none was given."""
        return self.memory_limit_bytes

    @property
    def step_estimate(self) -> tuple[float, str] | None:
        """The seconds of an update of every model, and ``"simulated"``."""
        found = self.prediction
        return None if found is None else (found.step_seconds, "simulated")

    @property
    def model_names(self) -> Sequence[str]:
        """The names of the models: the seed, hyperparameters, batch and workload."""
        names = []
        for member, task in zip(self.models, self.trained, strict=True):
            values = [f"{name} {value:g}" for name, value in member.hyperparameters.items()]
            values += [f"batch {task.batch_size}"] if task.batch_size != self.batch_size else []
            values += [task.workload] if task.workload else []
            names.append(", ".join([f"seed {member.seed}", *values]))
        return names

    def workloads(self, workload: WorkloadProtocol) -> list[WorkloadProtocol]:
        given = {"": workload}
        return [named_workload(one.workload, given, self.named_by) for one in self.trained]

    def admitted(self, trust: bool = False) -> ArrayPlan:
        for name in {task.workload for task in self.trained if ":" in task.workload}:
            WorkloadSpec.parse(name).in_file(self.named_by).admitted(trust)
        return replace(self, named_by="")

    @classmethod
    def out_of_file(cls, written: dict[str, Any]) -> ArrayPlan:
        return cls(**written, named_by="a document")

    def resolved(self, path: Path | str) -> ArrayPlan:
        return replace(super().resolved(path), named_by=str(path))

    def moved(
        self, workload: Callable[[WorkloadSpec], WorkloadSpec], target: Callable[[str], str]
    ) -> ArrayPlan:
        """Return the plan with other names for its files, those that its models name too."""

        def named(name: str) -> str:
            # Others are names of objects.
            return str(workload(WorkloadSpec.parse(name))) if ":" in name else name

        return replace(
            super().moved(workload, target),
            models=tuple(replace(one, workload=named(one.workload)) for one in self.models),
            tasks=tuple(replace(one, workload=named(one.workload)) for one in self.tasks),
        )

    def _violations(self) -> Iterator[Violation]:
        count, wrong = len(self.models), tuple(member_violations(self.models))
        yield from wrong
        numbers = ("batch_size", self.batch_size), ("bundle_bytes", self.bundle_bytes)
        for name, number in (*numbers, ("memory_limit_bytes", self.memory_limit_bytes)):
            if number is not None and number < 1:
                yield Violation(f"{name}={number}; give at least 1.", "array-size")
        if self.cluster.num_devices != 1:
            yield Violation(
                f"the cluster {self.cluster} has {self.cluster.num_devices} devices; models of an "
                "array share one: give 1x1.",
                "array-size",
            )
        placed = sorted(model for group in self.partition for model in group)
        if placed != list(range(count)) or not all(self.partition):
            yield Violation(
                f"partition={[list(group) for group in self.partition]} does not have each of the "
                f"models 0 to {count - 1} once; put every one into one sub-array.",
                "array-partition",
            )
        elif not wrong:
            yield from self._mixed()
        if self.order not in ORDERS:
            yield Violation(
                f"order={self.order!r} is unknown; choose {' or '.join(ORDERS)}.", "array-order"
            )
        elif self.order == "multiplexed" and len(self.partition) < 2:
            yield Violation(
                f"order='multiplexed' with {len(self.partition)} sub-arrays; the passes of several "
                "are multiplexed: make two or more, or take order='in turn'.",
                "array-order",
            )
        if len(self.decisions) != len(self.partition):
            yield Violation(
                f"decisions has {len(self.decisions)} lists for {len(self.partition)} sub-arrays; "
                "give one list each, empty where all is retained.",
                "array-decisions",
            )
        for a, chosen in enumerate(self.decisions):
            names = [decision.bundle for decision in chosen]
            for name in sorted({name for name in names if names.count(name) > 1}):
                yield Violation(
                    f"decisions[{a}] has {name!r} {names.count(name)} times; decide it once.",
                    "array-decisions",
                )
            for decision in chosen:
                if decision.ahead < 0:
                    yield Violation(
                        f"decisions[{a}] fetches {decision.bundle!r} ahead={decision.ahead} "
                        "segments; give 0 or more.",
                        "array-size",
                    )

    def _mixed(self) -> Iterator[Violation]:
        """Yield a violation per sub-array of several programs, and for sharing over workloads."""
        for a, group in enumerate(self.partition):
            tasks = dict.fromkeys(self.trained[model] for model in group)
            if len(tasks) > 1:
                yield Violation(
                    f"sub-array {a} has models {list(group)}, which train "
                    f"{', '.join(map(str, tasks))}; a sub-array is one program: put models of "
                    "other workloads or batch sizes into others.",
                    "array-tasks",
                )
        yield from sharing_violations(self.shared, self.trained)
        yield from layer_remat_violations(self.remat, "array-remat")
