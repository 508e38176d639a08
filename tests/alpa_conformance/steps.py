"""Train steps for Alpa: a chain of products, and the workload of a plan; all abstract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import shims  # isort: skip  # before jax and alpa
import alpa
import jax
import jax.numpy as jnp

from capture.alpa import worker
from capture.plan import Plan

assert shims
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def chain(num_layers: int, batch_size: int = 64, width: int = 16, marked: bool = True, skip_to: Sequence[int] = ()) -> Step:
    """Layers of one product and one activation each; momentum for an optimizer, so that the update has state of its own.

    Layers of ``skip_to`` also read what the first one made.
    """

    def loss(params, x, y):
        for i, weight in enumerate(params):
            x = jnp.tanh(x @ weight)
            if i == 0:
                skipping = 2.0 * x
            if i in skip_to:
                x = x * skipping
            if marked and i + 1 < num_layers:
                alpa.mark_pipeline_boundary()
        return jnp.mean((x - y) ** 2)

    def step(state, batch):
        params, momentum = state
        gradients = alpa.grad(loss)(params, batch["x"], batch["y"])
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        return [p - 0.1 * m for p, m in zip(params, momentum, strict=True)], momentum

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [struct(width, width)] * num_layers
    return step, ((weights, list(weights)), {"x": struct(batch_size, width), "y": struct(batch_size, width)})


def of_workload(plan: Plan) -> Step:
    """What a profiling job of the plan's workload trains; the worker's changes to Alpa are made."""
    workload = worker.load_workload(plan.workload.to_json())
    key = jax.random.PRNGKey(0)
    params = jax.eval_shape(workload.init, key)
    batch = jax.eval_shape(lambda key: workload.batch(key, plan.global_batch_size), key)
    return worker.train_step(workload), ((params, jax.eval_shape(workload.optimizer.init, params)), batch)
