"""A character-level language model in plain JAX: parameters are a dictionary, blocks are scanned.

capture plan docs/examples/plain_jax.py:language_model --cluster 1x2 --global-batch 16
"""

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from capture import Workload

VOCABULARY, LENGTH = 96, 32


def language_model(width: int = 64, depth: int = 4) -> Workload:
    def init(key):
        ends, *keys = jax.random.split(key, 4)
        embedding, head = jax.random.normal(ends, (2, VOCABULARY, width)) / 8
        mix, up, down = (jax.random.normal(k, (depth, width, width)) / width**0.5 for k in keys)
        return {
            "embedding": embedding,
            "blocks": {"mix": mix, "up": up, "down": down},
            "head": head,
        }

    def block(x, weights):
        x = checkpoint_name(x, "layer_boundary")  # a stage may begin here, in every iteration
        seen = jnp.cumsum(x, axis=1) / jnp.arange(1, LENGTH + 1)[:, None]
        x = x + jax.nn.gelu(seen @ weights["mix"])
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    def loss_fn(params, batch):
        x = params["embedding"][batch["inputs"]]
        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = x @ params["head"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def batch(key, batch_size):
        text = jax.random.randint(key, (batch_size, LENGTH + 1), 0, VOCABULARY)
        return {"inputs": text[:, :-1], "targets": text[:, 1:]}

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return Workload(loss_fn, init, batch, optimizer)
