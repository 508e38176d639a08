"""The gradients of a whole loss by all its parameters, those that are integers among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capture.model.workload import PyTree


def loss_and_gradients(loss_fn: Callable[..., Any]) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Return what computes a loss and its gradients by the first argument.

    Gradients of parameters that are not floating-point numbers (a permutation, a table of indices)
    are zeros of their type, as in every step here; ``jax.value_and_grad`` refuses such parameters.

    Example:
        >>> compute = loss_and_gradients(lambda p: p["scale"] * p["index"].sum())
        >>> _, gradients = compute({"scale": jnp.float32(2), "index": jnp.arange(3)})
        >>> gradients["scale"].item(), gradients["index"].tolist()
        (3.0, [0, 0, 0])
    """
    differentiated = jax.value_and_grad(loss_fn, allow_int=True)

    def gradients(params: PyTree, *arguments: Any) -> tuple[jax.Array, PyTree]:
        def of(param: Any, gradient: Any) -> Any:
            return gradient if jnp.issubdtype(param.dtype, jnp.inexact) else jnp.zeros_like(param)

        loss, found = differentiated(params, *arguments)
        return loss, jax.tree.map(of, params, found)

    return gradients
