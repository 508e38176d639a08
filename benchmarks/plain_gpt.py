"""A GPT as somebody writes it who has never heard of CAPTURE: plain JAX, no marks, no module
library, four activations, two precisions.

The zoo's models are what the estimates of OSDP were made with; this one is what they are tried on.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax

from capture.model.workload import Workload

ACTIVATIONS = {
    "tanh_gelu": partial(jax.nn.gelu, approximate=True),
    "erf_gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def gpt(
    activation: str = "tanh_gelu",
    dtype: str = "float32",
    num_blocks: int = 6,
    width: int = 512,
    num_heads: int = 8,
    seq_len: int = 256,
    vocab_size: int = 2048,
    remat: bool = False,
) -> Workload:
    """The task: next-token prediction with AdamW; parameters are float32 and cast where they are
    used.

    Args:
        activation: Of ``ACTIVATIONS``.
        dtype: Of the computation; normalisation and loss are in float32.
        num_blocks, width, num_heads, seq_len, vocab_size: Of the model.
        remat: Whether every block is a ``jax.checkpoint``.

    Returns:
        Its loss also takes ``between``: given the activations and the number of the block that
        takes them, from 1 on, it returns the same activations, marked as somebody wants the place
        marked.
    """
    act = ACTIVATIONS[activation]

    def init(key):
        keys = iter(jax.random.split(key, 4 * num_blocks + 3))

        def weights(*shape):
            return 0.02 * jax.random.normal(next(keys), shape)

        def norm():
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        def block():
            return {
                "ln1": norm(),
                "qkv": {"w": weights(width, 3 * width), "b": jnp.zeros(3 * width)},
                "out": {"w": weights(width, width), "b": jnp.zeros(width)},
                "ln2": norm(),
                "up": {"w": weights(width, 4 * width), "b": jnp.zeros(4 * width)},
                "down": {"w": weights(4 * width, width), "b": jnp.zeros(width)},
            }

        return {
            "tokens": weights(vocab_size, width),
            "positions": weights(seq_len, width),
            "blocks": [block() for _ in range(num_blocks)],
            "ln": norm(),
            "head": weights(width, vocab_size),
        }

    def normed(p, x):
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return ((x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]).astype(dtype)

    def dense(p, x):
        return x @ p["w"].astype(dtype) + p["b"].astype(dtype)

    def attend(p, x):
        n, t, _ = x.shape
        q, k, v = (
            y.reshape(n, t, num_heads, -1) for y in jnp.split(dense(p["qkv"], x), 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // num_heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores.astype(jnp.float32), -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(dtype), v)
        return dense(p["out"], mixed.reshape(n, t, -1))

    def apply_block(p, x):
        x = x + attend(p, normed(p["ln1"], x))
        return x + dense(p["down"], act(dense(p["up"], normed(p["ln2"], x))))

    def loss(params, batch, *, between=lambda x, block: x):
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = (params["tokens"][tokens] + params["positions"]).astype(dtype)
        for i, p in enumerate(params["blocks"]):
            x = between(x, i) if i else x
            x = (jax.checkpoint(apply_block) if remat else apply_block)(p, x)
        logits = (normed(params["ln"], x) @ params["head"].astype(dtype)).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    def batch(key, n):
        return {"tokens": jax.random.randint(key, (n, seq_len + 1), 0, vocab_size)}

    return Workload(loss, init, batch, optax.adamw(3e-4))
