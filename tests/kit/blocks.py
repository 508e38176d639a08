"""What the models of the kit are built from: parameters from shapes, data, losses, optimizers and a
few blocks of operations.

A tree of shapes (tuples of integers) says what the parameters are. Losses are means over the
examples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from capture.model.workload import Workload

#: By name, what makes a transformation; every model of the kit can be trained with each.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.01),
    "momentum": lambda: optax.sgd(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clipped_adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "muon": lambda: optax.contrib.muon(1e-3),
}


def mark(x):
    """A layer may end here."""
    return checkpoint_name(x, "layer_boundary")


def chain(x, steps: Sequence[Callable]):
    """Each step is a layer; the last one goes on."""
    for i, step in enumerate(steps):
        x = step(x)
        x = mark(x) if i + 1 < len(steps) else x
    return x


def workload(loss, shapes, batch, optimizer: str) -> Workload:
    """The task of a loss, its parameters given by shapes and its optimizer by name."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))

    def init(key):
        keys = jax.random.split(key, len(leaves))
        values = [jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)]
        return tree.unflatten(
            [1 + 0.1 * v if v.ndim < 2 else v * math.prod(v.shape[:-1]) ** -0.5 for v in values]
        )

    return Workload(loss, init, batch, OPTIMIZERS[optimizer]())


# ---- data ----------------------------------------------------------------------------------------


def vectors(width: int, num_classes: int | None = None):
    """Batches of vectors, with labels if there are classes."""

    def batch(key, n):
        x = jax.random.normal(key, (n, width))
        return (
            x
            if num_classes is None
            else {"x": x, "labels": jax.random.randint(key, (n,), 0, num_classes)}
        )

    return batch


def tokens(length: int, vocab: int):
    """Batches of sequences and the tokens that come next."""

    def batch(key, n):
        drawn = jax.random.randint(key, (n, length + 1), 0, vocab)
        return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}

    return batch


def images(size: int, channels: int, num_classes: int):
    """Batches of images and labels."""

    def batch(key, n):
        return {
            "x": jax.random.normal(key, (n, size, size, channels)),
            "labels": jax.random.randint(key, (n,), 0, num_classes),
        }

    return batch


# ---- losses --------------------------------------------------------------------------------------


def cross_entropy(logits, labels):
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], -1)
    )


def mse(x, y):
    return jnp.mean((x - y) ** 2)


def hinge(scores, labels):
    """Of several classes: how far wrong ones come within 1 of the right one."""
    right = jnp.take_along_axis(scores, labels[..., None], -1)
    return jnp.mean(jnp.sum(jnp.maximum(0.0, 1.0 + scores - right), -1)) - 1.0


# ---- blocks --------------------------------------------------------------------------------------


def norm(x, gain=1.0):
    return gain * (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def dropout(x, key, rate=0.1):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def feed_forward_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {"gain": (width,), "up": (width, hidden), "down": (hidden, width)}


def feed_forward(p, x, activation=jax.nn.gelu):
    return x + activation(norm(x, p["gain"]) @ p["up"]) @ p["down"]


def attention_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {"gain": (width,), "q": (width, width), "kv": (width, 2 * width), "out": (width, width)}


def attention(p, x, memory=None, *, causal=False, mask=None, bias=0.0, heads=2):
    """Of x to the memory, or to itself; ``mask`` [batch, keys] says what may be read."""
    h = norm(x, p["gain"])
    keys, values = jnp.split((h if memory is None else memory) @ p["kv"], 2, -1)

    def split(a):
        return a.reshape(*a.shape[:-1], heads, a.shape[-1] // heads)

    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", split(h @ p["q"]), split(keys))
        * (h.shape[-1] // heads) ** -0.5
        + bias
    )
    if causal:
        scores = jnp.where(jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool), scores, -1e9)
    if mask is not None:
        scores = jnp.where(mask[:, None, None, :], scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), split(values))
    return x + mixed.reshape(x.shape) @ p["out"]


def block_shapes(width: int, hidden: int | None = None):
    return {
        "attention": attention_shapes(width),
        "ff": feed_forward_shapes(width, hidden or 4 * width),
    }


def block(p, x, **options):
    """Of a transformer."""
    return feed_forward(p["ff"], attention(p["attention"], x, **options))


def conv(x, kernel, stride=1, groups=1, dilation=1):
    """Of any number of spatial dimensions; channels last."""
    letters = "WHD"[: x.ndim - 2]
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * len(letters),
        "SAME",
        rhs_dilation=(dilation,) * len(letters),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )


def halved(x):
    """The largest of every square of 2 x 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def doubled(x):
    """Every pixel as a square of 2 x 2."""
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def over_time(cell, state, x):
    """A recurrence over the second dimension of x: all outputs."""
    return jnp.moveaxis(lax.scan(cell, state, jnp.moveaxis(x, 1, 0))[1], 0, 1)


def gru_shapes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {"x": (width, 3 * hidden), "h": (hidden, 3 * hidden), "b": (3 * hidden,)}


def gru(p, x, initial=None):
    """All states of a gated recurrent unit over the second dimension of x."""

    def cell(h, gates):
        z, r, _ = jnp.split(jax.nn.sigmoid(gates + h @ p["h"]), 3, -1)
        candidate = jnp.tanh(jnp.split(gates, 3, -1)[2] + r * jnp.split(h @ p["h"], 3, -1)[2])
        h = (1 - z) * h + z * candidate
        return h, h

    hidden = p["h"].shape[0]
    state = jnp.zeros((x.shape[0], hidden), x.dtype) if initial is None else initial
    return over_time(cell, state, x @ p["x"] + p["b"])
