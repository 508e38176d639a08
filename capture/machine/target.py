"""A kind of device to plan for: its memory, rates and links, each number with its source, and how
to compile for it.

Targets are JSON files: those of ``capture/machine/targets`` by name, a user's own by path. Every
number is an object of ``value`` and ``source``, except in ``compiler``, which goes to the compiler
as it is:

    schema_version   1
    name, description, platform ("cuda", "tpu" or "cpu")
    memory           capacity_bytes, allocator_fraction, context_bytes, collective_bytes
    on_chip_bytes    optional: memory beside the main one, in which the compiler holds what is in
                     use
    compute          flops_per_second by data type, efficiency (fraction of that rate which large
                     matrix products reach); optional: kernel_seconds (the least that a kernel
                     takes, its launch included), cores (that make tiles of products, see
                     ``capture.machine.tiles``; without them every product fills the device)
    products         optional: dtypes, fuse_operands and their source, see ``Products``
    memory_rate      bytes_per_second, efficiency
    links            intra_node, inter_node: latency_seconds, bytes_per_second in one direction per
                     device; host: the same as to_device and to_host, and duplex (true or false)
    compiler         cuda: the device description that XLA plans with; tpu: topologies by name,
                     ascending. Both: ``options`` of XLA, numbers, true or false

``cpu`` has no rates and no capacity: virtual devices measure memory, and nothing else.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from capture import documents
from capture.errors import TargetError
from capture.extras import EXTRA_OF, compilers_of, install_command
from capture.machine.tiles import FULL_REUSE
from capture.quantities import format_bytes

TARGET = documents.Format(
    "target file",
    TargetError,
    "target",
    "see capture/machine/target.py, which says what it holds",
    not_json="file",
)
#: Of an element that products compute in.
_BYTES = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4, "float64": 8}
TARGETS_FOLDER = Path(__file__).parent / "targets"

Platform = Literal["cpu", "cuda", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class Sourced:
    """A number and where it is from."""

    value: int | float
    source: str


@dataclass(frozen=True)
class Link:
    """What joins two devices, or a device and its host.

    Attributes:
        latency_seconds: Alpha, of one message.
        bytes_per_second: 1 / beta, in one direction, per device.
    """

    latency_seconds: Sourced
    bytes_per_second: Sourced

    def seconds(self, nbytes: float) -> float:
        """Time of one message: alpha + n * beta.

        Example:
            >>> Link(Sourced(1e-6, ""), Sourced(1e9, "")).seconds(1000)
            2e-06
        """
        return self.latency_seconds.value + nbytes / self.bytes_per_second.value


@dataclass(frozen=True)
class HostLink:
    """What joins a device and the memory of its host.

    Attributes:
        to_device, to_host: Each direction while the other one is idle.
        duplex: Whether both keep their bandwidth while both are busy; otherwise they share it.
        duplex_source: Where that is from.
    """

    to_device: Link
    to_host: Link
    duplex: bool
    duplex_source: str


@dataclass(frozen=True)
class DeviceMemory:
    """What a process can use of a device's memory.

    usable = capacity x allocator_fraction - context - collective

    Attributes:
        capacity_bytes: As the driver or the compiler reports it.
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
        """What programs may need at their peak."""
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


