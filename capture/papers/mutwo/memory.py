"""How many bytes a schedule holds: Algorithm G."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capture.papers.mutwo.schedule import Node, PairSchedule

#: What happens: "backward 3", "forward 0", "fetch 7", "recompute 2", "before".
Instant = tuple[str, int]


@dataclass(frozen=True)
class GraphMemory:
    """The bytes that one merged graph holds, instant by instant.

    Attributes:
        held: What is held at most while something happens, in order.
    """

    held: tuple[tuple[Instant, int], ...]

    @property
    def peak_bytes(self) -> int:
        return max(nbytes for _, nbytes in self.held)

    def above(self, limit_bytes: int) -> set[Instant]:
        """Return the peak interval: what happens above a limit."""
        return {instant for instant, nbytes in self.held if nbytes > limit_bytes}


def memory_of(schedule: PairSchedule) -> GraphMemory:
    """Return the bytes that a schedule holds at every instant (Algorithm G).

    Weights are in the active memory of both graphs, so they are subtracted once (M-t). Of the
    graph's intermediates are resident before it begins those that are neither swapped nor to be
    recomputed (M-u).
    """
    return _Simulator(schedule).run(schedule.merged())


class _Simulator:
    def __init__(self, schedule: PairSchedule):
        self._schedule, self._readings = schedule, schedule.readings
        graph, now = schedule.graph, schedule.now
        self._bw_inter = sum(
            graph.values[v].nbytes
            for v in graph.intermediates
            if v not in now.swaps and v not in now.recomputed
        )
        self._fw_inter = 0
        self._static = schedule.pair.static_bytes
        self._fw_active = self._bw_active = 0
        if self._readings.weights_once:
            self._fw_active = self._bw_active = self._static
            self._bw_active += graph.rest_bytes[graph.num_forward - 1] if graph.num_forward else 0
        self._held: list[tuple[Instant, int]] = []

    def run(self, nodes: Sequence[Node]) -> GraphMemory:
        if self._readings.weights_once:
            self._mark(("before", 0))
        for node in nodes:
            self._step(node)
        return GraphMemory(tuple(self._held))

    def _mark(self, instant: Instant, more: int = 0) -> None:
        current = self._fw_active + self._bw_active + self._bw_inter + self._fw_inter - self._static
        self._held.append((instant, current + more))

    def _step(self, node: Node) -> None:
        graph, rank = node.graph, node.rank
        backward, whole = node.side == "backward", self._readings.workspace
        sizes = graph.sizes
        if backward or self._readings.prompts_anywhere:
            fetched = self._schedule.graph.values
            for v in node.to_prefetch:
                self._bw_inter += fetched[v].nbytes
                if whole:
                    self._mark(("fetch", v))
        if backward:
            for v, cost in node.to_recompute:
                if whole:
                    self._mark(("recompute", v), cost.nbytes)
                self._bw_inter += sizes[v]
            self._bw_inter -= sum(sizes[v] for v in graph.first_bw_uses[rank - graph.num_forward])
        active = graph.peak_bytes[rank] if whole else graph.active_bytes[rank]
        self._set(backward, active)
        self._mark((node.side, rank - graph.num_forward if backward else rank))
        if whole:
            self._set(backward, graph.rest_bytes[rank])
        if not backward:
            gone = (*node.to_delete, *node.to_offload)
            self._fw_inter -= sum(sizes[v] for v in gone)
            self._fw_inter += sum(sizes[v] for v in graph.last_fw_uses[rank])

    def _set(self, backward: bool, moving: int) -> None:
        if backward:
            self._bw_active = self._static + moving
        else:
            self._fw_active = self._static + moving
