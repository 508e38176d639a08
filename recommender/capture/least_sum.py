"""Least sum of stage times where stages, updates and peaks have caps: one suffix programme over
(device, stages after, layer).

A state is (p, a, first): the devices from p and the layers from ``first`` are to be placed, in a
stages, as in ``reach.py``: of K position rows the last means "K or more", so a stops at K - 1. With
``value[r]`` the least value of a range over its choices at row r,

    tails[p][r + 1, first] = min over degree d at p, stop of
                             value[d][r, first, stop] + tails[p + d][r, stop]

The longest update of a plan is no sum. But it is at least any weighted mean, and the shares d / D
of the devices add up to 1 in every plan, so that the sum of ``t + d / D x max(u, shortest)`` is at
most the sum of t plus the longest u, where that is at least ``shortest``. The programme minimises
this sum. It is exact once only one value of the longest update is left.

The same programme without positions (K = 1, each stage at its best one) costs K times less. It
bounds every sum from below; often its plan is allowed where it stands and thus the answer; and its
prefixes and suffixes say which ranges can be part of a better plan.

Source: Alpa (OSDI 2022), section 5.2, solves a programme of this kind per candidate of the slowest
stage; positions, choices and the update are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from recommender.capture.minmax import least_largest
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.reach import rows_behind, spans_of
from recommender.capture.result import PlacedStage, placed
from recommender.capture.ticks import Ticks

Tables = Mapping[int, np.ndarray]
Cut = tuple[int, int, int]  # first, stop, degree


@dataclass(frozen=True)
class Caps:
    """The caps of a plan: stages up to ``slowest``, updates up to ``longest``; its longest update
    is at least ``shortest``."""

    slowest: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class TimedPlan:
    """A plan, its value as a step, and the parts of the value.

    Attributes:
        stages: In pipeline order.
        value: ``Ticks.step``.
        least_sum: What the programme minimised: no plan within the caps has a smaller sum of stages
            plus longest update.
        slowest: Largest value of a stage.
        update: Largest value of an update.
    """

    stages: tuple[PlacedStage, ...]
    value: int
    least_sum: int
    slowest: int
    update: int

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)


class LeastSum:
    """The programme of least sums for one memory limit.

    Args:
        problem: What to search.
        ticks: Its times.
        limit: Bytes per device; no stage above it is used.
    """

    def __init__(self, problem: SearchProblem, ticks: Ticks, limit: int):
        self.problem, self.ticks, self.limit = problem, ticks, min(limit, NEVER - 1)
        self.num_explored = 0
        self._fits = {d: problem.cost[d] <= self.limit for d in problem.used_degrees}
        self._fits_somewhere = {d: fits.any(axis=1) for d, fits in self._fits.items()}
        # Made once: new memory for every programme would take a third of the time.
        shape = problem.num_positions, *problem.kinds.shape
        self._tables = {d: np.full(shape, NEVER) for d in problem.used_degrees}
        self._used: dict[int, tuple[np.ndarray, ...]] = {}

    def least_slowest(self) -> int:
        """Return a lower bound for the slowest stage of every plan, whatever its positions;
        ``NEVER`` if there is no plan."""
        fitting = {
            d: np.where(fits, self.ticks.stage[d], NEVER).min(axis=0)
            for d, fits in self._fits_somewhere.items()
        }
        return least_largest(self.problem, fitting)

    def plan(self, caps: Caps, budget: int) -> TimedPlan | None:
        """Return the plan of least sum within caps; None if no sum is below ``budget``."""
        values = self._values(caps)
        relaxed = self._relaxed(values)
        tails = self._tails(relaxed, None)
        if tails[0, 0, 0] >= min(budget, NEVER):
            return None
        cuts = self._read(relaxed, tails)
        placed = zip(range(len(cuts), 0, -1), cuts, strict=True)
        if any(
            self._value(values, j, cut) != relaxed[cut[2]][0, cut[0], cut[1]] for j, cut in placed
        ):
            full, spans = self._full(values, relaxed, tails[:, 0], budget)
            tails = self._tails(full, spans)
            if tails[0, :, 0].min() >= min(budget, NEVER):
                return None
            cuts = self._read(full, tails)
        return self._timed(cuts, values, frugal=False)

    def frugal_plan(self, plan: TimedPlan) -> TimedPlan:
        """Return the plan of least peak among those of least sum that exceed neither the slowest
        stage nor the longest update of a plan."""
        values = self._values(Caps(plan.slowest, plan.update, plan.update))
        relaxed = self._relaxed(values)
        budget = plan.value - self.ticks.num_waits * (plan.slowest - 1) + 1
        full, spans = self._full(values, relaxed, self._tails(relaxed, None)[:, 0], budget)
        tails, own = self._tails(full, spans), self._bytes_of(values, full)
        peaks = np.full(tails.shape, NEVER)
        peaks[-1, 0, -1] = -NEVER
        for p, d, rows, firsts, stops in self._blocks(spans, tails.shape[1]):
            value = full[d][rows, firsts, stops] + tails[p + d, rows, None, stops]
            states = np.minimum(np.arange(tails.shape[1])[rows] + 1, tails.shape[1] - 1)
            tight = value == tails[p, states, firsts][..., None]
            peak = np.where(
                tight,
                np.maximum(own[d][rows, firsts, stops], peaks[p + d, rows, None, stops]),
                NEVER,
            ).min(axis=2)
            one_more(peaks[p, :, firsts], rows, peak)
        return self._timed(self._read(full, tails, own, peaks), values, frugal=True)

    def _relaxed(self, values: Tables) -> dict[int, np.ndarray]:
        """Return the least values where every stage stands at its best position, (1, L, L + 1)."""
        return {
            d: self.problem.spread(np.where(fits, values[d], NEVER).min(axis=0))[None]
            for d, fits in self._fits_somewhere.items()
        }

    def _values(self, caps: Caps) -> dict[int, np.ndarray]:
        """Return, per number of devices, what each stage adds to the sum, in ticks, shape
        (num_choices, S); ``NEVER`` where a stage is above one of the caps."""
        values, num_devices = {}, self.problem.cluster.num_devices
        for d, stage in self.ticks.stage.items():
            update = self.ticks.update[d]
            share = np.maximum(update, caps.shortest) // num_devices * d
            values[d] = np.where(
                (stage <= caps.slowest) & (update <= caps.longest), stage + share, NEVER
            )
        return values

    def _value(self, values: Tables, j: int, cut: Cut) -> int:
        """Return the least value of a stage over its choices that fit with j stages to the end."""
        first, stop, d = cut
        kind = self.problem.kinds[first, stop]
        fits = self._fits[d][:, min(j, self.problem.num_positions) - 1, kind]
        return int(np.where(fits, values[d][:, kind], NEVER).min())

    def _full(
        self, values: Tables, relaxed: Tables, tail: np.ndarray, budget: int
    ) -> tuple[dict[int, np.ndarray], list[tuple[int, int]]]:
        """Return the values at every position, ``NEVER`` where no plan below the budget can be, and
        the first layers such a plan can have.

        Returns:
            Per degree (K, L, L + 1), overwritten by the next call; per p the interval of first
            layers, (0, 0) if none.
        """
        problem, budget = self.problem, min(budget, NEVER)
        head = np.full(tail.shape, NEVER)
        head[0, 0] = 0
        useful = {d: np.zeros(table.shape[1:], bool) for d, table in relaxed.items()}
        for p, here in enumerate(problem.degrees):
            for d in here:
                both = relaxed[d][0] + head[p, :-1, None]
                np.minimum(head[p + d], both.min(axis=0), out=head[p + d])
                useful[d] |= np.minimum(both, NEVER) + tail[p + d] < budget
        for d, mask in useful.items():
            if d in self._used:
                first, stop = self._used[d]
                self._tables[d][:, first, stop] = NEVER
            first, stop = self._used[d] = np.nonzero(mask)
            kinds, at = np.unique(problem.kinds[first, stop], return_inverse=True)
            least = np.full((problem.num_positions, len(kinds)), NEVER)
            for fits, value in zip(self._fits[d], values[d], strict=True):
                np.minimum(least, np.where(fits[:, kinds], value[kinds], NEVER), out=least)
            self._tables[d][:, first, stop] = least[:, at]
        return self._tables, spans_of(head + tail < budget)

    def _bytes_of(self, values: Tables, full: Tables) -> dict[int, np.ndarray]:
        """Return the least bytes of the choices with the values of ``full``, (K, L, L + 1)."""
        least = {}
        for d, table in full.items():
            row, first, stop = np.nonzero(table < NEVER)
            kind, here = self.problem.kinds[first, stop], np.full(len(row), NEVER)
            choices = zip(self._fits[d], values[d], self.problem.cost[d], strict=True)
            for fits, value, cost in choices:
                gives = fits[row, kind] & (value[kind] == table[row, first, stop])
                np.minimum(here, np.where(gives, cost[row, kind], NEVER), out=here)
            least[d] = np.full(table.shape, NEVER)
            least[d][row, first, stop] = here
        return least

    def _blocks(
        self, spans: Sequence[tuple[int, int]] | None, num_rows: int
    ) -> Iterator[tuple[int, int, slice, slice, slice]]:
        """Yield device, degree, and the rows, first layers and next layers that matter, from the
        last device to the first."""
        problem, num_layers = self.problem, self.problem.num_layers
        num_devices = len(problem.degrees)
        for p in reversed(range(num_devices)):
            low, high = spans[p] if spans is not None else (0, num_layers)
            for d in problem.degrees[p]:
                next_low, next_high = spans[p + d] if spans is not None else (0, num_layers + 1)
                rows = slice(
                    min(problem.fewest_stages[p + d], num_rows - 1),
                    min(num_devices - p - d, num_rows - 1) + 1,
                )
                stops = slice(max(next_low, low + 1), next_high)
                if low < high and rows.start < rows.stop and stops.start < stops.stop:
                    yield p, d, rows, slice(low, high), stops

    def _tails(self, tables: Tables, spans: Sequence[tuple[int, int]] | None) -> np.ndarray:
        """Return the least sum from every state, (D + 1, K, L + 1)."""
        num_rows = next(iter(tables.values())).shape[0]
        tails = np.full(
            (self.problem.cluster.num_devices + 1, num_rows, self.problem.num_layers + 1), NEVER
        )
        tails[-1, 0, -1] = 0
        for p, d, rows, firsts, stops in self._blocks(spans, num_rows):
            value = tables[d][rows, firsts, stops] + tails[p + d, rows, None, stops]
            self.num_explored += value.size
            one_more(tails[p, :, firsts], rows, value.min(axis=2))
        return tails

    def _read(
        self,
        tables: Tables,
        tails: np.ndarray,
        own: Tables | None = None,
        peaks: np.ndarray | None = None,
    ) -> list[Cut]:
        """Return the cuts of a plan of the least sum, and of the least peak among those if bytes
        and ``peaks`` are given."""
        num_rows = tails.shape[1]
        keys = [
            (int(tails[0, a, 0]), 0 if peaks is None else int(peaks[0, a, 0]), a)
            for a in range(num_rows)
        ]
        state, p, first, cuts = min(keys)[2], 0, 0, list[Cut]()
        while p < len(self.problem.degrees):
            for row, d in product(rows_behind(state, num_rows), self.problem.degrees[p]):
                best = tables[d][row, first] + tails[p + d, row] == tails[p, state, first]
                if own is not None and peaks is not None:
                    best &= (
                        np.maximum(own[d][row, first], peaks[p + d, row]) == peaks[p, state, first]
                    )
                if best.any():
                    break
            else:
                raise AssertionError("every state that has a sum has a stage that leads on")
            stop = int(best.argmax())
            cuts.append((first, stop, d))
            state, p, first = row, p + d, stop
        return cuts

    def _timed(self, cuts: Sequence[Cut], values: Tables, *, frugal: bool) -> TimedPlan:
        """Return the stages with the choices of least value; among equal ones that of the fewest
        bytes, or else of the shortest update."""
        stages, times, updates, device, least_sum = [], [], [], 0, 0
        for stage_id, (first, stop, d) in enumerate(cuts):
            own = self.problem.bytes_per_choice(d, len(cuts) - stage_id, first, stop)
            kind = self.problem.kinds[first, stop]
            value = np.where(own <= self.limit, values[d][:, kind], NEVER)
            time, update = self.ticks.stage[d][:, kind], self.ticks.update[d][:, kind]
            choice = int(np.lexsort([update, own, value] if frugal else [own, update, value])[0])
            stages.append(
                placed(device, first, stop, self.problem.choices[d][choice], int(own[choice]))
            )
            times.append(int(time[choice]))
            updates.append(int(update[choice]))
            least_sum += int(value[choice])
            device += d
        return TimedPlan(
            tuple(stages), self.ticks.step(times, updates), least_sum, max(times), max(updates)
        )


def one_more(states: np.ndarray, rows: slice, least: np.ndarray) -> None:
    """Lower the states (K, n) that lie before stages of the given rows."""
    if rows.stop == len(states):
        np.minimum(states[-1], least[-1], out=states[-1])
        rows, least = slice(rows.start, rows.stop - 1), least[:-1]
    before = states[rows.start + 1 : rows.stop + 1]
    np.minimum(before, least, out=before)
