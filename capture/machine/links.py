"""How long messages and collectives take: the one alpha-beta model of links.

A message takes alpha + bytes x beta (``Link.seconds``), and so does a collective by each algorithm,
with another alpha and beta. The fastest algorithm is taken, as NCCL does. Below, n devices stand in
N nodes, m = n / N in each; R are the bytes per second that collectives reach inside a node, A those
of a network adapter per device, B = min(R, m A); a and b are the latencies of a message inside and
between nodes; V are the bytes.

    ring                  one ring through all devices, which leaves each node by all its adapters
      all-gather, reduce-scatter   (n - 1 - h) a + h b + V (n - 1) / n / B
                          of its hops h = N leave a node, N - 1 if m = 1
      all-reduce                   a reduce-scatter, then an all-gather
    tree                  all-reduce: up and down two binary trees of nodes, chains inside nodes
                          2 ((m - 1) a + log2(N) b) + 2 V / (efficiency B)
    switch sums           all-reduce inside a node, added up by its switch (NVLS): a device sends V
                          and V / n, and receives as much: a + V (1 + 1 / n) / R
    switch sums and tree  all-reduce: the same in nodes, and trees over them, in a pipeline
                          a + 2 log2(N) b + max(V (1 + 1 / m) / R, 2 V / (m A))
    direct                all-to-all: a message to every other device, one after the other
                          (m - 1) (a + V / n / R) + (n - m) (b + V / n / A)
    two levels            all-to-all of chips of a torus in nodes, inside and then between these
                          (m - 1) (a + V / m / R) + (N - 1) (b + V / N / A)
    one message           collective-permute

Bytes that leave a leaf of a fat tree have A divided by its oversubscription: all of them, but of a
ring only those from its last node in the leaf to the first of the next. Slices of a torus have
algorithms of their own (``capture.machine.torus``).

Source: Thakur, Rabenseifner, Gropp 2005 (rings, trees); Sanders, Speck, Traeff 2009 (two trees);
NCCL, src/graph/tuning.cc and src/tuning/nvls.cc (which algorithms there are, their latencies);
OSDP, 2.1 and 3.1; Hockney 1994 (alpha, beta).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capture.machine.rates import AlphaBeta, Link, Rates, Sourced
from capture.machine.torus import Torus
from capture.memo import memo


def ring_steps(kind: str, group_size: int) -> int:
    """Return how many messages every device of a ring sends, one after the other."""
    return (group_size - 1) * (2 if kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Layout:
    """The places of the devices of a cluster, in node-major order.

    Attributes:
        devices_per_node: In the largest node.
        torus: A slice, where the nodes are hosts of slices of a torus.
    """

    devices_per_node: int
    torus: Torus | None = None


@dataclass(frozen=True)
class Links:
    """The links of equal devices in nodes, and what messages and collectives take on them.

    Attributes:
        rates: Of a target: its links.
        layout: Where the devices stand.
    """

    rates: Rates
    layout: Layout

    def seconds(self, kind: str, nbytes: float, group_size: int, stride: int = 1) -> float:
        """Return the seconds of one collective by the fastest algorithm, alone on its links.

        Args:
            kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
                ``collective-permute``.
            nbytes: Size of the larger of what goes in and what comes out, per device: of an
                all-gather or a reduce-scatter, the whole array.
            group_size: Devices that take part; of a permute, any two a stride apart.
            stride: Distance of neighbours in device order. Groups of the same kind that stand
                between these devices communicate at the same time.

        Example:
            >>> from capture.machine.target import Target
            >>> links = Links(Target.load("h100").rates, Layout(devices_per_node=8))
            >>> inside, outside = (links.seconds("all-gather", 10**9, n) for n in (8, 16))
            >>> round(inside * 1e3, 3), round(outside * 1e3, 3)  # milliseconds
            (2.524, 2.83)
        """
        costs = self.costs(kind, group_size, stride).values()
        return min((cost.seconds(nbytes) for cost in costs), default=0.0)

    def least_added_seconds(
        self, kind: str, nbytes: float, group_size: int, stride: int = 1
    ) -> float:
        """Return the least seconds by which a collective grows if so many bytes are added to it:
        bytes by the algorithm that is fastest for the largest arrays. Added to any smaller
        collective it stays below the collective of all bytes, whatever algorithms these have."""
        costs = self.costs(kind, group_size, stride).values()
        return nbytes * min((cost.seconds_per_byte for cost in costs), default=0.0)

    @memo
    def costs(self, kind: str, group_size: int, stride: int = 1) -> Mapping[str, AlphaBeta]:
        """Return what a collective takes by each algorithm that there is for it, by name; none for
        a single device."""
        if group_size == 1:
            return {}
        if self.layout.torus is not None:
            return self._on_slices(self.layout.torus, kind, group_size, stride)
        group = _InNodes.of(self.rates, self.layout, group_size, stride)
        if kind == "collective-permute":
            return {"one message": group.message()}
        if kind == "all-to-all":
            on_torus = self.rates.fabric.torus is not None
            return {"two levels": group.two_levels()} if on_torus else {"direct": group.direct()}
        if kind != "all-reduce":
            return {"ring": group.ring(kind)}
        summed = {
            "ring": group.ring("reduce-scatter") + group.ring("all-gather"),
            "tree": group.tree(),
            "switch sums": group.switch_sums(),
        }
        return {name: cost for name, cost in summed.items() if cost is not None}

    def _on_slices(
        self, torus: Torus, kind: str, size: int, stride: int
    ) -> Mapping[str, AlphaBeta]:
        """Return what a collective takes on slices of a torus: inside of each, and then between
        them a ring of what each device has a share of."""
        inside = max(1, min(size, torus.num_devices // stride))
        slices = -(-size // inside)
        here = torus.costs(kind, inside, stride) if inside > 1 or slices == 1 else {}
        if slices == 1:
            return here
        far = self._between_slices
        if kind == "collective-permute":
            near = here.get("one message", AlphaBeta(0, 0))
            return {"one message": AlphaBeta(*map(max, near, far))}
        steps, share = ring_steps(kind, slices), 1 if kind == "all-to-all" else inside
        ring = far.times(steps, steps / slices / share)
        return {f"{way}, then slices": cost + ring for way, cost in here.items()} or {"ring": ring}

    @property
    def _between_slices(self) -> AlphaBeta:
        link = self.rates.fabric.slices
        assert link is not None, "a cluster of several slices has links between them"
        return AlphaBeta(link.latency_seconds.value, 1 / link.bytes_per_second.value)

    @memo
    def routed(self, source: tuple[int, ...], target: tuple[int, ...]) -> AlphaBeta:
        """Return the cost of a message from each device of a place to one of another at the same
        time, over the torus that the devices stand on or between its slices."""
        torus, count = self.layout.torus, max(len(source), len(target))
        assert torus is not None, "devices on a torus"
        size, ends = torus.num_devices, [source, target]
        if len({device // size for device in (*source, *target)}) > 1:
            return self._between_slices
        sent = ([place[i * len(place) // count] % size for i in range(count)] for place in ends)
        return torus.message([*zip(*sent, strict=True)])

    def send_seconds(self, nbytes: float, leaves_node: bool) -> float:
        """Return the seconds of one message from a device to another one, in its own node or not;
        on a torus, to its neighbour. Alone on its adapter: where a node sends replicas, one of them
        has to leave it."""
        if self.layout.torus is not None:
            return self.layout.torus.hop.seconds(nbytes)
        if not leaves_node:
            return self.rates.intra_node.seconds(nbytes)
        return self.rates.inter_node.seconds(nbytes * self.rates.fabric.oversubscription.value)

    def slowest_of_ring(self, num_nodes: int) -> Link:
        """Return the link that limits one ring through all devices of so many nodes: what enters
        and leaves a node has the bandwidth of all of its devices (O-q)."""
        if num_nodes == 1:
            return self.rates.intra_node
        per_node, rates = self.layout.devices_per_node, self.rates
        inside, between = rates.intra_node.bytes_per_second, rates.inter_node.bytes_per_second
        adapters = per_node / min(per_node, rates.fabric.devices_per_adapter.value)
        node = Sourced(between.value * adapters, between.source)
        return Link(rates.inter_node.latency_seconds, min(inside, node, key=lambda of: of.value))


@dataclass(frozen=True)
class _InNodes:
    """A group of devices in nodes, and the groups like it that communicate at the same time.

    Attributes:
        rates: The target's.
        size, inside, nodes: Devices n, m of them in each of N nodes.
        adapter: Bandwidth A between nodes, per device.
        in_leaf: Nodes of the group under one leaf of a fat tree.
        out_of_leaf: Bandwidth A of messages to another leaf.
    """

    rates: Rates
    size: int
    inside: int
    nodes: int
    adapter: float
    in_leaf: int
    out_of_leaf: float

    @classmethod
    def of(cls, rates: Rates, layout: Layout, size: int, stride: int) -> _InNodes:
        per_node, fabric = layout.devices_per_node, rates.fabric
        inside = max(1, min(size, per_node // stride))
        nodes = -(-size // inside)
        sharing = min(per_node, fabric.devices_per_adapter.value)
        adapter = rates.inter_node.bytes_per_second.value / sharing
        in_leaf = max(1, int(fabric.nodes_per_leaf.value) // max(1, stride // per_node))
        far = adapter / fabric.oversubscription.value if nodes > in_leaf else adapter
        return cls(rates, size, inside, nodes, adapter, min(in_leaf, nodes), far)

    def ring(self, kind: str) -> AlphaBeta:
        """Return the cost of an all-gather or a reduce-scatter round one ring."""
        inside, between = self.rates.intra_node, self.rates.inter_node
        reached = inside.bytes_per_second
        if kind == "reduce-scatter" and self.rates.fabric.reduce_scatter is not None:
            reached = self.rates.fabric.reduce_scatter
        rates = [reached.value] if self.inside > 1 else []
        if self.nodes > 1:  # one device of a leaf's nodes sends out of it, for each adapter
            rates.append(self.inside * min(self.adapter, self.in_leaf * self.out_of_leaf))
        leaving = self.nodes - (self.inside == 1) if self.nodes > 1 else 0
        fixed = (self.size - 1 - leaving) * inside.latency_seconds.value
        fixed += leaving * between.latency_seconds.value
        return AlphaBeta(fixed, (self.size - 1) / self.size / min(rates))

    def tree(self) -> AlphaBeta | None:
        """Return the cost of an all-reduce over trees of nodes; None inside one node."""
        step, efficiency = self.rates.fabric.tree_seconds, self.rates.fabric.tree_efficiency
        if step is None or efficiency is None or self.nodes == 1:
            return None
        rate = self.inside * self.out_of_leaf
        if self.inside > 1:
            rate = min(rate, self.rates.intra_node.bytes_per_second.value)
        fixed = 2 * (self.inside - 1) * step.value + self._up_and_down
        return AlphaBeta(fixed, 2 / (efficiency.value * rate))

    def switch_sums(self) -> AlphaBeta | None:
        """Return the cost of an all-reduce that the switches of nodes add up; None without such
        switches, or where each node has one device of the group."""
        sums = self.rates.fabric.switch_sums
        if sums is None or self.inside == 1:
            return None
        fixed = sums.latency_seconds.value
        per_byte = (1 + 1 / self.inside) / sums.bytes_per_second.value
        if self.nodes > 1:
            fixed += self._up_and_down
            per_byte = max(per_byte, 2 / (self.inside * self.out_of_leaf))
        return AlphaBeta(fixed, per_byte)

    def direct(self) -> AlphaBeta:
        """Return the cost of an all-to-all, a message after the other."""
        near, other = self.inside - 1, self.size - self.inside
        far = self.size - min(self.size, self.inside * self.in_leaf)
        inside, between = self.rates.intra_node, self.rates.inter_node
        fixed = near * inside.latency_seconds.value + other * between.latency_seconds.value
        per_byte = near / inside.bytes_per_second.value + far / self.out_of_leaf
        per_byte += (other - far) / self.adapter
        return AlphaBeta(fixed, per_byte / self.size)

    def two_levels(self) -> AlphaBeta:
        """Return the cost of an all-to-all inside nodes and then between them: of chips on a torus
        whose slice is not known, which have no network that joins all of them."""
        inside, between = self.rates.intra_node, self.rates.inter_node
        near, far = self.inside - 1, self.nodes - 1
        fixed = near * inside.latency_seconds.value + far * between.latency_seconds.value
        per_byte = near / self.inside / inside.bytes_per_second.value
        return AlphaBeta(fixed, per_byte + far / self.nodes / self.out_of_leaf)

    def message(self) -> AlphaBeta:
        """Return the cost of a message to the device a stride away."""
        if self.nodes == 1:
            link = self.rates.intra_node
            return AlphaBeta(link.latency_seconds.value, 1 / link.bytes_per_second.value)
        return AlphaBeta(self.rates.inter_node.latency_seconds.value, 1 / self.out_of_leaf)

    @property
    def _up_and_down(self) -> float:
        """The latency of the way up a binary tree of the nodes and down again."""
        return 2 * (self.nodes - 1).bit_length() * self.rates.inter_node.latency_seconds.value
