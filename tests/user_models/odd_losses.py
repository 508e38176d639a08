"""Losses that train otherwise than one thinks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 8


def model(loss="mean"):
    """``mean`` is what is asked for; ``sum`` grows with the examples, ``root`` is no number."""

    def loss_fn(params, x):
        x = checkpoint_name(jnp.tanh(x @ params["up"]), "layer_boundary") @ params["down"]
        squares = (x**2).mean(-1)
        if loss == "root":
            return jnp.sqrt(-1 - squares).mean()
        return squares.sum() if loss == "sum" else squares.mean()

    def init(key):
        return {"up": jax.random.normal(key, (WIDTH, WIDTH)), "down": jnp.ones((WIDTH, WIDTH))}

    def batch(key, n):
        return jax.random.normal(key, (n, WIDTH))

    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.sgd(0.1))
