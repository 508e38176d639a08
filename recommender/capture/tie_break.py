"""The paper's tie-break, exactly: least of the per-device bytes sorted from the largest,
lexicographically.

Adding one stage to two suffixes that use the same devices never changes which of their sorted
vectors is smaller, so a state needs only its least vector. That also holds for the C largest values
alone: the first difference of two vectors stays the first difference. Candidates are compared
column by column, and only those that still tie.

Source: CAPTURE III-C, tie-breaking; devices are excluded one at a time until none is left
(READINGS.md, C-o and C-p).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.reach import Stages


def fairest_cuts(
    problem: SearchProblem, stages: Mapping[int, Stages], live: np.ndarray, columns: int
) -> list[tuple[int, int, int]]:
    """Find the plan of least peak whose ``columns`` largest per-device bytes are lexicographically
    least.

    Args:
        problem: What is searched.
        stages, live: What is on plans of least peak, as ``Reach.on_plans`` gives it.
        columns: How many of the largest values to compare.

    Returns:
        (first, stop, degree) in pipeline order. Full ties: the smallest degree, then the latest
        row, then the fewest layers first.

    Time O(C K L^2 D log G) at worst; memory O(C K L D) at worst. Only states on a plan of least
    peak are visited.
    """
    num_devices, num_layers, num_rows = live.shape[0] - 1, live.shape[2] - 1, live.shape[1]
    last_use = _last_use(problem.degrees)

    # p -> (states, C), each row descending.
    vectors: dict[int, np.ndarray] = {num_devices: np.zeros((1, 0), np.int64)}
    # (p, a, first) -> row of vectors[p].
    state_ids = np.full((num_devices + 1, num_rows, num_layers + 1), -1, np.int32)
    state_ids[num_devices, 0, num_layers] = 0
    picks: dict[int, np.ndarray] = {}  # p -> (states, 3): degree, row, stop
    for p in reversed(range(num_devices)):
        if not live[p].any():
            continue
        width, parts, pool, offset = min(columns, num_devices - p), [], [], 0
        for d in problem.degrees[p]:
            if p + d not in vectors:
                continue
            of = stages[d]
            goes_on = state_ids[p + d, of.row, of.stop] >= 0
            of = of.take(live[p, of.state, of.first] & goes_on)
            state = of.state * (num_layers + 1) + of.first if p else np.zeros_like(of.row)
            child = state_ids[p + d, of.row, of.stop] + offset
            copies = np.full_like(of.row, d)
            parts.append(np.stack([state, of.nbytes, copies, child, of.row, of.stop]))
            after = vectors[p + d]
            wider = ((0, 0), (0, width + 1 - after.shape[1]))
            pool.append(np.pad(after, wider, constant_values=-NEVER))
            offset += len(after)
        merged, children = np.concatenate(parts, axis=1), np.concatenate(pool)
        merged = merged[:, np.argsort(merged[0], kind="stable")]
        winners = merged[:, _least_of_each_state(merged, children, width)]
        vectors[p] = _with_own(children[winners[3]], winners[1], winners[2], width)
        state_ids[p].reshape(-1)[winners[0]] = np.arange(winners.shape[1])
        picks[p] = winners[[2, 4, 5]].T
        for done in last_use.get(p, ()):
            vectors.pop(done, None)

    return _read_back(picks, state_ids, num_devices)


def _read_back(
    picks: Mapping[int, np.ndarray], state_ids: np.ndarray, num_devices: int
) -> list[tuple[int, int, int]]:
    """Return (first, stop, degree) in pipeline order, by what was picked in every state."""
    cuts: list[tuple[int, int, int]] = []
    here = (0, 0, 0)  # (p, a, first) of the state reached
    while here[0] < num_devices:
        d, next_row, next_first = picks[here[0]][state_ids[here]].tolist()
        cuts.append((here[2], next_first, d))
        here = here[0] + d, next_row, next_first
    return cuts


def _last_use(degrees: list[list[int]]) -> dict[int, list[int]]:
    """Return p -> positions whose vectors no stage at a device before p can continue to."""
    smallest = {}
    for p in reversed(range(len(degrees))):
        for d in degrees[p]:
            smallest[p + d] = p
    last: dict[int, list[int]] = {}
    for position, p in smallest.items():
        last.setdefault(p, []).append(position)
    return last


def _least_of_each_state(candidates: np.ndarray, children: np.ndarray, width: int) -> np.ndarray:
    """Return per state the first candidate of least merge of its child's vector and its own bytes.

    Args:
        candidates: int64 (6, n) by ascending state: state, own bytes, copies of them, row of
            ``children``, ...
        children: (m, width + 1), padded with ``-NEVER``.
        width: Columns to compare.

    Returns:
        Ascending indices of the winners.
    """
    state, own, copies, child = candidates[:4]
    alive, taken, left, winners = np.arange(len(state)), np.zeros_like(state), copies.copy(), []
    for _ in range(width):
        starts = np.flatnonzero(np.diff(state[alive], prepend=-1))
        sizes = np.diff(starts, append=len(alive))
        winners.append(alive[starts[sizes == 1]])
        alive, sizes = alive[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]
        if not len(alive):
            break
        top = children[child[alive], taken[alive]]
        mine = (left[alive] > 0) & (own[alive] > top)
        value = np.where(mine, own[alive], top)
        left[alive] -= mine
        taken[alive] += ~mine
        least = np.minimum.reduceat(value, np.cumsum(sizes) - sizes)
        alive = alive[value == np.repeat(least, sizes)]
    winners.append(alive[np.flatnonzero(np.diff(state[alive], prepend=-1))])
    return np.sort(np.concatenate(winners))


def _with_own(children: np.ndarray, own: np.ndarray, copies: np.ndarray, width: int) -> np.ndarray:
    """Return the ``width`` largest of each child's vector and ``copies`` times its own bytes,
    descending."""
    result = np.empty((len(own), width), np.int64)
    for d in np.unique(copies):
        which = np.flatnonzero(copies == d)
        both = np.concatenate(
            [children[which, :width], np.repeat(own[which, None], min(d, width), axis=1)], axis=1
        )
        result[which] = -np.sort(-both, axis=1)[:, :width]
    return result
