"""BERT that classifies pairs of sentences: the encoders that Harmony fine-tunes, and BERT-Base, of
which mu-TWO trains several.

Parameters as counted by ``jax.eval_shape``:

    size    width  blocks  heads     parameters
    tiny       64       4      4        222,658
    base      768      12     12    109,474,562
    large    1024      24     16    335,119,362
    96L      1024      96     16  1,241,973,762

Sequence 512, the vocabulary of BERT, 30522 word pieces, two classes, Adam; tiny has sequence 32 and
vocabulary 256. Embedding, every block, the pooler, the classifier and the loss are layers of their
own, as in the profiles of the paper's authors: four more than blocks. The mask of an example goes
to every block.

Source: Devlin et al. 2019 (BERT), section 3 and Appendix A.3 (learning rate); Li et al. 2022
(Harmony), 5.1; Purandare et al. 2023 (mu-TWO), Table 1, which says 100M parameters of what is
BERT-Base. Departures: no dropout, and keys have no bias (``zoo_transformer.SelfAttention``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    layer_boundary,
    mean_cross_entropy,
    optimizer_of,
)
from zoo_transformer import INIT_STD, FeedForward, SelfAttention

NUM_SEGMENTS, NUM_CLASSES = 2, 2


@dataclass(frozen=True)
class BertConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks.
        num_heads: Attention heads; divides ``width``.
        learning_rate: Of Adam.
        seq_len: Word pieces of an example, S.
        vocab_size: Distinct word pieces, V.
        dtype: Dtype of the computation.
    """

    width: int
    num_layers: int
    num_heads: int
    learning_rate: float = 2e-5
    seq_len: int = 512
    vocab_size: int = 30522
    dtype: str = "float32"


SIZES = MappingProxyType(
    {
        "tiny": BertConfig(64, 4, 4, 1e-3, seq_len=32, vocab_size=256),
        "base": BertConfig(768, 12, 12),
        "large": BertConfig(1024, 24, 16),
        "96L": BertConfig(1024, 96, 16),
    }
)


class Block(nn.Module):
    """Attention and feed-forward, each added to the stream, which is normalised after it: [B, S, D]
    -> [B, S, D]."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.config
        attention = SelfAttention(config.num_heads, INIT_STD, config.dtype, name="attention")
        feed_forward = FeedForward(4 * config.width, INIT_STD, config.dtype, name="feed_forward")
        x = nn.LayerNorm(dtype=config.dtype, name="attention_norm")(x + attention(x, mask))
        return nn.LayerNorm(dtype=config.dtype, name="feed_forward_norm")(x + feed_forward(x))


class Bert(nn.Module):
    """A batch to logits, [B, 2]: ``tokens`` and ``segments``, int32 [B, S], and ``mask``, bool
    [B, S]."""

    config: BertConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        config, init = self.config, nn.initializers.normal(INIT_STD)

        def embed(count: int, name: str) -> nn.Embed:
            return nn.Embed(count, config.width, embedding_init=init, dtype=config.dtype, name=name)

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, kernel_init=init, dtype=config.dtype, name=name)

        x = embed(config.vocab_size, "token_embedding")(batch["tokens"])
        x = x + embed(config.seq_len, "position_embedding")(jnp.arange(config.seq_len))
        x = x + embed(NUM_SEGMENTS, "segment_embedding")(batch["segments"])
        x = nn.LayerNorm(dtype=config.dtype, name="embedding_norm")(x)
        for i in range(config.num_layers):
            x = Block(config, name=f"block_{i}")(layer_boundary(x), batch["mask"])
        x = nn.tanh(dense(config.width, "pooler")(layer_boundary(x)[:, 0]))
        return layer_boundary(dense(NUM_CLASSES, "classifier")(layer_boundary(x)))


def random_pairs(
    key: jax.Array, batch_size: int, seq_len: int, vocab_size: int
) -> dict[str, jax.Array]:
    """Pairs of random sentences of random lengths: ``tokens``, ``segments``, ``mask``, and the
    ``labels``, int32 [batch_size], which say whether the first word piece is of the upper half of
    the vocabulary."""
    token_key, length_key = jax.random.split(key)
    tokens = jax.random.randint(token_key, (batch_size, seq_len), 0, vocab_size, jnp.int32)
    lengths = jax.random.randint(length_key, (batch_size, 1), seq_len // 2, seq_len + 1, jnp.int32)
    positions = jnp.arange(seq_len)
    return {
        "tokens": tokens,
        "segments": (2 * positions >= lengths).astype(jnp.int32),
        "mask": positions < lengths,
        "labels": (2 * tokens[:, 0] >= vocab_size).astype(jnp.int32),
    }


def bert(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    num_layers: int | None = None,
    seq_len: int | None = None,
    injected: bool = False,
) -> Workload:
    """Classification of random pairs of sentences with Adam.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Word pieces of an example instead of the size's.
        injected: Whether the numbers of Adam are part of its state, so that an array of models may
            vary them.

    Returns:
        The workload; a batch is that of ``random_pairs``; the first loss is about ``log(2)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("bert", SIZES, size)
    given = {"num_layers": num_layers, "seq_len": seq_len}
    config = replace(
        base, dtype=dtype, **{key: value for key, value in given.items() if value is not None}
    )
    check_options(dtype, {key: getattr(config, key) for key in given})
    model = Bert(config)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return mean_cross_entropy(model.apply({"params": params}, batch), batch["labels"])

    def init(key: jax.Array) -> PyTree:
        shapes = jax.eval_shape(
            lambda key: random_pairs(key, 1, config.seq_len, config.vocab_size), key
        )
        return model.lazy_init(key, shapes)["params"]

    return Workload(
        loss_fn=loss_fn,
        init=init,
        batch=lambda key, batch_size: random_pairs(
            key, batch_size, config.seq_len, config.vocab_size
        ),
        optimizer=optimizer_of(optax.adam, injected, learning_rate=config.learning_rate),
    )
