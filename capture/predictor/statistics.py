"""From measured windows to every stage: M_i plus the sum of M_a, with several neighbour counts and
long windows as anchors.

For a component X (what is kept, temporaries of the backward pass, ...), with N the largest
neighbour count measured:

    X[a, b) = measured                                              b - a <= N + 1
    X[a, b) = X[a, b - 1) + M_a(b - 1),  M_a(l) = X[l - N, l] - X[l - N, l - 1]      beyond

Longer measured windows (anchors) show how far this drifts; the drift is interpolated over the
length of the stage.

Source: CAPTURE III-A1 and III-B1, per component instead of per peak; IV-B on several neighbour
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import count, pairwise

import numpy as np


def extend_windows(
    windows: Mapping[tuple[int, int], np.ndarray],
    num_layers: int,
    keys: Sequence[Hashable] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Extend measured windows to all stages: return the sum of M_a, and the drift to add to it.

    Args:
        windows: Arrays of components, by (first, stop); at least every single layer and every pair
            of neighbours.
        num_layers: L.
        keys: A key per layer, equal for equal layers; None if all are.

    Returns:
        Two float64 arrays (components, L, L + 1), NaN where stop <= first: their sum is the best
        prediction; the first alone is comparable between micro-batch sizes that have different
        anchors.

    Raises:
        KeyError: for a single layer or a pair that was not measured.
    """
    size = len(next(iter(windows.values())))
    table = np.full((size, num_layers, num_layers + 1), np.nan)
    most = _contiguous(windows, num_layers)
    # M_a of every layer that has as many neighbours before it as the largest window
    added = np.zeros((size, num_layers))
    for layer in range(most - 1, num_layers):
        first = layer + 1 - most
        added[:, layer] = windows[first, layer + 1] - (windows[first, layer] if most > 1 else 0)
    for first in range(num_layers):
        reach = min(first + most, num_layers)
        for stop in range(first + 1, reach + 1):
            table[:, first, stop] = windows[first, stop]
        table[:, first, reach + 1 :] = windows[first, reach][:, None] + np.cumsum(
            added[:, reach:], axis=1
        )
    return table, _drift(table, windows, most, [None] * num_layers if keys is None else keys)


