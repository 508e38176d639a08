"""Which stages of a model are alike: a deep model has thousands of stages, of which a few hundred
differ in any table."""

from __future__ import annotations

import numpy as np


class Kinds:
    """The grouping of stages into kinds: stages of one number are equal in every table that was
    looked at.

    Attributes:
        of: The number of every stage [first, stop), int64 (L, L + 1). No empty stage (stop <=
            first) has that of another.
        first: The place of one stage of every number in ``of.ravel()``, (S,).

    Args:
        of: Tables (L, L + 1), at least one, to look at first.

    Example:
        >>> length = np.arange(4) - np.arange(3)[:, None]
        >>> kinds = Kinds(np.maximum(length, 0))
        >>> kinds.once(10 * length).tolist()
        [0, 10, 20, 30]
    """

    def __init__(self, *of: np.ndarray):
        empty = empty_stages(len(of[0]))
        self._stages = np.flatnonzero(~empty)
        self.of = (~empty).astype(np.int64)
        self.first = np.array([0, self._stages[0]])
        self._seen: dict[int, np.ndarray] = {}
        self.look(*of)

    def look(self, *tables: np.ndarray, kept: bool = False) -> None:
        """Split kinds whose stages differ in some tables (..., L, L + 1). A table that is ``kept``
        is looked at only once."""
        for table in tables:
            if kept and id(table) in self._seen:
                continue
            if kept:
                self._seen[id(table)] = table
            rows = table.reshape(-1, self.of.size)[:, self._stages]
            known = table.reshape(len(rows), -1)[:, self.first]
            for row in rows[(known[:, self.of.ravel()[self._stages]] != rows).any(axis=1)]:
                self._split(row)

    def once(self, table: np.ndarray) -> np.ndarray:
        """Return a table that was looked at with one column per kind of stage: (..., S)."""
        return table.reshape(*table.shape[:-2], -1)[..., self.first]

    def renumber(self, table: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Return a table of other kinds ``of``, (..., S'), with one column per kind of this object.
        The array ``of``, (L, L + 1), was looked at."""
        return table[..., of.ravel()[self.first]]

    def _split(self, row: np.ndarray) -> None:
        """Split kinds whose stages have different values in ``row``, which has one value per stage
        that is not empty."""
        of = self.of.ravel()
        _, values = np.unique(row, return_inverse=True)
        both = of[self._stages] * (int(values.max()) + 1) + values
        _, first, numbers = np.unique(both, return_index=True, return_inverse=True)
        self.first = np.concatenate([[0], self._stages[first]])
        of = np.zeros_like(of)
        of[self._stages] = numbers + 1
        self.of = of.reshape(self.of.shape)


def empty_stages(num_layers: int) -> np.ndarray:
    """Return which stages [first, stop) have no layer, bool (L, L + 1)."""
    return np.tri(num_layers, num_layers + 1, dtype=bool)
