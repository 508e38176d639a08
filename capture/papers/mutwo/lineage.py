"""Sources and cost of recomputations, and how decisions change them: Algorithms D, E and F.

What is recomputed is gone, so whoever was made from it is made from its sources, together with it.
A tensor is made once for itself, and once more inside each recomputation that it is a source of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from capture.papers.mutwo.graph import TrainingGraph
from capture.papers.mutwo.readings import Readings


@dataclass
class RecomputeCost:
    """The sources, time and memory of recomputing one tensor, under the decisions so far.

    Attributes:
        sources: Tensors that it is made from (recomp_srcs).
        seconds: Once (recomp_time).
        nbytes: That this takes (recomp_memory).
        total_seconds: In all of its lifetime (total_recomp_time).
    """

    sources: frozenset[int]
    seconds: float
    nbytes: int
    total_seconds: float


class Lineage:
    """The costs of all tensors of a graph that may be recomputed.

    Args:
        graph: Whose backward pass is scheduled.
        readings: Of the algorithms.
    """

    def __init__(self, graph: TrainingGraph, readings: Readings):
        self._graph, self._readings = graph, readings
        self.costs = {
            v: RecomputeCost(slice_.sources, slice_.seconds, slice_.nbytes, slice_.seconds)
            for v, slice_ in graph.slices.items()
        }

    def copy(self) -> dict[int, RecomputeCost]:
        return {v: RecomputeCost(**vars(cost)) for v, cost in self.costs.items()}

    def overhead(self, v: int) -> float:
        """Return the seconds that recomputing a tensor takes in all (Algorithm D)."""
        return self.costs[v].total_seconds

    def ratio(self, v: int) -> float:
        """Return bytes per second of recomputation (recompute_ratio); infinite for no seconds."""
        total = self.costs[v].total_seconds
        return self._graph.values[v].nbytes / total if total > 0 else float("inf")

    def in_memory(self, v: int, needed_by: int) -> bool:
        """Return whether a tensor that is not retained is there when another one is first accessed:
        in its active_bw_interval. Both at one operation: it comes first (M-r)."""
        graph = self._graph
        at = graph.first_bw_access[needed_by]
        return graph.first_bw_access[v] <= at <= graph.last_bw_access[v]

    def existing(self, chosen: int, recomputed: Collection[int]) -> int:
        """Give the sources of a new recomputation to decided ones that read it (Algorithm E).

        Returns:
            How often the new one is made (recomp_cnt).
        """
        count = 1
        for other in recomputed:
            if not self._replaced(chosen, other, recomputed, self._readings.sources_in_memory):
                continue
            count += 1
            if self._readings.totals_of_existing:
                self.costs[other].total_seconds = self.costs[other].seconds
        return count

    def remaining(
        self, chosen: int, count: int, candidates: Collection[int], recomputed: Collection[int]
    ) -> None:
        """Give the sources of what is not retained to candidates that read it (Algorithm F)."""
        for candidate in candidates:
            if candidate not in self.costs:
                continue
            cost = self.costs[candidate]
            if self._replaced(chosen, candidate, recomputed, keep_residents=True):
                cost.total_seconds = cost.seconds * self._count(candidate, recomputed)
            if chosen in self.costs and candidate in self.costs[chosen].sources:
                cost.total_seconds = count * cost.seconds
            if self._readings.totals_of_all:
                cost.total_seconds = cost.seconds * self._count(candidate, recomputed)

    def _count(self, v: int, recomputed: Iterable[int]) -> int:
        """Count how often a tensor is made: for itself, and in each recomputation that reads it."""
        return 1 + sum(v in self.costs[other].sources for other in recomputed)

    def _replaced(
        self, gone: int, of: int, recomputed: Collection[int], keep_residents: bool
    ) -> bool:
        """Replace one source of a tensor by those that it is made from; return whether that was
        done. What cannot be recomputed stays: it has to arrive in time."""
        cost = self.costs[of]
        if gone == of or gone not in cost.sources or gone not in self.costs:
            return False
        if keep_residents and self.in_memory(gone, of):
            return False
        source = self.costs[gone]
        cost.sources = cost.sources - {gone} | source.sources
        cost.seconds += source.seconds
        cost.nbytes += source.nbytes
        if self._readings.sources_in_memory:
            for other in recomputed:
                self._replaced(other, of, recomputed, keep_residents=True)
        return True
