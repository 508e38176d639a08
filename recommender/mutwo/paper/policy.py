"""What is swapped and what is recomputed: Algorithm B, of one merged graph, and of the two that a
pair of sub-arrays alternates between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from recommender.mutwo.paper.engine import Engine, Execution
from recommender.mutwo.paper.graph import Pair, TrainingGraph
from recommender.mutwo.paper.memory import MemoryUse, memory_of
from recommender.mutwo.paper.overhead import Case, swap_overhead, update_swap_prompts
from recommender.mutwo.paper.readings import Readings
from recommender.mutwo.paper.schedule import Schedule


@dataclass(frozen=True)
class Choice:
    """One pass through the loop of Algorithm B.

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
class Policy:
    """Algorithm B on one merged graph.

    Attributes:
        schedule: Of it.
        limit_bytes: What may be held (mem_limit).
        candidates: Left to choose (candidate_set).
        choices: In order.
    """

    schedule: Schedule
    limit_bytes: int
    candidates: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self):
        self.candidates = list(self.schedule.graph.intermediates)

    @property
    def fits(self) -> bool:
        return memory_of(self.schedule).peak_bytes <= self.limit_bytes

    def run(self) -> bool:
        """The loop: whether the limit is kept at its end (M-e, M-f)."""
        if self.schedule.readings.limit_first and self.fits:
            return True
        while self.candidates:
            self.decide()
            if self.fits:
                return True
        return False

    def decide(self) -> Choice:
        """One pass: the better candidate of both is swapped or recomputed."""
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
            choice = Choice(swapped, "swap", quote.seconds, quote.case)
        else:
            if readings.rollback:
                schedule.restore(saved)
            # Printed, the candidate for swapping goes (M-a), and this one comes again.
            self.candidates.remove(again)
            choice = Choice(again, "recompute", lineage.overhead(again), quote.case)
            schedule.recompute(again, self.candidates)
        update_swap_prompts(
            schedule, again if choice.what == "recompute" else None, self.limit_bytes
        )
        self.choices.append(choice)
        return choice


@dataclass(frozen=True)
class PairSchedule:
    """Of two sub-arrays: [BW_1, FW_2], then [BW_2, FW_1].

    Attributes:
        policies: Of both merged graphs.
        fits: Whether both keep the limit, as Algorithm G counts.
    """

    policies: tuple[Policy, Policy]
    fits: bool

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        return tuple(memory_of(policy.schedule) for policy in self.policies)

    @property
    def peak_bytes(self) -> int:
        return max(use.peak_bytes for use in self.uses)

    def execute(self) -> Execution:
        """One body, by Algorithm H."""
        engine = Engine(self.policies[0].schedule.readings)
        for policy in self.policies:
            engine.run(policy.schedule.graph, policy.schedule.merged())
        return engine.execution


def schedule_pair(
    first: TrainingGraph,
    second: TrainingGraph,
    limit_bytes: int,
    readings: Readings,
    static_bytes: int = 0,
) -> PairSchedule:
    """Algorithm B on both merged graphs of a pair (3.2, 5).

    The forward pass of one graph offloads and deletes what was decided in the other. Printed, they
    are scheduled one after the other, so the first one knows no hints; otherwise (M-w) decisions
    are made one by one, each in the graph whose tensors hold most of the higher peak, until both
    keep the limit.

    Args:
        first, second: The sub-arrays.
        limit_bytes: What may be held.
        readings: Of the algorithms.
        static_bytes: Resident in any case.
    """
    pairs = Pair(first, second, static_bytes), Pair(second, first, static_bytes)
    one, two = (Policy(Schedule(pair, readings), limit_bytes) for pair in pairs)
    if not readings.both_graphs:
        fits = one.run()
        _tell(one, two)
        fits = two.run() and fits
        return PairSchedule((one, two), fits)
    while not (one.fits and two.fits):
        policy = _next(one, two)
        if policy is None:
            return PairSchedule((one, two), False)
        policy.decide()
        _tell(one, two)
        _tell(two, one)
    return PairSchedule((one, two), True)


def _tell(decided: Policy, other: Policy) -> None:
    """The forward pass in the other graph is that of the sub-array whose tensors are decided."""
    now = decided.schedule.now
    other.schedule.hints = frozenset(now.swaps), frozenset(now.recomputed) - frozenset(now.swaps)


def _next(one: Policy, two: Policy) -> Policy | None:
    """Where to decide next: a tensor of a sub-array is held before its backward pass in one graph,
    and behind its forward pass in the other."""
    uses = memory_of(one.schedule), memory_of(two.schedule)
    fuller = 0 if uses[0].peak_bytes >= uses[1].peak_bytes else 1
    instants = [instant for instant, _ in uses[fuller].held]
    peak = max(range(len(instants)), key=lambda at: uses[fuller].held[at][1])
    policies = (one, two) if fuller == 0 else (two, one)
    behind, forward = _resident(policies[0].schedule, instants[:peak])
    order = policies if behind >= forward else policies[::-1]
    return next((policy for policy in order if policy.candidates), None)


def _resident(schedule: Schedule, before: list[tuple[str, int]]) -> tuple[int, int]:
    """Bytes of undecided tensors at an instant: of the backward pass, and of the forward pass."""
    graph, forward, now = schedule.graph, schedule.pair.forward_of, schedule.now
    done = set(before)
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
