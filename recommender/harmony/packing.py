"""Packings: how the layers of a model become packs that fit a device.

Each is a function of the layers at a micro-batch size, how many of them to pack, and a limit on C
of a pack (``SizedLayers.pack_bytes``); it answers packs, or None where it finds none. The rules are
those of the released scheduler where it has them, ties and rounding included.

Source: Li et al. 2022 (Harmony), Algorithm 2, 4.3.1 and 5.5; readings H-f to H-k, H-u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from capture.measured.layer_passes import SizedLayers
from capture.plan.task_graph import Span

Packs = tuple[Span, ...]
Packing = Callable[[SizedLayers, int, float], Packs | None]


def balanced_time(layers: SizedLayers, num_layers: int, limit_bytes: float) -> Packs | None:
    """Pack layers into the fewest packs of nearly equal time that fit (Algorithm 2).

    Cuts are inserted left of equal ones into the sums of times, so of six equal layers in three
    packs the first has one and the last three (H-h).

    Example:
        >>> six = SizedLayers(np.ones(6), np.full(6, 10), np.zeros(6, int))
        >>> balanced_time(six, 6, 30)
        ((0, 1), (1, 3), (3, 6))
    """
    return _fewest(layers, num_layers, limit_bytes, _cut_left_of_time)


def balanced_memory(layers: SizedLayers, num_layers: int, limit_bytes: float) -> Packs | None:
    """Pack layers into the fewest packs of nearly equal bytes that fit; cuts as
    ``balanced_time``."""
    return _fewest(layers, num_layers, limit_bytes, _cut_left_of_memory)


def greedy(layers: SizedLayers, num_layers: int, limit_bytes: float) -> Packs | None:
    """Pack greedily from the first layer: a pack takes layers while it stays below the limit."""
    packs, first = [], 0
    while first < num_layers:
        stop = first
        while stop < num_layers and layers.pack_bytes(first, stop + 1) < limit_bytes:
            stop += 1
        if stop == first:
            return None
        packs.append((first, stop))
        first = stop
    return tuple(packs)


def greedy_reverse(layers: SizedLayers, num_layers: int, limit_bytes: float) -> Packs | None:
    """Pack greedily from the last layer: a pack takes layers while it stays below the limit."""
    packs, stop = [], num_layers
    while stop > 0:
        first = stop
        while first > 0 and layers.pack_bytes(first - 1, stop) < limit_bytes:
            first -= 1
        if stop == first:
            return None
        packs.append((first, stop))
        stop = first
    return tuple(reversed(packs))


def constant(layers: SizedLayers, num_layers: int, limit_bytes: float) -> Packs | None:
    """Pack layers into packs of one number of layers, the largest that fits."""
    for length in range(num_layers, 0, -1):
        packs = of_length(num_layers, length)
        if _fits(layers, packs, limit_bytes):
            return packs
    return None


def of_length(num_layers: int, length: int) -> Packs:
    """Return packs of so many layers each; the first takes what is left over.

    Example:
        >>> of_length(7, 3)
        ((0, 1), (1, 4), (4, 7))
    """
    stops = range(num_layers, 0, -length)
    return tuple((max(0, stop - length), stop) for stop in reversed(stops))


def reused(packs: Packs, layers: SizedLayers, limit_bytes: float) -> Packs | None:
    """Return the backward packs but the last (*reuse*); None if one is not below the limit
    (H-k)."""
    most = max((layers.pack_bytes(*pack) for pack in packs[:-1]), default=0)
    return packs[:-1] if most < limit_bytes else None


#: By name; ``expert`` packs as ``constant``, and is picky about sizes.
PACKINGS: Mapping[str, Packing] = {
    "balanced_time": balanced_time,
    "balanced_memory": balanced_memory,
    "greedy": greedy,
    "greedy_reverse": greedy_reverse,
    "constant": constant,
}
REUSE, EXPERT = "reuse", "expert"
PACKING_NAMES = (*PACKINGS, REUSE, EXPERT)


class LeastMaxTime:
    """A dynamic programme over layers that finds packs whose longest is as short as can be; its
    rows serve every prefix of the layers.

    Args:
        layers: At a size.
        fits: [first, stop] whether these layers may be one pack.
    """

    def __init__(self, layers: SizedLayers, fits: np.ndarray):
        sums = np.array(layers.sums)
        self._seconds = np.where(fits, sums[None, :] - sums[:, None], np.inf)
        start = np.full(len(sums), np.inf)
        start[0] = 0.0
        # Per number of packs: seconds of the longest of a prefix, and where its last one begins.
        self._best = [start]
        self._came: list[np.ndarray] = []

    def packs(self, num_layers: int) -> Iterator[Packs | None]:
        """Yield the best packs of the first ``num_layers`` layers: as one pack, as two, and so on;
        None where so many cannot be."""
        for num_packs in range(1, num_layers + 1):
            if len(self._came) < num_packs:
                longest = np.maximum(self._best[-1][:, None], self._seconds)
                self._came.append(longest.argmin(axis=0))
                self._best.append(longest.min(axis=0))
            if not math.isfinite(self._best[num_packs][num_layers]):
                yield None
                continue
            stops = [num_layers]
            for row in reversed(self._came[:num_packs]):
                stops.append(int(row[stops[-1]]))
            yield tuple(pairwise(reversed(stops)))


def fewest_packs(layers: SizedLayers, num_layers: int, limit_bytes: float) -> int:
    """Return S_min: fewer packs cannot hold all bytes, those of inputs left out."""
    return max(1, math.ceil(layers.inner_sums[num_layers] / limit_bytes))


def _fewest(
    layers: SizedLayers,
    num_layers: int,
    limit_bytes: float,
    cut: Callable[[SizedLayers, int, int], Sequence[int]],
) -> Packs | None:
    for num_packs in range(fewest_packs(layers, num_layers, limit_bytes), num_layers + 1):
        packs = tuple(pairwise((0, *cut(layers, num_layers, num_packs), num_layers)))
        if all(first < stop for first, stop in packs) and _fits(layers, packs, limit_bytes):
            return packs
    return None


def _fits(layers: SizedLayers, packs: Packs, limit_bytes: float) -> bool:
    return all(layers.pack_bytes(*pack) <= limit_bytes for pack in packs)


def _cut_left_of_time(layers: SizedLayers, num_layers: int, num_packs: int) -> list[int]:
    sums = np.cumsum(layers.seconds[:num_layers])
    wanted = np.arange(1, num_packs) * (sums[-1] / num_packs)
    return np.searchsorted(sums, wanted, side="left").tolist()


def _cut_nearest_time(layers: SizedLayers, num_layers: int, num_packs: int) -> list[int]:
    sums = np.array(layers.sums[: num_layers + 1])
    wanted = np.arange(1, num_packs) * (sums[-1] / num_packs)
    return np.abs(sums[None, :] - wanted[:, None]).argmin(axis=1).tolist()


def _cut_left_of_memory(layers: SizedLayers, num_layers: int, num_packs: int) -> list[int]:
    sums = layers.inner_sums[1 : num_layers + 1]
    wanted = np.arange(1, num_packs) * (sums[-1] // num_packs)
    return np.searchsorted(sums, wanted, side="left").tolist()


#: Where to cut into so many packs of nearly equal time.
CUTS = (_cut_left_of_time, _cut_nearest_time)
