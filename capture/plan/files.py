"""What plans of every kind share: one kind of file, which names the workload and the devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_type_hints

from capture import documents
from capture.errors import CaptureError, PlanError, TracingError
from capture.machine.cluster import Cluster
from capture.machine.target import Target, relative_target, resolved_target
from capture.model.workload import WorkloadProtocol, WorkloadSpec, name_of, of_document
from capture.plan.headroom import Headroom, Peaks

T = TypeVar("T")
P = TypeVar("P", bound="PlanFile")


@dataclass(frozen=True)
class ClusterRow:
    """A cluster as plans have it."""

    nodes: tuple[int, ...]
    target_per_node: tuple[str, ...]
    slice_shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterRow:
        targets = (cluster.target,) * len(cluster.nodes)
        return cls(cluster.nodes, targets, cluster.slice_shape)

    def to_json(self) -> dict[str, Any]:
        return documents.but_empty(self, "slice_shape")

    @property
    def wrong(self) -> str:
        """The error in the row's form, in words; empty if there is none."""
        none = "cluster.target_per_node is empty and must have a target for every node"
        return "" if self.target_per_node else none

    @property
    def cluster(self) -> Cluster:
        """The cluster.

        Raises:
            PlanError: ``plan-mixed-targets``.
        """
        targets = sorted(set(self.target_per_node))
        if len(targets) > 1:
            raise PlanError.of(
                f"plan mixes the targets {targets}; one target per plan for now.",
                "plan-mixed-targets",
            )
        return Cluster(self.nodes, targets[0], self.slice_shape)


