"""Whether layers treat the examples of a micro-batch apart: then they are the same function at any
size of the micro-batch, and their results can be put together and cut.

Read off two traces of the same layers at two sizes. Where a dimension that grows with the
micro-batch enters an operation and none leaves it, or one leaves that grows otherwise, or where the
operation mixes along one, examples meet: the statistics of a batch, the balance of a load, a
matrix of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from capture.model.graph import Tensor
from capture.tracing.jaxprs import opened, primitives, several, sub_jaxprs
from capture.tracing.model import TracedModel
from capture.tracing.slices import struct_of

#: Parameters that name the dimensions along which these operations mix elements.
_ALONG = {"sort": "dimension", "rev": "dimensions", "argmax": "axes", "argmin": "axes"}
_ALONG |= dict.fromkeys(primitives("cumsum cumprod cummax cummin cumlogsumexp"), "axis")
_BROADCASTS = ("broadcast_in_dim", "squeeze")


def coupled_examples(one: TracedModel, other: TracedModel, stop: int) -> str | None:
    """Describe what first lets examples of a micro-batch influence each other in layers [0, stop);
    None if nothing does.

    Args:
        one, other: The same loss at two sizes.
    """
    if any(tensor.dtype.startswith("key<") for tensor in one.graph.batch):
        return "the loss takes a random key"
    crossing = {v for cut in range(1, stop + 1) for v in one.graph.crossing(cut)}
    for v in sorted(crossing):
        tensor, dim = one.graph.values[v], one.graph.values[v].batch_dim
        if dim is None or tensor.shape[dim] != one.graph.microbatch_size:
            return f"{tensor.name} of shape {tensor.shape} holds no example in a place of its own"
    if not stop:
        return None
    met = _meetings(*(opened(_jaxpr(traced, stop)) for traced in (one, other)))
    return next(met, None)


def _jaxpr(traced: TracedModel, stop: int) -> Any:
    layers, graph = traced.slice(0, stop), traced.graph

    def structs(tensors: Sequence[Tensor], which: Sequence[int]) -> list[Any]:
        return [struct_of(tensors[i]) for i in which]

    params, batch = structs(graph.params, layers.params), structs(graph.batch, layers.batch)
    return jax.make_jaxpr(lambda params, batch: layers(params, [], batch))(params, batch)


def _meetings(one: Any, other: Any) -> Iterator[str]:
    pairs = _alike(one.eqns, other.eqns)
    if pairs is None:
        yield "the layers are other operations at the other size"
        return
    for a, b in pairs:
        name = a.primitive.name
        bodies = list(zip(sub_jaxprs(a.params), sub_jaxprs(b.params), strict=True))
        for bodies_of in bodies:
            yield from _meetings(*bodies_of)
        grown = [_grown(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        if bodies or not any(grown):
            continue
        made = [_grown(x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]
        along = a.params.get(_ALONG.get(name, ""), ())
        mixed = set(several(along))
        if any(len(dims) != 1 for dims in made) or any(mixed & set(dims) for dims in grown):
            yield f"the operation {name} joins examples"


def _alike(one: Sequence[Any], other: Sequence[Any]) -> list[tuple[Any, Any]] | None:
    """Return the equal operations of two programs as pairs; None if the programs differ. Over a
    single example JAX does not broadcast, and what is made so has no use but in the operations
    behind it."""

    def names(equations: Sequence[JaxprEqn]) -> list[str]:
        return [equation.primitive.name for equation in equations]

    if names(one) != names(other):
        one, other = (
            [equation for equation in equations if equation.primitive.name not in _BROADCASTS]
            for equations in (one, other)
        )
    return list(zip(one, other, strict=True)) if names(one) == names(other) else None


def _grown(one: Any, other: Any) -> list[int]:
    """Return the dimensions of a value that depend on the size of the micro-batch."""
    pair = np.shape(one.aval), np.shape(other.aval)
    return [d for d, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