@dataclass(frozen=True)
class Rates:
    """How fast a device computes and reads its memory.

    Attributes:
        flops_per_second: Specified, by data type name.
        compute_efficiency: Fraction of it that large matrix products reach.
        bytes_per_second: Specified, of the device's memory.
        memory_efficiency: Fraction of it that streaming reaches.
        intra_node, inter_node: Links between devices.
        host: Link with the memory of the host.
        default_dtypes: By data type, the one in which products at default precision compute
            (``Products.dtypes``).
        kernel_seconds: The least that a kernel takes, its launch included.
        cores: That make the tiles of products; 0 where products are taken to fill the device.
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

    def computed_in(self, dtype: str, precision: str) -> str:
        """The data type whose rate products have.

        Args:
            dtype: Data type of their operands.
            precision: That they ask for (``jax.lax.Precision``). ``high`` is TF32, too, on GPUs
                that have it, and on TPUs three passes in bfloat16, which count as the six of
                ``highest``.

        Example:
            >>> rates = Target.load("h100").rates
            >>> [rates.computed_in("float32", asked) for asked in ("default", "high", "highest")]
            ['tf32', 'tf32', 'float32']
        """
        narrow = self.default_dtypes.get(dtype, dtype)
        return (
            narrow
            if precision == "default" or (precision == "high" and narrow == "tf32")
            else dtype
        )

    def rate_of(self, dtype: str, precision: str = "highest") -> Sourced:
        """Specified FLOPs per second of products of a data type at a precision; an unlisted type
        counts as float32."""
        return self.flops_per_second.get(
            self.computed_in(dtype, precision), self.flops_per_second["float32"]
        )

    def reached_flops_per_second(self, dtype: str, precision: str = "highest") -> float:
        """What large products reach of that rate."""
        return self.rate_of(dtype, precision).value * self.compute_efficiency.value

    def needed_reuse(self, dtype: str, precision: str = "highest") -> float:
        """How often tiles of products must use an element that they read, to reach their rate: as
        often as those of 128 x 128 where products read most bytes per second, less elsewhere."""
        read = {
            name: rate.value * _BYTES.get(name, 4) for name, rate in self.flops_per_second.items()
        }
        computed = self.computed_in(dtype, precision)
        return FULL_REUSE * read.get(computed, read["float32"]) / max(read.values())

    @property
    def reached_bytes_per_second(self) -> float:
        """What streaming reaches of the rate of the memory."""
        return self.bytes_per_second.value * self.memory_efficiency.value


@dataclass(frozen=True)
class Products:
    """What the compiler makes of matrix products and convolutions.

    Attributes:
        dtypes: By data type, the one in which products at default precision compute with it, where
            that is another: its rate is theirs, and what only they read is gathered and kept in its
            bytes.
        fuse_operands: Whether element-wise operations are computed inside the product that reads
            their result, which is then in no memory.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    fuse_operands: bool = False


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        name: As in ``Cluster.target``: the name of a shipped target, or the path of a file.
        description: For people.
        platform: Compiler family.
        memory: None where capacity means nothing (virtual CPU devices).
        rates: None likewise.
        compiler: Settings of the compiler.
        on_chip_bytes: Size of a memory beside the main one, in which the compiler holds what is in
            use.
        products: What the compiler makes of products.

    Example:
        >>> target = Target.load("a100-40g")
        >>> target.platform, target.memory.usable_bytes < 40 * 2**30
        ('cuda', True)
    """

    name: str
    description: str
    platform: Platform
    memory: DeviceMemory | None = None
    rates: Rates | None = None
    compiler: Mapping[str, Any] = field(default_factory=dict, hash=False)
    on_chip_bytes: Sourced = Sourced(0, "none")
    products: Products = Products()

    @classmethod
    def load(cls, name: str) -> Target:
        """A shipped target by name (in any spelling that ``known_name`` knows), or the file at a
        path that ends in ``.json``.

        Raises:
            TargetError: ``target-unknown``, ``target-file`` if a path does not exist or is no JSON,
                ``target-schema`` for an unknown schema version, ``target-corrupt`` for a missing or
                wrong field, ``target-devices`` for the device information of earlier versions.
        """
        return _load(known_name(name))

    @property
    def key(self) -> dict[str, Any]:
        """What of the target can change a compiled program's memory: part of the key of every
        measurement."""
        return {
            "platform": self.platform,
            "compiler": {k: v for k, v in self.compiler.items() if not k.endswith("source")},
        }

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options that every program of the target is compiled with."""
        return dict(self.compiler.get("options", {}))


def check_compiler(target: Target) -> None:
    """Refuse a target whose compiler is not installed; virtual CPU devices need none.

    Raises:
        TargetError: ``target-missing``, with the command that installs it.
    """
    modules = compilers_of(target.platform)
    if modules and not any(find_spec(module) for module in modules):
        raise TargetError.of(
            f"target={target.name!r} is compiled by the {target.platform.upper()} plugin of JAX, "
            "which is not installed; it needs no "
            f"device: {install_command(EXTRA_OF[modules[0]])}.",
            "target-missing",
        )


def relative_target(name: str, directory: Path) -> str:
    """The same target, the path of a file written relative to a directory (that of a plan or a
    profile)."""
    return (
        os.path.relpath(Path(name).resolve(), directory.resolve())
        if name.endswith(".json")
        else name
    )


def resolved_target(name: str, directory: Path) -> str:
    """The inverse of ``relative_target``: relative to the working directory."""
    return os.path.relpath((directory / name).resolve()) if name.endswith(".json") else name


def same_target(one: str, other: str) -> bool:
    """Whether two names mean the same target, however the path of a file is written."""
    return one == other or (
        one.endswith(".json")
        and other.endswith(".json")
        and Path(one).resolve() == Path(other).resolve()
    )


def known_name(name: str) -> str:
    """The shipped target that is meant by another spelling of its name; any other name as it is.

    Example:
        >>> spelled = ("H100", "A100-80GB", "NVIDIA A100 80GB", "TPU v5e", "a100")
        >>> tuple(map(known_name, spelled))
        ('h100', 'a100-80g', 'a100-80g', 'v5e', 'a100')
    """
    if name.endswith(".json") or name in target_names():
        return name
    spelled = re.sub(r"(\d)gb$", r"\1g", re.sub(r"[\s_]+", "-", name.strip().lower()))
    spellings = (spelled, spelled.removeprefix("nvidia-"), re.sub(r"^tpu-?(?=v)", "", spelled))
    return next((spelling for spelling in spellings if spelling in target_names()), name)


