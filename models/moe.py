"""GShard mixture of experts: a causal transformer whose every second block chooses among expert
feed-forward layers.

Parameters as counted by ``jax.eval_shape``; one layer is one block, and blocks 0, 2, 4, ... have
experts:

    size   width  blocks  experts  parameters
    tiny      64       4        4        759,296
    380M     768       8        8    408,648,192
    690M     768       8       16    710,662,656
    1.3B     768      16       16  1,371,385,344
    2.4B    1024      16       16  2,415,716,352   (2.42 billion)
    7.1B    1280      16       32  7,109,255,680   (7.11 billion)
    10B     1536      16       32  10,217,217,024
    27B     2048      16       48  26,709,446,656

Sequence 1024, vocabulary 32000, 16 heads, feed-forward width 8x (dense and expert), top-2 gating
within groups of 2048 tokens, untied head, Adafactor; tiny has sequence 32, vocabulary 256, 4 heads
and groups of 32 tokens.

**Groups and examples.** Tokens are gated in groups of consecutive tokens: [B, S, D] -> [G, T, D],
with whole groups inside the batch, so the tokens of a batch must be a multiple of T (an even number
of examples where T = 2048 and S = 1024; an error says so). Experts have room for 2 T / E tokens of
a group and what overflows is passed by, so the examples of a group affect one another. The
load-balancing loss is a mean over groups too. Hence the loss of a batch is the mean over its
groups: it splits exactly over micro-batches that hold whole groups, and is a mean over examples
where a group lies within one (tiny). The load-balancing loss is a float32 scalar that runs through
every layer boundary beside the activations.

Source: Lepikhin et al. 2020 (GShard), Algorithm 1 and section 2.2; Alpa 0.2.3, MoE benchmark suite
(sizes, and expert blocks first); CAPTURE, Table I. Departures from GShard: the second expert is
always used, not with a probability, and the model is a causal decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from zoo import (
    PyTree,
    Workload,
    check_options,
    config_of,
    forward,
    initializer,
    layer_boundary,
    mean_cross_entropy,
    random_tokens,
)
from zoo_transformer import INIT_STD, FeedForward, SelfAttention


@dataclass(frozen=True)
class MoeConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks; every second one, from block 0, has experts.
        num_experts: E, in each of those blocks.
        num_heads: Attention heads; divides ``width``.
        seq_len: Tokens of an example, S.
        vocab_size: Distinct tokens, V.
        group_tokens: Tokens that are gated together, T.
        feed_forward_ratio: Hidden features of a feed-forward layer or an expert over ``width``.
        balance_weight: Of the load-balancing loss in the loss.
        learning_rate: Of Adafactor.
        dtype: Dtype of the computation; gating is float32.
        attention: See ``SelfAttention``.
    """

    width: int
    num_layers: int
    num_experts: int
    num_heads: int = 16
    seq_len: int = 1024
    vocab_size: int = 32000
    group_tokens: int = 2048
    feed_forward_ratio: int = 8
    balance_weight: float = 0.01
    learning_rate: float = 1e-2
    dtype: str = "float32"
    attention: str = "dot_product"

    @property
    def examples_per_group(self) -> int:
        """The fewest examples that are whole groups; a batch has a multiple of them."""
        return self.group_tokens // gcd(self.group_tokens, self.seq_len)

    @property
    def out_init_std(self) -> float:
        """Initial deviation of a projection onto the residual stream, so that the stream's variance
        does not grow with depth (GPT-2)."""
        return INIT_STD * (2 * self.num_layers) ** -0.5


SIZES = MappingProxyType(
    {
        "tiny": MoeConfig(64, 4, 4, num_heads=4, seq_len=32, vocab_size=256, group_tokens=32),
        "380M": MoeConfig(768, 8, 8),
        "690M": MoeConfig(768, 8, 16),
        "1.3B": MoeConfig(768, 16, 16),
        "2.4B": MoeConfig(1024, 16, 16),
        "7.1B": MoeConfig(1280, 16, 32),
        "10B": MoeConfig(1536, 16, 32),
        "27B": MoeConfig(2048, 16, 48),
    }
)


