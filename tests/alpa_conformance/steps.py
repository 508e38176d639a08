"""Train steps for Alpa: a chain of products, and the workload of a plan; all abstract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import shims  # isort: skip  # before jax and alpa
import alpa
import jax
import jax.numpy as jnp

from capture.documents import write
from capture.papers.alpa import worker
from capture.plan.stages import Plan

assert shims
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def chain(
    num_layers: int,
    batch_size: int = 64,
    width: int = 16,
    marked: bool = True,
    skip_to: Sequence[int] = (),
    dtype: Any = jnp.float32,
    master_copy: bool = False,
) -> Step:
    """Layers of one product and one activation each; momentum for an optimizer, so that the update
    has state of its own.

    Layers of ``skip_to`` also read what the first one made. Parameters are of float32 and computed
    with in ``dtype``; with a master copy they are of ``dtype`` themselves, and the copy is part of
    the state, as in the models of Alpa's suites.
    """

    def loss(params, x, y):
        for i, weight in enumerate(params):
            x = jnp.tanh(x @ weight.astype(dtype))
            if i == 0:
                skipping = 2.0 * x
            if i in skip_to:
                x = x * skipping
            if marked and i + 1 < num_layers:
                alpa.mark_pipeline_boundary()
        return jnp.mean((x - y) ** 2)

    def step(state, batch):
        params, momentum, *copy = state
        gradients = alpa.grad(loss)(params, batch["x"], batch["y"])
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        updated = [p - 0.1 * m for p, m in zip(copy[0] if copy else params, momentum, strict=True)]
        if not copy:
            return updated, momentum
        # Alpa's own trick to have old parameters donated to new ones.
        return (
            [new.astype(dtype) + 0 * old for new, old in zip(updated, params, strict=True)],
            momentum,
            updated,
        )

    def structs(dtype: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((width, width), dtype)] * num_layers

    state = (
        (structs(dtype), structs(jnp.float32), structs(jnp.float32))
        if master_copy
        else (structs(jnp.float32), structs(jnp.float32))
    )
    example = jax.ShapeDtypeStruct((batch_size, width), dtype)
    return step, (state, {"x": example, "y": example})


def of_workload(plan: Plan) -> Step:
    """What a profiling job of the plan's workload trains; the worker's changes to Alpa are made."""
    workload = worker.load_workload(write(plan.workload))
    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(workload.init, key)
    batch = jax.eval_shape(lambda key: workload.batch(key, plan.global_batch_size), key)
    return worker.train_step(workload), (
        (params, jax.eval_shape(workload.optimizer.init, params)),
        batch,
    )
