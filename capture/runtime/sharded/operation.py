"""What an operation reads of sharded parameters, and the pieces that it is run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from capture.runtime.sharded.all_gather import ParamArray, Piece
from capture.runtime.sharded.placement import LeafPlacement
from capture.runtime.sharded.slices import BlockRows, LeafRows, Taken
from capture.tracing.leaf_uses import ORDERED, Slicing, slicing_of
from capture.tracing.program import Op
from capture.tracing.slices import run_op

_CASTS = ("convert_element_type", "reduce_precision", "copy")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredParam:
    """A parameter as it is stored, and what the program does to it before an operation reads it.

    Attributes:
        arrays: One per part.
        parts, slice_dim: As in ``LeafPlacement``.
        chain: Ops that keep its elements.
    """

    arrays: tuple[Any, ...]
    parts: tuple[LeafRows, ...] = field(metadata={"static": True})
    slice_dim: int | None = field(metadata={"static": True})
    chain: tuple[Op, ...] = field(default=(), metadata={"static": True})

    @property
    def _num_casts(self) -> int:
        """The number of ops that come before the all-gather, so that less is sent."""
        return next(
            (i for i, op in enumerate(self.chain) if op.primitive.name not in _CASTS),
            len(self.chain),
        )

    @property
    def sources(self) -> list[ParamArray]:
        return [
            ParamArray(part, partial(_applied, self.chain[: self._num_casts]))
            for part in self.parts
        ]

    def read(self, gathered: Sequence[Any]) -> Any:
        """Return what the operation reads, made of all of the gathered leaf or of a slice of it."""
        whole = (
            gathered[0] if len(gathered) == 1 else jnp.concatenate(gathered, axis=self.slice_dim)
        )
        return _applied(self.chain[self._num_casts :], whole)

    @property
    def plain(self) -> Any:
        """The value as an ordinary array, sharded as XLA likes."""
        return self.read(
            [source.cast(array) for source, array in zip(self.sources, self.arrays, strict=True)]
        )

    @property
    def has_slices(self) -> bool:
        return len(self.parts) > 1 or self.parts[0].num_slices > 1

    def dims_as_read(self) -> tuple[int, ...] | None:
        """Return the leaf's dimension behind each that is read; None if slices do not stay."""
        dims = tuple(range(self.arrays[0].ndim))
        for op in self.chain:
            if op.primitive.name not in ORDERED:
                return None
            dims = tuple(dims[d] for d in op.params.get("permutation", range(len(dims))))
        return dims


def stored(placement: LeafPlacement, leaf: object) -> list[Any]:
    """Return what an evaluation of the loss gets for a leaf: one value per step of a scan."""
    rows = [leaf] if placement.stacked is None else _unstacked(leaf, placement.stacked)
    if placement.is_small:
        return rows
    of = placement.parts, placement.slice_dim
    return [StoredParam(tuple(jax.tree.leaves(row)), *of) for row in rows]


def is_stored(value: object) -> TypeGuard[StoredParam]:
    """Return whether a value is a parameter as it is stored."""
    return isinstance(value, StoredParam)


def plain(value: object) -> Any:
    return value.plain if is_stored(value) else value


def pieces_of(
    op: Op, inputs: Sequence[Any], sharded: Sequence[int], others: Sequence[int]
) -> list[Piece]:
    """Return the operation in slices where its parameter has some and it can be split along them;
    else as one whole piece."""
    first: StoredParam = inputs[sharded[0]]
    dims = (
        first.dims_as_read()
        if len(sharded) == 1 and first.has_slices and first.slice_dim is not None
        else None
    )
    if dims is not None:
        shape = tuple(
            first.parts[-1].stop if d == first.slice_dim else first.arrays[0].shape[d] for d in dims
        )
        slicing = slicing_of(op, sharded[0], shape)
        if slicing is not None and dims[slicing.dim] == first.slice_dim:
            return [
                _slice(
                    op,
                    inputs,
                    sharded[0],
                    others,
                    first,
                    slicing,
                    Taken(array, first.slice_dim, of_array),
                    of_leaf,
                )
                for array, part in enumerate(first.parts)
                for of_array, of_leaf in zip(part.slices(), part.slices(part.first), strict=True)
            ]
    counts = [len(inputs[i].arrays) for i in sharded]
    starts = [sum(counts[:n]) for n in range(len(counts))]

    def compute(gathered, operands):
        given = list(inputs)
        for i, start, count in zip(sharded, starts, counts, strict=True):
            given[i] = inputs[i].read(gathered[start : start + count])
        for i, value in zip(others, operands, strict=True):
            given[i] = value
        return list(run_op(op, given))

    return [Piece(tuple(Taken(i) for i in range(sum(counts))), None, compute)]


def _slice(
    op: Op,
    inputs: Sequence[Any],
    position: int,
    others: Sequence[int],
    param: StoredParam,
    slicing: Slicing,
    taken: Taken,
    rows: BlockRows,
) -> Piece:
    """Return the piece of a split operation that reads what is taken from one of its parameter's
    arrays, these rows of the whole parameter."""

    def compute(gathered, operands):
        given, of_slice = list(inputs), op
        given[position] = param.read(gathered)
        for i, value in zip(others, operands, strict=True):
            given[i] = value
        if slicing.partner_dim is None:  # a lookup: rows of other slices are filled with zeros
            indices = given[slicing.partner]
            if op.params["mode"] == lax.GatherScatterMode.CLIP:
                indices = jnp.clip(indices, 0, param.parts[-1].stop - 1)
            given[slicing.partner] = rows.position(indices)
            of_slice = replace(
                op,
                params={**op.params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0},
            )
        return list(run_op(of_slice, given))

    partner = None
    if slicing.partner_dim is not None:
        partner = Taken(
            others.index(slicing.partner), slicing.partner_dim, rows, is_activation=True
        )
    return Piece((taken,), partner, compute)


def _applied(chain: Sequence[Op], value: object) -> Any:
    for op in chain:
        (value,) = run_op(op, [value])
    return value


def _unstacked(leaf: object, dim: int) -> list[Any]:
    """Return a leaf's parts along a dimension; gradients are put together once, not added up."""

    @jax.custom_vjp
    def run(leaf):
        return [lax.index_in_dim(leaf, i, dim, keepdims=False) for i in range(leaf.shape[dim])]

    run.defvjp(lambda leaf: (run(leaf), None), lambda _, gradients: (jnp.stack(gradients, dim),))
    return run(leaf)
