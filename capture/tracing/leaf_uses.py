"""How a traced loss uses its parameter leaves: along which dimension a product that reads one can
be split into slices, and which are read through a cast alone.

A product over the slices of a contracted dimension is a sum of products, one per slice; a lookup in
a table is the sum of lookups in slices of its rows, where a row of another slice counts as zero.

Source: Jiang et al. 2023 (OSDP), 3.3 and Figure 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from capture.tracing.cut import PRODUCTS
from capture.tracing.jaxprs import is_variable
from capture.tracing.layers import LayerOps
from capture.tracing.program import LossProgram, Op

CAST = "convert_element_type"
#: Ops that keep a leaf's elements and its rank: slices pass through them.
ORDERED = (CAST, "transpose", "copy", "reduce_precision")
#: Ops that keep a leaf's elements: they are applied after it is gathered.
LAYOUT = (*ORDERED, "reshape", "squeeze", "broadcast_in_dim", "expand_dims")


@dataclass(frozen=True)
class Slicing:
    """The dimensions along which an operation that reads a parameter is split.

    Attributes:
        dim: Dimension of the parameter, as the operation reads it.
        partner: Operand that is split with it, ``partner_dim`` of it; of a lookup, the indices,
            which are not split (None).
    """

    dim: int
    partner: int
    partner_dim: int | None


def slicing_of(op: Op, operand: int, shape: tuple[int, ...]) -> Slicing | None:
    """Return how to split an operation along one of its operands; None if it cannot be.

    Args:
        operand: Position of the parameter among its inputs.
        shape: The parameter's shape as the operation reads it.
    """
    partner = 1 - operand
    if op.primitive.name == "dot_general":
        contracted = op.params["dimension_numbers"][0]
        pairs = list(zip(contracted[operand], contracted[partner], strict=True))
        if not pairs:
            return None
        dim, partner_dim = max(pairs, key=lambda pair: (shape[pair[0]], -pair[0]))
        return Slicing(dim, partner, partner_dim)
    if op.primitive.name == "conv_general_dilated" and operand == 1:
        numbers = op.params["dimension_numbers"]
        whole = op.params["feature_group_count"] == op.params["batch_group_count"] == 1
        return Slicing(numbers.rhs_spec[1], 0, numbers.lhs_spec[1]) if whole else None
    if op.primitive.name == "gather" and operand == 0:
        numbers = op.params["dimension_numbers"]
        rows = tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        return (
            Slicing(0, 1, None)
            if rows and tuple(op.params["slice_sizes"][1:]) == tuple(shape[1:])
            else None
        )
    return None


@dataclass(frozen=True)
class Cast:
    """The cast to a smaller dtype through which all layers read a parameter.

    Attributes:
        once: Whether one layer does so, in one place. The parameter's gradient is then that of the
            cast, converted; of several casts it is a sum, which the dtype need not hold.
    """

    dtype: str
    once: bool


def casts(program: LossProgram, layers: Sequence[LayerOps]) -> tuple[Cast | None, ...]:
    """Return, per parameter of a program, the cast through which all layers read it. None where a
    layer reads it otherwise, or none does."""
    reads: defaultdict[int, list[Any]] = defaultdict(list)
    for layer in layers:
        for v in layer.outputs:
            reads[v].append(None)
        for op in layer.ops:
            for v in op.reads:
                is_cast = op.primitive.name == CAST
                reads[v].append(op.params["new_dtype"] if is_cast else None)

    def cast(v: int) -> Cast | None:
        own, dtypes = program.avals[v].dtype, {*reads[v]}
        if len(dtypes) != 1 or None in dtypes or not program.avals[v].size:
            return None
        (dtype,) = map(jnp.dtype, dtypes)
        floats = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if not floats or dtype.itemsize >= own.itemsize:
            return None
        return Cast(str(dtype), len(reads[v]) == 1)

    return tuple(map(cast, program.params))


def split_dims(program: LossProgram) -> tuple[int | None, ...]:
    """Return, per parameter, the dimension along which all its readers can be split; else None."""
    seen: dict[int, tuple[int, tuple[int, ...]]] = {
        v: (p, tuple(range(len(program.avals[v].shape)))) for p, v in enumerate(program.params)
    }
    found: list[set[int | None]] = [set() for _ in program.params]
    static = program.from_params - program.from_batch
    for op in program.ops:
        for position, value in enumerate(op.inputs):
            if not is_variable(value) or value not in seen:
                continue
            param, dims = seen[value]
            if op.primitive.name in ORDERED:
                seen[op.outputs[0]] = (
                    param,
                    tuple(dims[d] for d in op.params.get("permutation", range(len(dims)))),
                )
                continue
            if op.primitive.name not in LAYOUT and static.issuperset(op.reads):
                # of parameters alone, such as a penalty on their size: nothing is gathered for it
                continue
            found[param].add(_split_dim(op, position, program.avals[value].shape, dims, static))
    return tuple(dims.pop() if len(dims) == 1 else None for dims in found)


def _split_dim(
    op: Op, position: int, shape: Any, dims: tuple[int, ...], static: frozenset[int]
) -> int | None:
    if op.primitive.name not in PRODUCTS or sum(v in static for v in op.reads) != 1:
        return None
    slicing = slicing_of(op, position, tuple(shape))
    return None if slicing is None else dims[slicing.dim]
