"""A vision transformer in Flax NNX without marks, so that its layers are cut inside its blocks."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from capture import Workload

WIDTH, PATCHES, PIXELS = 64, 16, 48


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, depth, rngs):
        self.embed = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, patches):
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def vit(depth: int = 6) -> Workload:
    def make(key):
        return Transformer(depth, nnx.Rngs(params=key))

    graphdef, _, rest = nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param, ...)

    def loss_fn(params, batch):
        logits = nnx.merge(graphdef, params, rest)(batch["patches"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    def batch(key, size):
        patches = jax.random.normal(key, (size, PATCHES, PIXELS))
        return {"patches": patches, "labels": jnp.zeros(size, jnp.int32)}

    def init(key):
        return nnx.state(make(key), nnx.Param)

    return Workload(loss_fn, init, batch, optax.adam(1e-3))
