"""Layers that compute in bfloat16 and keep their parameters in float32: a matrix that the first and
the last one read, and scales that are read as they are."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 16
HALF = jnp.bfloat16


def model(layers=2, clipped=False):
    def init(key):
        tied, *own = jax.random.normal(key, (layers + 1, WIDTH, WIDTH)) / 4
        return {
            "tied": tied,
            "blocks": [
                {"w": w, "bias": jnp.full(WIDTH, 0.1), "scale": jnp.ones(WIDTH)} for w in own
            ],
        }

    def loss_fn(params, batch):
        x = checkpoint_name(batch.astype(HALF) @ params["tied"].astype(HALF), "layer_boundary")
        for block in params["blocks"]:
            scaled = (x.astype(jnp.float32) * block["scale"]).astype(HALF)
            y = jnp.tanh(scaled @ block["w"].astype(HALF) + block["bias"].astype(HALF))
            x = checkpoint_name(x + y, "layer_boundary")
        return ((x @ params["tied"].astype(HALF).T).astype(jnp.float32) ** 2).mean()

    optimizer = optax.adamw(1e-2)
    if clipped:
        optimizer = optax.chain(optax.clip_by_global_norm(0.01), optimizer)
    return SimpleNamespace(
        loss_fn=loss_fn,
        init=init,
        batch=lambda key, n: jax.random.normal(key, (n, WIDTH)),
        optimizer=optimizer,
    )
