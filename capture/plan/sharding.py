"""What a search of OSDP decides, in plain data: the contract between the searches and the step
that is built of it.

Its JSON has the fields of the classes below, ``operators`` a row per operator in program order;
schema 1 has no kind, workload, hash, cluster and costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from capture import documents
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.files import PlanFile
from capture.plan.headroom import Peaks
from capture.quantities import format_bytes

SHARDING_PLAN = documents.Format(
    "sharding plan",
    PlanError,
    "osdp-plan",
    "see capture/plan/sharding.py, which says what it holds",
    versions=(1, 2),
    kind="sharding",
    not_json="file",
    strict=True,
)


@dataclass(frozen=True, order=True)
class Mode:
    """The way in which the parameters of one operator are held.

    Attributes:
        num_slices: g, slices of its input dimension, worked through one after the other; 1 where it
            is not split.
        num_sharded: k, those of them in ZDP mode; the others are replicated (DP).
        group_size: Devices that share a sharded slice; groups are replicas of each other. None: all
            devices.
    """

    num_slices: int = 1
    num_sharded: int = 0
    group_size: int | None = None

    def __str__(self) -> str:
        if not self.num_sharded:
            return "DP"
        split = "" if self.num_slices == 1 else f" {self.num_sharded}/{self.num_slices}"
        return f"ZDP{split}" + ("" if self.group_size is None else f" by {self.group_size}")


DP = Mode()
ZDP = Mode(1, 1)


@dataclass(frozen=True)
class ParameterLeaf:
    """A parameter leaf as the choice of its sharding sees it; of a leaf stacked over the steps of a
    scan, one of its parts.

    Attributes:
        name: Path of the leaf in the user's tree; of a part, with its index.
        shape, item_bytes: The whole array's shape, and the bytes of one of its numbers.
        split_dim: The dimension that all products that read it contract (of a table: its rows), so
            that they can be split into slices along it; None if there is none.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    split_dim: int | None = None

    @property
    def nbytes(self) -> int:
        size = self.item_bytes
        for extent in self.shape:
            size *= extent
        return size

    def shard_dim(self, num_devices: int) -> int | None:
        """Return the first dimension that the devices divide; None if there is none.

        Shards of the first one lie one after the other in memory: what is gathered from them need
        not be transposed, nor what is reduced to them.

        Example:
            >>> leaves = ParameterLeaf("kernel", (64, 512, 7), 4), ParameterLeaf("scale", (7,), 4)
            >>> tuple(leaf.shard_dim(8) for leaf in leaves)
            (0, None)
        """
        return next((d for d, extent in enumerate(self.shape) if extent % num_devices == 0), None)

    def can_shard(self, num_devices: int, smallest_bytes: int) -> bool:
        """Return whether it is large enough to be sharded, and devices divide a dimension of it."""
        return self.nbytes >= max(1, smallest_bytes) and self.shard_dim(num_devices) is not None


@dataclass(frozen=True)
class OperatorCost:
    """The memory and seconds of an operator in its mode on every device, by the search's costs.

    Attributes:
        parameter_bytes: All of its parameters, unsharded.
        resident_bytes: Held for the whole step.
        transient_bytes: While it runs, beside that.
        seconds: Forward and backward.
        at_peak: Bytes of it at the peak of the step, by category; all operators' add up to the
            peak. Empty where it was not looked at.
    """

    parameter_bytes: int
    resident_bytes: float
    transient_bytes: float
    seconds: float
    at_peak: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class _Operator:
    name: str
    mode: Mode
    params: tuple[str, ...]
    cost: OperatorCost | None = None


