"""The demo's own model: a small GPT in plain JAX, with layer marks. ``capture demo`` works outside
a checkout with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from capture.model.workload import Workload

VOCABULARY, SEQUENCE, WIDTH, HEADS = 512, 64, 64, 4


def gpt(num_blocks: int = 8) -> Workload:
    """Make a GPT of as many layers as blocks: the embedding goes with the first, the head and the
    loss with the last."""

    def init(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, num_blocks + 3)
        return {
            "embedding": 0.02 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
            "positions": 0.02 * jax.random.normal(keys[1], (SEQUENCE, WIDTH)),
            "blocks": [_init_block(k) for k in keys[3:]],
            "scale": jnp.ones(WIDTH),
            "head": 0.02 * jax.random.normal(keys[2], (WIDTH, VOCABULARY)),
        }

    def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = params["embedding"][batch["tokens"]] + params["positions"]
        for i, block in enumerate(params["blocks"]):
            x = _block(block, x if i == 0 else checkpoint_name(x, "layer_boundary"))
        logits = _norm(x, params["scale"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batch(key: jax.Array, batch_size: int) -> dict[str, jax.Array]:
        tokens = jax.random.randint(key, (batch_size, SEQUENCE + 1), 0, VOCABULARY)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    return Workload(loss_fn, init, batch, optax.adamw(1e-3))


def _init_block(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 6)
    kernels = {
        name: 0.02 * jax.random.normal(k, (WIDTH, WIDTH))
        for name, k in zip("qkvo", keys, strict=False)
    }
    return {
        **kernels,
        "up": 0.02 * jax.random.normal(keys[4], (WIDTH, 4 * WIDTH)),
        "down": 0.02 * jax.random.normal(keys[5], (4 * WIDTH, WIDTH)),
        "scale_attention": jnp.ones(WIDTH),
        "scale_mlp": jnp.ones(WIDTH),
    }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    y = _norm(x, p["scale_attention"])
    q, k, v = ((y @ p[name]).reshape(*y.shape[:2], HEADS, WIDTH // HEADS) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(y.shape) @ p["o"]
    return x + jax.nn.gelu(_norm(x, p["scale_mlp"]) @ p["up"]) @ p["down"]
