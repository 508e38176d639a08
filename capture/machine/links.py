"""How long messages and collectives take: the one alpha-beta model of links.

A message takes alpha + bytes x beta (``Link.seconds``), and collectives of n devices go round a
ring in steps of bytes / n:

    all-gather, reduce-scatter    n - 1 steps; bytes are those of the whole array
    all-reduce                    2 (n - 1) steps: a reduce-scatter, then an all-gather
    all-to-all                    n - 1 steps
    collective-permute            one message of all bytes

A group on several nodes works in two levels. Each device of a node sends its share of the bytes
between nodes, but for an all-to-all, which has none to share:

    ring(bytes, devices of a node, inside) + ring(bytes / devices of a node, nodes, between)

Source: Thakur, Rabenseifner, Gropp 2005; OSDP, 2.1 and 3.1 (rings); Hockney 1994 (alpha, beta).
"""

from __future__ import annotations

from dataclasses import dataclass

from capture.machine.rates import Link, Sourced


def ring_steps(kind: str, group_size: int) -> int:
    """Return how many messages every device of a ring sends, one after the other."""
    return (group_size - 1) * (2 if kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Links:
    """The links of equal devices in nodes, whose order is node-major.

    Attributes:
        intra_node, inter_node: Inside a node and between nodes.
        devices_per_node: In the largest node.
    """

    intra_node: Link
    inter_node: Link
    devices_per_node: int

    def seconds(self, kind: str, nbytes: float, group_size: int, stride: int = 1) -> float:
        """Return the seconds of one collective, alone on its links.

        Args:
            kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
                ``collective-permute``.
            nbytes: Size of the larger of what goes in and what comes out, per device: of an
                all-gather or a reduce-scatter, the whole array.
            group_size: Devices that take part; of a permute, any two a stride apart.
            stride: Distance of neighbours in device order.

        Example:
            >>> fast, slow = (Link(Sourced(1e-5, ""), Sourced(rate, "")) for rate in (1e9, 1e8))
            >>> links = Links(fast, slow, devices_per_node=4)
            >>> links.seconds("all-gather", 4_000_000, 4)  # three steps of 1 MB
            0.00303
            >>> links.seconds("collective-permute", 1_000_000, 2, stride=4)  # to the next node
            0.01001
        """
        inside = max(1, min(group_size, self.devices_per_node // stride))
        nodes = -(-group_size // inside)
        fast, slow = self.intra_node, self.inter_node
        if kind == "collective-permute":
            return (slow if nodes > 1 else fast).seconds(nbytes)
        share = nbytes if kind == "all-to-all" else nbytes / inside
        return _ring(kind, nbytes, inside, fast) + _ring(kind, share, nodes, slow)

    def slowest_of_ring(self, num_nodes: int) -> Link:
        """Return the link that limits one ring through all devices of so many nodes: what enters
        and leaves a node has the bandwidth of all of its devices (O-q)."""
        if num_nodes == 1:
            return self.intra_node
        inside, between = self.intra_node.bytes_per_second, self.inter_node.bytes_per_second
        node = Sourced(between.value * self.devices_per_node, between.source)
        return Link(self.inter_node.latency_seconds, min(inside, node, key=lambda rate: rate.value))


def _ring(kind: str, nbytes: float, n: int, link: Link) -> float:
    return ring_steps(kind, n) * link.seconds(nbytes / n)
