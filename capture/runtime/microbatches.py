"""Cut a global batch into micro-batches on the host, and check that it is the batch that the plan
was made for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np

from capture.errors import ExecutionError, Violation
from capture.model.graph import Tensor
from capture.model.workload import PyTree
from capture.tracing import TracedModel


def split_microbatches(
    traced: TracedModel, num_microbatches: int, batch: PyTree, key: jax.Array | None
) -> list[list[Any]]:
    """``split_examples`` into equal micro-batches.

    Args:
        traced: At the micro-batch size.
        num_microbatches: M.
        batch, key: As there.
    """
    return split_examples(traced, [traced.graph.microbatch_size] * num_microbatches, batch, key)


def split_examples(
    traced: TracedModel, sizes: Sequence[int], batch: PyTree, key: jax.Array | None
) -> list[list[Any]]:
    """Per part, the leaves of ``graph.batch`` on the host, the part's own key last if the loss
    takes one.

    Args:
        traced: At any micro-batch size.
        sizes: Examples of each part; leaf dimensions that hold the examples are cut, other leaves
            are shared.
        batch: A global batch.
        key: The step's random key; part m gets ``jax.random.fold_in(key, m)``.

    Raises:
        ExecutionError: ``run-batch`` naming every leaf of another shape or dtype.
    """
    tensors, num_parts = traced.graph.batch, len(sizes)
    traced_size, starts = traced.graph.microbatch_size, (0, *accumulate(sizes))
    host = jax.tree.map(_host_leaf, batch)
    keys = [None] * num_parts if key is None else _microbatch_keys(key, num_parts)
    try:
        parts = [traced.batch_leaves(host, own) for own in keys]
    except ValueError as error:  # of JAX's flattening; it names the first difference
        raise ExecutionError.of(
            f"the batch has another structure than the plan's: {error}.", "run-batch"
        ) from None
    ExecutionError.check(_batch_violations(tensors, parts[0], traced_size, sizes))
    return [
        [
            _part(leaf, tensor, traced_size, span)
            for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
        for leaves, span in zip(parts, pairwise(starts), strict=True)
    ]


def _host_leaf(leaf: Any) -> np.ndarray:
    """As JAX would take it: 64-bit numbers as 32-bit, unless it is told to keep them."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


@partial(jax.jit, static_argnums=1)
def _microbatch_keys(key: jax.Array, num_microbatches: int) -> list[jax.Array]:
    """One program instead of one per key. A loop, because not every kind of key folds the same
    under ``jax.vmap``."""
    keys = jax.lax.map(lambda m: jax.random.fold_in(key, m), np.arange(num_microbatches))
    return [keys[m] for m in range(num_microbatches)]


def _part(leaf: Any, tensor: Tensor, traced_size: int, span: tuple[int, int]) -> Any:
    if tensor.batch_dim is None:
        return leaf
    rows = tensor.shape[tensor.batch_dim] // traced_size
    return leaf[(slice(None),) * tensor.batch_dim + (slice(rows * span[0], rows * span[1]),)]


def _batch_violations(
    tensors: Sequence[Tensor], leaves: Sequence[Any], traced_size: int, sizes: Sequence[int]
) -> list[Violation]:
    found = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        expected = tuple(
            size // traced_size * sum(sizes) if d == tensor.batch_dim else size
            for d, size in enumerate(tensor.shape)
        )
        if tuple(leaf.shape) != expected or str(leaf.dtype) != tensor.dtype:
            found.append(
                Violation(
                    f"{tensor.name} has shape {tuple(leaf.shape)} {leaf.dtype}; the plan was made "
                    f"for {expected} {tensor.dtype} "
                    f"({len(sizes)} micro-batches).",
                    "run-batch",
                )
            )
    return found
