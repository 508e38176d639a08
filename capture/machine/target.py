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
                     ``capture.machine.tiles``; without them every product fills the device),
                     array_width (of systolic arrays)
    products         optional: dtypes, fuse_operands and their source, see ``Products``
    memory_rate      bytes_per_second, efficiency
    level            optional: fraction of both that kernels reach in a training step, where it was
                     fitted to runs (its source says to which, and how far it is off on others)
    host             optional: memory_bytes for each device of the machine, and of its processes
                     message_bytes_per_second and delete_seconds, see
                     ``HostMachine``
    links            intra_node, inter_node: latency_seconds, bytes_per_second in one direction per
                     device, as all-gathers reach it; host: the same as to_device and to_host, and
                     duplex (true or false); fabric, optional: reduce_scatter (bytes per second),
                     switch_sums, ..., see ``capture.machine.rates.Fabric``
    compiler         cuda: the device description that XLA plans with; tpu: topologies by name,
                     ascending. Both: ``options`` of XLA, numbers, true or false, that stand for
                     what a machine would tell; ``run_options``, that runs are compiled with as well

``cpu`` has no rates and no capacity: virtual devices measure memory, and nothing else.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from capture import documents, environment
from capture.errors import TargetError
from capture.extras import EXTRA_OF, compilers_of, install_command
from capture.machine.rates import (
    HIDDEN,
    DeviceMemory,
    Fabric,
    HostLink,
    HostMachine,
    Link,
    Products,
    Rates,
    Sourced,
    TorusLinks,
)

TARGET = documents.Format(
    "target file",
    TargetError,
    "target",
    "see capture/machine/target.py, which says what it holds",
    not_json="file",
)
TARGETS_FOLDER = Path(__file__).parent / "targets"

Platform = Literal["cpu", "cuda", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "tpu")
_NOTHING, _AS_THEY_ARE, _ANY_HOST = Sourced(0, "none"), Products(), HostMachine()
_NO_FABRIC = Fabric()


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        name: As in ``Cluster.target``: the name of a shipped target, or the path of a file.
        description: A sentence for people.
        platform: Compiler family.
        memory: None where capacity means nothing (virtual CPU devices).
        rates: None where nothing is known of time (virtual CPU devices).
        compiler: Settings of the compiler.
        on_chip_bytes: Size of a memory beside the main one, in which the compiler holds what is in
            use.
        products: The compiler's choices for matrix products.
        host: The host machine that devices are in.

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
    on_chip_bytes: Sourced = _NOTHING
    products: Products = _AS_THEY_ARE
    host: HostMachine = _ANY_HOST

    @classmethod
    def load(cls, name: str) -> Target:
        """Load a shipped target by name (in any spelling that ``known_name`` knows), or the file at
        a path that ends in ``.json``.

        Raises:
            TargetError: ``target-unknown``, ``target-file`` if a path does not exist or is no JSON,
                ``target-schema`` for an unknown schema version, ``target-corrupt`` for a missing or
                wrong field, ``target-devices`` for the device information of earlier versions.
        """
        return _load(known_name(name))

    @property
    def key(self) -> dict[str, Any]:
        """The parts of the target that can change a compiled program's memory: part of the key of
        every measurement."""
        return {
            "platform": self.platform,
            "compiler": {k: v for k, v in self.compiler.items() if not k.endswith("source")},
        }

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options that every program of the target is compiled with where no device is there."""
        return {**self.compiler.get("options", {}), **self.run_options}

    @property
    def run_options(self) -> dict[str, Any]:
        """Options that programs are compiled with wherever they run, as recipes set them. What the
        user's own flags name is theirs."""
        given = environment.flag_names()
        options = self.compiler.get("run_options", {})
        return {name: value for name, value in options.items() if name not in given}


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
    """Return the name of a target, the path of a file written relative to a directory (that of a
    plan or a profile)."""
    if not name.endswith(".json"):
        return name
    return os.path.relpath(Path(name).resolve(), directory.resolve())


def resolved_target(name: str, directory: Path) -> str:
    """Return a target's path relative to the working directory: undo ``relative_target``."""
    return os.path.relpath((directory / name).resolve()) if name.endswith(".json") else name


def same_target(one: str, other: str) -> bool:
    """Return whether two names mean the same target, however the path of a file is written."""
    are_files = one.endswith(".json") and other.endswith(".json")
    return one == other or (are_files and Path(one).resolve() == Path(other).resolve())


