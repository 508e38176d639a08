"""Cut a global batch into micro-batches on the host, and check that it is the batch that the plan
was made for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    """Per micro-batch, the leaves of ``graph.batch`` on the host, the micro-batch's own key last if
    the loss takes one.

    Args:
        traced: At the micro-batch size.
        num_microbatches: M; leaf dimensions that hold the examples are cut into M equal parts,
            other leaves are shared.
        batch: A global batch.
        key: The step's random key; micro-batch m gets ``jax.random.fold_in(key, m)``.

    Raises:
        ExecutionError: ``run-batch`` naming every leaf of another shape or dtype.
    """
    tensors = traced.graph.batch
    host = jax.tree.map(_host_leaf, batch)
    keys = [None] * num_microbatches if key is None else _microbatch_keys(key, num_microbatches)
    try:
        parts = [traced.batch_leaves(host, own) for own in keys]
    except ValueError as error:  # of JAX's flattening; it names the first difference
        raise ExecutionError.of(
            f"the batch has another structure than the plan's: {error}.", "run-batch"
        ) from None
    ExecutionError.check(_batch_violations(tensors, parts[0], num_microbatches))
    return [
        [_part(leaf, tensor, m) for leaf, tensor in zip(leaves, tensors, strict=True)]
        for m, leaves in enumerate(parts)
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


def _part(leaf: Any, tensor: Tensor, microbatch: int) -> Any:
    if tensor.batch_dim is None:
        return leaf
    size = tensor.shape[tensor.batch_dim]
    return leaf[
        (slice(None),) * tensor.batch_dim + (slice(microbatch * size, (microbatch + 1) * size),)
    ]


def _batch_violations(
    tensors: Sequence[Tensor], leaves: Sequence[Any], num_microbatches: int
) -> list[Violation]:
    found = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        expected = tuple(
            size * num_microbatches if d == tensor.batch_dim else size
            for d, size in enumerate(tensor.shape)
        )
        if tuple(leaf.shape) != expected or str(leaf.dtype) != tensor.dtype:
            found.append(
                Violation(
                    f"{tensor.name} has shape {tuple(leaf.shape)} {leaf.dtype}; the plan was made "
                    f"for {expected} {tensor.dtype} "
                    f"({num_microbatches} micro-batches).",
                    "run-batch",
                )
            )
    return found
