"""Train steps for Alpa: a chain of products, and Alpa's own models at any size; all abstract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shims  # isort: skip  # before jax and alpa
import alpa
import jax
import jax.numpy as jnp

assert shims
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def chain(num_layers: int, batch_size: int = 64, width: int = 16, marked: bool = True) -> Step:
    """Layers of one product and one activation each; momentum for an optimizer, so that the update has state of its own."""

    def loss(params, x, y):
        for i, weight in enumerate(params):
            x = jnp.tanh(x @ weight)
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
