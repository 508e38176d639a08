"""LLaMA-like causal language model: RMS normalisation, rotary positions, grouped-query attention,
SwiGLU; sizes of Llama 3.

Parameters as counted by ``jax.eval_shape``:

    size   width  blocks  heads  key-value heads  hidden  parameters
    tiny      64       8      4                2     192         427,072
    8B      4096      32     32                8   14336   8,030,261,248
    70B     8192      80     64                8   28672  70,553,706,496

Sequence 2048 (Llama 3 trains on 8192), vocabulary 128256, untied head, AdamW; tiny has sequence 32
and vocabulary 256. One layer is one block; the embedding belongs to the first, the head and the
loss to the last. ``dtype`` is that of the computation: parameters stay float32 unless
``param_dtype`` says otherwise.

Any other shape is given by its counts. Mistral 7B is ``size=8B&vocab_size=32000``; Qwen3 8B is
``size=8B&num_layers=36&hidden=12288&vocab_size=151936&qk_norm=true``.

Source: Touvron et al. 2023 (LLaMA), section 2; Grattafiori et al. 2024 (Llama 3), Table 3 (sizes,
learning rates, rotary base); Su et al. 2021 (rotary positions); Ainslie et al. 2023 (grouped
queries); Yang et al. 2025 (Qwen3), 2 (normalised queries and keys). Departure: all three AdamW
constants are those of LLaMA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from zoo import (
    PyTree,
    Workload,
    check_options,
    config_of,
    layer_boundary,
    next_token_workload,
)
from zoo_attention import flash_attention
from zoo_transformer import INIT_STD


@dataclass(frozen=True)
class LlamaConfig:
    """One size, with the options of the workload.

    Attributes:
        width: Features of the residual stream, D.
        num_layers: Transformer blocks.
        num_heads: Query heads, H; divides ``width`` unless ``head_dim`` is given.
        num_key_value_heads: G; divides ``num_heads``.
        hidden: Features between the products of the feed-forward layer.
        learning_rate: Of AdamW.
        seq_len: Tokens of an example, S.
        vocab_size: Distinct tokens, V.
        rotary_base: Of the wavelengths of rotary positions.
        dtype: Dtype of the computation.
        attention: ``"dot_product"``, or ``"flash"`` (``zoo_attention``).
        head_dim: Features of a head, K; 0 for ``width`` / ``num_heads``.
        param_dtype: Dtype of the parameters, and so of the optimizer's state.
        qk_norm: Whether the queries and keys of each head are normalised before they are rotated.
        saved: Names of what each block keeps for its backward pass besides its input, of
            ``SAVED``; the rest is computed again. With none the model leaves that to others.
        loss_chunks: Parts of the sequence whose logits are computed one after the other, and again
            in the backward pass; with 1 all logits are kept.
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
    head_dim: int = 0
    param_dtype: str = "float32"
    qk_norm: bool = False
    saved: tuple[str, ...] = ()
    loss_chunks: int = 1

    @property
    def features_of_head(self) -> int:
        """K, given or derived."""
        return self.head_dim or self.width // self.num_heads


#: What a block may keep, by the names that MaxText gives: the results of its products, and of
#: flash attention what its backward pass reads.
SAVED = (
    "query_proj",
    "key_proj",
    "value_proj",
    "context",
    "out_proj",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
)

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


def _norm(config: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(dtype=config.dtype, param_dtype=config.param_dtype, name=name)


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
            config.features_of_head,
        )

        def heads(name: str, *shape: int) -> jax.Array:
            init = nn.initializers.normal(INIT_STD)
            made = nn.DenseGeneral(
                (*shape, head_dim),
                use_bias=False,
                kernel_init=init,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                name=name,
            )(x)
            return checkpoint_name(made, f"{name}_proj")

        query, key, value = (
            heads("query", groups, in_group),
            heads("key", groups),
            heads("value", groups),
        )
        if config.qk_norm:
            query, key = _norm(config, "query_norm")(query), _norm(config, "key_norm")(key)
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
        made = nn.DenseGeneral(
            width,
            axis=(-3, -2, -1),
            use_bias=False,
            kernel_init=init,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            name="out",
        )(mixed)
        return checkpoint_name(made, "out_proj")


