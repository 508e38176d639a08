"""The same training on one device, for comparison: it accumulates the same micro-batches in the
same order with the same keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capture.model.graph import LayerGraph
from capture.model.workload import PyTree, WorkloadProtocol
from capture.runtime.gradients import loss_and_gradients
from capture.runtime.microbatches import split_examples
from capture.tracing import TracedModel

#: Times the floor, errors of gradients are taken to be of roundings.
_NOISE = 10.0


@dataclass(frozen=True)
class ReferenceStep:
    """Gradient accumulation by ``jax.value_and_grad`` of the user's own loss, on the first device.

    Attributes:
        traced: At any micro-batch size.
        sizes: Examples of each micro-batch.
    """

    workload: WorkloadProtocol
    traced: TracedModel
    sizes: Sequence[int]

    @cached_property
    def _grad(self):
        return _gradients(self.workload.loss_fn)

    @cached_property
    def _update(self):
        def update(params, state, grads):
            updates, state = self.workload.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(update)

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and optimizer state."""
        params = jax.tree.map(jnp.asarray, params)
        return params, self.workload.optimizer.init(params)

    def loss_and_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[float, PyTree]:
        """Return the mean loss and the mean gradients over the examples."""
        losses: list[float] = []
        tree: Any = jax.tree.structure(batch)  # JAX's stubs leave its methods out
        total, examples = None, sum(self.sizes)
        parts = split_examples(self.traced, self.sizes, batch, key)
        for size, leaves in zip(self.sizes, parts, strict=True):
            count, share = tree.num_leaves, examples / size
            loss, grads = self._grad(params, tree.unflatten(leaves[:count]), *leaves[count:])
            grads = jax.tree.map(lambda g, share=share: (g / share).astype(g.dtype), grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            losses.append(float(loss))
        return float(np.average(losses, weights=self.sizes)), total

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        key: jax.Array | None = None,
        *,
        roundings: int = 0,
    ) -> tuple[PyTree, PyTree, float]:
        """Make one update; with gradients that are off by so many roundings (``rounded``)."""
        loss, grads = self.loss_and_gradients(params, batch, key)
        params, state = self._update(params, state, rounded(grads, roundings))
        return params, state, loss

    def compare(
        self, gradients: PyTree, params: PyTree, batches: Sequence[PyTree], keys: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the loss of every step here, and by how much gradients of the first are off.

        Args:
            gradients: Of the first step, by what is checked.
            params: With which the training begins.
            batches, keys: Of every step.
        """
        own, state = self.init(params)
        _, expected = self.loss_and_gradients(own, batches[0], keys[0])
        floor = rounding_floor(self.traced.graph)
        errors = relative_errors(gradients, expected, floor)
        worst = max(errors, key=errors.__getitem__)
        losses = []
        for batch, key in zip(batches, keys, strict=True):
            own, state, loss = self(own, state, batch, key)
            losses.append(loss)
        return {
            "reference_losses": losses,
            "max_relative_gradient_error": errors[worst],
            "worst_gradient": worst,
            "gradient_rounding_error": _NOISE * floor,
        }


@lru_cache(maxsize=1)
def _gradients(loss_fn: Callable[..., object]) -> Callable[..., Any]:
    """Compile a loss's gradients once for several trainings, one after the other."""
    return jax.jit(loss_and_gradients(loss_fn))


def rounded(gradients: PyTree, roundings: int) -> PyTree:
    """Return gradients as sums in another order may be. Each element is off, up or down, by so many
    times eps of the largest value of its leaf; but for zeros, which are sums of nothing.

    What a training makes of this says how exactly it can be compared at all. Momentum keeps such an
    error as it is; Adam divides every element by its own size, so that one of almost no gradient is
    moved as far as others, in a direction that the error decides.
    """
    if not roundings:
        return gradients
    leaves = jax.tree.leaves(gradients)
    tree: Any = jax.tree.structure(gradients)  # JAX's stubs leave its methods out

    def off(n: int, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        signs = jax.random.rademacher(jax.random.key(n), leaf.shape, leaf.dtype)
        by = roundings * jnp.finfo(leaf.dtype).eps * jnp.abs(leaf).max()
        return jnp.where(leaf == 0, leaf, leaf + by * signs)

    return tree.unflatten([off(n, leaf) for n, leaf in enumerate(leaves)])


def rounding_floor(graph: LayerGraph) -> float:
    """Return the size, as a fraction of the largest value of a gradient, below which a leaf is
    measured against that size: sqrt(eps).

    ``eps`` is that of the least precise floating-point numbers among the parameters and what passes
    between layers. Sums in another order differ by some eps times the largest value that they may
    hold, also in a leaf whose true gradient is zero (the bias of attention keys), where an error
    relative to the leaf itself says nothing. With the root in between, such noise reads as about
    sqrt(eps), while a leaf that is wrong reads as its whole error down to a size of sqrt(eps), and
    as more than the noise down to eps.

    Example:
        A leaf of 1e-5 times the largest one that is all wrong reads as 0.03 in float32, and noise
        in a leaf of zeros as 1e-4.
    """
    dtypes = {jnp.dtype(tensor.dtype) for tensor in (*graph.params, *graph.values)}
    return (
        max(float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
        ** 0.5
    )


def relative_errors(value: PyTree, reference: PyTree, floor: float) -> dict[str, float]:
    """Return, by leaf, max |value - reference| / max(max |reference|, floor * max |reference| over
    all leaves); infinite where one is no number.

    Args:
        floor: See ``rounding_floor``.

    Example:
        >>> relative_errors({"a": [2.0, 8.0], "b": [0.5]}, {"a": [2.0, 10.0], "b": [0.0]}, 0.1)
        {'a/0': 0.0, 'a/1': 0.2, 'b/0': 0.5}
    """
    named, others = jax.tree.leaves_with_path(reference), jax.tree.leaves(value)
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, (_, b) in zip(others, named, strict=True)
    ]
    largest = max((float(np.abs(b).max(initial=0.0)) for _, b in pairs), default=0.0)

    def error(a: Any, b: Any) -> float:
        scale = max(float(np.abs(b).max(initial=0.0)), floor * largest)
        off = float(np.abs(a - b).max(initial=0.0))
        return (off / scale if scale else off) if np.isfinite(off) else float("inf")

    names = [
        jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in named
    ]
    return {name: error(a, b) for name, (a, b) in zip(names, pairs, strict=True)}


def max_relative_error(value: PyTree, reference: PyTree, floor: float = 1e-6) -> float:
    """Return the largest of ``relative_errors``."""
    return max(relative_errors(value, reference, floor).values(), default=0.0)
