"""Tiny models of the recorded cases: equal layers, uneven ones, and parameters that several layers
read under a norm of all gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from capture import Workload


def _mark(x):
    return checkpoint_name(x, "layer_boundary")


def _normals(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return [
        jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, shape in zip(keys, shapes, strict=True)
    ]


def _vectors(width):
    return lambda key, n: dict(zip("xy", jax.random.normal(key, (2, n, width)), strict=True))


def uneven(layers=6, marked=True):
    """Blocks of two products whose hidden widths differ from layer to layer; without marks it is
    cut by work.
    """
    hidden = [32 + 24 * (i * i % 5) for i in range(layers)]

    def init(key):
        return [
            dict(zip(("up", "down"), _normals(k, [(16, h), (h, 16)]), strict=True))
            for k, h in zip(jax.random.split(key, layers), hidden, strict=True)
        ]

    def loss_fn(params, batch):
        x = batch["x"]
        for i, p in enumerate(params):
            x = _mark(x) if i and marked else x
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    return Workload(loss_fn, init, _vectors(16), optax.adam(1e-3))


def equal(layers=6, width=16):
    """One product per layer, all alike."""

    def loss_fn(params, batch):
        x = batch["x"]
        for i, w in enumerate(params):
            x = jnp.tanh((_mark(x) if i else x) @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    return Workload(
        loss_fn,
        lambda key: _normals(key, [(width, width)] * layers),
        _vectors(width),
        optax.sgd(1e-2, momentum=0.9),
    )


def shared(width=16, vocab=32, length=4):
    """A table at both ends, a skip from the first layer to the last, a key for dropout, and
    gradients clipped by the norm of all.
    """

    def init(key):
        return dict(
            zip(
                ("table", "a", "b", "c"),
                _normals(key, [(vocab, width), (width, width), (width, width), (2 * width, width)]),
                strict=True,
            )
        )

    def loss_fn(params, batch, key):
        first = _mark(jnp.tanh(params["table"][batch["tokens"]]))
        x = _mark(jnp.tanh(first @ params["a"]))
        x = x * jax.random.bernoulli(key, 0.8, x.shape)
        x = _mark(x + jnp.sin(x @ params["b"]))
        x = jnp.tanh(jnp.concatenate([x, first], -1) @ params["c"])
        return optax.softmax_cross_entropy_with_integer_labels(
            x @ params["table"].T, batch["labels"]
        ).mean()

    def batch(key, n):
        return dict(
            zip(
                ("tokens", "labels"),
                (jax.random.randint(k, (n, length), 0, vocab) for k in jax.random.split(key)),
                strict=True,
            )
        )

    return Workload(
        loss_fn, init, batch, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    )
