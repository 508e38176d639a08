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

from typing import NamedTuple

import numpy as np

from capture.predictor.alike import Kinds


class Mixed(NamedTuple):
    """The layers of stages, and the border in each from which layers recompute as ``cheap``; arrays
    that broadcast.

    Attributes:
        first, stop: Layers [first, stop) of every stage.
        border: The first layer that is as ``cheap``: ``stop`` where there is none.
    """

    first: np.ndarray
    border: np.ndarray
    stop: np.ndarray

    @classmethod
    def every(cls, num_layers: int, num_full: int) -> Mixed:
        """Return all stages, (L, L + 1), each with its first ``num_full`` layers as ``full``."""
        first, stop = np.ogrid[:num_layers, : num_layers + 1]
        return cls._at(first, stop, np.array(num_full))

    @classmethod
    def of_kinds(cls, kinds: Kinds, num_full: np.ndarray) -> Mixed:
        """Return one stage of every kind, (n, S), for n numbers of layers as ``full``. Kinds whose
        stages are not mixed of the same kinds are split first."""
        num_layers = len(kinds.of)
        before = None
        while kinds.of is not before:
            before = kinds.of
            for each in num_full.tolist():
                kinds.look(*cls.every(num_layers, each).windows(before))
        first, stop = np.divmod(kinds.first, num_layers + 1)
        return cls._at(first, stop, num_full[:, None])

    @classmethod
    def _at(cls, first: np.ndarray, stop: np.ndarray, num_full: np.ndarray) -> Mixed:
        return cls(first, np.clip(first + num_full, 1, np.maximum(stop, 1)), stop)

    def windows(self, table: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return every entry of a table that the functions below read."""
        first, border, stop = self
        inside = np.minimum(border, len(table) - 1)
        return (
            table[first, border],
            np.where(border < stop, table[inside, stop], -1),
            np.where(border < stop, table[first, inside + 1], -1),
            np.where(border < stop, table[inside, inside + 1], -1),
            table[border - 1, stop],
            table[border - 1, border],
        )


def kept(full: np.ndarray, cheap: np.ndarray, mixed: Mixed) -> np.ndarray:
    """Return the bytes that mixed stages keep per micro-batch, from the tables (..., L, L + 1) of
    both kinds of activation checkpointing.

    Example:
        >>> of_layer = np.arange(4) - np.arange(3)[:, None]
        >>> kept(10 * of_layer, 100 * of_layer, Mixed.every(3, 2))[0, 1:].tolist()
        [10, 20, 120]
    """
    first, border, stop = mixed
    rest = cheap[..., np.minimum(border, full.shape[-2] - 1), stop]
    return full[..., first, border] + np.where(border < stop, rest, 0)


def running(full: np.ndarray, cheap: np.ndarray, mixed: Mixed) -> np.ndarray:
    """Return the bytes that the programs of mixed stages need while they run; arguments as for
    ``kept``."""
    first, border, stop = mixed
    inside = np.minimum(border, full.shape[-2] - 1)
    alone = full[..., inside, inside + 1]
    grown = cheap[..., inside, stop] + np.maximum(full[..., first, inside + 1] - alone, 0)
    behind = seconds(full, cheap, mixed)
    return np.where(border < stop, np.maximum(behind, grown), behind)


def least_kept(
    full: np.ndarray, cheap: np.ndarray, mixed: Mixed, *, passed: np.ndarray
) -> np.ndarray:
    """Return lower bounds of the bytes that mixed stages keep, from tables of lower bounds.

    Args:
        full, cheap, mixed: See there.
        passed: Bytes, per cut, of values and batch leaves that layers on both sides of it touch,
            (L + 1,).
    """
    _, border, stop = mixed
    return kept(full, cheap, mixed) - np.where(border < stop, passed[border], 0)


def least_running(
    full: np.ndarray, cheap: np.ndarray, mixed: Mixed, *, passed: np.ndarray
) -> np.ndarray:
    """Return lower bounds of the bytes that programs of mixed stages need: the larger of both
    parts. Arguments as for ``least_kept``."""
    first, border, stop = mixed
    rest = cheap[..., np.minimum(border, full.shape[-2] - 1), stop]
    before = full[..., first, border]
    return np.where(border < stop, np.fmax(before, rest) - passed[border], before)


def seconds(full: np.ndarray, cheap: np.ndarray, mixed: Mixed) -> np.ndarray:
    """Return the seconds that the programs of mixed stages take; arguments as for ``kept``."""
    first, border, stop = mixed
    more = cheap[..., border - 1, stop] - cheap[..., border - 1, border]
    return full[..., first, border] + np.maximum(more, 0)
