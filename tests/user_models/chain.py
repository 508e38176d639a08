"""Products in a row."""

import jax
import jax.numpy as jnp
import optax

from capture import Workload


def model(depth):
    def init(key):
        keys = jax.random.split(key, depth)
        return [{"w": jax.random.normal(k, (16, 16)) / 4} for k in keys]

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    def batch(key, size):
        x, y = jax.random.normal(key, (2, size, 16))
        return {"x": x, "y": y}

    return Workload(loss_fn, init, batch, optax.adam(1e-2))
