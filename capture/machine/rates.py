"""What a device has: memory, rates and links, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capture import documents
from capture.machine.tiles import FULL_REUSE
from capture.quantities import format_bytes

#: Of an element that products compute in.
_BYTES = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Sourced:
    """A number and where it is from."""

    value: int | float
    source: str


@dataclass(frozen=True)
class Link:
    """A link between two devices, or between a device and its host, by the alpha-beta model.

    Attributes:
        latency_seconds: Alpha, of one message.
        bytes_per_second: 1 / beta, in one direction, per device.
    """

    latency_seconds: Sourced
    bytes_per_second: Sourced

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one message of n bytes: alpha + n * beta.

        Example:
            >>> Link(Sourced(1e-6, ""), Sourced(1e9, "")).seconds(1000)
            2e-06
        """
        return self.latency_seconds.value + nbytes / self.bytes_per_second.value


class AlphaBeta(NamedTuple):
    """The seconds of a collective by one algorithm: fixed_seconds + bytes x seconds_per_byte."""

    fixed_seconds: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a collective of so many bytes."""
        return self.fixed_seconds + nbytes * self.seconds_per_byte

    def __add__(self, other: tuple[float, ...]) -> AlphaBeta:  # type: ignore[override]
        """Return the cost of one collective and then another one of as many bytes."""
        return AlphaBeta(self[0] + other[0], self[1] + other[1])

    def times(self, latencies: float, shares: float) -> AlphaBeta:
        """Return the cost of so many latencies, and of so many times the bytes."""
        return AlphaBeta(self.fixed_seconds * latencies, self.seconds_per_byte * shares)


@dataclass(frozen=True)
class TorusLinks:
    """The links of chips that stand on a torus: each has two neighbours on every axis.

    Attributes:
        latency_seconds: Seconds per hop from a chip to its neighbour.
        bytes_per_second: Bandwidth of one link in one direction, per device.
        host: Chips of a host on each axis.
        devices_per_chip: Devices that JAX shows of a chip.
        wraps_at: An axis whose length is a multiple of this many chips is closed to a ring.
        wraps_together: Whether the axes of a slice are closed only if all of them can be.
        source: Where that is from.
    """

    latency_seconds: Sourced
    bytes_per_second: Sourced
    host: tuple[int, ...]
    devices_per_chip: int
    wraps_at: int
    wraps_together: bool
    source: str


@dataclass(frozen=True)
class Fabric:
    """The parts of a target's links beside the plain link of a node and the one between nodes. A
    target without a part has None, and collectives then do without it.

    Attributes:
        reduce_scatter: Bytes per second that reduce-scatters reach inside a node, where that is
            another number than all-gathers reach.
        switch_sums: All-reduces that the switch of a node adds up (NVLS): latency, and the bytes
            per second that a device sends and receives.
        tree_seconds: Latency of a step inside a node of all-reduces over trees of nodes.
        tree_efficiency: Fraction of the bandwidth of a ring that the trees reach.
        devices_per_adapter: Devices that share one adapter, whose bandwidth is then that of
            ``inter_node``.
        nodes_per_leaf: Nodes whose adapters one leaf switch (or set of rail switches) joins.
        oversubscription: Bytes per second into a leaf from its nodes over those out of it.
        torus: The links of chips that stand on a torus.
        slices: The link between slices of a torus (the data-center network), per device.
    """

    reduce_scatter: Sourced | None = None
    switch_sums: Link | None = None
    tree_seconds: Sourced | None = None
    tree_efficiency: Sourced | None = None
    devices_per_adapter: Sourced = Sourced(1, "none")
    nodes_per_leaf: Sourced = Sourced(1, "none")
    oversubscription: Sourced = Sourced(1, "none")
    torus: TorusLinks | None = None
    slices: Link | None = None


@dataclass(frozen=True)
class HostLink:
    """The link between a device and the memory of its host, in both directions.

    Attributes:
        to_device, to_host: The link in each direction while the other one is idle.
        duplex: Whether both keep their bandwidth while both are busy; otherwise they share it.
        duplex_source: Where that is from.
    """

    to_device: Link
    to_host: Link
    duplex: bool
    duplex_source: str


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, and what others than programs take of it.

    usable = capacity x allocator_fraction - context - collective

    Attributes:
        capacity_bytes: Capacity as the driver or the compiler reports it.
        allocator_fraction: Share of it that the process may claim.
        context_bytes: Taken by the driver's context and its libraries.
        collective_bytes: Buffers of the collectives library, outside of the compiler's view.
    """

    capacity_bytes: Sourced
    allocator_fraction: Sourced
    context_bytes: Sourced
    collective_bytes: Sourced

    @property
    def usable_bytes(self) -> int:
        """The bytes of one device's memory that programs may need at their peak."""
        claimed = self.capacity_bytes.value * self.allocator_fraction.value
        return int(claimed - self.context_bytes.value - self.collective_bytes.value)

    def to_json(self) -> dict[str, Any]:
        return {"usable_bytes": self.usable_bytes, **documents.fields_of(self)}

    def __str__(self) -> str:
        capacity, context, collective = (
            format_bytes(int(term.value))
            for term in (self.capacity_bytes, self.context_bytes, self.collective_bytes)
        )
        claimed = f"{capacity} x {self.allocator_fraction.value:g}"
        return (
            f"{format_bytes(self.usable_bytes)} usable: {claimed} - {context} context - "
            f"{collective} collectives"
        )


#: How the source of a number begins that is a guess.
ASSUMED = "assumed: "


