"""Equal layers, and what can be wrong with a model that loads."""

import multiprocessing
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 16


def model(layers=8, scalar=True, dies=False):
    """Equal layers: few different stages to compile."""
    if dies and multiprocessing.parent_process() is not None:
        os._exit(3)

    def init(key):
        return [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, layers)]

    def loss_fn(params, batch):
        x = batch["x"]
        for i, w in enumerate(params):
            x = jnp.tanh((checkpoint_name(x, "layer_boundary") if i else x) @ w)
        losses = ((x - batch["y"]) ** 2).mean(-1)
        return losses.mean() if scalar else losses

    def batch(key, n):
        return dict(zip("xy", jax.random.normal(key, (2, n, WIDTH)), strict=True))

    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.adam(1e-2))
