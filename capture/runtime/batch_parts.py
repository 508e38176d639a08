"""What a process needs of a global batch, of which the others read the rest, and micro-batches of
which only that is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from capture.model.graph import LayerGraph, Tensor


class Reader(Protocol):
    """A stage, some of whose devices are of this process."""

    @property
    def layers(self) -> Any: ...

    def batch_structs(self, leaves: Sequence[int]) -> list[jax.ShapeDtypeStruct]: ...


@dataclass(frozen=True)
class Need:
    """The part of one leaf of the global batch that a process needs.

    Attributes:
        name: Of the leaf.
        is_read: Whether it needs any of it.
        examples: Of the global batch, ascending; as many of every micro-batch. Empty for a leaf
            that is not read, and for one that holds no examples and is read whole.
        dim: That holds the examples; None if none does.
        rows: Of an example in that dimension.
    """

    name: str
    is_read: bool
    examples: tuple[range, ...] = ()
    dim: int | None = None
    rows: int = 1

    @property
    def num_examples(self) -> int:
        return sum(map(len, self.examples))

    def part(self, leaf: object) -> Any:
        """Return the part of a leaf of the whole batch that is needed; None if nothing is."""
        if not self.is_read or self.dim is None:
            return leaf if self.is_read else None
        array = np.asarray(leaf)
        parts = [examples_of(array, self.dim, span, self.rows) for span in self.examples]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, self.dim)

    def shape_of_part(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what ``part`` gives of a leaf that is read and has this shape."""
        if self.dim is None:
            return whole
        return (*whole[: self.dim], self.rows * self.num_examples, *whole[self.dim + 1 :])

    def microbatch(self, part: np.ndarray, m: int, num_microbatches: int) -> Rows:
        """Return the rows of micro-batch ``m``, cut from the part that is needed."""
        assert self.dim is not None, f"{self.name} holds no examples, so it is there whole"
        count = self.num_examples // num_microbatches
        own = examples_of(part, self.dim, range(m * count, (m + 1) * count), self.rows)
        return Rows(own, self.dim, self.rows * self.examples[0].start)


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch's leaf that are there; it is cut by the indexes of the whole.

    Attributes:
        array: Those that are there.
        dim: That holds them.
        first: Of them, in the whole.
    """

    array: np.ndarray
    dim: int
    first: int

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows = index[self.dim]
        own = slice(rows.start - self.first, rows.stop - self.first)
        return self.array[(*index[: self.dim], own, *index[self.dim + 1 :])]


def needs_of(graph: LayerGraph, num_microbatches: int, stages: Sequence[Reader]) -> list[Need]:
    """Return what this process needs of each batch leaf, the key's last if the loss takes one.

    Devices that read different examples of a micro-batch may leave some in between, which count as
    needed.

    Args:
        graph: At the size of a micro-batch.
        stages: Those with devices of this process.
    """
    return [_need(graph, b, num_microbatches, stages) for b in range(len(graph.batch))]


def _need(graph: LayerGraph, b: int, num_microbatches: int, stages: Sequence[Reader]) -> Need:
    tensor, size = graph.batch[b], graph.microbatch_size
    readers = [stage for stage in stages if b in stage.layers.batch]
    if not readers or tensor.batch_dim is None:
        return Need(tensor.name, bool(readers), dim=tensor.batch_dim)
    spans = [span for stage in readers for span in _spans(stage, b, tensor)]
    rows = tensor.shape[tensor.batch_dim] // size
    first, stop = min(a for a, _ in spans) // rows, -(-max(b for _, b in spans) // rows)
    examples = (
        (range(size * num_microbatches),)
        if (first, stop) == (0, size)
        else tuple(range(m * size + first, m * size + stop) for m in range(num_microbatches))
    )
    return Need(tensor.name, True, examples, tensor.batch_dim, rows)


def _spans(stage: Reader, b: int, tensor: Tensor) -> list[tuple[int, int]]:
    """Return, per device of this process, its rows of a micro-batch."""
    (struct,), dim = stage.batch_structs([b]), tensor.batch_dim
    assert struct.sharding is not None and dim is not None
    indices = struct.sharding.addressable_devices_indices_map(tuple(struct.shape))
    return [index[dim].indices(tensor.shape[dim])[:2] for index in indices.values() if index]


def examples_of(array: np.ndarray, dim: int, examples: range, rows: int) -> np.ndarray:
    """Return the rows of some examples, as many of each, along a dimension."""
    own = slice(rows * examples.start, rows * examples.stop)
    return array[(slice(None),) * dim + (own,)]
