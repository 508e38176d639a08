"""An Equinox model: `eqx.filter` takes its arrays out, `eqx.combine` makes it whole in the loss.

capture plan docs/examples/equinox_mlp.py:regression --cluster 1x2 --global-batch 16
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from capture import Workload

SIZE = 16


class Residual(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, key):
        self.norm = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=key)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        return x + self.dropout(self.mlp(self.norm(x)), key=key)


class Regression(eqx.Module):
    first: eqx.nn.Linear
    blocks: list[Residual]
    last: eqx.nn.Linear

    def __init__(self, width: int, depth: int, key):
        first, last, *keys = jax.random.split(key, depth + 2)
        self.first = eqx.nn.Linear(SIZE, width, key=first)
        self.blocks = [Residual(width, key) for key in keys]
        self.last = eqx.nn.Linear(width, SIZE, key=last)

    def __call__(self, x, key):
        x = self.first(x)
        for block, own in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, own)
        return self.last(x)


def regression(width: int = 32, depth: int = 2) -> Workload:
    def make(key):
        return Regression(width, depth, key)

    # What is no array (activation functions, sizes) is known from shapes alone.
    _, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda leaf: hasattr(leaf, "shape")
    )

    def init(key):
        return eqx.filter(make(key), eqx.is_inexact_array)

    def loss_fn(params, batch, key):
        model = eqx.combine(params, static)
        keys = jax.random.split(key, len(batch["x"]))
        return jnp.mean((jax.vmap(model)(batch["x"], keys) - batch["y"]) ** 2)

    def batch(key, batch_size):
        x, y = jax.random.normal(key, (2, batch_size, SIZE))
        return {"x": x, "y": y}

    return Workload(loss_fn, init, batch, optax.adam(1e-3))
