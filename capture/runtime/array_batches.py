"""Batches of an array of models, as its step is fed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.errors import ExecutionError, Violation
from capture.model.workload import WorkloadProtocol
from capture.plan.array import ArrayPlan, Member
from capture.runtime.array_state import check_count
from capture.runtime.layerwise import KEYS
from capture.runtime.microbatches import host_leaf, leaves_of
from capture.runtime.state import made_by_host
from capture.tracing import TracedModel


def step_key(member: Member, update: int) -> jax.Array:
    """Return a model's random key in an update, from 0 on: its own, whatever others there are."""
    return jax.random.fold_in(jax.random.split(jax.random.key(member.seed), 3)[2], update)


def drawn(plan: ArrayPlan, workloads: Sequence[WorkloadProtocol], update: int) -> Any:
    """Return the batch of each model of an array for an update, which it draws by its own seed; one
    for all where the plan shares them, by the seed of the first.

    Args:
        plan: Of the array.
        workloads: By model.
        update: From 0 on.
    """

    def batch(workload: WorkloadProtocol, member: Member, size: int) -> Any:
        key = jax.random.fold_in(jax.random.key(member.seed), 1 + update)
        return made_by_host(lambda key: workload.batch(key, size), key)

    found = [
        batch(workload, member, task.batch_size)
        for workload, member, task in zip(workloads, plan.models, plan.trained, strict=True)
        if not plan.shared_batches or member is plan.models[0]
    ]
    return found[0] if plan.shared_batches else found


def stacked(plan: ArrayPlan, traced: Sequence[TracedModel], batch: Any, update: int) -> list[Any]:
    """Return the batch leaves of all sub-arrays, on the host, and keys of every model.

    Args:
        plan: Of the models.
        traced: Each of them.
        batch: One batch per model, or one for all where the plan shares them.
        update: For which, from 0 on.

    Raises:
        ExecutionError: ``array-count``, ``run-batch``.
    """
    if plan.shared_batches:
        own = [_checked(traced[0], batch, "the batch")]
    else:
        check_count("batch", batch, len(plan.models))
        own = [
            _checked(of, one, f"the batch of model {m}")
            for m, (of, one) in enumerate(zip(traced, batch, strict=True))
        ]
    found: list[Any] = []
    for group in plan.partition:
        for leaf, tensor in enumerate(traced[group[0]].graph.batch):
            if tensor.dtype in KEYS:
                # As a step of one micro-batch draws.
                keys = [jax.random.fold_in(step_key(plan.models[m], update), 0) for m in group]
                found.append(jnp.stack(keys))
            elif plan.shared_batches:
                found.append(own[0][leaf])
            else:
                found.append(np.stack([own[model][leaf] for model in group]))
    return found


def _checked(traced: TracedModel, batch: Any, name: str) -> list[np.ndarray]:
    """Return the leaves of a batch that are no keys, which come last."""
    tensors = [tensor for tensor in traced.graph.batch if tensor.dtype not in KEYS]
    key = jax.eval_shape(lambda: jax.random.key(0))
    leaves = leaves_of(traced, jax.tree.map(host_leaf, batch), key, name)[: len(tensors)]
    ExecutionError.check(
        Violation(
            f"{tensor.name} of {name} has shape {leaf.shape} {leaf.dtype}; the plan's has "
            f"{tuple(tensor.shape)} {tensor.dtype}.",
            "run-batch",
        )
        for tensor, leaf in zip(tensors, leaves, strict=True)
        if leaf.shape != tuple(tensor.shape) or str(leaf.dtype) != tensor.dtype
    )
    return leaves
