"""The device information of OSDP: how many devices, how much memory, and alpha, beta, gamma; from
JSON or from a target file.

JSON, every measured number with its source, as in target files:

    schema_version       1
    name
    num_nodes, devices_per_node
    memory_limit_bytes   {"value", "source"}
    flops_per_second     {"value", "source"}: 1 / gamma per FLOP, as reached in practice
    memory_bytes_per_second   {"value", "source"}
    on_chip_bytes        {"value", "source"}, optional: memory beside the limit that holds what is
                         in use
    intra_node, inter_node    latency_seconds (alpha) and bytes_per_second (1 / beta), each
                              {"value", "source"}: in one direction, per
                              device; one node needs no ``inter_node``

A collective of n devices takes n - 1 steps around a ring, each alpha + beta bytes / n. One that
leaves the node runs in two levels:

    all-gather = reduce-scatter = ring(bytes, devices of a node, inside) + ring(bytes / devices of a
    node, nodes, between) all-reduce = reduce-scatter + all-gather

Source: paper 2.1 and 3.1 (rings); Thakur, Rabenseifner, Gropp 2005.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from capture.documents import FieldError, Fields
from capture.errors import TargetError
from capture.machine.cluster import Cluster
from capture.machine.target import Link, Sourced, Target

DEVICES_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Devices:
    """N equal devices in equal nodes.

    Attributes:
        name: For people.
        num_nodes, devices_per_node: N is their product.
        memory_limit_bytes: Of one device.
        flops_per_second: That products reach.
        memory_bytes_per_second: That element-wise kernels reach.
        intra_node, inter_node: Links in one direction, per device.
        on_chip_bytes: Of a memory beside the limit, in which the compiler holds arrays that are in
            use.

    Example:
        >>> fast = Link(Sourced(1e-5, ""), Sourced(1e9, ""))
        >>> devices = Devices("four", 1, 4, Sourced(8e9, ""), Sourced(1e13, ""), Sourced(1e11, ""), fast, fast)
        >>> devices.num_devices, devices.gather_seconds(4_000_000, 4)  # three steps of 1 MB
        (4, 0.00303)
    """

    name: str
    num_nodes: int
    devices_per_node: int
    memory_limit_bytes: Sourced
    flops_per_second: Sourced
    memory_bytes_per_second: Sourced
    intra_node: Link
    inter_node: Link
    on_chip_bytes: Sourced = Target.on_chip_bytes

    @property
    def num_devices(self) -> int:
        """N of the paper."""
        return self.num_nodes * self.devices_per_node

    @property
    def ring(self) -> Link:
        """The slowest link of one ring through all devices: between nodes, it has the bandwidth of
        a whole node (O-q)."""
        if self.num_nodes == 1:
            return self.intra_node
        inside, between = self.intra_node.bytes_per_second, self.inter_node.bytes_per_second
        node = Sourced(between.value * self.devices_per_node, between.source)
        return Link(self.inter_node.latency_seconds, min(inside, node, key=lambda rate: rate.value))

    def with_limit(self, memory_limit_bytes: float, source: str = "given") -> Devices:
        """The same devices with another memory limit."""
        return replace(self, memory_limit_bytes=Sourced(memory_limit_bytes, source))

    def group(self, size: int, stride: int = 1) -> Devices:
        """So many of the devices, a stride apart in device order, as devices of their own."""
        per_node = max(1, min(size, self.devices_per_node // stride))
        return replace(self, num_nodes=-(-size // per_node), devices_per_node=per_node)

    def gather_seconds(self, nbytes: float, group_size: int, stride: int = 1) -> float:
        """An all-gather, or a reduce-scatter, of an array of so many bytes.

        Args:
            nbytes: Of the whole array.
            group_size: Devices that hold a part each.
            stride: Distance of neighbours in device order, which is node-major.
        """
        inside = max(1, min(group_size, self.devices_per_node // stride))
        nodes = -(-group_size // inside)
        return _ring(nbytes, inside, self.intra_node) + _ring(
            nbytes / inside, nodes, self.inter_node
        )

    def reduce_seconds(self, nbytes: float, group_size: int, stride: int = 1) -> float:
        """An all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.gather_seconds(nbytes, group_size, stride)

    def send_seconds(self, nbytes: float, stride: int) -> float:
        """One message to the device so far ahead."""
        return (self.intra_node if stride < self.devices_per_node else self.inter_node).seconds(
            nbytes
        )

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": DEVICES_SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Devices:
        """The devices that ``to_json`` wrote, or a description written by hand.

        Raises:
            TargetError: ``devices-schema`` for an unknown version, ``devices-corrupt`` for a
                missing or wrong field.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != DEVICES_SCHEMA_VERSION:
            raise TargetError.of(
                f"the device information has schema_version={version!r}; this version of capture "
                f"reads {DEVICES_SCHEMA_VERSION}.",
                "devices-schema",
            )
        try:
            return _read(Fields(data))
        except FieldError as error:
            raise TargetError.of(
                f"the device information is not one: {error}; capture/machine/devices.py says "
                "what it holds.",
                "devices-corrupt",
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Devices:
        """The devices of a JSON file.

        Raises:
            TargetError: ``devices-file`` if it cannot be read or is no JSON, and those of
                ``from_json``.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise TargetError.of(
                f"device information {str(path)!r} cannot be read: {error}.", "devices-file"
            ) from None
        return cls.from_json(data)

    @classmethod
    def of_target(
        cls, cluster: Cluster, dtype: str = "float32", precision: str = "default"
    ) -> Devices:
        """The devices of a cluster, by the rates and the usable memory of its target.

        Args:
            cluster: With its target.
            dtype: Of what products read.
            precision: That they ask for; ``"highest"`` for the rate of ``dtype`` itself
                (``Rates.computed_in``).

        Raises:
            TargetError: ``devices-no-rates`` for a target without rates or memory (``cpu``),
                ``devices-uneven`` for nodes of several sizes, and those of ``Target.load``.
        """
        target = Target.load(cluster.target)
        if target.rates is None or target.memory is None:
            raise TargetError.of(
                f"target={cluster.target!r} has no rates or no memory, so no time or limit "
                "follows from it; name an accelerator.",
                "devices-no-rates",
            )
        if len(set(cluster.nodes)) > 1:
            raise TargetError.of(
                f"cluster {cluster} has nodes of several sizes; collectives of two levels need "
                "equal nodes.",
                "devices-uneven",
            )
        rates, memory = target.rates, target.memory
        flops, reached = rates.rate_of(dtype, precision), rates.compute_efficiency
        return cls(
            cluster.target,
            len(cluster.nodes),
            cluster.nodes[0],
            Sourced(memory.usable_bytes, f"usable memory of target {cluster.target}"),
            Sourced(flops.value * reached.value, f"{flops.source}; {reached.source}"),
            Sourced(
                rates.bytes_per_second.value * rates.memory_efficiency.value,
                rates.bytes_per_second.source,
            ),
            rates.intra_node,
            rates.inter_node,
            target.on_chip_bytes,
        )