def _did_you_mean(name: str) -> str:
    """A question with the nearest names of shipped targets, or nothing."""
    kind, colon, count = name.lower().partition(":")
    if colon and count.isdecimal() and known_name(kind) in target_names():
        return f" Did you mean --target {known_name(kind)} --cluster 1x{count}?"
    near = [
        known
        for known in target_names()
        if kind and (known.startswith(kind) or kind.startswith(known))
    ]
    near = near or difflib.get_close_matches(kind, target_names(), cutoff=0.7)
    return f" Did you mean {' or '.join(sorted(near))}?" if near else ""


@lru_cache(maxsize=1)
def target_names() -> tuple[str, ...]:
    """Names of the shipped targets, sorted."""
    return tuple(sorted(path.stem for path in TARGETS_FOLDER.glob("*.json")))


@lru_cache(maxsize=64)
def _load(name: str) -> Target:
    is_file = name.endswith(".json")
    if not is_file and name not in target_names():
        raise TargetError.of(
            f"target={name!r} is unknown; choose one of {', '.join(target_names())}, or give the "
            "path of a target file (.json)."
            f"{_did_you_mean(name)}",
            "target-unknown",
        )
    path = name if is_file else TARGETS_FOLDER / f"{name}.json"
    return TARGET.load(path, lambda data: _read(data, name))


def _read(data: Any, name: str) -> Target:
    if isinstance(data, Mapping) and "devices_per_node" in data:
        raise TargetError.of(
            f"target file {name!r} is the device information of an earlier version (num_nodes, "
            "devices_per_node, memory_limit_bytes, ...). Write a target file, which holds rates "
            "and links in the same units (capture/machine/target.py says how); the number of "
            "devices is the cluster's (2x8), and a memory limit is given beside it.",
            "target-devices",
        )
    file = replace(TARGET, name=f"target file {name!r}")
    try:
        return file.read(data, _Document).target(name)
    except documents.FieldError as error:
        raise file.corrupt(str(error)) from None


@dataclass(frozen=True)
class _Compute:
    flops_per_second: Mapping[str, Sourced]
    efficiency: Sourced
    kernel_seconds: Sourced = Rates.kernel_seconds
    cores: Sourced = Rates.cores


@dataclass(frozen=True)
class _MemoryRate:
    bytes_per_second: Sourced
    efficiency: Sourced


@dataclass(frozen=True)
class _Duplex:
    value: bool
    source: str


@dataclass(frozen=True)
class _HostLink:
    to_device: Link
    to_host: Link
    duplex: _Duplex


@dataclass(frozen=True)
class _Links:
    intra_node: Link
    inter_node: Link
    host: Mapping[str, Any]

    @property
    def host_link(self) -> HostLink:
        if "latency_seconds" in self.host:  # a file from before the directions
            link = documents.read(self.host, Link, "links.host")
            shared = "not given, so both directions share the bandwidth"
            return HostLink(link, link, False, shared)
        host = documents.read(self.host, _HostLink, "links.host")
        return HostLink(host.to_device, host.to_host, host.duplex.value, host.duplex.source)


@dataclass(frozen=True)
class _Document:
    """A target's file."""

    platform: Platform
    compiler: Mapping[str, Any]
    description: str = ""
    memory: DeviceMemory | None = None
    compute: _Compute | None = None
    memory_rate: _MemoryRate | None = None
    links: _Links | None = None
    on_chip_bytes: Sourced | None = None
    products: Products | None = None

    def target(self, name: str) -> Target:
        options = self.compiler.get("options", {})
        for option, value in options.items() if isinstance(options, Mapping) else [("", options)]:
            # A text could be a path: of what XLA writes, or of programs that it runs.
            if not isinstance(value, int | float):
                raise documents.FieldError(
                    f"compiler.options.{option} is {value!r} and must be a number, true or false"
                )
        products = self.products or Products()
        return Target(
            name,
            self.description,
            self.platform,
            self.memory,
            None if self.compute is None else self._rates(self.compute, products),
            self.compiler,
            self.on_chip_bytes or Target.on_chip_bytes,
            products,
        )

    def _rates(self, compute: _Compute, products: Products) -> Rates:
        if "float32" not in compute.flops_per_second:
            raise documents.FieldError("compute.flops_per_second.float32 is missing")
        if self.memory_rate is None or self.links is None:
            wanted = "memory_rate" if self.memory_rate is None else "links"
            raise documents.FieldError(f"{wanted} is missing")
        host = self.links.host_link
        links = {
            "intra_node": self.links.intra_node,
            "inter_node": self.links.inter_node,
            "host.to_device": host.to_device,
            "host.to_host": host.to_host,
        }
        for link_name, link in links.items():
            latency, rate = link.latency_seconds.value, link.bytes_per_second.value
            if latency < 0 or rate <= 0:
                raise documents.FieldError(
                    f"links.{link_name} has latency_seconds {latency:g} and bytes_per_second "
                    f"{rate:g}; the first must be 0 or more, the second above 0"
                )
        return Rates(
            compute.flops_per_second,
            compute.efficiency,
            self.memory_rate.bytes_per_second,
            self.memory_rate.efficiency,
            self.links.intra_node,
            self.links.inter_node,
            host,
            products.dtypes,
            compute.kernel_seconds,
            compute.cores,
        )
