"""The buffer that waits for gradients to be added, where several layers of a stage read a
parameter.

The gradient that the last of them makes is in memory until the backward pass comes to the first:
one buffer of the parameter's size, however many layers read it, because each of the others is added
to it in place. A sum over windows has no such buffer where no window holds two of the layers, and
where the gradient of a single reader needs none: rows of a table are added to the accumulated
gradient in place. Where it does need one (the gradient of a matrix product), what the layer adds
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from capture.model.graph import LayerGraph

Windows = Mapping[tuple[int, int], np.ndarray]


def held_gradients(
    graph: LayerGraph, param_bytes: Sequence[int], added: np.ndarray | None = None
) -> np.ndarray:
    """Return the bytes per device that gradients of shared parameters wait in, of every stage
    [first, stop): float64 (L, L + 1).

    Args:
        graph: The layers.
        param_bytes: Bytes per device of the whole gradient of every parameter.
        added: Bytes that a backward pass is known to need more with each layer: what the layers
            behind the first reader add is taken off. Without it, nothing is.

    Example:
        See ``tests/unit/test_held_gradients.py``.
    """
    num_layers = graph.num_layers
    held = np.zeros((num_layers, num_layers + 1))
    stops = np.arange(num_layers + 1)
    for p, nbytes in enumerate(param_bytes):
        readers = np.array(graph.param_readers(p), int)
        if len(readers) < 2:
            continue
        before = np.searchsorted(readers, stops)
        known = np.zeros(len(readers) + 1)
        if added is not None:
            known[1:] = np.cumsum(np.clip(added[readers], 0, nbytes))
        # What is known behind the first reader of a stage.
        behind = known[before][None, :] - known[np.minimum(before[:-1] + 1, len(readers))][:, None]
        several = before[None, :] - before[:-1, None] > 1
        held += np.where(several, np.maximum(nbytes - behind, 0), 0)
    return held


def added_bytes(windows: Windows, num_layers: int, row: int) -> np.ndarray:
    """Return the bytes that each layer adds to the longest measured window of the layers before it,
    (L,); 0 for the first layer."""
    added = np.zeros(num_layers)
    for layer in range(1, num_layers):
        first = layer
        while (first - 1, layer + 1) in windows and (first - 1, layer) in windows:
            first -= 1
        if first < layer:
            added[layer] = windows[first, layer + 1][row] - windows[first, layer][row]
    return added


def held_beyond(
    extend: Callable[[Windows], tuple[np.ndarray, np.ndarray]],
    windows: Windows,
    held: np.ndarray,
    row: int,
) -> np.ndarray:
    """Return how much more a component of every stage is than the sum over windows with its drift,
    (L, L + 1); never less than 0, and 0 where the windows say it.

    The bytes ``held`` are taken out of the windows that have them and added to the stages that do.

    Args:
        extend: The function from windows to the table and its drift.
        windows: Arrays of components, by (first, stop).
        held: What ``held_gradients`` returns.
        row: Row of the component.
    """
    without = {window: parts.copy() for window, parts in windows.items()}
    for window, parts in without.items():
        parts[row] -= held[window]
    (table, drift), (apart, drift_apart) = (extend(found) for found in (windows, without))
    as_measured, drift_apart = table[row] + drift[row], drift_apart[row]
    # Of several parameters a long window may hold fewer buffers at once: shorter stages may not.
    drift_apart = np.where(held > 0, np.fmax(drift_apart, np.fmin(drift[row], 0)), drift_apart)
    return np.maximum(np.nan_to_num(apart[row] + drift_apart + held - as_measured), 0)
