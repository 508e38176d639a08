"""Sums and largest parts over the layers of every stage [first, stop), from what the layer graph
knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from capture.model.graph import LayerGraph


def once_per_stage(items_of_layer: Sequence[Sequence[int]], sizes: np.ndarray) -> np.ndarray:
    """Return, per stage [first, stop), the total size of the items that its layers read, each
    counted once; int64 (L, L + 1).

    An item counts in stages that begin after its previous reader and reach its next one.
    """
    num_layers = len(items_of_layer)
    # [first, layer]: items of the layer that no layer since first has read.
    new = np.zeros((num_layers, num_layers), np.int64)
    last_reader: dict[int, int] = {}
    for layer, items in enumerate(items_of_layer):
        for item in dict.fromkeys(items):
            new[last_reader.get(item, -1) + 1 : layer + 1, layer] += sizes[item]
            last_reader[item] = layer
    return np.concatenate([np.zeros((num_layers, 1), np.int64), np.cumsum(new, axis=1)], axis=1)


def largest_sum(of_stage: np.ndarray) -> int:
    """Return the largest sum over the stages of any way to cut the layers; ``of_stage`` is indexed
    [first, stop)."""
    best = np.zeros(of_stage.shape[1], np.int64)
    for stop in range(1, len(best)):
        best[stop] = (best[:stop] + of_stage[:stop, stop]).max()
    return int(best[-1])


def largest_part(of_stage: np.ndarray) -> np.ndarray:
    """Return, per stage [first, stop), the largest known value of any stage within it; NaN where
    none is known."""
    return np.fmax.accumulate(np.fmax.accumulate(of_stage[::-1])[::-1], axis=1)


def kept_twice(graph: LayerGraph, longest: int, value_split: tuple[int, int]) -> np.ndarray:
    """Return, per stage [first, stop), the most bytes that the sum over windows counts twice,
    (L, L + 1): of values and batch leaves that two layers touch, too far apart for a window, and
    none between."""
    found = np.zeros((graph.num_layers, graph.num_layers + 1))
    for nbytes, layers in _touched(graph, value_split):
        for layer, later in pairwise(layers):
            if later - layer >= longest:
                found[: layer + 1, later + 1 :] += nbytes
    return found


def passed(graph: LayerGraph, value_split: tuple[int, int]) -> np.ndarray:
    """Return, per cut, the bytes of the values and batch leaves that layers on both sides of it
    touch, (L + 1,)."""
    found = np.zeros(graph.num_layers + 1)
    for nbytes, layers in _touched(graph, value_split):
        if layers:
            found[layers[0] + 1 : layers[-1] + 1] += nbytes
    return found


def _touched(graph: LayerGraph, value_split: tuple[int, int]) -> Iterator[tuple[int, list[int]]]:
    """Yield, per value and batch leaf, its bytes and the layers that read or make it, in order."""
    for v in range(len(graph.values)):
        layers = [layer.layer_id for layer in graph.layers if v in layer.inputs + layer.outputs]
        yield graph.value_bytes(v, value_split), layers
    for b, leaf in enumerate(graph.batch):
        layers = [layer.layer_id for layer in graph.layers if b in layer.batch]
        yield leaf.shard_bytes(value_split[0]), layers
