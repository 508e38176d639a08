"""Cut a global batch into micro-batches on the host, and check that it is the batch that the plan
was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np

from capture.errors import ExecutionError, Violation
from capture.model.graph import Tensor
from capture.model.workload import PyTree
from capture.runtime.batch_parts import Need, examples_of
from capture.tracing import TracedModel


def split_examples(
    traced: TracedModel,
    sizes: Sequence[int],
    batch: PyTree,
    key: jax.Array | None,
    needs: Sequence[Need] = (),
    of: str = "",
) -> list[list[Any]]:
    """Return, per part, the leaves of ``graph.batch`` on the host, its own key last if any.

    Args:
        traced: At any micro-batch size.
        sizes: Examples of each part; leaf dimensions that hold the examples are cut, other leaves
            are shared.
        batch: A global batch; each leaf whole or, where ``needs`` says what of it is read here,
            that part.
        key: The step's random key; part m gets ``jax.random.fold_in(key, m)``.
        needs: Per leaf; the parts are of equal size.
        of: Whose the batch is, for messages, such as `` of model 3``.

    Raises:
        ExecutionError: ``run-batch`` naming every leaf of another shape or dtype,
            ``run-batch-part`` every one that is neither whole nor what is read of it.
    """
    tensors, num_parts = traced.graph.batch, len(sizes)
    needs = needs or [Need(tensor.name, True) for tensor in tensors]
    traced_size, starts = traced.graph.microbatch_size, (0, *accumulate(sizes))
    host = jax.tree.map(_host_leaf, batch)
    keys = [None] * num_parts if key is None else _microbatch_keys(key, num_parts)
    parts = [_leaves_of(traced, host, own, of) for own in keys]
    wholes = [_whole_shape(tensor, traced_size, sizes) for tensor in tensors]
    ExecutionError.check(
        _batch_violations(tensors, parts[0], wholes, needs, f"{num_parts} micro-batches{of}")
    )

    def part(b: int, leaf: Any, m: int, span: tuple[int, int]) -> Any:
        if leaf is None or tuple(leaf.shape) == wholes[b]:
            return _part(leaf, tensors[b], traced_size, span)
        return needs[b].microbatch(leaf, m, num_parts)

    return [
        [part(b, leaf, m, span) for b, leaf in enumerate(leaves)]
        for m, (leaves, span) in enumerate(zip(parts, pairwise(starts), strict=True))
    ]


def _leaves_of(traced: TracedModel, batch: PyTree, key: Any, of: str) -> list[Any]:
    """Return the host's leaves of a batch, and a random key, in the order of the layer graph."""
    try:
        return traced.batch_leaves(batch, key)
    except ValueError:
        # JAX's flattening names the first difference, with what it finds there: shapes, no numbers.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        try:
            traced.batch_leaves(shapes, key)
        except ValueError as error:
            said = str(error).rstrip(".")
            raise ExecutionError.of(
                f"the batch{of} has another structure than the plan's: {said}.", "run-batch"
            ) from None
        raise


def _host_leaf(leaf: object) -> np.ndarray:
    """Return a leaf as JAX takes it: 64-bit numbers as 32-bit, unless it is told to keep them."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


@partial(jax.jit, static_argnums=1)
def _microbatch_keys(key: jax.Array, num_microbatches: int) -> list[jax.Array]:
    """Return all keys by one program instead of one per key. It is a loop, because not every kind
    of key folds the same under ``jax.vmap``."""
    keys = jax.lax.map(lambda m: jax.random.fold_in(key, m), np.arange(num_microbatches))
    return [keys[m] for m in range(num_microbatches)]


def _part(leaf: Any, tensor: Tensor, traced_size: int, span: tuple[int, int]) -> Any:
    if leaf is None or tensor.batch_dim is None:
        return leaf
    rows = tensor.shape[tensor.batch_dim] // traced_size
    return examples_of(leaf, tensor.batch_dim, range(*span), rows)


def _whole_shape(tensor: Tensor, traced_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        size // traced_size * sum(sizes) if d == tensor.batch_dim else size
        for d, size in enumerate(tensor.shape)
    )


def _batch_violations(
    tensors: Sequence[Tensor],
    leaves: Sequence[Any],
    wholes: Sequence[tuple[int, ...]],
    needs: Sequence[Need],
    parts: str,
) -> Iterator[Violation]:
    for tensor, leaf, whole, need in zip(tensors, leaves, wholes, needs, strict=True):
        if leaf is None and not need.is_read:
            continue
        own = need.shape_of_part(whole) if need.examples else whole
        shape, dtype = (None, None) if leaf is None else (tuple(leaf.shape), str(leaf.dtype))
        if shape in (whole, own) and dtype == tensor.dtype:
            continue
        given = "is None" if leaf is None else f"has shape {shape} {dtype}"
        if leaf is None or own != whole:
            spans = ", ".join(f"{span.start} to {span.stop - 1}" for span in need.examples)
            read = f", of which this process reads {own}: examples {spans}" if spans else ""
            yield Violation(
                f"{tensor.name} {given}; the whole is {whole} {tensor.dtype}{read}: give the whole "
                "or what step.needs() names.",
                "run-batch-part",
            )
        else:
            yield Violation(
                f"{tensor.name} {given}; the plan was made for {whole} {tensor.dtype} ({parts}).",
                "run-batch",
            )
