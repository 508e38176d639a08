"""The parts that the transformers of the zoo share: self-attention and the dense feed-forward
layer.

Weights keep the axis that Megatron-LM splits (heads, hidden features) as an axis of its own and
before any smaller one, so that a planner can split a weight along its first free axis. Queries,
keys and values have separate weights for the same reason.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

try:
    from zoo_attention import flash_attention
except ImportError:  # the JAX of Alpa's environment is older than ``custom_partitioning``
    flash_attention = None

INIT_STD = 0.02
"""Standard deviation of the initial weights (Radford et al. 2019, GPT-2; Brown et al. 2020,
GPT-3)."""


class SelfAttention(nn.Module):
    """Multi-head softmax attention: [B, S, D] -> [B, S, D], causal, over all positions, or over
    those of ``mask``, bool [B, S], where it is given.

    Keys have no bias: it adds the same number to a query's scores for all keys, which softmax
    removes, so its gradient is zero and Adam would amplify the rounding noise in it.

    Attributes:
        num_heads: H; each head has K = D / H features.
        out_init_std: Standard deviation of the initial output projection.
        dtype: Dtype of the computation; softmax is float32.
        dropout: Probability of dropping an attention weight.
        attention: ``"dot_product"``, or ``"flash"`` (``zoo_attention``).
        causal: Whether a position sees those before it alone, where no mask is given.
    """

    num_heads: int
    out_init_std: float
    dtype: str = "float32"
    dropout: float = 0.0
    attention: str = "dot_product"
    causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        seq_len, width = x.shape[-2:]
        head_dim = width // self.num_heads

        def heads(name: str, use_bias: bool) -> jax.Array:
            init = nn.initializers.normal(INIT_STD)
            return nn.DenseGeneral(
                (self.num_heads, head_dim),
                use_bias=use_bias,
                kernel_init=init,
                dtype=self.dtype,
                name=name,
            )(x)

        query, key, value = heads("query", True), heads("key", False), heads("value", True)
        if self.attention == "flash":
            mixed = flash_attention(query[..., None, :], key, value).reshape(query.shape)
        else:
            scores = jnp.einsum("bqhd,bkhd->bhqk", query * head_dim**-0.5, key).astype(jnp.float32)
            if mask is not None or self.causal:
                if mask is None:
                    seen = jnp.tril(jnp.ones((seq_len, seq_len), bool))
                else:
                    seen = mask[:, None, None, :]
                scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
            weights = nn.softmax(scores).astype(self.dtype)
            weights = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)(weights)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        out_init = nn.initializers.normal(self.out_init_std)
        return nn.DenseGeneral(
            width, axis=(-2, -1), kernel_init=out_init, dtype=self.dtype, name="out"
        )(mixed)


class FeedForward(nn.Module):
    """Dense layer, GELU, dense layer: [B, S, D] -> [B, S, D].

    Attributes:
        hidden: Features between the two dense layers.
        out_init_std: Standard deviation of the initial second weight.
        dtype: Dtype of the computation.
    """

    hidden: int
    out_init_std: float
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up = nn.Dense(
            self.hidden, kernel_init=nn.initializers.normal(INIT_STD), dtype=self.dtype, name="up"
        )(x)
        down_init = nn.initializers.normal(self.out_init_std)
        return nn.Dense(x.shape[-1], kernel_init=down_init, dtype=self.dtype, name="down")(
            nn.gelu(up)
        )
