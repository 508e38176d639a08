"""The least peak of every suffix of a pipeline whose stages stay within a byte limit.

A state is (p, a, first): p devices are used, a stages follow, ``first`` is the next layer. Row r =
j - 1 of the cost table belongs to a stage with j stages to the end; the last of the K rows means "K
or more", and the last a "K - 1 or more". With the least bytes of a stage over its choices,

    tails[p, min(r + 1, K - 1), first] = min over degree d at p, stop of
                                         max(bytes[d][r, first, stop], tails[p + d, r, stop])

Few stages are within a limit near the least peak. So they are listed, not looked up in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from recommender.capture.problem import NEVER, SearchProblem


class Stages(NamedTuple):
    """Stages of one degree, by ascending row, then first, then stop; arrays (n,).

    Attributes:
        row: Of the cost table, and what follows the state behind the stage.
        state: Stages that follow the state before it.
        first, stop: Its layers.
        nbytes: Least bytes over its choices.
    """

    row: np.ndarray
    state: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    nbytes: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """The place of the first stage of every row and first layer."""
        others = np.diff(self.row, prepend=-1) | np.diff(self.first, prepend=-1)
        return np.flatnonzero(others)

    def take(self, which: np.ndarray) -> Stages:
        """Return some of the stages, by a mask or by their positions."""
        return Stages(*(column[which] for column in self))


class Reach:
    """The stages of a problem within a limit, and the least peaks of pipelines of them.

    Args:
        problem: What to search.
        rows: Per degree, least bytes over choices, (K, S) as in the problem's tables.
        limit: Bytes per device, below ``NEVER``.

    Attributes:
        stages: By degree.
        tails: (D + 1, K, L + 1): least peak behind every state; ``NEVER`` if nothing is within the
            limit.
        peak: The least peak of a whole plan, likewise.
    """

    def __init__(self, problem: SearchProblem, rows: Mapping[int, np.ndarray], limit: int):
        self.problem, num_rows = problem, problem.num_positions
        self.stages = {d: _within(problem, table, limit) for d, table in rows.items()}
        self.tails = np.full((len(problem.degrees) + 1, num_rows, problem.num_layers + 1), NEVER)
        self.tails[-1, 0, -1] = -NEVER
        starts = {d: of.starts for d, of in self.stages.items()}
        for p in reversed(range(len(problem.degrees))):
            for d in problem.degrees[p]:
                of, start = self.stages[d], starts[d]
                if len(start):
                    peaks = np.maximum(of.nbytes, self.tails[p + d][of.row, of.stop])
                    least = np.minimum.reduceat(peaks, start)
                    np.minimum.at(self.tails[p], (of.state[start], of.first[start]), least)
        self.peak = int(self.tails[0, :, 0].min())

    def on_plans(self) -> tuple[dict[int, Stages], np.ndarray]:
        """Return the stages within the least peak by degree, and the states on plans of least
        peak, a mask (D + 1, K, L + 1)."""
        within = {d: of.take(of.nbytes <= self.peak) for d, of in self.stages.items()}
        goes_on = self.tails <= self.peak
        live = np.zeros_like(goes_on)
        live[0, :, 0] = goes_on[0, :, 0]
        for p, here in enumerate(self.problem.degrees):
            for d in here:
                of = within[d]
                on = of.take(live[p][of.state, of.first] & goes_on[p + d][of.row, of.stop])
                live[p + d][on.row, on.stop] = True
        return within, live

    def plan(self) -> list[tuple[int, int, int]]:
        """Return a plan of least peak as (first, stop, degree), which there must be.

        Of several: the smallest degree, then the fewest layers first, then the fewest stages.
        """
        cuts, p, first, state = list[tuple[int, int, int]](), 0, 0, -1
        goes_on = self.tails <= self.peak
        while p < len(self.problem.degrees):
            ways = []
            for d in self.problem.degrees[p]:
                of = self.stages[d]
                is_next = (of.first == first) & (of.nbytes <= self.peak)
                is_next &= goes_on[p + d][of.row, of.stop] & ((of.state == state) | (p == 0))
                of = of.take(is_next)
                ways += [(d, *way) for way in zip(of.stop.tolist(), of.row.tolist(), strict=True)]
            d, stop, state = min(ways)
            cuts.append((first, stop, d))
            p, first = p + d, stop
        return cuts


def _within(problem: SearchProblem, rows: np.ndarray, limit: int) -> Stages:
    first, stop = np.nonzero(problem.spread((rows <= limit).any(axis=0) & ~problem.empty))
    nbytes = rows[:, problem.kinds[first, stop]]
    row, at = np.nonzero(nbytes <= limit)
    state = np.minimum(row + 1, problem.num_positions - 1)
    return Stages(row, state, first[at], stop[at], nbytes[row, at])


def rows_behind(state: int, num_rows: int) -> list[int]:
    """Return the rows that the next stage of a state may use: the last state comes before both of
    the last rows."""
    return [state - 1] * (state > 0) + [state] * (state == num_rows - 1)


def spans_of(alive: np.ndarray) -> list[tuple[int, int]]:
    """Return per p the interval of first layers that holds all states of a mask (D + 1, L + 1); (0,
    0) if none."""
    low, high = alive.argmax(axis=1), alive.shape[1] - alive[:, ::-1].argmax(axis=1)
    return [
        (int(a), int(b)) if some else (0, 0)
        for a, b, some in zip(low, high, np.any(alive, axis=1), strict=True)
    ]
