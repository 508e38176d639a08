"""Layers of different widths: a stage to compile each."""

from types import SimpleNamespace

import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name


def model(widths="8,12,16,20,24"):
    sizes = [int(w) for w in str(widths).split(",")]

    def init(key):
        return [jnp.ones((16, n)) for n in sizes]

    def loss_fn(params, x):
        for i, w in enumerate(params):
            x = checkpoint_name(x, "layer_boundary") if i else x
            x = x + jnp.tanh(x @ w) @ w.T
        return (x**2).mean()

    def batch(key, n):
        return jnp.ones((n, 16))

    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.sgd(0.1))
