"""The devices a plan may use: nodes of equal devices, in node-major order; and with what their
target says of them, the machine."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from capture.errors import ClusterError, TargetError
from capture.machine.links import Layout, Links
from capture.machine.rates import Rates, TorusLinks
from capture.machine.target import Target, known_name
from capture.machine.torus import Torus


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices of one target. Device ids count from 0 in node-major order.

    Attributes:
        nodes: Devices per node; stages fill the nodes in this order.
        target: Name of the device kind, for example ``"cpu"``; another spelling of a shipped one's
            becomes its name (``known_name``).
        slice_shape: Chips on each axis of a slice, where the nodes are the hosts of slices of a
            torus; empty where a network joins the nodes.

    Example:
        >>> parse = Cluster.parse
        >>> parse("2x4").nodes, parse("4+2").num_devices, parse("2 * 8", "H100").target
        ((4, 4), 6, 'h100')
        >>> two = parse("2x(4x4x4)", "v5p")  # hosts of four chips
        >>> str(two), len(two.nodes), two.nodes[0], two.slice_shape
        ('2x(4x4x4)', 32, 4, (4, 4, 4))
    """

    nodes: tuple[int, ...]
    target: str = "cpu"
    slice_shape: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "target", known_name(self.target))
        if not self.nodes or any(size < 1 for size in self.nodes):
            raise ClusterError.of(
                f"nodes={self.nodes} needs at least one node of at least one device; write NxG or "
                "a list such as 4+2.",
                "cluster-nodes",
            )

    @classmethod
    def parse(cls, text: str, target: str = "cpu") -> Cluster:
        """Parse ``"NxG"``, also ``"N*G"`` (N nodes of G devices), ``"4+2"`` (a list of nodes),
        ``"4x4x4"`` (a slice of a torus of three axes, in chips) or ``"2x(4x8)"`` (slices of a torus
        of two axes or three); spaces and capitals do not matter.

        Raises:
            ClusterError: ``cluster-syntax`` if the text is none of them, ``cluster-nodes`` if a
                node is empty, ``cluster-slices`` if the target has no such slices.
        """
        spelled = re.sub(r"\s*([x*×+()])\s*", r"\1", text.strip().lower())
        spelled = re.sub("[*×]", "x", spelled)
        if match := re.fullmatch(r"(\d+)x(\d+)", spelled):
            num_nodes, size = map(int, match.groups())
            return cls((size,) * num_nodes, target)
        if re.fullmatch(r"\d+(\+\d+)*", spelled):
            return cls(tuple(map(int, spelled.split("+"))), target)
        if match := re.fullmatch(r"(\d+)x\((\d+(?:x\d+){1,2})\)", spelled):
            return cls.of_slices(int(match[1]), _shape(match[2]), target)
        if re.fullmatch(r"\d+(x\d+){2}", spelled) and _torus_links(target) is not None:
            return cls.of_slices(1, _shape(spelled), target)
        raise ClusterError.of(
            f"cluster={text!r} is neither NxG (4x4: 4 nodes of 4 devices), nor a list of nodes "
            f"(4+2), nor slices of a torus (4x4x4 or 2x(16x16)).{_did_you_mean(spelled)}",
            "cluster-syntax",
        )

    @classmethod
    def of_slices(cls, count: int, shape: tuple[int, ...], target: str) -> Cluster:
        """Return a cluster of slices of a torus.

        Args:
            count: Slices.
            shape: Chips on each axis of a slice.
            target: Kind of the devices.

        Raises:
            ClusterError: ``cluster-slices`` if the target has no such slices, or there are none;
                TargetError: those of ``Target.load``.
        """
        links = _torus_links(target)
        host = () if links is None else links.host
        fits = count > 0 and len(shape) == len(host)
        if (
            links is None
            or not fits
            or any(n < 1 or n % of for n, of in zip(shape, host, strict=True))
        ):
            wanted = (
                f"one slice or more, of {len(host)} axes that are multiples of a host's "
                f"{'x'.join(map(str, host))} chips"
                if host
                else "NxG: N nodes of G devices"
            )
            raise ClusterError.of(
                f"cluster {count}x({'x'.join(map(str, shape))}) is of slices of a torus that "
                f"target={target!r} does not have; give {wanted}.",
                "cluster-slices",
            )
        one = Torus(links, shape)
        hosts = one.num_devices // one.devices_per_host
        return cls((one.devices_per_host,) * hosts * count, target, shape)

    def __str__(self) -> str:
        if self.slice_shape:
            count, shape = self.num_slices, "x".join(map(str, self.slice_shape))
            return shape if count == 1 and len(self.slice_shape) > 2 else f"{count}x({shape})"
        if len(set(self.nodes)) == 1:
            return f"{len(self.nodes)}x{self.nodes[0]}"
        return "+".join(map(str, self.nodes))

    @cached_property
    def num_devices(self) -> int:
        return sum(self.nodes)

    @property
    def process_needs(self) -> tuple[int, str]:
        """The devices of a process that compiles for the cluster, and their platform."""
        return self.num_devices, Target.load(self.target).platform

    @cached_property
    def torus(self) -> Torus | None:
        """One of its slices; None where a network joins the nodes.

        Raises:
            ClusterError: ``cluster-slices`` if the target has no such slices, or the nodes are not
                their hosts.
        """
        if not self.slice_shape:
            return None
        one = Cluster.of_slices(1, self.slice_shape, self.target)
        count = len(self.nodes) // len(one.nodes)
        if not count or self.nodes != one.nodes * count:
            raise ClusterError.of(
                f"nodes={self.nodes} are not the {len(one.nodes)} hosts of {one.nodes[0]} devices "
                f"that each slice {one} of {self.target} has; give the nodes of whole slices.",
                "cluster-slices",
            )
        links = _torus_links(self.target)
        assert links is not None, "the target has slices"
        return Torus(links, self.slice_shape)

    @property
    def num_slices(self) -> int:
        """The number of slices of a torus; 1 where a network joins the nodes."""
        return 1 if self.torus is None else self.num_devices // self.torus.num_devices

    @property
    def layout(self) -> Layout:
        """The places of the devices, as links need them."""
        return Layout(max(self.nodes), self.torus)

    def is_block(self, first: int, num_devices: int) -> bool:
        """Return whether a stage may take devices that follow one another: always where a network
        joins the nodes; on a torus a box that begins at a multiple of its size, or whole slices."""
        if self.torus is None:
            return True
        size = self.torus.num_devices
        aligned = first % min(num_devices, size) == 0
        if num_devices > size:
            return aligned and num_devices % size == 0
        return aligned and self.torus.is_block(first % size, num_devices)

    def first_nodes(self) -> list[Cluster]:
        """Return the clusters of its first 1, 2, 3, ... nodes up to all of them; of slices those of
        half an axis less, and then 1, 2, 3, ... whole slices."""
        if self.torus is None:
            return [replace(self, nodes=self.nodes[: n + 1]) for n in range(len(self.nodes))]
        shapes, host = [self.slice_shape], self.torus.links.host
        while halves := [
            axis for axis, n in enumerate(shapes[0]) if n // 2 % host[axis] == 0 == n % 2 and n > 1
        ]:
            longest = max(halves, key=lambda axis: shapes[0][axis])
            half = shapes[0][longest] // 2
            shapes.insert(0, (*shapes[0][:longest], half, *shapes[0][longest + 1 :]))
        smaller = [Cluster.of_slices(1, shape, self.target) for shape in shapes[:-1]]
        hosts = len(self.nodes) // self.num_slices
        whole = range(hosts, len(self.nodes) + 1, hosts)
        return smaller + [replace(self, nodes=self.nodes[:n]) for n in whole]

    def without(self, gone: Collection[int]) -> Cluster:
        """Return the cluster without some nodes; a slice that has lost a host is no torus, so all
        of it goes.

        Raises:
            ClusterError: ``cluster-nodes`` if nothing is left.
        """
        hosts = len(self.nodes) // self.num_slices if self.slice_shape else 1
        lost = {node // hosts for node in gone}
        left = tuple(size for node, size in enumerate(self.nodes) if node // hosts not in lost)
        return replace(self, nodes=left)

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        return tuple(node for node, size in enumerate(self.nodes) for _ in range(size))

    def group(self, size: int, stride: int = 1) -> Cluster:
        """Return a cluster of ``size`` of the devices, which stand ``stride`` apart in equal nodes.

        Example:
            >>> Cluster((8, 8)).group(4).nodes, Cluster((8, 8)).group(4, stride=4).nodes
            ((4,), (2, 2))
        """
        per_node = max(1, min(size, self.nodes[0] // stride))
        return Cluster((per_node,) * -(-size // per_node), self.target)


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes with its target: what a choice between memory and time asks.

    Attributes:
        cluster: How many devices, and in which nodes.
        target: Kind of the devices, with rates.
        memory_limit_bytes: What programs may use of one device's memory.
        computed_in: The data type whose rate products have (``Rates.computed_in``).

    Example:
        >>> machine = Machine.of(Cluster((8, 8), "h100"))
        >>> machine.num_devices, machine.computed_in, machine.with_limit(2**34).memory_limit_bytes
        (16, 'tf32', 17179869184)
    """

    cluster: Cluster
    target: Target
    memory_limit_bytes: float
    computed_in: str = "float32"

    @classmethod
    def of(cls, cluster: Cluster, dtype: str = "float32", precision: str = "default") -> Machine:
        """Return the machine that a cluster's target describes, with all of the usable memory.

        Args:
            cluster: Devices in equal nodes.
            dtype: Data type that products read.
            precision: That they ask for; ``"highest"`` for the rate of ``dtype`` itself.

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
        computed_in = target.rates.computed_in(dtype, precision)
        return cls(cluster, target, target.memory.usable_bytes, computed_in)

    @property
    def rates(self) -> Rates:
        assert self.target.rates is not None, "a machine has times"
        return self.target.rates

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def devices_per_node(self) -> int:
        return self.cluster.nodes[0]

    @cached_property
    def links(self) -> Links:
        return Links(self.rates, self.cluster.layout)

    @cached_property
    def flops_per_second(self) -> float:
        """The FLOPs per second that large products reach on one device."""
        return self.rates.reached_flops_per_second(self.computed_in)

    def with_limit(self, memory_limit_bytes: float) -> Machine:
        """Return the same machine with another limit on the memory used of one device."""
        return replace(self, memory_limit_bytes=memory_limit_bytes)

    def group(self, size: int, stride: int = 1) -> Machine:
        """Return the machine with only some of its devices (``Cluster.group``)."""
        return replace(self, cluster=self.cluster.group(size, stride))


def _torus_links(target: str) -> TorusLinks | None:
    rates = Target.load(target).rates
    return None if rates is None else rates.fabric.torus


def _shape(spelled: str) -> tuple[int, ...]:
    return tuple(map(int, spelled.split("x")))


def _did_you_mean(spelled: str) -> str:
    """Return a question that names the nearest cluster, or an empty text."""
    if re.fullmatch(r"\d+(x\d+){2,}", spelled):
        nodes, *sizes = map(int, spelled.split("x"))
        return f" Did you mean {nodes}x{math.prod(sizes)}?"
    if re.fullmatch(r"\d+([,;]\s*\d+)+", spelled):
        return f" Did you mean {'+'.join(re.findall(r'[0-9]+', spelled))}?"
    return ""