def known_name(name: str) -> str:
    """Return the shipped target that another spelling of its name means; any other name as it is.

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
    """Return a question with the nearest names of shipped targets, or an empty text."""
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
    """Return the names of the shipped targets, sorted."""
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


def _read(data: object, name: str) -> Target:
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
        found = file.read(data, _TargetFile)
        if isinstance(data, Mapping) and found.links:  # a misspelt part would be left out
            documents.read(data["links"].get("fabric", {}), Fabric, "links.fabric", strict=True)
        return found.target(name)
    except documents.FieldError as error:
        raise file.corrupt(str(error)) from None


@dataclass(frozen=True)
class _Compute:
    flops_per_second: Mapping[str, Sourced]
    efficiency: Sourced
    kernel_seconds: Sourced = Rates.kernel_seconds
    cores: Sourced = Rates.cores
    array_width: Sourced = Rates.array_width


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
    fabric: Fabric = _NO_FABRIC

    @property
    def host_link(self) -> HostLink:
        if "latency_seconds" in self.host:  # a file from before the directions
            link = documents.read(self.host, Link, "links.host")
            shared = "not given, so both directions share the bandwidth"
            return HostLink(link, link, False, shared)
        host = documents.read(self.host, _HostLink, "links.host")
        return HostLink(host.to_device, host.to_host, host.duplex.value, host.duplex.source)


@dataclass(frozen=True)
class _TargetFile:
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
    host: HostMachine = _ANY_HOST
    level: Sourced = Rates.level

    def target(self, name: str) -> Target:
        for part in ("options", "run_options"):
            _check_options(part, self.compiler.get(part, {}))
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
            self.host,
        )

    def _rates(self, compute: _Compute, products: Products) -> Rates:
        if "float32" not in compute.flops_per_second:
            raise documents.FieldError("compute.flops_per_second.float32 is missing")
        if self.memory_rate is None or self.links is None:
            wanted = "memory_rate" if self.memory_rate is None else "links"
            raise documents.FieldError(f"{wanted} is missing")
        if not self.level.value > 0:
            raise documents.FieldError(f"level is {self.level.value:g} and must be above 0")
        host, fabric = self.links.host_link, self.links.fabric
        _check_links(
            {
                "intra_node": self.links.intra_node,
                "inter_node": self.links.inter_node,
                "host.to_device": host.to_device,
                "host.to_host": host.to_host,
                "fabric.switch_sums": fabric.switch_sums,
                "fabric.slices": fabric.slices,
                "fabric.torus": fabric.torus,
            }
        )
        _check_fabric(fabric)
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
            compute.array_width,
            self.level,
            fabric,
            HIDDEN[self.platform],
        )


def _check_links(links: Mapping[str, Link | TorusLinks | None]) -> None:
    for name, link in links.items():
        if link is None:
            continue
        latency, rate = link.latency_seconds.value, link.bytes_per_second.value
        if latency < 0 or rate <= 0:
            raise documents.FieldError(
                f"links.{name} has latency_seconds {latency:g} and bytes_per_second "
                f"{rate:g}; the first must be 0 or more, the second above 0"
            )


#: The texts that an option of the compiler may be.
_STATES = ("ENABLED", "DISABLED", "AUTO")


def _check_options(name: str, options: object) -> None:
    for option, value in options.items() if isinstance(options, Mapping) else [("", options)]:
        # Another text could be a path: of what XLA writes, or of programs that it runs.
        if not isinstance(value, int | float) and value not in _STATES:
            raise documents.FieldError(
                f"compiler.{name}.{option} is {value!r} and must be a number, true, false, "
                f"{', '.join(_STATES)}"
            )


#: The numbers of a fabric, each with the interval that it must lie in.
_FABRIC = {
    "reduce_scatter": (1.0, math.inf),
    "tree_seconds": (0.0, math.inf),
    "tree_efficiency": (0.01, 1.0),
    "devices_per_adapter": (1.0, math.inf),
    "nodes_per_leaf": (1.0, math.inf),
    "oversubscription": (1.0, math.inf),
}


def _check_fabric(fabric: Fabric) -> None:
    """Refuse numbers that no network has."""
    for name, (least, most) in _FABRIC.items():
        number = getattr(fabric, name)
        if number is not None and not least <= number.value <= most:
            raise documents.FieldError(
                f"links.fabric.{name} is {number.value:g} and must be at least {least:g}"
                + (f" and at most {most:g}" if most < math.inf else "")
            )
    torus = fabric.torus
    if torus and (len(torus.host) not in (2, 3) or min(*torus.host, torus.devices_per_chip) < 1):
        raise documents.FieldError(
            f"links.fabric.torus has host {torus.host} and devices_per_chip "
            f"{torus.devices_per_chip}; a host has chips on two axes or three, a chip a device"
        )
    if torus and torus.wraps_at < 2:
        raise documents.FieldError("links.fabric.torus.wraps_at must be 2 or more")
