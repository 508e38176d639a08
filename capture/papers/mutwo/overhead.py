"""What it costs to swap a tensor: Algorithm C, with its six cases, and what recomputations change
for swaps that are decided already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capture.papers.mutwo.engine import Engine
from capture.papers.mutwo.memory import GraphMemory, Instant, memory_of
from capture.papers.mutwo.schedule import PairSchedule, Prompt

Case = Literal["1a", "1b", "2a", "2b", "3"]
#: Seconds below which nothing is left of a copy.
NOTHING = 1e-12


@dataclass(frozen=True)
class Quote:
    """The cost of a swap, and where its copy in would begin.

    Attributes:
        seconds: Of the copy in, that nothing hides (swap_overhead).
        prompt: Where it begins (prefetch_prompt).
        case: Of 4.2.2: 1a the peak interval is reached before; 1b and another copy is on the link;
            2a hidden by forward operations; 2b by forward and backward ones, or backward ones
            alone; 3 in part.
    """

    seconds: float
    prompt: Prompt
    case: Case


def swap_overhead(schedule: PairSchedule, v: int, limit_bytes: int) -> Quote:
    """Return what it costs to swap a tensor (Algorithm C). Forward operations that hide the copy
    stand before its access from then on: whoever decides otherwise restores the schedule (M-i).

    Args:
        schedule: So far; it is changed.
        v: The tensor that would be swapped (swap_cand).
        limit_bytes: What may be held.
    """
    return _Overhead(schedule, v, limit_bytes).quote()


class _Overhead:
    def __init__(self, schedule: PairSchedule, v: int, limit_bytes: int):
        self._schedule, self._v, self._limit = schedule, v, limit_bytes
        self._readings, self._graph = schedule.readings, schedule.graph
        self._before = memory_of(schedule)
        self._peak = self._before.above(limit_bytes)
        self._access = schedule.access(v)

    def quote(self) -> Quote:
        schedule, access = self._schedule, self._access
        left = self._graph.values[self._v].swap_in_seconds
        left -= self._recomputed(access)
        if self._readings.credit_that_runs:
            left = max(0.0, left)
        if self._reached():
            if access < schedule.now.last_prompt.rank:
                return Quote(left, Prompt(access), "1a")
            return Quote(left + self._remaining(), Prompt(access), "1b")
        left = self._forward(left)
        if left <= NOTHING:
            hidden = self._v in schedule.now.shares
            return Quote(0.0, self._own_prompt(), "2a" if hidden else "2b")
        return self._backward(left)

    def earlier(self) -> Quote:
        """Return the quote for an access that now comes earlier: no more operations move."""
        left = max(
            0.0, self._graph.values[self._v].swap_in_seconds - self._recomputed(self._access)
        )
        if self._reached():
            return Quote(left, Prompt(self._access), "1a")
        return self._backward(left)

    def _reached(self) -> bool:
        """Return whether the peak interval lies right before the access, or, printed, was met by an
        earlier walk (M-c)."""
        if self._schedule.now.reached_peak and not self._readings.peak_asked_anew:
            return True
        return self._access == 0 or self._in_peak(self._access - 1)

    def _in_peak(self, rank: int) -> bool:
        """Return whether a backward operation was above the limit in the schedule as it was. The
        tensor is resident there, so it has room where nothing exceeds the limit."""
        return rank < 0 or ("backward", rank) in self._peak

    def _recomputed(self, rank: int) -> float:
        """Return the seconds of recomputations before a backward operation (get_recomp_time). What
        reads the tensor itself waits for it, and what hides another copy does not hide this one."""
        graph, now = self._graph, self._schedule.now
        again = [v for v in now.recomputed if graph.first_bw_access[v] == rank]
        costs = self._schedule.lineage.costs
        if self._readings.credit_that_runs:
            taken = any(prompt.rank <= rank <= self._schedule.access(v)
                        for v, prompt in now.swaps.items())  # fmt: skip
            again = [] if taken else [v for v in again if self._v not in costs[v].sources]
        return sum(costs[v].seconds for v in again)

    def _remaining(self) -> float:
        """Return the seconds that copies in begun before still take when the access would run
        (get_remaining_time, M-m)."""
        schedule, graph = self._schedule, self._graph
        events = Engine(self._readings).run(graph, schedule.merged()).events
        name = graph.operations[graph.num_forward + self._access].name
        at = next(n for n, one in enumerate(events) if one.label == f"{graph.name} {name}")
        copies = [one.end for one in events[:at] if one.stream == "in"]
        return max(0.0, max(copies, default=0.0) - events[at].start)

    # ---- forward operations ----------------------------------------------------------------------

    def _forward(self, left: float) -> float:
        """Put forward operations before the access, one after the other (cases 2 and 3, lines 19 to
        31); return the seconds that they leave of the copy."""
        schedule, forward = self._schedule, self._schedule.pair.forward_of
        needed = left
        first = schedule.first_forward(self._v, self._access) if self._readings.nodes_follow else 0
        while left > NOTHING and first < forward.num_forward:
            seconds = forward.operations[first].seconds
            saved = schedule.save()
            enough = schedule.add_forward(
                self._v, self._access, min(needed, needed - left + seconds)
            )
            if not (enough and self._safe()):
                if self._readings.rollback:
                    schedule.restore(saved)
                break
            left -= seconds
            first += 1
        return left

    def _safe(self) -> bool:
        """Return whether memory stays safe (check_mem_safety), with the tensor swapped (M-j)."""
        schedule = self._schedule
        saved = schedule.save()
        schedule.now.swaps[self._v] = self._own_prompt()
        use = memory_of(schedule)
        schedule.restore(saved)
        if not self._readings.nothing_above_limit:
            return use.peak_bytes < self._before.peak_bytes
        before = _most(self._before)
        held = _most(use)
        return all(nbytes <= max(self._limit, before.get(at, 0)) for at, nbytes in held.items())

    def _own_prompt(self) -> Prompt:
        """Return the prompt of a copy that forward operations hide, or that nothing has to hide."""
        if self._readings.prompts_anywhere:
            return Prompt(self._access, self._v in self._schedule.now.shares)
        if not self._readings.last_counted_prompt or self._v in self._schedule.now.shares:
            return Prompt(max(0, self._start()))
        return Prompt(self._access)

    # ---- backward operations ---------------------------------------------------------------------

    def _start(self) -> int:
        """Return the backward operation at which the walk begins (lines 33 to 37)."""
        last = self._schedule.now.last_prompt
        if self._access < last.rank:
            return self._access - 1
        return last.rank - 1 if self._readings.last_counted_prompt else last.rank

    def _backward(self, left: float) -> Quote:
        """Walk over the backward operations before the access, or before the last prompt (cases 2
        and 3, lines 38 to 43), and return the quote."""
        rank, prompt = self._start(), self._own_prompt()
        while left > NOTHING and not self._in_peak(rank):
            left -= self._window(rank)
            if self._readings.last_counted_prompt:
                prompt = Prompt(rank)
            rank -= 1
        if not self._readings.last_counted_prompt:
            prompt = Prompt(max(0, rank))
        if left > NOTHING:
            self._schedule.now.reached_peak = True
        return Quote(max(0.0, left), prompt, "3" if left > NOTHING else "2b")

    def _window(self, rank: int) -> float:
        """Return the seconds from the beginning of a backward operation to that of the next: with
        what is recomputed before it, and with the forward operations that follow it already."""
        seconds = self._graph.operations[self._graph.num_forward + rank].seconds
        seconds += self._recomputed(rank)
        if self._readings.nodes_follow and rank + 1 != self._access:
            seconds += self._behind(rank + 1)
        return seconds

    def _behind(self, rank: int) -> float:
        """Return the seconds of forward operations before a backward one, unless a copy has
        them."""
        last = self._schedule.now.last_prompt
        if rank >= last.rank and last.at_forward:
            return 0.0
        forward, shares = self._schedule.pair.forward_of, self._schedule.now.shares
        found = 0.0
        for v, share in shares.items():
            if share.rank == rank:
                first = self._schedule.first_forward(v, rank)
                found += sum(
                    forward.operations[at].seconds
                    for at in range(first, min(first + share.num, forward.num_forward))
                )
        return found


def _most(use: GraphMemory) -> dict[Instant, int]:
    """Return the bytes held per operation, by which two orders can be compared; copies count by
    what runs beside them."""
    return {instant: held for instant, held in use.held if instant[0] in ("backward", "forward")}


def update_swap_prompts(schedule: PairSchedule, recomputed: int | None, limit_bytes: int) -> None:
    """Update earlier swaps after a decision (Algorithm B, line 22; A.5): a tensor that a
    recomputation reads arrives before it, and a new recomputation hides what was left of a copy
    beside which it runs.

    Args:
        schedule: With the decision.
        recomputed: The tensor that is recomputed by it, if one is.
        limit_bytes: What may be held.
    """
    for v in schedule.arrive_in_time():
        saved = schedule.save()
        del schedule.now.swaps[v]
        quote = _Overhead(schedule, v, limit_bytes).earlier()
        schedule.restore(saved)
        now = schedule.now
        now.swaps[v], now.stalls[v] = quote.prompt, quote.seconds
        now.last_prompt = min(now.last_prompt, quote.prompt, key=lambda one: one.place)
    if recomputed is None:
        return
    now, cost = schedule.now, schedule.lineage.costs[recomputed]
    left, at = cost.seconds, schedule.graph.first_bw_access[recomputed]
    for v, prompt in now.swaps.items():
        if prompt.rank <= at <= schedule.access(v) and v not in cost.sources:
            hidden = min(left, now.stalls[v])
            now.stalls[v] -= hidden
            left -= hidden
