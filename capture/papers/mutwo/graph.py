"""The graph of a sub-array for mu-TWO's algorithms, and all that follows from it without running:
when its feature maps are used, and what its operations hold with all of them swapped out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class GraphValue:
    """A tensor that one operation passes to others.

    Attributes:
        name: For people.
        nbytes: Of it (memory_size).
        swap_in_seconds, swap_out_seconds: Of a copy from the host, and to it (swap_time).
    """

    name: str
    nbytes: int
    swap_in_seconds: float = 0.0
    swap_out_seconds: float = 0.0


@dataclass(frozen=True)
class Operation:
    """A node of a training graph.

    Attributes:
        name: Unique in its graph.
        reads, writes: Values.
        seconds: Of one execution (run_time).
        temporaries_bytes: Its workspace, beside what it reads and writes.
        donated: Values that end in it, in whose room it writes.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float
    temporaries_bytes: int = 0
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slice:
    """The operations that make an intermediate again, while everything else is retained.

    Attributes:
        sources: Intermediates that it reads (recomp_srcs).
        seconds: Of it (recomp_time).
        nbytes: That it takes beside its sources, with what it makes (recomp_memory).
    """

    sources: frozenset[int]
    seconds: float
    nbytes: int


@dataclass(frozen=True, eq=False)
class TrainingGraph:
    """The forward and backward pass of a sub-array. What is there before the step, such as weights
    and the batch, is no value: its bytes are static.

    Ranks count operations from 0, the backward pass after the forward pass; a *backward rank*
    counts from the first operation backward.

    Attributes:
        name: For people.
        values: By number.
        operations: In topological order, forward pass first.
        num_forward: Operations of the forward pass.
        given_slices: Of intermediates that may be recomputed; None to derive all of them from the
            operations.
    """

    name: str
    values: tuple[GraphValue, ...]
    operations: tuple[Operation, ...]
    num_forward: int
    given_slices: Mapping[int, Slice] | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each value, by its number."""
        return tuple(value.nbytes for value in self.values)

    @property
    def num_backward(self) -> int:
        return len(self.operations) - self.num_forward

    @cached_property
    def writer(self) -> dict[int, int]:
        """The rank of the operation that writes each value."""
        return {v: rank for rank, op in enumerate(self.operations) for v in op.writes}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """The ranks of the operations that read each value, ascending."""
        found: dict[int, list[int]] = {v: [] for v in range(len(self.values))}
        for rank, op in enumerate(self.operations):
            for v in op.reads:
                found[v].append(rank)
        return {v: tuple(ranks) for v, ranks in found.items()}

    # ---- attributes of Tables A and B ------------------------------------------------------------

    @cached_property
    def intermediates(self) -> tuple[int, ...]:
        """The feature maps: values that the forward pass makes and the backward pass reads."""
        return tuple(
            v
            for v in range(len(self.values))
            if self.writer[v] < self.num_forward
            if self.readers[v] and self.readers[v][-1] >= self.num_forward
        )

    @cached_property
    def last_fw_access(self) -> dict[int, int]:
        """The rank at which the forward pass makes or reads each intermediate last."""
        return {
            v: max([self.writer[v], *(r for r in self.readers[v] if r < self.num_forward)])
            for v in self.intermediates
        }

    @cached_property
    def first_bw_access(self) -> dict[int, int]:
        """The backward rank at which each intermediate is first read."""
        return {
            v: min(r for r in self.readers[v] if r >= self.num_forward) - self.num_forward
            for v in self.intermediates
        }

    @cached_property
    def last_bw_access(self) -> dict[int, int]:
        """The backward rank at which each intermediate is last read."""
        return {v: self.readers[v][-1] - self.num_forward for v in self.intermediates}

    @cached_property
    def last_fw_uses(self) -> tuple[tuple[int, ...], ...]:
        """The intermediates whose last forward access it is, by rank of the forward pass."""
        return _at(self.last_fw_access, self.num_forward)

    @cached_property
    def first_bw_uses(self) -> tuple[tuple[int, ...], ...]:
        """The intermediates whose first backward access it is, by backward rank."""
        return _at(self.first_bw_access, self.num_backward)

    @cached_property
    def inactive_seconds(self) -> dict[int, float]:
        """The seconds between each intermediate's last access forward and its first backward."""
        ends = [0.0, *accumulate(op.seconds for op in self.operations)]
        return {
            v: ends[self.num_forward + self.first_bw_access[v]] - ends[self.last_fw_access[v] + 1]
            for v in self.intermediates
        }

    def idle_seconds(self, v: int, less_swaps: bool) -> float:
        """Return the seconds by which swaps are chosen: inactive time, or less both swaps."""
        value = self.values[v]
        swaps = value.swap_in_seconds + value.swap_out_seconds if less_swaps else 0.0
        return self.inactive_seconds[v] - swaps

    # ---- memory, with every intermediate swapped out between its accesses ------------------------

    @cached_property
    def _held(self) -> tuple[tuple[int, int, int], ...]:
        intermediates = set(self.intermediates)
        live, found = set[int](), []
        for rank, op in enumerate(self.operations):
            if rank >= self.num_forward:
                live.update(self.first_bw_uses[rank - self.num_forward])
            before = self._bytes(live)
            live.difference_update(op.donated)
            live.update(op.writes)
            after = self._bytes(live)
            for v in list(live):
                last = self.readers[v][-1] if self.readers[v] else rank
                if last <= rank or (v in intermediates and self.last_fw_access[v] == rank):
                    live.remove(v)
            # What is donated is gone when the workspace is needed beside what is written.
            found.append((max(before, after), after + op.temporaries_bytes, self._bytes(live)))
        return tuple(found)

    def _bytes(self, values) -> int:
        return sum(self.values[v].nbytes for v in values)

    @cached_property
    def active_bytes(self) -> tuple[int, ...]:
        """The bytes of inputs, outputs and what else is alive at each rank, without the workspace
        (active_mem); without static memory."""
        return tuple(active for active, _, _ in self._held)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The bytes held at each rank with the workspace (peak_mem); without static memory."""
        return tuple(peak for _, peak, _ in self._held)

    @cached_property
    def rest_bytes(self) -> tuple[int, ...]:
        """The bytes that stay after each rank, without intermediates that are swapped out then."""
        return tuple(rest for _, _, rest in self._held)

    # ---- recomputation ---------------------------------------------------------------------------

    @cached_property
    def slices(self) -> Mapping[int, Slice]:
        """The slice that makes each intermediate again that may be recomputed."""
        if self.given_slices is not None:
            return self.given_slices
        return {v: self._slice(v) for v in self.intermediates}

    def _slice(self, target: int) -> Slice:
        """Return the slice from a tensor back along its lineage, to intermediates that are in
        memory when it is needed; what is on two ways is made once (M-s)."""
        needed_at, kept = self.first_bw_access[target], set(self.intermediates)
        sources, ranks, pending = set[int](), set[int](), [target]
        while pending:
            v = pending.pop()
            if v != target and v in kept and self.last_bw_access[v] >= needed_at:
                sources.add(v)
            elif self.writer[v] not in ranks:
                ranks.add(self.writer[v])
                pending += self.operations[self.writer[v]].reads
        made = {v for rank in ranks for v in self.operations[rank].writes}
        most = max(self.operations[rank].temporaries_bytes for rank in ranks)
        seconds = sum(self.operations[rank].seconds for rank in sorted(ranks))
        return Slice(frozenset(sources - made), seconds, self._bytes(made) + most)


def _at(access: Mapping[int, int], count: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for v, rank in access.items():
        found[rank].append(v)
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Pair:
    """The merged graph to schedule: a sub-array's backward pass beside another's forward pass.

    Attributes:
        backward_of, forward_of: Their graphs (BW_j, FW_i).
        static_bytes: Resident in any case: the weights of all sub-arrays, and their batches.
    """

    backward_of: TrainingGraph
    forward_of: TrainingGraph
    static_bytes: int = 0