@dataclass(frozen=True)
class ShardingPlan(PlanFile):
    """A batch size and the mode of every operator.

    Attributes:
        batch_size: Examples per device.
        modes: Mode of each operator, in program order.
        step_seconds: Time of one step, estimated.
        peak_bytes: Estimated peak memory of every device: what is resident and the largest
            transient.
        examples_per_second: Throughput of all devices together: N b / T.
        names: Names of the operators; empty for a plan of a description alone.
        params: Names of the parameter leaves that belong to each operator; empty likewise.
        remat: Whether the backward pass computes every operator again from its inputs.
        smallest_bytes: Smaller parameters are replicated whatever the mode of their operator.
        look_ahead: Whether the forward pass may gather parameters while the operator before them
            runs. Where it is repeated, it may not.
        compiled_peak_bytes: Peak memory of every device by the target's compiler; None if it was
            not asked.
        interval_bytes: (low, high) that ``peak_bytes`` may compile to, by what steps of other
            models did; None where nobody said.
        cluster: The devices; None for a plan of a description alone, or of schema 1.
        costs: Cost of each operator; empty likewise.
    """

    FORMAT = SHARDING_PLAN
    IN_FILES: ClassVar[Mapping[str, Any]] = {
        "operators": tuple[_Operator, ...],
        **dict.fromkeys(("modes", "names", "params", "costs")),
    }
    REQUIRED = ("remat", "smallest_bytes", "look_ahead")
    LEFT_OUT = ("compiled_peak_bytes", "interval_bytes", "asked")

    batch_size: int
    modes: tuple[Mode, ...]
    step_seconds: float
    peak_bytes: int
    examples_per_second: float
    names: tuple[str, ...] = ()
    params: tuple[tuple[str, ...], ...] = ()
    remat: bool = False
    smallest_bytes: int = 0
    look_ahead: bool = False
    compiled_peak_bytes: int | None = None
    interval_bytes: tuple[int, int] | None = None
    cluster: Cluster | None = field(default=None, kw_only=True)
    costs: tuple[OperatorCost, ...] = ()

    @property
    def step_examples(self) -> int:
        return self.batch_size * (1 if self.cluster is None else self.cluster.num_devices)

    @property
    def peaks(self) -> Peaks:
        """The peak of a device: compiled, else the estimate and its interval, which has no
        probability, so that it never just fits."""
        if self.compiled_peak_bytes is not None:
            return Peaks.compiled(self.compiled_peak_bytes)
        peak, how, interval = self.peak_bytes, "estimated, not compiled", self.interval_bytes
        if interval is not None:
            how += f": {format_bytes(interval[0])} to {format_bytes(interval[1])}"
        return Peaks((peak,), [interval or (peak, peak)], how, None, extrapolated=True)

    @property
    def predicted_bytes_per_device(self) -> tuple[int, ...]:
        """The peak bytes per device, the same for all: compiled, else estimated."""
        return (self.known_peak_bytes,) * self.known_cluster.num_devices

    @property
    def step_estimate(self) -> tuple[float, str]:
        """The seconds of a step by the model of costs, and ``"estimated"``."""
        return self.step_seconds, "estimated"

    @property
    def seconds_per_example(self) -> float:
        """The objective, per device: T / b (Eq. 1)."""
        return self.step_seconds / self.batch_size

    @property
    def sharded_fraction(self) -> float:
        """The part of the operators that have a slice in ZDP mode."""
        return sum(mode.num_sharded > 0 for mode in self.modes) / len(self.modes)

    @property
    def split_fraction(self) -> float:
        """The part of the operators that are split into slices."""
        return sum(mode.num_slices > 1 for mode in self.modes) / len(self.modes)

    @property
    def mode_of_param(self) -> dict[str, Mode]:
        """The mode of each parameter leaf, by the leaf's name."""
        return {
            name: mode
            for mode, names in zip(self.modes, self.params, strict=True)
            for name in names
        }

    def summary(self) -> dict[str, Any]:
        """Return the plan in a few numbers, as results of experiments hold it."""
        names = [str(mode) for mode in self.modes]
        return {
            "batch_size": self.batch_size,
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "examples_per_second": self.examples_per_second,
            "operators_by_mode": {name: names.count(name) for name in sorted(set(names))},
        }

    def in_files(self) -> dict[str, Any]:
        count = len(self.modes)
        names, params = self.names or ("",) * count, self.params or ((),) * count
        rows = zip(names, self.modes, params, self.costs or (None,) * count, strict=True)
        return {"operators": [_Operator(*row) for row in rows]}

    @classmethod
    def out_of_file(cls, written: dict[str, Any]) -> ShardingPlan:
        rows = written.pop("operators")
        for i, mode in enumerate(row.mode for row in rows):
            least = min(
                mode.num_slices, mode.num_slices if mode.group_size is None else mode.group_size
            )
            if least < 1 or not 0 <= mode.num_sharded <= mode.num_slices:
                raise SHARDING_PLAN.corrupt(
                    f"operators[{i}].mode has {mode.num_sharded} of {mode.num_slices} slices "
                    f"sharded by {mode.group_size}; give 0 <= num_sharded <= num_slices"
                )
        costs = tuple(row.cost for row in rows if row.cost is not None)
        return cls(
            modes=tuple(row.mode for row in rows),
            names=tuple(row.name for row in rows),
            params=tuple(row.params for row in rows),
            costs=costs if len(costs) == len(rows) else (),
            **written,
        )
