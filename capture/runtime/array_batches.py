"""Batches of an array of models, as its step is fed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture.model.workload import WorkloadProtocol
from capture.plan.array import ArrayPlan, Member
from capture.runtime.array_state import check_count
from capture.runtime.layerwise import KEYS
from capture.runtime.microbatches import split_examples
from capture.runtime.state import made_by_host
from capture.tracing import TracedModel


def step_key(member: Member, update: int) -> jax.Array:
    """Return a model's random key in an update, from 0 on: its own, whatever others there are."""
    return jax.random.fold_in(jax.random.split(jax.random.key(member.seed), 3)[2], update)


def drawn(plan: ArrayPlan, workloads: Sequence[WorkloadProtocol], update: int) -> Any:
    """Return the batch of each model of an array for an update, which it draws by its own seed; one
    for all where the plan shares them, by the seed of the first.

    Args:
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
        batch: One batch per model, or one for all where the plan shares them.
        update: For which, from 0 on.

    Raises:
        ExecutionError: ``array-count``, ``run-batch``.
    """
    if not plan.shared_batches:
        check_count("batch", batch, len(plan.models))
    own: list[list[Any]] = []
    for m, model in enumerate(traced):
        keyed = any(tensor.dtype in KEYS for tensor in model.graph.batch)
        key = step_key(plan.models[m], update) if keyed else None
        given, of = (batch, "") if plan.shared_batches else (batch[m], f" of model {m}")
        own += split_examples(model, [model.graph.microbatch_size], given, key, of=of)
    found: list[Any] = []
    for group in plan.partition:
        for leaf, tensor in enumerate(traced[group[0]].graph.batch):
            rows = [own[model][leaf] for model in group]
            if tensor.dtype in KEYS:
                found.append(jnp.stack(rows))
            else:
                found.append(own[0][leaf] if plan.shared_batches else np.stack(rows))
    return found
