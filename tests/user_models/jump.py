"""Layers whose memory jumps where a micro-batch is large."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

WIDTH, LAYERS = 16, 4


def model(above=16, times=12):
    """Above a size of the batch every layer also works on copies of its input, and the last
    reads the first's: another program."""

    def init(key):
        return [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, LAYERS)]

    def loss_fn(params, batch):
        x = first = batch["x"]
        large = x.shape[0] > above
        for i, w in enumerate(params):
            x = checkpoint_name(x, "layer_boundary") if i else x
            if large:
                x = jnp.sin(jnp.tanh(jnp.tile(x, (1, times)) + 1)).reshape(-1, times, WIDTH).mean(1)
            x = jnp.tanh(x @ w)
            first = x if i == 0 else first
        return ((x + first * large - batch["y"]) ** 2).mean()

    def batch(key, n):
        return dict(zip("xy", jax.random.normal(key, (2, n, WIDTH)), strict=True))

    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.adam(1e-2))