@dataclass(frozen=True)
class HostMachine:
    """The host machine that devices are in: its memory, and what its processes' messages cost.

    Attributes:
        memory_bytes: Host memory for each of its devices: for weights, optimizer state and what is
            kept for the backward pass.
        message_bytes_per_second: Bandwidth from one process to another; all that work share it, and
            every byte is written and read.
        delete_seconds: Seconds to give the memory of a task back.
    """

    memory_bytes: Sourced = Sourced(
        64 * 2**30, f"{ASSUMED}64 GiB per device, for the target does not say; give --host-memory"
    )
    message_bytes_per_second: Sourced = Sourced(
        16 * 2**30, f"{ASSUMED}the released scheduler's, for any host"
    )
    delete_seconds: Sourced = Sourced(
        0.0, f"{ASSUMED}an array is given back without waiting for the device"
    )


@dataclass(frozen=True)
class Rates:
    """The rates at which a device computes, reads its memory and sends, each with its source.

    Attributes:
        flops_per_second: Specified FLOPs per second, by data type name.
        compute_efficiency: Fraction of it that large matrix products reach.
        bytes_per_second: Specified bandwidth of the device's memory.
        memory_efficiency: Fraction of it that streaming reaches.
        intra_node, inter_node: Links between devices; of the second, several devices may share one
            (``Fabric.devices_per_adapter``).
        host: Link with the memory of the host.
        default_dtypes: By data type, the one in which products at default precision compute
            (``Products.dtypes``).
        kernel_seconds: The least that a kernel takes, its launch included.
        cores: Cores that make the tiles of products; 0 where products are taken to fill the device.
        array_width: Rows and columns of the systolic arrays in which products are computed: what of
            a product is narrower leaves a part of them idle; 0 where there are none.
        level: Fraction of what a kernel alone reaches, computing or reading memory, that kernels
            reach in a training step; 1 where no run was compared.
        fabric: What else of the links is known.
        hidden: By kind of collective between replicas, the share of it that the compiler hides
            behind kernels, where there are enough of them: of programs that are not compiled.
    """

    flops_per_second: Mapping[str, Sourced]
    compute_efficiency: Sourced
    bytes_per_second: Sourced
    memory_efficiency: Sourced
    intra_node: Link
    inter_node: Link
    host: HostLink
    default_dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    kernel_seconds: Sourced = Sourced(0.0, "none")
    cores: Sourced = Sourced(0, "none")
    array_width: Sourced = Sourced(0, "none")
    level: Sourced = Sourced(1.0, "none")
    fabric: Fabric = Fabric()
    hidden: Mapping[str, Sourced] = field(default_factory=dict, hash=False)

    def computed_in(self, dtype: str, precision: str) -> str:
        """Return the data type whose rate products have.

        Args:
            dtype: Data type of their operands.
            precision: That they ask for (``jax.lax.Precision``). ``high`` is TF32, too, on GPUs
                that have it, and on TPUs three passes in bfloat16, which count as the six of
                ``highest``.

        Example:
            >>> from capture.machine.target import Target
            >>> rates = Target.load("h100").rates
            >>> [rates.computed_in("float32", asked) for asked in ("default", "high", "highest")]
            ['tf32', 'tf32', 'float32']
        """
        narrow = self.default_dtypes.get(dtype, dtype)
        is_narrow = precision == "default" or (precision == "high" and narrow == "tf32")
        return narrow if is_narrow else dtype

    def rate_of(self, dtype: str, precision: str = "highest") -> Sourced:
        """Return the specified FLOPs per second of products of a data type at a precision; an
        unlisted type counts as float32."""
        return self.flops_per_second.get(
            self.computed_in(dtype, precision), self.flops_per_second["float32"]
        )

    def reached_flops_per_second(self, dtype: str, precision: str = "highest") -> float:
        """Return the FLOPs per second that large products reach: specified rate x efficiency x
        level."""
        rate = self.rate_of(dtype, precision).value
        return rate * self.compute_efficiency.value * self.level.value

    def needed_reuse(self, dtype: str, precision: str = "highest") -> float:
        """Return how often tiles of products must use an element they read, to reach their rate: as
        often as those of 128 x 128 where products read most bytes per second, less elsewhere."""
        read = {
            name: rate.value * _BYTES.get(name, 4) for name, rate in self.flops_per_second.items()
        }
        computed = self.computed_in(dtype, precision)
        return FULL_REUSE * read.get(computed, read["float32"]) / max(read.values())

    @property
    def reached_bytes_per_second(self) -> float:
        """The bytes per second of device memory that streaming reaches: specified x efficiency x
        level."""
        return self.bytes_per_second.value * self.memory_efficiency.value * self.level.value


_COMPILED = (
    "of compiled stages of LLaMA 8B 0.89 to 1 is hidden, of GPT-3 1.3B 0.75 to 0.92, of smaller "
    "models less (benchmarks/results/2026-11-28-overlap.json)"
)
#: By platform, ``Rates.hidden``. XLA for TPUs waits for sums, and gathers step by step.
HIDDEN: Mapping[str, Mapping[str, Sourced]] = {
    "cpu": {},
    "cuda": {
        kind: Sourced(0.85, _COMPILED) for kind in ("all-gather", "all-reduce", "reduce-scatter")
    },
    "tpu": {kind: Sourced(0.85, _COMPILED) for kind in ("all-gather", "reduce-scatter")},
}


@dataclass(frozen=True)
class Products:
    """The compiler's choices for matrix products and convolutions: their data types and fusion.

    Attributes:
        dtypes: By data type, the one in which products at default precision compute with it, where
            that is another: its rate is theirs, and what only they read is gathered and kept in its
            bytes.
        fuse_operands: Whether element-wise operations are computed inside the product that reads
            their result, which is then in no memory.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    fuse_operands: bool = False
