"""Rows of parameters: the parts that a leaf is stored in, the slices that a part is gathered in,
and what a piece of an operation takes of its operands."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding


@dataclass(frozen=True)
class LeafRows:
    """An array that holds some rows of a parameter leaf, all of them as a rule.

    Attributes:
        first, stop: The rows, along the dimension that the leaf is split in.
        reduced: Shardings that its gradient is brought to, one after the other; the last is
            ``stored``.
        num_slices: Slices that are gathered one by one where an operation can be split.
        num_blocks: Shards along the dimension of the slices, each of which has a share of every
            slice; 1 if it is sharded along another.
    """

    first: int
    stop: int
    stored: NamedSharding
    reduced: tuple[NamedSharding, ...]
    num_slices: int = 1
    num_blocks: int = 1

    @property
    def is_sharded(self) -> bool:
        return not self.stored.is_fully_replicated

    def slices(self, offset: int = 0) -> list[BlockRows]:
        """Return the rows of each slice, in an array in which the part begins at ``offset``; sizes
        differ by one per block at most."""
        size = (self.stop - self.first) // self.num_blocks
        bounds = [size * i // self.num_slices for i in range(self.num_slices + 1)]
        return [
            BlockRows(offset, self.num_blocks, size, a, b) for a, b in pairwise(bounds) if b > a
        ]


@dataclass(frozen=True)
class BlockRows:
    """Some rows of every one of equal blocks that follow each other: a slice of a sharded dimension
    is that slice of every shard.

    Attributes:
        start: Where the first block begins.
        num_blocks, block_size: How many, and rows of each.
        first, stop: The rows, within a block.
    """

    start: int
    num_blocks: int
    block_size: int
    first: int
    stop: int

    def of(self, array: jax.Array, dim: int) -> Any:
        """Return these rows of a parameter, in their order; the blocks are its shards."""
        blocks = array.reshape(
            *array.shape[:dim], self.num_blocks, self.block_size, *array.shape[dim + 1 :]
        )
        return lax.slice_in_dim(blocks, self.first, self.stop, axis=dim + 1).reshape(
            *array.shape[:dim], -1, *array.shape[dim + 1 :]
        )

    def put(self, whole: Any, part: Any, dim: int) -> Any:
        """Return the parameter with the part in these rows; built up in place, slice by slice."""
        blocks = whole.reshape(
            *whole.shape[:dim], self.num_blocks, self.block_size, *whole.shape[dim + 1 :]
        )
        part = part.reshape(*part.shape[:dim], self.num_blocks, -1, *part.shape[dim + 1 :])
        return lax.dynamic_update_slice_in_dim(blocks, part, self.first, axis=dim + 1).reshape(
            whole.shape
        )

    def of_activation(self, array: jax.Array, dim: int) -> Any:
        """Return these rows of an array that is whole along the dimension, often its last: a TPU
        would copy all of it to reshape that."""
        return jnp.concatenate(
            [lax.slice_in_dim(array, a, b, axis=dim) for a, b in self._spans()], axis=dim
        )

    def put_activation(self, whole: Any, part: Any, dim: int) -> Any:
        """Return the array with the part in place of these rows."""
        for (a, _), of_block in zip(
            self._spans(), jnp.split(part, self.num_blocks, axis=dim), strict=True
        ):
            whole = lax.dynamic_update_slice_in_dim(whole, of_block, a, axis=dim)
        return whole

    def position(self, indices: Any) -> Any:
        """Return the position of each index among these rows; -1 where it is another row's."""
        block, within = jnp.divmod(indices - self.start, self.block_size)
        inside = (
            (block >= 0) & (block < self.num_blocks) & (within >= self.first) & (within < self.stop)
        )
        return jnp.where(inside, block * (self.stop - self.first) + within - self.first, -1)

    def _spans(self) -> list[tuple[int, int]]:
        starts = range(self.start, self.start + self.num_blocks * self.block_size, self.block_size)
        return [(start + self.first, start + self.stop) for start in starts]


@dataclass(frozen=True)
class Taken:
    """A slice of an array that a piece needs: of the parameters it is gathered.

    Attributes:
        array: Position among the arrays.
        dim, rows: Along that dimension these rows; None for all of it.
        is_activation: Whether the array is the other operand.
    """

    array: int
    dim: int = 0
    rows: BlockRows | None = None
    is_activation: bool = False

    def of(self, array: jax.Array) -> Any:
        if self.rows is None:
            return array
        return (self.rows.of_activation if self.is_activation else self.rows.of)(array, self.dim)

    def put(self, whole: Any, part: Any) -> Any:
        """Return an array of the whole's shape with the part in its place."""
        if self.rows is None:
            return part
        whole = (
            jnp.zeros(whole.shape, part.dtype) if isinstance(whole, jax.ShapeDtypeStruct) else whole
        )
        return (self.rows.put_activation if self.is_activation else self.rows.put)(
            whole, part, self.dim
        )
