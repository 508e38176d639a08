"""A Flax NNX transformer with dropout: split into parameters and the rest, merged in the loss.

capture plan docs/examples/flax_nnx.py:classifier --cluster 1x2 --global-batch 16
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from capture import Workload

VOCABULARY, LENGTH, CLASSES = 128, 16, 10


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=width, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Classifier(nnx.Module):
    def __init__(self, width: int, depth: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def classifier(width: int = 32, depth: int = 2) -> Workload:
    def make(key):
        return Classifier(width, depth, rngs=nnx.Rngs(params=key, dropout=0))

    # Shapes alone: `init` makes the parameters. `rest` is the state of the random streams.
    graphdef, _, rest = nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param, ...)

    def init(key):
        return nnx.state(make(key), nnx.Param)

    def loss_fn(params, batch, key):  # every micro-batch gets a key of its own
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rest)
        model = nnx.merge(graphdef, params, zeros, copy=True)  # dropout counts in a copy
        model.train()
        nnx.reseed(model, dropout=key)
        logits = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batch(key, batch_size):
        tokens, labels = jax.random.split(key)
        return {
            "tokens": jax.random.randint(tokens, (batch_size, LENGTH), 0, VOCABULARY),
            "labels": jax.random.randint(labels, (batch_size,), 0, CLASSES),
        }

    return Workload(loss_fn, init, batch, optax.adamw(1e-3))
