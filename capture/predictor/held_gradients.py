"""The buffer that waits for gradients to be added, where several layers of a stage read a
parameter.

The gradient that the last of them makes is in memory until the backward pass comes to the first:
one buffer of the parameter's size, however many layers read it, because each of the others is added
to it in place. Windows tell so only where they hold two of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from capture.model.graph import LayerGraph

Windows = Mapping[tuple[int, int], np.ndarray]


def held_gradients(graph: LayerGraph, param_bytes: Sequence[int]) -> np.ndarray:
    """Return the bytes per device that gradients of shared parameters wait in, of every stage
    [first, stop): int64 (L, L + 1).

    Args:
        graph: The layers.
        param_bytes: Per parameter, bytes per device of a whole gradient.

    Example:
        See ``tests/unit/test_held_gradients.py``.
    """
    held = np.zeros((graph.num_layers, graph.num_layers + 1), np.int64)
    for p, nbytes in enumerate(param_bytes):
        readers = np.array(graph.param_readers(p), int)
        if len(readers) > 1:
            before = np.searchsorted(readers, np.arange(graph.num_layers + 1))
            held += nbytes * (before[None, :] - before[:-1, None] > 1)
    return held


def extend_held(
    extend: Callable[[Windows], tuple[np.ndarray, np.ndarray]],
    windows: Windows,
    held: np.ndarray,
    rows: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of all stages and the drift to add to it, as ``extend`` does, with what
    gradients wait in.

    The bytes ``held`` are taken out of the windows that have them and added to the stages that do.
    Where the windows show that a compiler needs less, the sum of the windows as they are may be
    larger, and counts.

    Args:
        extend: From windows to the table and its drift.
        windows: Per (first, stop), an array of components.
        held: What ``held_gradients`` returns.
        rows: The components that are backward passes with gradients of parameters.
    """
    table, drift = extend(windows)
    if held.any():
        rows = list(rows)
        without = {window: parts.copy() for window, parts in windows.items()}
        for (first, stop), parts in without.items():
            parts[rows] -= held[first, stop]
        total = np.add(*extend(without))[rows] + held
        drift[rows] = np.fmax(table[rows] + drift[rows], total) - table[rows]
    return table, drift
