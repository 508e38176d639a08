"""Operators of GPT-like Transformers from their sizes alone: two per layer, attention and
feed-forward, an embedding and a head.

What the backward pass needs of a layer of width h, for a sequence of s tokens and a heads, in
elements:

    attention     6 s h + 2 a s^2  its input before and after normalisation, queries, keys, values,
                                   the mixture; scores before and after the softmax
    feed-forward  10 s h           its input before and after normalisation, 4 s h before and after
                                   the non-linearity

Source: the paper's Table 1 counts 2 operators per layer and 2 more; Korthikanti et al. 2022,
section 4.1 (what is kept).
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.model.operators import Block, Operator, OperatorModel


def transformer(
    name: str,
    layers: Sequence[tuple[int, int]],
    *,
    seq_len: int,
    vocab_size: int,
    head_width: int = 64,
    item_bytes: int = 4,
    state_bytes_per_parameter_byte: float = 4.0,
) -> OperatorModel:
    """Return the operators of a GPT whose layers may differ in width.

    Args:
        name: For people.
        layers: (number of layers, width) in order; between two widths, the first layer's products
            change the width for free.
        seq_len: Tokens of an example, s.
        vocab_size: Rows of the embedding, columns of the untied head.
        head_width: Features of an attention head.
        item_bytes: Bytes of one number, in parameters and activations alike.
        state_bytes_per_parameter_byte: See ``OperatorModel``.

    Example:
        >>> model = transformer("N&D", [(48, 1024)], seq_len=128, vocab_size=50257)
        >>> model.num_operators, round(model.parameter_bytes / 4 / 1e9, 2)
        (98, 0.71)
    """
    first, last = layers[0][1], layers[-1][1]
    tokens, logits = 4 * seq_len, seq_len * vocab_size * item_bytes
    embedding = Operator(
        "embedding",
        "embedding",
        (vocab_size + seq_len) * first * item_bytes,
        activation_bytes=tokens,
        input_bytes=tokens,
        output_bytes=seq_len * first * item_bytes,
    )
    head = Operator(
        "head",
        "matmul",
        (vocab_size * last + 2 * last) * item_bytes,
        activation_bytes=2 * seq_len * last * item_bytes + logits,
        input_bytes=seq_len * last * item_bytes,
        output_bytes=logits,
        flops=2 * seq_len * vocab_size * last,
    )
    blocks = (
        Block(_layer(width, seq_len, head_width, item_bytes), count) for count, width in layers
    )
    return OperatorModel(
        name, (Block((embedding,)), *blocks, Block((head,))), state_bytes_per_parameter_byte
    )


def _layer(h: int, s: int, head_width: int, item_bytes: int) -> tuple[Operator, Operator]:
    stream = s * h * item_bytes
    scores = h // head_width * s * s
    attention = Operator(
        "attention",
        "matmul",
        (4 * h * h + 6 * h)
        * item_bytes,  # four projections, their biases, the scale and offset of the normalisation
        activation_bytes=6 * stream + 2 * scores * item_bytes,
        input_bytes=stream,
        output_bytes=stream,
        flops=8 * s * h * h + 4 * s * s * h,
    )
    feed_forward = Operator(
        "feed_forward",
        "matmul",
        (8 * h * h + 7 * h) * item_bytes,
        activation_bytes=10 * stream,
        input_bytes=stream,
        output_bytes=stream,
        flops=16 * s * h * h,
    )
    return attention, feed_forward