def top2_gating(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Send each token to its two best experts, first choices before second ones, until an expert of
    the group is full.

    The load-balancing loss of a group is ``E * sum_e f_e * p_e`` with f_e the fraction of its
    tokens whose first choice is expert e and p_e the mean gate of e; it is 1 when both are uniform.

    Args:
        gates: Probabilities, float32 [G, T, E].
        capacity: Tokens of a group that an expert takes, C.

    Returns:
        Weights to combine the experts' outputs with, float32 [G, T, E, C], zero where a token has
        no place; and the mean load-balancing loss over the groups, a scalar.

    Source: GShard, Algorithm 1.
    """
    num_experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, -1), num_experts)
    second = jax.nn.one_hot(jnp.argmax(jnp.where(first > 0, -jnp.inf, gates), -1), num_experts)
    # A token's place with an expert is the number of earlier claims; second choices queue behind
    # all first ones.
    first_place = jnp.cumsum(first, 1) - first
    second_place = jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)
    first_gate, second_gate = (gates * first).sum(-1), (gates * second).sum(-1)
    total = first_gate + second_gate

    def combine(gate: jax.Array, choice: jax.Array, place: jax.Array) -> jax.Array:
        # All zero beyond the capacity.
        slot = jax.nn.one_hot((place * choice).sum(-1).astype(jnp.int32), capacity)
        return ((gate / total)[..., None] * choice)[..., :, None] * slot[..., None, :]

    weights = combine(first_gate, first, first_place) + combine(second_gate, second, second_place)
    balance = num_experts * (first.mean(1) * gates.mean(1)).sum(-1).mean()
    return weights, balance


class Experts(nn.Module):
    """Gating and E feed-forward layers: [B, S, D] -> [B, S, D], and the load-balancing loss."""

    config: MoeConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, width, experts = self.config, self.config.width, self.config.num_experts
        hidden, init = config.feed_forward_ratio * width, nn.initializers.normal
        gate = self.param("gate", init(INIT_STD), (width, experts))
        up = self.param("up", init(INIT_STD), (experts, width, hidden)).astype(config.dtype)
        down = self.param("down", init(config.out_init_std), (experts, hidden, width)).astype(
            config.dtype
        )

        tokens = x.reshape(-1, config.group_tokens, width)
        gates = nn.softmax(jnp.einsum("gtd,de->gte", tokens.astype(jnp.float32), gate))
        weights, balance = top2_gating(gates, capacity=max(1, 2 * config.group_tokens // experts))
        sent = jnp.einsum("gtec,gtd->egcd", (weights > 0).astype(config.dtype), tokens)
        outputs = jnp.einsum(
            "egch,ehd->egcd", nn.relu(jnp.einsum("egcd,edh->egch", sent, up)), down
        )
        return jnp.einsum("gtec,egcd->gtd", weights.astype(config.dtype), outputs).reshape(
            x.shape
        ), balance


class Block(nn.Module):
    """Attention, then experts or a dense feed-forward layer: [B, S, D] -> [B, S, D], and the
    load-balancing loss (None if dense)."""

    config: MoeConfig
    has_experts: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        config = self.config
        attention = SelfAttention(
            config.num_heads,
            config.out_init_std,
            config.dtype,
            attention=config.attention,
            name="attention",
        )
        x = x + attention(nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x))
        normed = nn.LayerNorm(dtype=config.dtype, name="feed_forward_norm")(x)
        if self.has_experts:
            update, balance = Experts(config, name="experts")(normed)
            return x + update, balance
        feed_forward = FeedForward(
            config.feed_forward_ratio * config.width,
            config.out_init_std,
            config.dtype,
            name="feed_forward",
        )
        return x + feed_forward(normed), None


class Moe(nn.Module):
    """Tokens, int32 [B, S], to logits, [B, S, V], and the load-balancing loss, the mean over the
    blocks with experts."""

    config: MoeConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, init = self.config, nn.initializers.normal(INIT_STD)
        if tokens.size % config.group_tokens:
            raise ValueError(
                f"{tokens.shape[0]} examples of {tokens.shape[1]} tokens are not whole expert "
                f"groups of {config.group_tokens} tokens; use "
                f"a multiple of {config.examples_per_group} examples in each micro-batch, or "
                "another group_tokens. [workload-batch]"
            )
        x = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=init,
            dtype=config.dtype,
            name="token_embedding",
        )(tokens)
        x = x + self.param("position_embedding", init, (config.seq_len, config.width)).astype(
            config.dtype
        )
        total, num_balances = jnp.zeros((), jnp.float32), 0
        for i in range(config.num_layers):
            x, balance = Block(config, has_experts=i % 2 == 0, name=f"block_{i}")(
                layer_boundary(x) if i else x
            )
            if balance is not None:
                total, num_balances = total + balance, num_balances + 1
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(x)
        logits = nn.Dense(
            config.vocab_size, use_bias=False, kernel_init=init, dtype=config.dtype, name="head"
        )(x)
        return logits, total / num_balances


def moe(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    num_layers: int | None = None,
    seq_len: int | None = None,
    group_tokens: int | None = None,
    attention: str = "dot_product",
) -> Workload:
    """Next-token prediction on random tokens with Adafactor.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Tokens of an example instead of the size's.
        group_tokens: Tokens of an expert group instead of the size's; divides the tokens of every
            micro-batch.
        attention: ``"dot_product"``, or ``"flash"``: no scores are kept, and GPUs and TPUs run a
            Pallas kernel.

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``; the loss raises
            ``[workload-batch]`` for a batch of broken groups.
    """
    base = config_of("moe", SIZES, size)
    config = replace(
        base,
        dtype=dtype,
        num_layers=base.num_layers if num_layers is None else num_layers,
        seq_len=base.seq_len if seq_len is None else seq_len,
        group_tokens=base.group_tokens if group_tokens is None else group_tokens,
        attention=attention,
    )
    counts = {
        "num_layers": config.num_layers,
        "seq_len": config.seq_len,
        "group_tokens": config.group_tokens,
    }
    check_options(dtype, counts, attention=attention)
    model = Moe(config)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        logits, balance = forward(model, params, batch["tokens"])
        return mean_cross_entropy(logits, batch["labels"]) + config.balance_weight * balance

    return Workload(
        loss_fn=loss_fn,
        init=initializer(model, (config.examples_per_group, config.seq_len), "int32"),
        batch=lambda key, batch_size: random_tokens(
            key, batch_size, config.seq_len, config.vocab_size
        ),
        optimizer=optax.adafactor(config.learning_rate),
    )
