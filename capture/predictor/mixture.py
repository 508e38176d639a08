"""Stages whose first layers recompute as ``full`` and the others as ``cheap``, from the tables of
both.

Of a stage [a, b) with the border at m:

    what is kept          full[a, m) + cheap[m, b)
    a running program     max(full[a, m) + cheap[m - 1, b) - cheap[m - 1, m),
                              cheap[m, b) + full[a, m + 1) - full[m, m + 1))
    seconds               full[a, m) + cheap[m - 1, b) - cheap[m - 1, m)

All that the backward passes of both parts read follows from what both keep, so a cut through the
whole stage keeps no more. A program is M_i of either part plus the sum of M_a of the other, and
counts as the larger of the two; no M_a below 0 counts.

Where the tables are lower bounds, of what both parts have to do with (a value at the border, a leaf
of the batch) it is not known that both keep it, or that it is in memory: ``least_kept``,
``least_running``.
"""

from __future__ import annotations

import numpy as np


def kept(full: np.ndarray, cheap: np.ndarray, num_full: int) -> np.ndarray:
    """Of every stage, (..., L, L + 1), from the tables of both kinds.

    Example:
        >>> of_layer = np.arange(4) - np.arange(3)[:, None]
        >>> kept(10 * of_layer, 100 * of_layer, 2)[0, 1:].tolist()
        [10, 20, 120]
    """
    first, border, stop = _borders(full, num_full)
    rest = cheap[..., np.minimum(border, len(first) - 1), stop]
    return full[..., first, border] + np.where(border < stop, rest, 0)


def running(full: np.ndarray, cheap: np.ndarray, num_full: int) -> np.ndarray:
    """As ``kept``, of what programs need while they run."""
    first, border, stop = _borders(full, num_full)
    inside = np.minimum(border, len(first) - 1)
    alone = full[..., inside, inside + 1]
    grown = cheap[..., inside, stop] + np.maximum(full[..., first, inside + 1] - alone, 0)
    behind = seconds(full, cheap, num_full)
    return np.where(border < stop, np.maximum(behind, grown), behind)


def least_kept(
    full: np.ndarray, cheap: np.ndarray, num_full: int, *, passed: np.ndarray
) -> np.ndarray:
    """As ``kept``, of lower bounds.

    Args:
        full, cheap, num_full: See there.
        passed: Per cut, bytes of what layers on both sides of it have to do with, (L + 1,).
    """
    _, border, stop = _borders(full, num_full)
    return kept(full, cheap, num_full) - np.where(border < stop, passed[border], 0)


def least_running(
    full: np.ndarray, cheap: np.ndarray, num_full: int, *, passed: np.ndarray
) -> np.ndarray:
    """As ``running``, of lower bounds: the larger of both parts. Arguments as of
    ``least_kept``."""
    first, border, stop = _borders(full, num_full)
    rest = cheap[..., np.minimum(border, len(first) - 1), stop]
    before = full[..., first, border]
    return np.where(border < stop, np.fmax(before, rest) - passed[border], before)


def seconds(full: np.ndarray, cheap: np.ndarray, num_full: int) -> np.ndarray:
    """As ``kept``, of what programs take."""
    first, border, stop = _borders(full, num_full)
    more = cheap[..., border - 1, stop] - cheap[..., border - 1, border]
    return full[..., first, border] + np.maximum(more, 0)


def _borders(table: np.ndarray, num_full: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First layer, first layer that is as ``cheap``, and next layer of every stage."""
    first, stop = np.ogrid[: table.shape[-2], : table.shape[-1]]
    return first, np.clip(first + num_full, 1, np.maximum(stop, 1)), stop
