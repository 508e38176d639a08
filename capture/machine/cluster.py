"""The devices a plan may use: nodes of equal devices, in node-major order; and with what their
target says of them, the machine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from capture.errors import ClusterError, TargetError
from capture.machine.links import Layout, Links
from capture.machine.rates import Rates
from capture.machine.target import Target, known_name


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices of one target. Device ids count from 0 in node-major order.

    Attributes:
        nodes: Devices per node; stages fill the nodes in this order.
        target: Name of the device kind, for example ``"cpu"``; another spelling of a shipped one's
            becomes its name (``known_name``).

    Example:
        >>> parse = Cluster.parse
        >>> parse("2x4").nodes, parse("4+2").num_devices, parse("2 * 8", "H100")
        ((4, 4), 6, Cluster(nodes=(8, 8), target='h100'))
    """

    nodes: tuple[int, ...]
    target: str = "cpu"

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
        """Parse ``"NxG"``, also ``"N*G"`` (N nodes of G devices), or ``"4+2"`` (a list of nodes);
        spaces and capitals do not matter.

        Raises:
            ClusterError: ``cluster-syntax`` if the text is neither, ``cluster-nodes`` if a node is
                empty.
        """
        spelled = (
            re.sub(r"\s*([x*×+])\s*", r"\1", text.strip().lower())
            .replace("*", "x")
            .replace("×", "x")
        )
        if match := re.fullmatch(r"(\d+)x(\d+)", spelled):
            num_nodes, size = map(int, match.groups())
            return cls((size,) * num_nodes, target)
        if re.fullmatch(r"\d+(\+\d+)*", spelled):
            return cls(tuple(map(int, spelled.split("+"))), target)
        raise ClusterError.of(
            f"cluster={text!r} is neither NxG (4x4: 4 nodes of 4 devices) nor a list of nodes "
            f"(4+2).{_did_you_mean(spelled)}",
            "cluster-syntax",
        )

    def __str__(self) -> str:
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

    @property
    def layout(self) -> Layout:
        """Where the devices stand, as links need it."""
        return Layout(max(self.nodes))

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


def _did_you_mean(spelled: str) -> str:
    """Return a question that names the nearest cluster, or an empty text."""
    if re.fullmatch(r"\d+(x\d+){2,}", spelled):
        nodes, *sizes = map(int, spelled.split("x"))
        return f" Did you mean {nodes}x{math.prod(sizes)}?"
    if re.fullmatch(r"\d+([,;]\s*\d+)+", spelled):
        return f" Did you mean {'+'.join(re.findall(r'[0-9]+', spelled))}?"
    return ""
