"""What is swapped and what is recomputed: Algorithm B, of one merged graph, and of those between
which sub-arrays alternate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from capture.papers.mutwo.engine import Engine, Execution
from capture.papers.mutwo.graph import Pair, TrainingGraph
from capture.papers.mutwo.memory import GraphMemory, Instant, memory_of
from capture.papers.mutwo.overhead import Case, swap_overhead, update_swap_prompts
from capture.papers.mutwo.readings import Readings
from capture.papers.mutwo.schedule import PairSchedule


@dataclass(frozen=True)
class LoopPass:
    """The decision of one pass through the loop of Algorithm B.

    Attributes:
        tensor: That was decided.
        what: Became of it.
        seconds: That it costs, as the algorithm counts.
        case: Of the swap that was weighed.
    """

    tensor: int
    what: Literal["swap", "recompute"]
    seconds: float
    case: Case


@dataclass
class SwapPolicy:
    """The state of Algorithm B on one merged graph.

    Attributes:
        schedule: Of it.
        limit_bytes: What may be held (mem_limit).
        candidates: Left to choose (candidate_set).
        choices: In order.
    """

    schedule: PairSchedule
    limit_bytes: int
    candidates: list[int] = field(default_factory=list)
    choices: list[LoopPass] = field(default_factory=list)

    def __post_init__(self):
        self.candidates = list(self.schedule.graph.intermediates)

    @property
    def fits(self) -> bool:
        return memory_of(self.schedule).peak_bytes <= self.limit_bytes

    def run(self) -> bool:
        """Run the loop; return whether the limit is kept at its end (M-e, M-f)."""
        if self.schedule.readings.limit_first and self.fits:
            return True
        while self.candidates:
            self.decide()
            if self.fits:
                return True
        return False

    def decide(self) -> LoopPass:
        """Swap or recompute the better candidate of both: one pass of the loop."""
        schedule, readings = self.schedule, self.schedule.readings
        graph, lineage = schedule.graph, schedule.lineage
        saved = schedule.save()
        swapped = max(
            self.candidates, key=lambda v: graph.idle_seconds(v, readings.idle_less_swaps)
        )
        quote = swap_overhead(schedule, swapped, self.limit_bytes)
        again = max((v for v in self.candidates if v in lineage.costs), key=lineage.ratio,
                    default=None)  # fmt: skip
        if again is None or quote.seconds < lineage.overhead(again):
            self.candidates.remove(swapped)
            schedule.swap(swapped, quote.prompt, quote.seconds, self.candidates)
            choice = LoopPass(swapped, "swap", quote.seconds, quote.case)
        else:
            if readings.rollback:
                schedule.restore(saved)
            # Printed, the candidate for swapping goes (M-a), and this one comes again.
            self.candidates.remove(again)
            choice = LoopPass(again, "recompute", lineage.overhead(again), quote.case)
            schedule.recompute(again, self.candidates)
        update_swap_prompts(
            schedule, again if choice.what == "recompute" else None, self.limit_bytes
        )
        self.choices.append(choice)
        return choice


@dataclass(frozen=True)
class CycleSchedule:
    """The schedule of sub-arrays in a cycle: each one's backward pass runs beside the forward pass
    of the next. Of two: [BW_1, FW_2] and [BW_2, FW_1].

    Attributes:
        policies: Of the merged graphs, by the sub-array of the backward pass.
        fits: Whether all keep the limit, as Algorithm G counts.
    """

    policies: tuple[SwapPolicy, ...]
    fits: bool

    @property
    def uses(self) -> tuple[GraphMemory, ...]:
        return tuple(memory_of(policy.schedule) for policy in self.policies)

    @property
    def peak_bytes(self) -> int:
        return max(use.peak_bytes for use in self.uses)

    def execute(self) -> Execution:
        """Execute one update of all models, by Algorithm H."""
        engine = Engine(self.policies[0].schedule.readings)
        for policy in self.policies:
            engine.run(policy.schedule.graph, policy.schedule.merged())
        return engine.execution


def schedule_cycle(
    graphs: Sequence[TrainingGraph], limit_bytes: int, readings: Readings, static_bytes: int = 0
) -> CycleSchedule:
    """Run Algorithm B on all merged graphs of some sub-arrays (3.2, 5).

    A forward pass offloads and deletes what was decided in the graph of its backward pass. Printed,
    they are scheduled one after the other, so most know no hints, and judged when all are decided;
    otherwise (M-w) decisions are made one by one, each of the sub-array whose tensors hold most of
    the highest peak, until all keep the limit.

    Args:
        graphs: The sub-arrays; a pair of them, as in the paper, or more.
        limit_bytes: What may be held.
        readings: Of the algorithms.
        static_bytes: Resident in any case.
    """
    nexts = [*graphs[1:], graphs[0]]
    policies = tuple(
        SwapPolicy(PairSchedule(Pair(graph, following, static_bytes), readings), limit_bytes)
        for graph, following in zip(graphs, nexts, strict=True)
    )
    if not readings.both_graphs:
        for n, policy in enumerate(policies):
            policy.run()
            _tell(policy, policies[n - 1])
        return CycleSchedule(policies, all(policy.fits for policy in policies))
    while not all(policy.fits for policy in policies):
        chosen = _next(policies)
        if chosen is None:
            return CycleSchedule(policies, False)
        policies[chosen].decide()
        _tell(policies[chosen], policies[chosen - 1])
    return CycleSchedule(policies, True)


def _tell(decided: SwapPolicy, other: SwapPolicy) -> None:
    """Tell the graph with the decided sub-array's forward pass what to offload and delete there."""
    now = decided.schedule.now
    other.schedule.hints = frozenset(now.swaps), frozenset(now.recomputed) - frozenset(now.swaps)


def _next(policies: Sequence[SwapPolicy]) -> int | None:
    """Return the sub-array to decide next; None if no candidates are left. Its tensors are held
    before its backward pass in one graph, and behind its forward pass in the one before."""
    uses = [memory_of(policy.schedule) for policy in policies]
    fullest = max(range(len(uses)), key=lambda n: (uses[n].peak_bytes, -n))
    held = uses[fullest].held
    peak = max(range(len(held)), key=lambda at: held[at][1])
    before = {instant for instant, _ in held[:peak]}
    backward, forward = _resident(policies[fullest].schedule, before)
    following = (fullest + 1) % len(policies)
    order = [fullest, following] if backward >= forward else [following, fullest]
    return next((n for n in [*order, *range(len(policies))] if policies[n].candidates), None)


def _resident(schedule: PairSchedule, done: set[Instant]) -> tuple[int, int]:
    """Return the bytes of undecided tensors of the backward and forward pass at an instant."""
    graph, forward, now = schedule.graph, schedule.pair.forward_of, schedule.now
    backward_bytes = sum(
        graph.values[v].nbytes
        for v in graph.intermediates
        if v not in now.swaps and v not in now.recomputed
        if ("backward", graph.first_bw_access[v]) not in done
    )
    forward_bytes = sum(
        forward.values[v].nbytes
        for v in forward.intermediates
        if ("forward", forward.last_fw_access[v]) in done
        if v not in schedule.hints[0] and v not in schedule.hints[1]
    )
    return backward_bytes, forward_bytes
