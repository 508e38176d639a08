"""GPT-2 in the sizes on which Harmony is evaluated, up to 80 billion parameters, and the small one,
of which mu-TWO trains several.

Parameters as counted by ``jax.eval_shape`` with the untied head; that of small is tied:

    size    width  blocks  heads  parameters
    tiny       64       4      4         234,624
    small     768      12     12     124,430,592
    medium   1024      24     16         406,261,760
    xl       1600      48     25       1,637,945,600
    10B      4096      50     32      10,484,695,040
    20B      4096     100     32      20,553,482,240
    30B      4096     150     32      30,622,269,440
    40B      4096     200     32      40,691,056,640
    80B      4096     400     32      80,966,205,440

Sequence 1024, the vocabulary of GPT-2, 50257 tokens, Adam; tiny has sequence 32 and vocabulary 256.
Embedding, every block, the last normalisation, the head and the loss are layers of their own, as in
the profiles of the paper's authors: four more than blocks.

Source: Radford et al. 2019 (GPT-2); Li et al. 2022 (Harmony), 5.1 and 5.7, whose profiles say the
widths and counts of blocks, and that the head has weights of its own. The heads of 10B and more are
those with which their bytes per example are as many copies of the scores as of xl: three forward,
five backward. Departures: no dropout, and those of ``gpt.py``, whose network it is.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import optax
from gpt import Gpt, GptConfig
from zoo import Workload, check_options, config_of, next_token_workload, optimizer_of

LEARNING_RATE = 2.5e-4


def _size(width: int, num_layers: int, num_heads: int, **more: Any) -> GptConfig:
    sizes = {"vocab_size": 50257, **more}
    return GptConfig(width, num_layers, num_heads, LEARNING_RATE, ends_apart=True, **sizes)


SIZES = MappingProxyType(
    {
        "tiny": _size(64, 4, 4, seq_len=32, vocab_size=256),
        "small": _size(768, 12, 12, tied=True),
        "medium": _size(1024, 24, 16),
        "xl": _size(1600, 48, 25),
        **{f"{billions}B": _size(4096, 5 * billions, 32) for billions in (10, 20, 30, 40, 80)},
    }
)


def gpt2(
    *,
    size: str = "tiny",
    dtype: str = "float32",
    num_layers: int | None = None,
    seq_len: int | None = None,
    injected: bool = False,
) -> Workload:
    """Next-token prediction on random tokens with Adam.

    Args:
        size: A key of ``SIZES``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the computation.
        num_layers: Transformer blocks instead of the size's.
        seq_len: Tokens of an example instead of the size's.
        injected: Whether the numbers of Adam are part of its state, so that an array of models may
            vary them.

    Returns:
        The workload; a batch is ``{"tokens", "labels"}``, int32 [batch_size, seq_len] each; the
        first loss is about ``log(vocab_size)``.

    Raises:
        ValueError: ``[workload-size]`` or ``[workload-option]``.
    """
    base = config_of("gpt2", SIZES, size)
    given = {"num_layers": num_layers, "seq_len": seq_len}
    config = replace(
        base, dtype=dtype, **{key: value for key, value in given.items() if value is not None}
    )
    check_options(dtype, {key: getattr(config, key) for key in given})
    workload = next_token_workload(
        Gpt(config), config.seq_len, config.vocab_size, config.learning_rate
    )
    optimizer = optimizer_of(optax.adam, injected, learning_rate=config.learning_rate)
    return replace(workload, optimizer=optimizer)