def _ring(nbytes: float, n: int, link: Link) -> float:
    return (n - 1) * link.seconds(nbytes / n)


def _read(document: Fields) -> Devices:
    def sourced(fields: Fields) -> Sourced:
        found = Sourced(fields.number("value"), fields.text("source"))
        if found.value < 0:
            raise FieldError(
                f"a value of {document.text('name')!r} is {found.value:g} and must be 0 or more"
            )
        return found

    def link(fields: Fields) -> Link:
        return Link(
            sourced(fields.object("latency_seconds")), sourced(fields.object("bytes_per_second"))
        )

    num_nodes, devices_per_node = (
        document.integer("num_nodes", 1),
        document.integer("devices_per_node"),
    )
    if min(num_nodes, devices_per_node) < 1:
        raise FieldError(
            f"num_nodes is {num_nodes} and devices_per_node {devices_per_node}; both must be 1 or "
            "more"
        )
    intra = link(document.object("intra_node"))
    return Devices(
        document.text("name"),
        num_nodes,
        devices_per_node,
        sourced(document.object("memory_limit_bytes")),
        sourced(document.object("flops_per_second")),
        sourced(document.object("memory_bytes_per_second")),
        intra,
        intra if num_nodes == 1 else link(document.object("inter_node")),
        Devices.on_chip_bytes
        if document.optional_object("on_chip_bytes") is None
        else sourced(document.object("on_chip_bytes")),
    )
