"""The same training on one device, for comparison: it accumulates the same micro-batches in the same order with the same keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capture.runtime.microbatches import split_microbatches
from capture.tracing import TracedModel
from capture.workload import PyTree, WorkloadProtocol


@dataclass(frozen=True)
class ReferenceStep:
    """Gradient accumulation by ``jax.value_and_grad`` of the user's own loss, on the first device.

    Attributes:
        workload: The task.
        traced: At the micro-batch size.
        num_microbatches: M.
    """

    workload: WorkloadProtocol
    traced: TracedModel
    num_microbatches: int

    @cached_property
    def _grad(self):
        return jax.jit(jax.value_and_grad(self.workload.loss_fn))

    @cached_property
    def _update(self):
        def update(params, state, grads):
            updates, state = self.workload.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(update)

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state."""
        params = jax.tree.map(jnp.asarray, params)
        return params, self.workload.optimizer.init(params)

    def loss_and_gradients(self, params: PyTree, batch: PyTree, key: jax.Array | None = None) -> tuple[float, PyTree]:
        """Mean loss and mean gradients over the micro-batches."""
        losses: list[float] = []
        tree: Any = jax.tree.structure(batch)  # JAX's stubs leave its methods out
        total = None
        for leaves in split_microbatches(self.traced, self.num_microbatches, batch, key):
            count = tree.num_leaves
            loss, grads = self._grad(params, tree.unflatten(leaves[:count]), *leaves[count:])
            grads = jax.tree.map(lambda g: g / self.num_microbatches, grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            losses.append(float(loss))
        return float(np.mean(losses)), total

    def __call__(self, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None = None) -> tuple[PyTree, PyTree, float]:
        """One update."""
        loss, grads = self.loss_and_gradients(params, batch, key)
        params, state = self._update(params, state, grads)
        return params, state, loss


def max_relative_error(value: PyTree, reference: PyTree, floor: float = 1e-6) -> float:
    """Largest over the leaves of max |value - reference| / max |reference|.

    Leaves whose reference is below ``floor`` times the largest of all leaves are measured against that: gradients that are zero
    analytically (the bias of attention keys) hold only rounding noise.
    """
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(reference), strict=True)
    ]
    largest = max((float(np.abs(b).max(initial=0.0)) for _, b in pairs), default=0.0)

    def error(a: Any, b: Any) -> float:
        scale = max(float(np.abs(b).max(initial=0.0)), floor * largest)
        return float(np.abs(a - b).max(initial=0.0)) / scale if scale else 0.0

    return max((error(a, b) for a, b in pairs), default=0.0)
