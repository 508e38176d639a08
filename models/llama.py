"""LLaMA-like causal language model: RMS normalisation, rotary positions, grouped-query attention,
SwiGLU; sizes of Llama 3.

Parameters as counted by ``jax.eval_shape``:

    size   width  blocks  heads  key-value heads  hidden  parameters
    tiny      64       8      4                2     192         427,072
    8B      4096      32     32                8   14336   8,030,261,248
    70B     8192      80     64                8   28672  70,553,706,496

Sequence 2048 (Llama 3 trains on 8192), vocabulary 128256, untied head, AdamW; tiny has sequence 32
and vocabulary 256. One layer is one block; the embedding belongs to the first, the head and the
loss to the last. ``dtype`` is that of the computation: parameters stay float32.

Source: Touvron et al. 2023 (LLaMA), section 2; Grattafiori et al. 2024 (Llama 3), Table 3 (sizes,
learning rates, rotary base); Su et al. 2021 (rotary positions); Ainslie et al. 2023 (grouped
queries). Departure: all three AdamW constants are those of LLaMA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
from zoo import Workload, check_options, config_of, layer_boundary, next_token_workload
from zoo_attention import flash_attention
from zoo_transformer import INIT_STD


@dataclass(frozen=True)
class LlamaConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks.
        num_heads: Query heads, H; divides ``width``.
        num_key_value_heads: G; divides ``num_heads``.
        hidden: Features between the products of the feed-forward layer.
        learning_rate: Of AdamW.
        seq_len: Tokens of an example, S.
        vocab_size: Distinct tokens, V.
        rotary_base: Of the wavelengths of rotary positions.
        dtype: Dtype of the computation.
        attention: ``"dot_product"``, or ``"flash"`` (``zoo_attention``).
    """

    width: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    hidden: int
    learning_rate: float
    seq_len: int = 2048
    vocab_size: int = 128256
    rotary_base: float = 500_000.0
    dtype: str = "float32"
    attention: str = "dot_product"


SIZES = MappingProxyType(
    {
        "tiny": LlamaConfig(64, 8, 4, 2, 192, 1e-3, seq_len=32, vocab_size=256),
        "8B": LlamaConfig(4096, 32, 32, 8, 14336, 3e-4),
        "70B": LlamaConfig(8192, 80, 64, 8, 28672, 1.5e-4),
    }
)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions: every pair (i, i + K / 2) of the features turns by position x base^(-2 i /
    K): [B, S, H, K] -> [B, S, H, K]."""
    seq_len, head_dim = x.shape[1], x.shape[-1]
    wavelengths = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(seq_len, dtype=jnp.float32)[:, None, None] * wavelengths
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    ]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class GroupedAttention(nn.Module):
    """Causal softmax attention whose query heads share keys and values in groups: [B, S, D] -> [B,
    S, D].

    A weight of queries is [D, G, H / G, K], so that splitting it along the groups splits keys and
    values alike.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, (seq_len, width) = self.config, x.shape[-2:]
        groups, in_group, head_dim = (
            config.num_key_value_heads,
            config.num_heads // config.num_key_value_heads,
            width // config.num_heads,
        )

        def heads(name: str, *shape: int) -> jax.Array:
            init = nn.initializers.normal(INIT_STD)
            return nn.DenseGeneral(
                (*shape, head_dim), use_bias=False, kernel_init=init, dtype=config.dtype, name=name
            )(x)

        query, key, value = (
            heads("query", groups, in_group),
            heads("key", groups),
            heads("value", groups),
        )
        query = rotate(
            query.reshape(*query.shape[:2], groups * in_group, head_dim), config.rotary_base
        ).reshape(query.shape)
        key = rotate(key, config.rotary_base)
        if config.attention == "flash":
            mixed = flash_attention(query, key, value)
        else:
            scores = jnp.einsum("bqghd,bkgd->bghqk", query * head_dim**-0.5, key).astype(
                jnp.float32
            )
            causal = jnp.tril(jnp.ones((seq_len, seq_len), bool))
            weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)).astype(
                config.dtype
            )
            mixed = jnp.einsum("bghqk,bkgd->bqghd", weights, value)
        init = nn.initializers.normal(INIT_STD * (2 * config.num_layers) ** -0.5)
        return nn.DenseGeneral(
            width,
            axis=(-3, -2, -1),
            use_bias=False,
            kernel_init=init,
            dtype=config.dtype,
            name="out",
        )(mixed)


class GatedFeedForward(nn.Module):
    """SwiGLU: [B, S, D] -> [B, S, D]."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def dense(features: int, name: str, std: float = INIT_STD) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=False,
                kernel_init=nn.initializers.normal(std),
                dtype=config.dtype,
                name=name,
            )

        hidden = nn.silu(dense(config.hidden, "gate")(x)) * dense(config.hidden, "up")(x)
        return dense(x.shape[-1], "down", INIT_STD * (2 * config.num_layers) ** -0.5)(hidden)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it: [B, S, D] -> [B,
    S, D]."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = x + GroupedAttention(config, name="attention")(
            nn.RMSNorm(dtype=config.dtype, name="attention_norm")(x)
        )
        return x + GatedFeedForward(config, name="feed_forward")(
            nn.RMSNorm(dtype=config.dtype, name="feed_forward_norm")(x)
        )


class Llama(nn.Module):
    """Tokens, int32 [B, S], to logits, [B, S, V] in the dtype of the computation."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, init = self.config, nn.initializers.normal(INIT_STD)
        x = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=init,
            dtype=config.dtype,
            name="token_embedding",
        )(tokens)
        for i in range(config.num_layers):
            x = Block(config, name=f"block_{i}")(layer_boundary(x) if i else x)
        x = nn.RMSNorm(dtype=config.dtype, name="final_norm")(x)
        return nn.Dense(
            config.vocab_size, use_bias=False, kernel_init=init, dtype=config.dtype, name="head"
        )(x)


def llama(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    num_layers: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    attention: str = "dot_product",
) -> Workload:
    """Next-token prediction on random tokens with AdamW.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Tokens of an example instead of the size's.
        vocab_size: Distinct tokens instead of the size's.
        attention: ``"dot_product"``, or ``"flash"``: no scores are kept, and GPUs and TPUs run a
            Pallas kernel.

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("llama", SIZES, size)
    given = {"num_layers": num_layers, "seq_len": seq_len, "vocab_size": vocab_size}
    config = replace(
        base,
        dtype=dtype,
        attention=attention,
        **{key: value for key, value in given.items() if value is not None},
    )
    check_options(dtype, {key: getattr(config, key) for key in given}, attention=attention)
    return next_token_workload(
        Llama(config), config.seq_len, config.vocab_size, config.learning_rate
    )
