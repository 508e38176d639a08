"""The state that mu-TWO's algorithms share while they schedule one merged graph: what is swapped
and from which prompt, what is recomputed, and which forward operations stand before which backward
ones. Every change can be undone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from capture.papers.mutwo.graph import Operation, Pair, TrainingGraph
from capture.papers.mutwo.lineage import Lineage, RecomputeCost
from capture.papers.mutwo.readings import Readings


class Prompt(NamedTuple):
    """The place where a fetch begins: before a backward operation, or before the forward operations
    that stand before it for the sake of this fetch.

    Attributes:
        rank: Backward.
        at_forward: Whether at these forward operations.
    """

    rank: int
    at_forward: bool = False

    @property
    def place(self) -> tuple[int, bool]:
        """The key by which prompts are ordered: rank, forward operations first."""
        return self.rank, not self.at_forward


_FIRST = Prompt(0)


class Share(NamedTuple):
    """The forward operations that stand before the access of a swapped tensor, to hide its copy.

    Attributes:
        rank: Backward, of the access.
        num: How many.
        seconds: That they have to take at least.
    """

    rank: int
    num: int
    seconds: float


@dataclass(frozen=True)
class Node:
    """An operation of a merged graph, with its hints (Table A).

    Attributes:
        graph: Whose it is.
        side: Of which pass (gtype).
        rank: In its graph.
        to_prefetch, to_recompute: Tensors of the backward pass, before it runs.
        to_delete, to_offload: Tensors of the forward pass, after it has run.
    """

    graph: TrainingGraph
    side: Literal["forward", "backward"]
    rank: int
    to_prefetch: tuple[int, ...] = ()
    to_recompute: tuple[tuple[int, RecomputeCost], ...] = ()
    to_delete: tuple[int, ...] = ()
    to_offload: tuple[int, ...] = ()

    @property
    def operation(self) -> Operation:
        return self.graph.operations[self.rank]


@dataclass
class Decided:
    """The decisions about a pair, which are all of its state that changes.

    Attributes:
        swaps: Tensor -> its prompt, in the order of decision.
        recomputed: In the order of decision.
        shares: Tensor -> the forward operations before its access.
        costs: Of recomputing, as ``Lineage`` keeps them.
        last_prompt: The one from which copies in are taken already (last_prompt).
        reached_peak: Whether a walk was cut by the peak interval.
        stalls: Tensor -> seconds of its copy that nothing hides.
    """

    swaps: dict[int, Prompt] = field(default_factory=dict)
    recomputed: list[int] = field(default_factory=list)
    shares: dict[int, Share] = field(default_factory=dict)
    costs: dict[int, RecomputeCost] = field(default_factory=dict)
    last_prompt: Prompt = _FIRST
    reached_peak: bool = False
    stalls: dict[int, float] = field(default_factory=dict)


class PairSchedule:
    """The schedule of one pair, as far as it is decided.

    Args:
        pair: The graphs.
        readings: Of the algorithms.

    Attributes:
        hints: What the forward pass offloads, and what it deletes: decided in the other graph.
    """

    def __init__(self, pair: Pair, readings: Readings):
        self.pair, self.readings = pair, readings
        self.graph = pair.backward_of
        self.lineage = Lineage(self.graph, readings)
        # Printed, the last node; counted from there, the first prompt would need what it fetches.
        last = self.graph.num_backward - (0 if readings.last_counted_prompt else 1)
        self.now = Decided(costs=self.lineage.costs, last_prompt=Prompt(last))
        self.hints: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    # ---- what is decided, and undoing it ---------------------------------------------------------

    def save(self) -> Decided:
        """Return a copy of the decisions, for ``restore`` to come back to, once."""
        now = self.now
        return replace(
            now,
            swaps=dict(now.swaps),
            recomputed=list(now.recomputed),
            shares=dict(now.shares),
            costs=self.lineage.copy(),
            stalls=dict(now.stalls),
        )

    def restore(self, saved: Decided) -> None:
        self.now = saved
        self.lineage.costs = saved.costs

    def swap(self, v: int, prompt: Prompt, stall: float, candidates: Collection[int]) -> None:
        """Swap a tensor (Algorithm B, lines 11 and 12), and what follows for others (20 and 21).

        Args:
            v: The tensor.
            prompt: Where its copy in begins.
            stall: Seconds of it that nothing hides.
            candidates: What is left to choose.
        """
        now = self.now
        now.swaps[v], now.stalls[v] = prompt, stall
        earliest = min(now.last_prompt, prompt, key=lambda one: one.place)
        now.last_prompt = earliest if self.readings.prompts_move_back else prompt
        count = 1
        if not self.readings.swaps_stay_sources:
            count = self.lineage.existing(v, now.recomputed)
        self.lineage.remaining(v, count, candidates, now.recomputed)

    def recompute(self, v: int, candidates: Collection[int]) -> None:
        """Recompute a tensor (lines 15 and 16), and update the costs of others (20 and 21)."""
        count = self.lineage.existing(v, self.now.recomputed)
        self.now.recomputed.append(v)
        self.lineage.remaining(v, count, candidates, self.now.recomputed)

    def access(self, v: int) -> int:
        """Return the backward rank at which a swapped tensor has to be there: its first access, or
        that of a recomputation that reads it (A.5)."""
        costs, first = self.lineage.costs, self.graph.first_bw_access
        return min([first[v], *(first[r] for r in self.now.recomputed if v in costs[r].sources)])

    def arrive_in_time(self) -> list[int]:
        """Move prompts behind the access of a new recomputation (A.5); return their tensors."""
        late = [v for v, prompt in self.now.swaps.items() if prompt.rank > self.access(v)]
        for v in late:
            self.now.swaps[v] = Prompt(self.access(v))
        return late

    # ---- forward operations beside the backward pass ---------------------------------------------

    def _in_order(self) -> list[int]:
        """Return the tensors with shares, as these follow each other: by access, and before one
        access what was decided last comes first, as prompts move back."""
        shares = self.now.shares
        age = {v: n for n, v in enumerate(shares)}
        return sorted(shares, key=lambda v: (shares[v].rank, -age[v]))

    def first_forward(self, v: int, rank: int) -> int:
        """Return the rank of the first forward operation that stands, or would stand, for a tensor
        with this access."""
        before = 0
        for other in self._in_order():
            if other == v or (v not in self.now.shares and self.now.shares[other].rank >= rank):
                break
            before += self.now.shares[other].num
        return before

    def add_forward(self, v: int, rank: int, seconds: float) -> bool:
        """Add one more forward operation before an access (add_forward_node); those of later
        accesses are served by the ones that follow (adjust_graph).

        Args:
            v: The tensor.
            rank: Of its access.
            seconds: That its forward operations hide, with this one.

        Returns:
            Whether there are enough of them.
        """
        shares, forward = self.now.shares, self.pair.forward_of
        count = shares[v].num if v in shares else 0
        shares[v] = Share(rank, count + 1, seconds)
        at, behind = 0, False
        for other in self._in_order():
            share = shares[other]
            if behind:
                count, got = 0, 0.0
                while got < share.seconds - 1e-12 and at + count < forward.num_forward:
                    got += forward.operations[at + count].seconds
                    count += 1
                if got < share.seconds - 1e-12:
                    return False
                shares[other] = share._replace(num=count)
            behind = behind or other == v
            at += shares[other].num
        return at <= forward.num_forward

    # ---- the merged graph ------------------------------------------------------------------------

    def merged(self) -> list[Node]:
        """Return the operations of the merged graph in their order, with their hints."""
        fetched: dict[tuple[str, int], list[int]] = {}
        groups: dict[int, list[int]] = {}
        begins: dict[int, int] = {}
        at = 0
        for v in self._in_order():
            share, begins[v] = self.now.shares[v], at
            end = min(at + share.num, self.pair.forward_of.num_forward)
            groups.setdefault(share.rank, []).extend(range(at, end))
            at = end
        # What is needed first comes first; of one access, what was decided last.
        newest = list(self.now.swaps)[::-1]
        for v in sorted(newest, key=self.access):
            prompt = self.now.swaps[v]
            place = ("backward", prompt.rank)
            if prompt.at_forward and begins[v] in groups.get(prompt.rank, ()):
                place = ("forward", begins[v])
            fetched.setdefault(place, []).append(v)
        again: dict[int, list[int]] = {}
        for v in sorted(self.now.recomputed, key=lambda v: self.graph.writer[v]):
            again.setdefault(self.graph.first_bw_access[v], []).append(v)
        nodes: list[Node] = []
        for rank in range(self.graph.num_backward):
            nodes += self._forward(groups.get(rank, []), fetched)
            nodes.append(
                Node(
                    self.graph,
                    "backward",
                    self.graph.num_forward + rank,
                    tuple(fetched.get(("backward", rank), ())),
                    tuple((v, self.lineage.costs[v]) for v in again.get(rank, ())),
                )
            )
        return [*nodes, *self._forward(range(at, self.pair.forward_of.num_forward), fetched)]

    def _forward(self, ranks, fetched) -> Iterator[Node]:
        forward, (offloaded, deleted) = self.pair.forward_of, self.hints
        for rank in ranks:
            last = forward.last_fw_uses[rank]
            yield Node(
                forward,
                "forward",
                rank,
                tuple(fetched.get(("forward", rank), ())),
                to_delete=tuple(v for v in last if v in deleted),
                to_offload=tuple(v for v in last if v in offloaded),
            )
