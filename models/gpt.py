"""GPT-3: a causal transformer language model, in the sizes of Alpa's benchmark suite and of
CAPTURE's Table I.

Parameters as counted by ``jax.eval_shape`` with the untied head (Alpa's name leaves some of them
out):

    size   width  blocks  heads  parameters
    tiny      64       8      4        434,304
    125M     768      12     12    164,476,416
    350M    1024      24     16    408,193,024
    760M    1536      24     16    838,781,952
    1.3B    2048      24     32  1,420,365,824
    2.6B    2560      32     32  2,782,336,000   (2.78 billion)
    6.7B    4096      32     32  6,867,656,704   (6.87 billion)
    15B     5120      48     40  15,631,984,640
    39B     8192      48     64  39,506,690,048

Sequence 1024, vocabulary 51200, feed-forward width 4x, AdamW; tiny has sequence 32 and vocabulary
256. One layer is one block; the embedding belongs to the first, the head and the loss to the last.
``dtype`` is that of the computation: parameters stay float32.

Source: Brown et al. 2020 (GPT-3), Table 2.1 (learning rates) and Appendix B (betas, weight decay);
Alpa 0.2.3, GPT benchmark suite (sizes); CAPTURE, Table I. Departures from Alpa: layer normalisation
comes before a sub-layer, and keys have no bias (``zoo_transformer.SelfAttention``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
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
class GptConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks.
        num_heads: Attention heads; divides ``width``.
        learning_rate: Of AdamW.
        seq_len: Tokens of an example, S.
        vocab_size: Distinct tokens, V.
        feed_forward_ratio: Hidden features of the feed-forward layer over ``width``.
        tied: Whether the head is the transposed token embedding; else it has weights of its own.
        dropout: Probability of dropping an activation.
        dtype: Dtype of the computation.
        attention: See ``SelfAttention``.
        ends_apart: Whether embedding, last normalisation, head and loss are layers of their own;
            else they belong to the first and the last block.
    """

    width: int
    num_layers: int
    num_heads: int
    learning_rate: float
    seq_len: int = 1024
    vocab_size: int = 51200
    feed_forward_ratio: int = 4
    tied: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    attention: str = "dot_product"
    ends_apart: bool = False

    @property
    def out_init_std(self) -> float:
        """Initial deviation of a projection onto the residual stream, so that the stream's variance
        does not grow with depth (GPT-2)."""
        return INIT_STD * (2 * self.num_layers) ** -0.5


SIZES = MappingProxyType(
    {
        "tiny": GptConfig(64, 8, 4, 1e-3, seq_len=32, vocab_size=256),
        "125M": GptConfig(768, 12, 12, 6e-4),
        "350M": GptConfig(1024, 24, 16, 3e-4),
        "760M": GptConfig(1536, 24, 16, 2.5e-4),
        "1.3B": GptConfig(2048, 24, 32, 2e-4),
        "2.6B": GptConfig(2560, 32, 32, 1.6e-4),
        "6.7B": GptConfig(4096, 32, 32, 1.2e-4),
        "15B": GptConfig(5120, 48, 40, 1e-4),
        "39B": GptConfig(8192, 48, 64, 1e-4),
    }
)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it: [B, S, D] -> [B,
    S, D]."""

    config: GptConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        dropout = nn.Dropout(config.dropout, deterministic=config.dropout == 0.0)
        attention = SelfAttention(
            config.num_heads,
            config.out_init_std,
            config.dtype,
            config.dropout,
            config.attention,
            name="attention",
        )
        feed_forward = FeedForward(
            config.feed_forward_ratio * config.width,
            config.out_init_std,
            config.dtype,
            name="feed_forward",
        )
        x = x + dropout(attention(nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x)))
        return x + dropout(
            feed_forward(nn.LayerNorm(dtype=config.dtype, name="feed_forward_norm")(x))
        )


class Gpt(nn.Module):
    """Tokens, int32 [B, S], to logits, [B, S, V] in the dtype of the computation."""

    config: GptConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, init = self.config, nn.initializers.normal(INIT_STD)
        embedding = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=init,
            dtype=config.dtype,
            name="token_embedding",
        )
        position = self.param("position_embedding", init, (config.seq_len, config.width))
        x = embedding(tokens) + position.astype(config.dtype)
        x = nn.Dropout(config.dropout, deterministic=config.dropout == 0.0)(x)
        end = layer_boundary if config.ends_apart else lambda x: x
        for i in range(config.num_layers):
            x = Block(config, name=f"block_{i}")(layer_boundary(x) if i else end(x))
        x = end(nn.LayerNorm(dtype=config.dtype, name="final_norm")(end(x)))
        if config.tied:
            return end(embedding.attend(x))
        head = nn.Dense(
            config.vocab_size, use_bias=False, kernel_init=init, dtype=config.dtype, name="head"
        )
        return end(head(x))


def gpt(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    tied: bool = False,
    num_layers: int | None = None,
    seq_len: int | None = None,
    dropout: float = 0.0,
    attention: str = "dot_product",
) -> Workload:
    """Next-token prediction on random tokens with AdamW.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        tied: Share the token embedding with the head; the first and the last layer then own one
            parameter together.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Tokens of an example instead of the size's.
        dropout: Probability of dropping an element of the embedding, the attention weights and both
            sub-layers' outputs; above 0, the loss takes a random key as its third argument.
        attention: ``"dot_product"``, or ``"flash"``: no scores are kept, and GPUs and TPUs run a
            Pallas kernel.

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("gpt", SIZES, size)
    config = replace(
        base,
        dtype=dtype,
        tied=tied,
        num_layers=base.num_layers if num_layers is None else num_layers,
        seq_len=base.seq_len if seq_len is None else seq_len,
        dropout=dropout,
        attention=attention,
    )
    check_options(
        dtype, {"num_layers": config.num_layers, "seq_len": config.seq_len}, dropout, attention
    )
    model = Gpt(config)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return mean_cross_entropy(forward(model, params, batch["tokens"]), batch["labels"])

    def random_loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return mean_cross_entropy(forward(model, params, batch["tokens"], key), batch["labels"])

    return Workload(
        loss_fn=random_loss_fn if dropout > 0.0 else loss_fn,
        init=initializer(Gpt(replace(config, dropout=0.0)), (1, config.seq_len), "int32"),
        batch=lambda key, batch_size: random_tokens(
            key, batch_size, config.seq_len, config.vocab_size
        ),
        optimizer=optax.adamw(config.learning_rate, b1=0.9, b2=0.95, weight_decay=0.1),
    )
