"""The pipeline suffixes that exist below a byte limit: 64 positions per machine word.

A state is (p, a, first): p devices are used, a stages follow, ``first`` is the next layer. Row r =
j - 1 of the cost table belongs to a stage with j stages to the end; the last of the K rows means "K
or more". The set of a's of one (p, first) is a row of K bits, and bit b stands for a = b, the top
bit for "K - 1 or more". One step of the programme is then an AND, an OR over stops and a shift:

    suffixes[p][first] = shift(OR over d, stop of allowed[d][stop, first] & suffixes[p + d][stop])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from recommender.capture.problem import NEVER, SearchProblem


@dataclass(frozen=True)
class Ranges:
    """The layer ranges of one degree that may matter, by ascending first, then stop.

    Attributes:
        first: (n,).
        stop: (n,).
        rows: int64 (n, K): least bytes per range and position.
    """

    first: np.ndarray
    stop: np.ndarray
    rows: np.ndarray


class Reach:
    """The reduced cost table of a problem and the states below a limit.

    Args:
        problem: What to search.
        floors: Per degree, least bytes over choices and positions, (L, L + 1).
        head: (D + 1, L + 1): a lower bound for the peak of the stages before a state.
        tail: The same for the stages after it.
        upper: Entries above it are dropped.
    """

    def __init__(
        self,
        problem: SearchProblem,
        floors: dict[int, np.ndarray],
        head: np.ndarray,
        tail: np.ndarray,
        upper: int,
    ):
        self.problem = problem
        self.num_words = -(-problem.num_positions // 64)
        self.state_floor = np.maximum(head, tail)
        self.ranges: dict[int, Ranges] = {}
        for d in problem.used_degrees:
            first, stop = np.nonzero((floors[d] <= upper) & (floors[d] < NEVER))
            self.ranges[d] = Ranges(first, stop, problem.least_rows(d, first, stop))
        used = np.arange(problem.num_positions)
        self._mask, self._top = self._words(np.stack([used >= 0, used == used[-1]]))

    def spans(self, limit: int) -> list[tuple[int, int]]:
        """Return per p the interval of first layers that a plan below the limit can have there; (0,
        0) if none."""
        return spans_of(self.state_floor <= limit)

    def allowed(self, limit: int) -> dict[int, np.ndarray]:
        """Return per degree the positions at which a range stays within the limit.

        Returns:
            uint64 (words, widest, L), indexed [word, stop - first - 1, first].
        """
        sets = {}
        for d, ranges in self.ranges.items():
            bits = self._words(ranges.rows <= limit)
            some = np.flatnonzero(bits.any(axis=1))
            first, width = ranges.first[some], ranges.stop[some] - ranges.first[some]
            sets[d] = np.zeros(
                (self.num_words, width.max(initial=0), self.problem.num_layers), np.uint64
            )
            sets[d][:, width - 1, first] = bits[some].T
        return sets

    def suffixes(self, limit: int) -> np.ndarray:
        """Return the states from which the rest can be placed within the limit: uint64 (D + 1,
        words, L + 1)."""
        return self._suffixes(self.allowed(limit), self.spans(limit))[
            :, :, : self.problem.num_layers + 1
        ]

    def _suffixes(self, allowed: dict[int, np.ndarray], spans: list[tuple[int, int]]) -> np.ndarray:
        num_devices, num_layers = self.problem.cluster.num_devices, self.problem.num_layers
        # Room for every first + width.
        sets = np.zeros((num_devices + 1, self.num_words, 2 * num_layers), np.uint64)
        sets[-1, 0, num_layers] = 1
        # [p, word, width, first] is sets[p, word, first + width].
        by_width = sliding_window_view(sets, num_layers, axis=2)
        for p in reversed(range(num_devices)):
            low, high = spans[p][0], min(spans[p][1], num_layers)
            if low >= high:
                continue
            here = np.zeros((self.num_words, high - low), np.uint64)
            for d in self.problem.degrees[p]:
                # Widths that lead from this interval of first layers into the next one.
                least, most = (
                    max(1, spans[p + d][0] - high + 1),
                    min(allowed[d].shape[1] + 1, spans[p + d][1] - low),
                )
                if least < most:
                    both = (
                        allowed[d][:, least - 1 : most - 1, low:high]
                        & by_width[p + d, :, least:most, low:high]
                    )
                    here |= np.bitwise_or.reduce(both, axis=1)
            sets[p, :, low:high] = self._one_more(here)
        return sets

    def plan(self, limit: int) -> list[tuple[int, int, int]]:
        """Return a plan within the limit as (first, stop, degree); [] if there is none.

        Of several: the fewest stages, then the smallest degree, then the fewest layers first.
        """
        allowed = self.allowed(limit)
        return self._read(allowed, self._suffixes(allowed, self.spans(limit)))

    def live(self, limit: int) -> np.ndarray:
        """Return the states on a complete plan within the limit: uint64 (D + 1, words, L + 1)."""
        suffixes, num_layers = self.suffixes(limit), self.problem.num_layers
        allowed = {}
        for d, ranges in self.ranges.items():
            allowed[d] = np.zeros((self.num_words, num_layers, num_layers + 1), np.uint64)
            allowed[d][:, ranges.first, ranges.stop] = self._words(ranges.rows <= limit).T
        live = np.zeros_like(suffixes)
        live[0, :, 0] = suffixes[0, :, 0]
        for p, here in enumerate(self.problem.degrees):
            firsts = np.flatnonzero(live[p].any(axis=0))
            if len(firsts):
                rows = self._one_less(live[p][:, firsts])
                for d in here:
                    placed = np.bitwise_or.reduce(allowed[d][:, firsts] & rows[..., None], axis=1)
                    live[p + d] |= placed & suffixes[p + d]
        return live

    def _read(
        self, allowed: dict[int, np.ndarray], suffixes: np.ndarray
    ) -> list[tuple[int, int, int]]:
        num_rows = self.problem.num_positions
        state = next((b for b in range(num_rows) if _has(suffixes[0, :, 0], b)), None)
        cuts: list[tuple[int, int, int]] = []
        p, first = 0, 0
        while state is not None and p < len(self.problem.degrees):
            state, d, stop = next(
                (row, d, first + 1 + int(widths[0]))
                for row in rows_behind(state, num_rows)
                for d in self.problem.degrees[p]
                if len(
                    widths := np.flatnonzero(
                        _has(self._next_states(allowed[d], suffixes[p + d], first), row)
                    )
                )
            )
            cuts.append((first, stop, d))
            p, first = p + d, stop
        return cuts

    def _next_states(self, allowed: np.ndarray, suffixes: np.ndarray, first: int) -> np.ndarray:
        """Return rows of ranges that start at ``first`` and lead to a state, (words, widest)."""
        return allowed[:, :, first] & suffixes[:, first + 1 : first + 1 + allowed.shape[1]]

    def next_rows(self, states: np.ndarray) -> np.ndarray:
        """Return the rows that the next stage of each state may use, (words, n) to bool (K, n)."""
        octets = np.ascontiguousarray(self._one_less(states).T.astype("<u8")).view(np.uint8)
        return (
            np.unpackbits(octets, axis=1, bitorder="little", count=self.problem.num_positions)
            .astype(bool)
            .T
        )

    def _words(self, bits: np.ndarray) -> np.ndarray:
        """Pack bits into words: bool (n, K) to uint64 (n, words)."""
        octets = np.zeros((len(bits), 8 * self.num_words), np.uint8)
        packed = np.packbits(bits, axis=1, bitorder="little")
        octets[:, : packed.shape[1]] = packed
        return octets.view("<u8").astype(np.uint64)

    def _one_more(self, rows: np.ndarray) -> np.ndarray:
        """Return the states before a stage from the rows it used, (words, n)."""
        return (_shift_words(rows) | (rows & self._top[:, None])) & self._mask[:, None]

    def _one_less(self, states: np.ndarray) -> np.ndarray:
        """Return the rows that the next stage of a state may use, (words, n)."""
        down = states >> np.uint64(1)
        down[:-1] |= states[1:] << np.uint64(63)
        return down | (states & self._top[:, None])


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


def _shift_words(sets: np.ndarray) -> np.ndarray:
    up = sets << np.uint64(1)
    up[1:] |= sets[:-1] >> np.uint64(63)
    return up


def _has(sets: np.ndarray, bit: int) -> np.ndarray:
    """Return where a bit is set, (words, ...) to bool (...)."""
    return (sets[bit // 64] >> np.uint64(bit % 64) & np.uint64(1)).astype(bool)