def extend_split(
    windows: Mapping[tuple[int, int], np.ndarray],
    num_layers: int,
    keys: Sequence[Hashable] | None,
    *,
    inputs: int,
    like: Mapping[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Extend measured windows to all stages where some components are of split backward passes.

    A stage that takes nothing which needs a gradient, at the first layers, has no program of the
    gradients of inputs: that of the weights is its whole backward pass. Nothing of the two of other
    stages follows from that.

    Args:
        windows, num_layers, keys: See there.
        inputs: The component that such a stage has nothing of.
        like: The others, each with the component of whole passes that it is there, but for what the
            longest of its windows that begin there say.
    """
    table, drift = extend_windows(windows, num_layers, keys)
    whole = 0
    while whole < num_layers and not any(
        parts[inputs] for (first, _), parts in windows.items() if first == whole
    ):
        longest = next(n for n in count(whole + 1) if (whole, n + 1) not in windows)
        known = table[:, whole, longest].copy()
        for row, same in like.items():
            beyond = table[same, whole, longest:] + known[row] - known[same]
            table[row, whole, longest:], drift[row, whole] = beyond, drift[same, whole]
        table[inputs, whole, whole + 1 :], drift[inputs, whole] = 0, 0
        whole += 1
    if 0 < whole < num_layers:
        rows = [inputs, *like]
        behind = {
            (first - whole, stop - whole): parts[rows]
            for (first, stop), parts in windows.items()
            if first >= whole
        }
        found = extend_windows(behind, num_layers - whole, None if keys is None else keys[whole:])
        for sums, inner in zip((table, drift), found, strict=True):
            sums[rows, whole:, whole:] = inner
    return table, drift


def _contiguous(windows: Mapping[tuple[int, int], np.ndarray], num_layers: int) -> int:
    """Return the largest n such that all windows of 1 to n layers were measured."""
    most = 0
    while most < num_layers and all((a, a + most + 1) in windows for a in range(num_layers - most)):
        most += 1
    if most < min(2, num_layers):
        wanted = ((a, a + most + 1) for a in range(num_layers - most))
        raise KeyError(next(window for window in wanted if window not in windows))
    return most


def inner_starts(length: int, num_layers: int) -> range:
    """Return the first layers of the windows that contain neither the first nor the last layer of
    the model; of all windows where none avoids both.

    Example:
        >>> list(inner_starts(2, 5)), list(inner_starts(4, 5))
        ([1, 2], [0, 1])
    """
    return (
        range(1, num_layers - length)
        if length <= num_layers - 2
        else range(num_layers - length + 1)
    )


def without_windows(
    missing: Collection[tuple[int, int]], wanted: Collection[tuple[int, int]]
) -> str:
    """Describe what ``extend_windows`` does where some of the wanted windows are missing.

    Args:
        missing: (first, stop) of those that could not be measured, at least one.
        wanted: All of them.

    Example:
        >>> without_windows([(0, 3)], [(a, a + n) for n in (1, 2, 3) for a in range(5 - n)])
        'M_a with 2 neighbours is not known of every layer (without layers 0 to 2); it is taken with
        1'
        >>> without_windows([(2, 3)], [(2, 3)])
        'M_i is not known of every layer (without layers 2 to 2); no stage is predicted or planned
        with it'
    """
    first, stop = min(missing, key=lambda window: (window[1] - window[0], window))
    length, lengths = stop - first, {b - a for a, b in wanted}
    longest = next(n for n in count(1) if n + 1 not in lengths)
    lacks = f"(without layers {first} to {stop - 1})"
    if length <= 2:
        statistic = "M_i" if length == 1 else "M_a"
        return (
            f"{statistic} is not known of every layer {lacks}; no stage is predicted or planned "
            "with it"
        )
    if length <= longest:
        return (
            f"M_a with {length - 1} neighbours is not known of every layer {lacks}; it is taken "
            f"with {length - 2}"
        )
    return (
        f"windows of {length} layers are not complete {lacks}; the sum of M_a is not corrected by "
        "them"
    )


def _drift(
    table: np.ndarray,
    windows: Mapping[tuple[int, int], np.ndarray],
    most: int,
    keys: Sequence[Hashable],
) -> np.ndarray:
    """Return measured minus summed bytes, linear in the length of a stage between anchors and
    beyond the last one; (components, L, L + 1).

    Where an anchor was not measured, among the first and the last layers, its drift grows from that
    of the anchor before as at the nearest start, if the layers that it adds are the same there. Of
    other layers it is not known that they need less than the sum says: there, and beyond the last
    anchor where layers come that it does not have, the drift only grows.
    """
    size, num_layers, _ = table.shape
    lengths = [
        n
        for n in sorted({stop - first for first, stop in windows if stop - first > most})
        if all((first, first + n) in windows for first in inner_starts(n, num_layers))
    ]
    drift = np.zeros_like(table)
    if not lengths:
        return drift

    def seen(first: int, length: int) -> np.ndarray:
        return windows[first, first + length] - table[:, first, first + length]

    def added(first: int, before: int, length: int) -> Sequence[Hashable]:
        return keys[first + before : first + length]

    points, spans = np.array([most, *lengths]), np.arange(num_layers + 1)
    starts = {
        n: [a for a in range(num_layers) if (a, a + n) in windows and (a, a + m) in windows]
        for m, n in pairwise(points)
    }
    for first in range(num_layers):
        values = np.zeros((len(points), size))
        for i, (before, n) in enumerate(pairwise(points)):
            nearest = min(
                starts[n],
                key=lambda start: (
                    abs(start - first),
                    not _alike(added(first, before, n), added(start, before, n)),
                ),
            )
            growth = seen(nearest, n) - seen(nearest, before)
            if not _alike(added(first, before, n), added(nearest, before, n)):
                growth = np.maximum(growth, 0)
            values[i + 1] = values[i] + growth
        slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
        reach = np.maximum(spans - first, most)
        inside = np.stack([np.interp(reach, points, values[:, c]) for c in range(size)])
        known = set(added(first, points[-2], points[-1]))
        beyond = np.zeros((size, num_layers + 1))
        for layer in range(first + points[-1], num_layers):
            beyond[:, layer + 1] = beyond[:, layer] + (
                slope if keys[layer] in known else np.maximum(slope, 0)
            )
        drift[:, first] = inside + beyond
    return drift


def _alike(mine: Sequence[Hashable], theirs: Sequence[Hashable]) -> bool:
    """Tell whether the layers of two windows are the same in the same order; near the end of the
    model the shorter window decides."""
    return all(a == b for a, b in zip(mine, theirs, strict=False))
