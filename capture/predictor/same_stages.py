"""Which stages of a model are the same program: what was compiled of one is known of all of them.

In a model of equal blocks, layers [3, 7) and [4, 8) differ in name only. The layer graph is enough
to tell: equal layers have equal keys, and what is left is how the values, parameters and batch
leaves of a stage hang together and go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

from capture.model.graph import LayerGraph, Tensor


def stage_signature(
    graph: LayerGraph,
    first: int,
    stop: int,
    param_bytes: Sequence[int],
    value_split: tuple[int, int],
) -> Hashable:
    """Return a value that is equal for layers [first, stop) whose forward and backward programs are
    the same but for names.

    Args:
        graph: The layer graph at the micro-batch size of the stages.
        first, stop: Layers [first, stop).
        param_bytes: Bytes per device of every parameter: equal layers may have been split
            differently.
        value_split: How the stages split what passes between them.

    Returns:
        Layers by key, each with local numbers for what it reads and makes; what each value and
        parameter is; whether values are read behind the stage. Nothing is said of the optimizer,
        which may treat equal layers differently.
    """
    onwards = set(graph.crossing(stop))
    numbers: dict[tuple[str, int], int] = {}
    fresh = count()

    def local(kind: str, index: int, what: Hashable) -> Hashable:
        """Return the number of a thing within the stage; where it is met first, what it is
        instead."""
        if (kind, index) in numbers:
            return numbers[kind, index]
        numbers[kind, index] = next(fresh)
        return what

    def value(v: int) -> Hashable:
        cut = graph.value_dim(v, value_split)
        return local("value", v, ("value", _facts(graph.values[v]), cut, v in onwards))

    def param(p: int) -> Hashable:
        readers = graph.param_readers(p)
        read_elsewhere = readers[0] >= first, readers[-1] >= stop
        return local(
            "param", p, ("param", _facts(graph.params[p]), param_bytes[p], *read_elsewhere)
        )

    def leaf(b: int) -> Hashable:
        return local("batch", b, ("batch", _facts(graph.batch[b])))

    layers = tuple(
        (
            layer.key,
            tuple(map(param, layer.params)),
            tuple(map(value, layer.inputs)),
            tuple(map(leaf, layer.batch)),
            tuple(map(value, layer.outputs)),
        )
        for layer in graph.layers[first:stop]
    )
    passing = sum(graph.producer(v) < first and ("value", v) not in numbers for v in onwards)
    return layers, passing, stop == graph.num_layers


def _facts(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.batch_dim, tensor.differentiable
