"""A workload of plain JAX and optax, as the library and Alpa's environment both import it."""

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name


class Workload:
    def __init__(self, num_layers, width):
        self.num_layers, self.width = num_layers, width
        self.optimizer = optax.adam(1e-3)

    def loss_fn(self, params, batch):
        x = batch["x"]
        for i, weight in enumerate(params):
            x = jnp.tanh((checkpoint_name(x, "layer_boundary") if i else x) @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    def init(self, key):
        return [
            0.1 * jax.random.normal(k, (self.width, self.width))
            for k in jax.random.split(key, self.num_layers)
        ]

    def batch(self, key, batch_size):
        return {
            "x": jax.random.normal(key, (batch_size, self.width)),
            "y": jnp.zeros((batch_size, self.width)),
        }


def model(num_layers=4, width=16):
    return Workload(num_layers, width)