class GatedFeedForward(nn.Module):
    """SwiGLU: [B, S, D] -> [B, S, D]."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config

        def dense(x: jax.Array, features: int, name: str, saved: str) -> jax.Array:
            layers = 2 * config.num_layers if name == "down" else 1
            made = nn.Dense(
                features,
                use_bias=False,
                kernel_init=nn.initializers.normal(INIT_STD * layers**-0.5),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                name=name,
            )(x)
            return checkpoint_name(made, saved)

        gate = dense(x, config.hidden, "gate", "mlpwi_0")
        hidden = nn.silu(gate) * dense(x, config.hidden, "up", "mlpwi_1")
        return dense(hidden, x.shape[-1], "down", "mlpwo")


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream and added to it: [B, S, D] -> [B,
    S, D]."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = x + GroupedAttention(config, name="attention")(_norm(config, "attention_norm")(x))
        return x + GatedFeedForward(config, name="feed_forward")(
            _norm(config, "feed_forward_norm")(x)
        )


class Llama(nn.Module):
    """Tokens, int32 [B, S], to logits, [B, S, V] in the dtype of the computation; or, where only
    features are asked for, to the inputs of the head, [B, S, D]."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, features: bool = False) -> jax.Array:
        config, init = self.config, nn.initializers.normal(INIT_STD)
        x = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=init,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            name="token_embedding",
        )(tokens)
        policy = jax.checkpoint_policies.save_only_these_names(*config.saved)
        block = nn.remat(Block, policy=policy) if config.saved else Block
        for i in range(config.num_layers):
            x = block(config, name=f"block_{i}")(layer_boundary(x) if i else x)
        x = _norm(config, "final_norm")(x)
        if features:
            return x
        return nn.Dense(
            config.vocab_size,
            use_bias=False,
            kernel_init=init,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            name="head",
        )(x)


def chunked_loss(model: Llama, params: PyTree, batch: PyTree) -> jax.Array:
    """Mean cross entropy whose logits are made for one part of the sequence after the other, and
    made again in the backward pass, so that those of one part are in memory at a time."""
    config = model.config
    x = model.apply({"params": params}, batch["tokens"], features=True)
    kernel = params["head"]["kernel"].astype(config.dtype)

    def summed(kernel: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (x @ kernel).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    # Nothing else computes these logits, so no barrier has to keep them from being shared.
    summed_again = jax.checkpoint(summed, prevent_cse=False)
    parts = (jnp.split(array, config.loss_chunks, axis=1) for array in (x, batch["labels"]))
    total = sum(summed_again(kernel, *part) for part in zip(*parts, strict=True))
    return total / batch["labels"].size


PARAM_DTYPES = ("float32", "bfloat16")
#: Counts that ``llama`` takes instead of the size's.
COUNTS = (
    "num_layers",
    "seq_len",
    "vocab_size",
    "width",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden",
    "loss_chunks",
)


def llama(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    param_dtype: str = "float32",
    attention: str = "dot_product",
    qk_norm: bool = False,
    saved: str = "",
    **counts: int,
) -> Workload:
    """Next-token prediction on random tokens with AdamW.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        param_dtype: Of ``PARAM_DTYPES``, of the parameters and of the optimizer's state.
        attention: ``"dot_product"``, or ``"flash"``: no scores are kept, and GPUs and TPUs run a
            Pallas kernel.
        qk_norm: Whether queries and keys are normalised, as in Qwen3.
        saved: What each block keeps for its backward pass besides its input: names of ``SAVED``
            with ``+`` between them. Empty leaves it to the plan (``remat``).
        counts: Of ``COUNTS``, instead of the size's: ``num_layers=2``, ``seq_len=4096``, ...

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("llama", SIZES, size)
    names = tuple(filter(None, saved.split("+")))
    for given, known, what in (
        (counts, COUNTS, "count"),
        (names, SAVED, "name in saved"),
        ((param_dtype,), PARAM_DTYPES, "param_dtype"),
    ):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"llama has no {what} {', '.join(unknown)}; choose of {', '.join(known)}. "
                "[workload-option]"
            )
    check_options(dtype, counts, attention=attention)
    config = replace(
        base,
        dtype=dtype,
        param_dtype=param_dtype,
        attention=attention,
        qk_norm=qk_norm,
        saved=names,
        **counts,
    )
    _check_shape(config)
    model = Llama(config)
    task = next_token_workload(model, config.seq_len, config.vocab_size, config.learning_rate)
    if config.loss_chunks == 1:
        return task
    return replace(task, loss_fn=lambda params, batch: chunked_loss(model, params, batch))


def _check_shape(config: LlamaConfig) -> None:
    """Refuse counts that do not divide each other.

    Raises:
        ValueError: ``[workload-option]``, one line for each.
    """
    rules = (
        ("num_heads", config.num_heads, "num_key_value_heads", config.num_key_value_heads),
        ("seq_len", config.seq_len, "loss_chunks", config.loss_chunks),
        ("the features of a head", config.features_of_head, "the halves that rotate", 2),
        *(
            []
            if config.head_dim
            else [("width", config.width, "num_heads (or give head_dim)", config.num_heads)]
        ),
    )
    violations = [
        f"{whole} is {count} and must be a multiple of {part}, {divisor}. [workload-option]"
        for whole, count, part, divisor in rules
        if count % divisor
    ]
    if violations:
        raise ValueError("\n".join(violations))
