"""minGPT-like language models whose width may change on the way: the families on which OSDP is
evaluated.

Parameters as counted by ``jax.eval_shape``:

    size                          family                        parameters
    tiny                          two widths, 64 and 128           307,712
    96x1024                       narrow and deep            1,312,198,656
    48x1536                       narrow and deep            1,514,428,416
    72x1280                       narrow and deep            1,545,507,840
    96x1536                       narrow and deep            2,874,267,648
    3x6144                        wide and shallow           1,977,532,416
    2x8192                        wide and shallow           2,435,284,992
    3x8192                        wide and shallow           3,240,689,664
    2x12288                       wide and shallow           4,860,887,040
    12x1024+12x2048               inconsistent                 912,038,912
    24x1024+12x2048+4x4096        inconsistent               1,980,003,328
    48x1024+24x1536+8x2048        inconsistent               1,846,582,272
    8x1024+8x2048+8x4096          inconsistent               2,382,558,208

A size is what it is made of: so many blocks of such a width, one after the other. Between two
widths stands a product that changes it, part of the block after it. Heads have 64 features,
sequences 128 tokens, the vocabulary is GPT-2's, 50257 tokens; tiny has sequence 32 and vocabulary
256. One layer is one block; the embedding belongs to the first, the head and the loss to the last.

Source: Jiang et al. 2023 (OSDP), Table 1, which gives ranges: layers and widths lie within them,
parameters but for 2x12288 (at most 4 billion there) and 8x1024+8x2048+8x4096 (2.3 billion); minGPT
(block, untied head, AdamW's constants). Departure: as in ``gpt.py``, whose block it is, and no
dropout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import flax.linen as nn
import jax
from gpt import Block, GptConfig
from zoo import Workload, check_options, config_of, layer_boundary, next_token_workload
from zoo_transformer import INIT_STD

HEAD_WIDTH = 64
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class MinGptConfig:
    """One size, with the options of the workload.

    Attributes:
        layers: (number of blocks, width) in order; ``HEAD_WIDTH`` divides every width.
        seq_len: Tokens of an example, S.
        vocab_size: Distinct tokens, V.
        dtype: Dtype of the computation.
    """

    layers: tuple[tuple[int, int], ...]
    seq_len: int = 128
    vocab_size: int = 50257
    dtype: str = "float32"

    @property
    def blocks(self) -> list[GptConfig]:
        """What each block is made by."""
        num_layers = sum(count for count, _ in self.layers)
        return [
            GptConfig(
                width,
                num_layers,
                width // HEAD_WIDTH,
                LEARNING_RATE,
                self.seq_len,
                self.vocab_size,
                dtype=self.dtype,
            )
            for count, width in self.layers
            for _ in range(count)
        ]


def layers_of(size: str) -> tuple[tuple[int, int], ...] | None:
    """(number of blocks, width) in order; None for another text.

    Example:
        >>> layers_of("6x1024+2x2048")
        ((6, 1024), (2, 2048))
    """
    if not re.fullmatch(r"\d+x\d+(\+\d+x\d+)*", str(size)):
        return None
    return tuple(
        (int(count), int(width))
        for count, _, width in (part.partition("x") for part in size.split("+"))
    )


_NARROW_DEEP = ("96x1024", "48x1536", "72x1280", "96x1536")
_WIDE_SHALLOW = ("3x6144", "2x8192", "3x8192", "2x12288")
_INCONSISTENT = (
    "12x1024+12x2048",
    "24x1024+12x2048+4x4096",
    "48x1024+24x1536+8x2048",
    "8x1024+8x2048+8x4096",
)
SIZES = MappingProxyType(
    {
        "tiny": MinGptConfig(((1, 64), (1, 128)), seq_len=32, vocab_size=256),
        **{
            size: MinGptConfig(layers_of(size))
            for size in (*_NARROW_DEEP, *_WIDE_SHALLOW, *_INCONSISTENT)
        },
    }
)


class MinGpt(nn.Module):
    """Tokens, int32 [B, S], to logits, [B, S, V] in the dtype of the computation."""

    config: MinGptConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, blocks, init = self.config, self.config.blocks, nn.initializers.normal(INIT_STD)

        def dense(features: int, name: str) -> Callable[[jax.Array], jax.Array]:
            return nn.Dense(
                features, use_bias=False, kernel_init=init, dtype=config.dtype, name=name
            )

        width = blocks[0].width
        x = nn.Embed(
            config.vocab_size,
            width,
            embedding_init=init,
            dtype=config.dtype,
            name="token_embedding",
        )(tokens)
        x = x + self.param("position_embedding", init, (config.seq_len, width)).astype(config.dtype)
        for i, block in enumerate(blocks):
            x = layer_boundary(x) if i else x
            if x.shape[-1] != block.width:
                x = dense(block.width, f"widen_{i}")(x)
            x = Block(block, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=config.dtype, name="final_norm")(x)
        return dense(config.vocab_size, "head")(x)


def mingpt(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    seq_len: int | None = None,
    vocab_size: int | None = None,
) -> Workload:
    """Next-token prediction on random tokens with AdamW.

    Args:
        size: A key of ``SIZES``, or other blocks: ``"6x1024+2x2048"`` is 6 of width 1024, then 2 of
            width 2048.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        seq_len: Tokens of an example instead of the size's.
        vocab_size: Distinct tokens instead of the size's.

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    layers = layers_of(size)
    base = MinGptConfig(layers) if layers else config_of("mingpt", SIZES, size)
    given = {"seq_len": seq_len, "vocab_size": vocab_size}
    config = replace(
        base, dtype=dtype, **{key: value for key, value in given.items() if value is not None}
    )
    check_options(
        dtype,
        {key: getattr(config, key) for key in given}
        | {"blocks": min(count for count, _ in config.layers)},
    )
    if any(width % HEAD_WIDTH or not width for _, width in config.layers):
        raise ValueError(
            f"size={size!r} has heads of {HEAD_WIDTH} features; give widths that are multiples of "
            f"{HEAD_WIDTH}. [workload-option]"
        )
    return next_token_workload(MinGpt(config), config.seq_len, config.vocab_size, LEARNING_RATE)
