"""A bound that no step is below, whatever the schedule: for proofs, where a closed form of a step
may be above it.

    step >= max over stages s of  t_1 + ... + t_(s-1) + M t_s,  and then the update of the first

Stage s begins when a micro-batch has gone forward through all stages before it, works on M of them,
and the backward pass of its last one goes back through the same stages, after which the first one
updates. Transfers, feeds, and what stages behind s make it wait are left out. Of one stage it is
``M t + u``, the step itself.

Alpa's ``sum t + (M - 1) max t + max u`` is no bound: the longest update may run beside the way back
to the first stage, and 1F1B hides stages behind the slowest one. It stays what proposes plans.

With V(p, first) the least of the plans of layers from ``first`` on devices from p, for stages that
fit, one programme from the last device to the first finds it:

    V(p, first) = min over degree d, stop, choice of  max(M t, t + V(p + d, stop))

What is known of the way on bounds every beginning of a plan, so that plans can be had one by one,
those of the least bound first (A*: Hart, Nilsson and Raphael 1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise, product
from typing import NamedTuple

import numpy as np

from capture.plan.choices import num_full_layers
from recommender.capture.least_sum import one_more
from recommender.capture.minmax import least_peak
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.reach import rows_behind
from recommender.capture.result import PlacedStage

#: Limits of memory that corners are found of.
MAX_LIMITS = 32


class _Beginning(NamedTuple):
    """The first stages of plans, and what a step with them takes at least.

    Attributes:
        seconds: Their micro-batch, forward and backward.
        working: Until the last of their micro-batches is through any of them, and the update of the
            first stage.
        update: Of the first stage.
        row: Of the stages that follow, as in the tails.
    """

    seconds: float = 0.0
    working: float = 0.0
    update: float = 0.0
    row: int = -1
    stages: tuple[PlacedStage, ...] = ()


class LeastStep:
    """The programme that bounds a step from below, of a problem with ``seconds``, for any limit."""

    def __init__(self, problem: SearchProblem):
        assert problem.seconds is not None, "only problems with times have a step time"
        self._problem, self._seconds = problem, problem.seconds
        self._num_rows = problem.num_positions

    def within(self, limit: int | None) -> tuple[float, int]:
        """Return a lower bound of the step of every plan within a limit, infinite if there is none.
        Return also the least limit for which the bound is known to be the same."""
        seconds, stages = self.plan(limit)
        return seconds, max((stage.peak_bytes for stage in stages), default=NEVER)

    def plan(self, limit: int | None) -> tuple[float, Sequence[PlacedStage]]:
        """Return the bound of ``within`` and a plan that has it; no stages if there is none."""
        problem, most = self._problem, NEVER - 1 if limit is None else min(limit, NEVER - 1)
        times, chosen = self._tables(most)
        tails = self._tails(times)
        ends = [
            (*self._first(d, c, tails[d], most), c, d)
            for d in problem.degrees[0]
            for c in range(len(problem.choices[d]))
        ]
        seconds, _, row, stop, c, d = min(ends, default=(np.inf, NEVER, 0, 0, 0, 0))
        if seconds == np.inf:
            return seconds, ()
        first = self._stage(0, d, c, (row, 0, stop))
        return seconds, (first, *self._behind(times, chosen, tails, (d, row, stop)))

    def corners(self) -> tuple[tuple[int, float], ...]:
        """Return (bytes, seconds) pairs: every plan within the problem's limit is at least as large
        and as slow as one of them; none if nothing fits."""
        top = self._problem.limit_bytes
        seconds, low = self.within(top)
        if seconds == np.inf:
            return ()
        least = least_peak(self._problem)
        # Ranges of limits, (first, last, seconds), ascending; between two of them it is not known.
        ranges = [(least, least, self.within(least)[0])] if least < low else []
        ranges.append((low, top, seconds))
        for turn in range(MAX_LIMITS):
            gaps = [
                (below[2] - above[2], i)
                for i, (below, above) in enumerate(pairwise(ranges))
                if below[1] + 1 < above[0] and below[2] > above[2]
            ]
            if not gaps:
                break
            i = max(gaps)[1]
            # In the middle the gap is halved; at its end it may close.
            limit = (ranges[i][1] + ranges[i + 1][0]) // 2 if turn % 2 else ranges[i + 1][0] - 1
            seconds, low = self.within(limit)
            ranges.insert(i + 1, (max(low, ranges[i][1] + 1), limit, seconds))
        starts = [least, *(last + 1 for _, last, _ in ranges)]
        found: list[tuple[int, float]] = []
        for start, (_, _, seconds) in zip(starts, ranges, strict=False):
            if not found or seconds < found[-1][1]:
                found.append((start, seconds))
        return tuple(found)

    def plans(self, limit: int, below: float) -> Iterator[tuple[float, Sequence[PlacedStage]]]:
        """Yield the plans within a limit whose bound is below some seconds, by ascending bound,
        each with its bound."""
        order, num_layers = count(), self._problem.num_layers
        tails = self._tails(self._tables(limit)[0])
        begun = [(0.0, next(order), _Beginning())]
        while begun:
            bound, _, beginning = heapq.heappop(begun)
            if beginning.stages and beginning.stages[-1].stop == num_layers:
                yield bound, beginning.stages
                continue
            for longer in self._longer(beginning, limit):
                last = longer.stages[-1]
                tail = longer.seconds + tails[last.devices[-1] + 1, longer.row, last.stop]
                bound = max(longer.working, tail + longer.update)
                if bound < below:
                    heapq.heappush(begun, (bound, next(order), longer))

    def _longer(self, beginning: _Beginning, limit: int) -> Iterator[_Beginning]:
        """Yield a beginning with one stage more, for every stage within the limit."""
        problem, (seconds, working, update, row, stages) = self._problem, beginning
        p, first = (stages[-1].devices[-1] + 1, stages[-1].stop) if stages else (0, 0)
        rows = rows_behind(row, self._num_rows) if stages else range(self._num_rows)
        for d in problem.degrees[p] if p < len(problem.degrees) else ():
            for c, choice in enumerate(problem.choices[d]):
                kinds = problem.kinds[first]
                own, times = problem.cost[d][c][:, kinds], self._seconds[d][c, kinds]
                if not stages and problem.update_seconds is not None:
                    once = problem.update_seconds[d][c, kinds]
                else:
                    once = np.full_like(times, update)
                # A mixture of no more layers is another name of "full".
                has_full = replace(choice, remat="full") in problem.choices[d]
                shortest = num_full_layers(choice.remat) * has_full + 1
                for r, stop in product(rows, range(first + shortest, problem.num_layers + 1)):
                    if own[r, stop] <= limit and times[stop] < np.inf:
                        t, u = float(times[stop]), float(once[stop])
                        until = seconds + problem.num_microbatches * t + u
                        stage = self._stage(p, d, c, (r, first, stop))
                        yield _Beginning(seconds + t, max(working, until), u, r, (*stages, stage))

    def _tails(self, times: dict[int, np.ndarray]) -> np.ndarray:
        """Return V by the number of stages that follow, (devices + 1, K, L + 1)."""
        degrees = self._problem.degrees
        shape = (len(degrees) + 1, self._num_rows, self._problem.num_layers + 1)
        tails = np.full(shape, np.inf)
        tails[-1, 0, -1] = 0.0
        for p in range(len(degrees) - 1, 0, -1):
            for d in degrees[p]:
                steps = self._steps(times[d], tails[p + d][:, None]).min(axis=2)
                one_more(tails[p, :, :-1], slice(0, self._num_rows), steps)
        return tails

    def _steps(self, times: np.ndarray, tails: np.ndarray) -> np.ndarray:
        return np.maximum(self._problem.num_microbatches * times, times + tails)

    def _tables(self, limit: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Return per degree the least seconds of every stage that fits, and a choice that has them,
        (K, L, L + 1)."""
        times, chosen, problem = {}, {}, self._problem
        for d in problem.used_degrees:
            shape = (self._num_rows, self._seconds[d].shape[1])
            least, best = np.full(shape, np.inf), np.zeros(shape, np.int64)
            for c, (own, seconds) in enumerate(zip(problem.cost[d], self._seconds[d], strict=True)):
                better = (own <= limit) & (seconds < least)
                np.copyto(least, seconds, where=better)
                np.copyto(best, c, where=better)
            times[d], chosen[d] = problem.spread(least), problem.spread(best)
        return times, chosen

    def _stage(self, p: int, d: int, c: int, at: tuple[int, int, int]) -> PlacedStage:
        """Return the stage with choice c on d devices from p on, at (row, first, stop)."""
        (row, first, stop), choice = at, self._problem.choices[d][c]
        peak = self._problem.bytes_per_choice(d, row + 1, first, stop)[c]
        return PlacedStage(first, stop, tuple(range(p, p + d)), choice, int(peak))

    def _first(self, d: int, c: int, tails: np.ndarray, limit: int) -> tuple[float, int, int, int]:
        """Return the least step with this first stage, its bytes, its next row, and its stop."""
        updates, kinds = self._problem.update_seconds, self._problem.kinds[0]
        own, times = self._problem.cost[d][c][:, kinds], self._seconds[d][c, kinds]
        steps = self._steps(times, tails) + (0.0 if updates is None else updates[d][c, kinds])
        steps = np.where(own <= limit, steps, np.inf)
        row, stop = np.unravel_index(int(steps.argmin()), steps.shape)
        return float(steps[row, stop]), int(own[row, stop]), int(row), int(stop)

    def _behind(
        self,
        times: dict[int, np.ndarray],
        chosen: dict[int, np.ndarray],
        tails: np.ndarray,
        at: tuple[int, int, int],
    ) -> list[PlacedStage]:
        """Return the stages behind the first one of the plan found."""
        (p, state, first), found = at, list[PlacedStage]()
        while 0 < p < len(tails) - 1 and tails[p, state, first] < np.inf:
            for row, d in product(rows_behind(state, len(tails[0])), self._problem.degrees[p]):
                steps = self._steps(times[d][row, first], tails[p + d, row])
                if steps.min() == tails[p, state, first]:
                    break
            else:
                raise AssertionError("every state that has a step has a stage that leads on")
            stop = int(steps.argmin())
            c = int(chosen[d][row, first, stop])
            found.append(self._stage(p, d, c, (row, first, stop)))
            p, state, first = p + d, row, stop
        return found
