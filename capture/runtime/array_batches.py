"""Batches of an array of models, as its step is fed with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from capture.errors import ExecutionError, Violation
from capture.plan.array import ArrayPlan
from capture.runtime.array_state import check_count
from capture.tracing import TracedModel


def stacked(plan: ArrayPlan, traced: TracedModel, batch: Any) -> list[Any]:
    """Leaves of all sub-arrays, on the host.

    Args:
        plan: Of the models.
        traced: One of them.
        batch: One batch per model, or one for all where the plan shares them.

    Raises:
        ExecutionError: ``array-count``, ``run-batch``.
    """
    if plan.shared_batches:
        leaves = _checked(traced, batch, "the batch")
        return [leaf for _ in plan.partition for leaf in leaves]
    check_count("batch", batch, len(plan.models))
    own = [_checked(traced, one, f"the batch of model {m}") for m, one in enumerate(batch)]
    return [
        np.stack([own[model][leaf] for model in group])
        for group in plan.partition
        for leaf in range(len(traced.graph.batch))
    ]


def _checked(traced: TracedModel, batch: Any, name: str) -> list[np.ndarray]:
    leaves = [np.asarray(leaf) for leaf in traced.batch_leaves(batch)]
    ExecutionError.check(
        Violation(
            f"{tensor.name} of {name} has shape {leaf.shape} {leaf.dtype}; the plan's has "
            f"{tuple(tensor.shape)} {tensor.dtype}.",
            "run-batch",
        )
        for tensor, leaf in zip(traced.graph.batch, leaves, strict=True)
        if leaf.shape != tuple(tensor.shape) or str(leaf.dtype) != tensor.dtype
    )
    return leaves