@cache
def _document(kind: Any) -> type[Any]:
    """Return the dataclass of what files of a kind of plan have, what all have first."""
    hints, known = get_type_hints(kind), {row.name: row for row in fields(kind)}
    hints["cluster"] = ClusterRow if hints["cluster"] is Cluster else ClusterRow | None
    hints |= kind.IN_FILES
    rows: list[tuple[str, Any, Any]] = []
    first = ("workload", "model_hash", "cluster", *(name for name in known if name != "asked"))
    for name in dict.fromkeys((*first, "asked", *kind.IN_FILES)):
        if (hint := hints[name]) is None:
            continue
        default = field(default=None) if NoneType in get_args(hint) else field()
        if name in known and name not in kind.REQUIRED:
            own = known[name]
            default = field(default=own.default, default_factory=own.default_factory)
        rows.append((name, hint, default))
    return make_dataclass(f"{kind.__name__}File", rows, frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The part of a plan that is alike for every kind: devices, workload, and a file of JSON.

    A kind of plan is a frozen dataclass of this class with what it decides, and a row of
    ``capture.plan.kinds``. Its files have its fields, but for what it says here.

    Attributes:
        FORMAT: How its files are told from others, and what is said of wrong ones.
        IN_FILES: Types of fields that are others in files (``in_files``), or are there alone; None
            for fields that are not there.
        REQUIRED: Fields with defaults that files must have all the same.
        LEFT_OUT: Fields that files leave out where they say nothing.
        workload: The workload by name; None for a plan made from Python objects.
        model_hash: Content hash of the traced loss; empty if never traced.
        cluster: The devices; None where a kind knows them otherwise, or not at all.
        asked: What ``capture plan`` was asked, as the keys of a question's file; empty for a plan
            that was made otherwise.
    """

    FORMAT: ClassVar[documents.Format]
    IN_FILES: ClassVar[Mapping[str, Any]] = {}
    REQUIRED: ClassVar[Collection[str]] = ()
    LEFT_OUT: ClassVar[Collection[str]] = ("asked",)
    workload: WorkloadSpec | None = None
    model_hash: str = ""
    cluster: Cluster | None
    asked: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def in_files(self) -> dict[str, Any]:
        """Return the values of fields that are others in files."""
        return {}

    @classmethod
    def out_of_file(cls, written: dict[str, Any]) -> Self:
        """Return the plan of what a file has, the inverse of ``in_files``.

        Args:
            written: By name, all that files have; the cluster as the plan has it.
        """
        return cls(**written)

    @classmethod
    def document(cls) -> type[Any]:
        """Return the dataclass of what files have."""
        return _document(cls)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return what a file has."""
        values = self.in_files()
        if self.cluster is not None:
            values["cluster"] = ClusterRow.of(self.cluster)
        written = {}
        for name in (row.name for row in fields(self.document())):
            value = values[name] if name in values else getattr(self, name)
            if value not in (None, {}, ()) or name not in self.LEFT_OUT:
                written[name] = documents.write(value)
        return self.FORMAT.write(written)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the plan that ``to_json`` wrote.

        Raises:
            PlanError: of ``FORMAT``: ``...-schema`` for an unknown version, ``...-kind`` for a plan
                of another kind, ``...-corrupt`` for a missing or wrong field;
                ``plan-mixed-targets``, and the codes of the class.
        """
        kind = cls.document()
        document = of_document(cls.FORMAT.read(data, kind))
        written = {row.name: getattr(document, row.name) for row in fields(kind)}
        if (row := written["cluster"]) is not None:
            if row.wrong:
                raise cls.FORMAT.corrupt(row.wrong)
            written["cluster"] = row.cluster
        return cls.out_of_file(written)

    def save(self, path: Path | str) -> None:
        """Write JSON; the paths of workloads and of a target's file are stored relative to the
        file."""
        path, folder = Path(path), Path(path).parent
        moved = self.moved(
            lambda spec: spec.relative_to(folder), lambda name: relative_target(name, folder)
        )
        path.write_text(json.dumps(moved.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what ``save`` wrote, also from another working directory.

        Raises:
            PlanError: of ``FORMAT``: ``...-file`` if there is no such file or it is no JSON, and
                the codes of ``from_json``.
        """
        return cls.FORMAT.load(path, cls.from_json).resolved(path)

    def resolved(self, path: Path | str) -> Self:
        """Return the plan that was read from a file, as seen from the working directory."""
        folder = Path(path).parent
        return of_document(self, path).moved(
            lambda spec: spec.resolved_from(folder), lambda name: resolved_target(name, folder)
        )

    def moved(
        self, workload: Callable[[WorkloadSpec], WorkloadSpec], target: Callable[[str], str]
    ) -> Self:
        """Return the plan with other names for its files: of its target, and of its workload."""
        moved: dict[str, Any] = {"asked": with_paths(self.asked, target)} if self.asked else {}
        if self.cluster is not None:
            moved["cluster"] = replace(self.cluster, target=target(self.cluster.target))
        if self.workload is not None:
            moved["workload"] = workload(self.workload)
        return replace(self, **moved) if moved else self

    @property
    def known_cluster(self) -> Cluster:
        """The devices of the plan; an error where it names none.

        Raises:
            PlanError: ``plan-cluster`` if it names none.
        """
        if self.cluster is None:
            raise PlanError.of(
                "the plan names no devices, as those of earlier versions did not; make it again "
                "with capture osdp.",
                "plan-cluster",
            )
        return self.cluster

    @property
    def num_devices(self) -> int | None:
        """The number of devices that the plan runs on; None if it names none."""
        return None if self.cluster is None else self.cluster.num_devices

    @property
    def device_groups(self) -> Sequence[Sequence[int]]:
        """The groups of devices that compute together; by default all devices are one."""
        return [range(self.known_cluster.num_devices)]

    @property
    def peaks(self) -> Peaks | None:
        """The peak memory of its devices, by the best that is known; None if nobody says."""
        raise NotImplementedError

    @property
    def predicted_bytes_per_device(self) -> Sequence[int] | None:
        """The peak memory of its devices as it was predicted; None if nobody did."""
        return None if (peaks := self.peaks) is None else peaks.per_device

    @property
    def target_name(self) -> str:
        """The name of the target that the plan is for."""
        return self.known_cluster.target

    @property
    def known_peak_bytes(self) -> int:
        """The peak of the device that needs most, by the best that is known; 0 if nothing is."""
        return 0 if (peaks := self.peaks) is None else max(peaks.per_device)

    @property
    def compiled(self) -> bool:
        """Whether the peaks are those of the plan's own programs, compiled."""
        return (peaks := self.peaks) is not None and peaks.how == "compiled"

    @property
    def own_limit_bytes(self) -> int | None:
        """The bytes of a device that the plan was made for; None where that is what the target
        says."""
        return None

    def headroom(self, memory_limit_bytes: int | None = None) -> Headroom | None:
        """Return the headroom below a limit; without one, below the plan's own, or what the
        target's devices can use. None where nobody knows a limit or peaks."""
        if (peaks := self.peaks) is None:
            return None
        limit = self.own_limit_bytes if memory_limit_bytes is None else memory_limit_bytes
        memory = None if self.cluster is None else Target.load(self.cluster.target).memory
        return Headroom.of(peaks, limit, memory)

    @property
    def step_estimate(self) -> tuple[float, str] | None:
        """The seconds of a step, and how they are known: simulated, or estimated; None if nobody
        says."""
        raise NotImplementedError

    @property
    def host_peak_bytes(self) -> int | None:
        """The peak memory of the host; None where the step does not use it."""
        return None

    @property
    def step_examples(self) -> int:
        """The number of examples in a step; of models that are trained together, those of one."""
        raise NotImplementedError

    @property
    def num_models(self) -> int:
        """How many models a step trains."""
        return 1

    @property
    def model_names(self) -> Sequence[str]:
        """The names of several models, by what is set for each; none where a step trains one."""
        return ()

    def workloads(self, workload: WorkloadProtocol) -> list[WorkloadProtocol]:
        """Return what each model trains, given the plan's own workload.

        Raises:
            WorkloadError: of models that name another workload, as ``named_workload``.
        """
        return [workload]

    def admitted(self, trust: bool = False) -> Self:
        """Return the plan, if what it names beside its own workload may be loaded.

        Raises:
            WorkloadError: as ``WorkloadSpec.admitted``.
        """
        return self

    @property
    def made_from(self) -> str:
        """A phrase that says what the plan was made from, if it names no workload."""
        return "Python objects"

    @property
    def memory_fraction(self) -> float | None:
        """The part of a device's memory that it counts on; None where no target says it."""
        memory = None if self.cluster is None else Target.load(self.cluster.target).memory
        return None if memory is None else float(memory.allocator_fraction.value)

    @property
    def host_memory_bytes(self) -> int:
        """The bytes that a step may hold in the memory of the host."""
        return 0


def with_paths(asked: Mapping[str, object], change: Callable[[str], str]) -> dict[str, Any]:
    """Return what was asked, with other names for its files."""

    def moved(value: object) -> Any:
        return change(value) if isinstance(value, str) else value

    return {name: documents.mapped(value, moved) for name, value in asked.items()}


def traced_for(
    plan: Any, workload: Any, trace: Callable[[], T], graph_of: Callable[[T], Any] = lambda t: t
) -> T:
    """Return what ``trace`` makes of a workload; refuse another model than the plan was made for.

    Args:
        plan: With ``workload``, ``num_layers`` (0 for any) and ``model_hash`` (empty for any).
        workload: The task that is traced.
        trace: Traces it, into as many layers as the plan's.
        graph_of: The graph of what it makes.

    Raises:
        PlanError: ``plan-other-model``.
    """
    try:
        traced = trace()
    except TracingError as error:
        if error.codes != ("trace-num-layers",):
            raise
        raise other_model(plan, workload, "has too few products for so many layers") from None
    graph = graph_of(traced)
    if plan.num_layers not in (0, graph.num_layers):
        raise other_model(plan, workload, f"has num_layers={graph.num_layers}")
    if plan.model_hash and plan.model_hash != graph.model_hash:
        has = f"has model_hash={graph.model_hash}"
        raise other_model(plan, workload, has)
    return traced


def other_model(plan: Any, workload: Any, has: str) -> CaptureError:
    """Return the error of a workload that is not the plan's.

    Args:
        plan: Of any kind.
        workload: The task that is given instead.
        has: What it has that the plan's has not.
    """
    num_layers, known = getattr(plan, "num_layers", 0), plan.model_hash
    about = [f"num_layers={num_layers}"] if num_layers else []
    about += [f"model_hash={known}"] if known else []
    return PlanError.of(
        f"the plan was made for {plan.workload or 'a model'} with {' and '.join(about)}, and "
        f"{name_of(workload)} {has}: another model, or its shapes or the version of JAX changed. "
        "Give the plan's own workload, or plan this one.",
        "plan-other-model",
    )
