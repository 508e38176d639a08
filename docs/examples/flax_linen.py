"""A Flax Linen MLP-Mixer with dropout: `apply` in the loss, with the key of the micro-batch.

capture plan docs/examples/flax_linen.py:mixer --cluster 1x2 --global-batch 16
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from capture import Workload

PATCHES, PIXELS, CLASSES = 16, 48, 10


class Mixer(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, patches, train: bool):
        x = nn.Dense(self.width)(patches)
        for _ in range(self.depth):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(PATCHES)(nn.gelu(nn.Dense(2 * PATCHES)(y)))
            x = x + nn.Dropout(0.1, deterministic=not train)(y.swapaxes(1, 2))
            y = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
        return nn.Dense(CLASSES)(x.mean(axis=1))


def mixer(width: int = 32, depth: int = 2) -> Workload:
    model = Mixer(width, depth)

    def init(key):
        return model.init(key, jnp.zeros((1, PATCHES, PIXELS)), train=False)["params"]

    def loss_fn(params, batch, key):  # every micro-batch gets a key of its own
        rngs = {"dropout": key}
        logits = model.apply({"params": params}, batch["patches"], train=True, rngs=rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batch(key, batch_size):
        patches, labels = jax.random.split(key)
        return {
            "patches": jax.random.normal(patches, (batch_size, PATCHES, PIXELS)),
            "labels": jax.random.randint(labels, (batch_size,), 0, CLASSES),
        }

    return Workload(loss_fn, init, batch, optax.sgd(0.1, momentum=0.9))
