"""The devices a plan may use: nodes of equal devices, in node-major order."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from capture.errors import ClusterError
from capture.machine.target import known_name


@dataclass(frozen=True)
class Cluster:
    """Nodes of devices of one target. Device ids count from 0 in node-major order.

    Attributes:
        nodes: Devices per node; stages fill the nodes in this order.
        target: Name of the device kind, for example ``"cpu"``; another spelling of a shipped one's
            becomes its name (``known_name``).

    Example:
        >>> Cluster.parse("2x4").nodes, Cluster.parse("4+2").num_devices, Cluster.parse("2 * 8", "H100")
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
        """``"NxG"``, also ``"N*G"`` (N nodes of G devices), or ``"4+2"`` (a list of nodes); spaces
        and capitals do not matter.

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

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        return tuple(node for node, size in enumerate(self.nodes) for _ in range(size))


def _did_you_mean(spelled: str) -> str:
    """A question with the nearest cluster, or nothing."""
    if re.fullmatch(r"\d+(x\d+){2,}", spelled):
        nodes, *sizes = map(int, spelled.split("x"))
        return f" Did you mean {nodes}x{math.prod(sizes)}?"
    if re.fullmatch(r"\d+([,;]\s*\d+)+", spelled):
        return f" Did you mean {'+'.join(re.findall(r'[0-9]+', spelled))}?"
    return ""
