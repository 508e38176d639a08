"""Transformers and others over tokens: embeddings tied and not, encoders with decoders, keys,
masks, shared tables."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from blocks import (
    attention,
    attention_shapes,
    block,
    block_shapes,
    chain,
    conv,
    cross_entropy,
    dropout,
    feed_forward,
    feed_forward_shapes,
    mark,
    mse,
    norm,
    tokens,
    workload,
)


def language_model(width=32, depth=6, vocab=2000, length=16, tied=True, optimizer="sgd"):
    """Causal; the embedding is also the head, or there are two."""

    def loss(params, batch):
        x = params["embedding"][batch["tokens"]]
        x = chain(x, [partial(block, p, causal=True) for p in params["blocks"]])
        head = params["embedding"].T if tied else params["head"]
        return cross_entropy(norm(x) @ head, batch["labels"])

    shapes = {"embedding": (vocab, width), "blocks": [block_shapes(width)] * depth}
    return workload(
        loss,
        shapes if tied else shapes | {"head": (width, vocab)},
        tokens(length, vocab),
        optimizer,
    )


def apart(width=24, depth=5, vocab=4000, length=8, tied=True, optimizer="sgd"):
    """Embedding and head are layers of their own, so that the largest parameter is all that the
    first and the last layer have."""

    def loss(params, batch):
        x = mark(params["embedding"][batch["tokens"]])
        for p in params["blocks"]:
            x = mark(feed_forward(p, x))
        return cross_entropy(
            x @ (params["embedding"].T if tied else params["head"]), batch["labels"]
        )

    shapes = {
        "embedding": (vocab, width),
        "blocks": [feed_forward_shapes(width, 3 * width)] * depth,
    }
    return workload(
        loss,
        shapes if tied else shapes | {"head": (width, vocab)},
        tokens(length, vocab),
        optimizer,
    )


def three_readers(width=32, depth=7, vocab=1500, length=8, optimizer="adam"):
    """The embedding is read at the start, by an auxiliary head in the middle, and at the end."""

    def loss(params, batch):
        x, auxiliary = params["embedding"][batch["tokens"]], 0.0
        for i, p in enumerate(params["blocks"]):
            x = feed_forward(p, x)
            if i == depth // 2:
                auxiliary = cross_entropy(norm(x) @ params["embedding"].T, batch["labels"])
            x, auxiliary = mark((x, auxiliary)) if i >= depth // 2 else (mark(x), auxiliary)
        return cross_entropy(norm(x) @ params["embedding"].T, batch["labels"]) + 0.3 * auxiliary

    shapes = {
        "embedding": (vocab, width),
        "blocks": [feed_forward_shapes(width, 2 * width)] * depth,
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def every_reader(width=24, depth=7, vocab=1000, length=8, optimizer="momentum"):
    """Every layer looks its tokens up again in the same table, and all share one norm."""

    def loss(params, batch):
        x = jnp.zeros((*batch["tokens"].shape, width))
        for p in params["blocks"]:
            x = mark(
                feed_forward(p | {"gain": params["gain"]}, x + params["embedding"][batch["tokens"]])
            )
        return cross_entropy(x @ params["head"], batch["labels"])

    blocks = [{"up": (width, 2 * width), "down": (2 * width, width)}] * depth
    shapes = {
        "embedding": (vocab, width),
        "gain": (width,),
        "blocks": blocks,
        "head": (width, vocab),
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def shared_blocks(width=32, depth=8, period=1, vocab=300, length=8, optimizer="adam"):
    """As many different blocks as the period, over and over."""

    def loss(params, batch):
        x = params["embedding"][batch["tokens"]]
        x = chain(
            x, [partial(block, params["blocks"][i % period], causal=True) for i in range(depth)]
        )
        return cross_entropy(x @ params["head"], batch["labels"])

    shapes = {
        "embedding": (vocab, width),
        "blocks": [block_shapes(width)] * period,
        "head": (width, vocab),
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def encoder_decoder(width=32, depth=3, vocab=2000, length=8, tied=True, optimizer="sgd"):
    """What the encoder made crosses all cuts of the decoder; tied, three places read the
    embedding."""

    def loss(params, batch):
        memory = params["embedding"][batch["tokens"]]
        for p in params["encoder"]:
            memory = mark(block(p, memory))
        x = (params["embedding"] if tied else params["target"])[batch["labels"]]
        for p in params["decoder"]:
            x = attention(p["cross"], block(p["self"], x, causal=True), memory)
            x = mark(x)
        logits = norm(x) @ (params["embedding"].T if tied else params["head"])
        return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])

    decoder = [{"self": block_shapes(width), "cross": attention_shapes(width)}] * depth
    shapes = {
        "embedding": (vocab, width),
        "encoder": [block_shapes(width)] * depth,
        "decoder": decoder,
    }
    if not tied:
        shapes |= {"target": (vocab, width), "head": (width, vocab)}
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def with_keys(width=32, depth=6, vocab=500, length=16, rate=0.1, optimizer="clipped_adamw"):
    """Dropout after every block, keys split on the way; the key crosses cuts."""

    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        for p in params["blocks"]:
            key, own = jax.random.split(key)
            x = mark(dropout(block(p, x, causal=True), own, rate))
        return cross_entropy(x @ params["embedding"].T, batch["labels"])

    shapes = {"embedding": (vocab, width), "blocks": [block_shapes(width)] * depth}
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def relative_bias(width=32, depth=7, vocab=400, length=16, optimizer="adafactor"):
    """All layers read one table of biases by distance; the loss has a term for the size of the
    logits."""

    def loss(params, batch):
        distance = jnp.arange(length)[:, None] - jnp.arange(length) + length - 1
        x = params["embedding"][batch["tokens"]]
        bias = params["bias"][:, distance]
        x = chain(x, [partial(block, p, bias=bias) for p in params["blocks"]])
        logits = x @ params["head"]
        return cross_entropy(logits, batch["labels"]) + 1e-3 * jnp.mean(
            jax.nn.logsumexp(logits, -1) ** 2
        )

    shapes = {
        "embedding": (vocab, width),
        "bias": (2, 2 * length - 1),
        "blocks": [block_shapes(width)] * depth,
        "head": (width, vocab),
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def padded_classifier(width=32, depth=6, vocab=300, length=24, optimizer="lion"):
    """A boolean mask of padding crosses all cuts; a mean over the tokens that count, then one
    label."""

    def loss(params, batch):
        x, mask = params["embedding"][batch["tokens"]], batch["tokens"] > vocab // 4
        for p in params["blocks"]:
            x, mask = mark((block(p, x, mask=mask), mask))
        pooled = jnp.sum(jnp.where(mask[..., None], x, 0), 1) / (1 + mask.sum(1, keepdims=True))
        return cross_entropy(pooled @ params["head"], batch["labels"][:, 0] % 5)

    shapes = {
        "embedding": (vocab, width),
        "blocks": [block_shapes(width)] * depth,
        "head": (width, 5),
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def experts(width=32, num_experts=4, depth=6, vocab=300, length=8, optimizer="adamw"):
    """Every other block sends tokens to experts by products with one-hot choices; their balance is
    part of the loss."""

    def sparse(p, x):
        probabilities = jax.nn.softmax(norm(x, p["gain"]) @ p["route"])
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), num_experts)
        hidden = jax.nn.relu(jnp.einsum("btd,bte,edf->btf", x, chosen, p["up"]))
        out = jnp.einsum("btf,bte,efd->btd", hidden, chosen * probabilities, p["down"])
        return x + out, jnp.mean(jnp.sum(probabilities * chosen, -1))

    def loss(params, batch):
        x, balance = params["embedding"][batch["tokens"]], jnp.float32(0)
        for p in params["blocks"]:
            if "route" in p:
                x, added = sparse(p, x)
                balance = balance + added
            else:
                x = block(p, x, causal=True)
            x, balance = mark((x, balance))
        return cross_entropy(x @ params["head"], batch["labels"]) + 0.01 * balance

    routed = {
        "gain": (width,),
        "route": (width, num_experts),
        "up": (num_experts, width, 2 * width),
        "down": (num_experts, 2 * width, width),
    }
    blocks = [routed if i % 2 else block_shapes(width) for i in range(depth)]
    return workload(
        loss,
        {"embedding": (vocab, width), "blocks": blocks, "head": (width, vocab)},
        tokens(length, vocab),
        optimizer,
    )


def linear_attention(width=32, depth=7, vocab=200, length=48, optimizer="adam"):
    """Sums over what came before instead of a softmax, in a recurrence that XLA sees as a product
    with a triangle."""

    def mixed(p, x):
        q, k, v = jnp.split(norm(x, p["gain"]) @ p["qkv"], 3, -1)
        weights = jnp.einsum("bqd,bkd->bqk", jax.nn.elu(q) + 1, jax.nn.elu(k) + 1) * jnp.tri(length)
        return x + (weights @ v / (1e-3 + weights.sum(-1, keepdims=True))) @ p["out"]

    def loss(params, batch):
        x = chain(
            params["embedding"][batch["tokens"]], [partial(mixed, p) for p in params["blocks"]]
        )
        return cross_entropy(x @ params["head"], batch["labels"])

    blocks = [{"gain": (width,), "qkv": (width, 3 * width), "out": (width, width)}] * depth
    return workload(
        loss,
        {"embedding": (vocab, width), "blocks": blocks, "head": (width, vocab)},
        tokens(length, vocab),
        optimizer,
    )


def narrowing(width=64, depth=4, vocab=800, length=32, optimizer="adamw"):
    """A funnel: after every two blocks half as many tokens, half again as wide."""

    def loss(params, batch):
        x = params["embedding"][batch["tokens"]]
        for p in params["levels"]:
            x = mark(block(p["first"], x))
            x = mark(x.reshape(x.shape[0], x.shape[1] // 2, -1) @ p["merge"])
        return cross_entropy(x.mean(1) @ params["head"], batch["labels"][:, 0])

    widths = [width * (2 + i) // 2 // 2 * 2 for i in range(depth + 1)]
    levels = [{"first": block_shapes(a, 2 * a), "merge": (2 * a, b)} for a, b in pairwise(widths)]
    shapes = {"embedding": (vocab, width), "levels": levels, "head": (widths[-1], vocab)}
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def text_convolution(width=48, depth=6, vocab=3000, length=32, optimizer="muon"):
    """Gated convolutions over tokens."""

    def step(p, x):
        a, b = jnp.split(conv(x, p["kernel"]), 2, -1)
        return x + a * jax.nn.sigmoid(b)

    def loss(params, batch):
        x = chain(
            params["embedding"][batch["tokens"]], [partial(step, p) for p in params["blocks"]]
        )
        return cross_entropy(x.max(1) @ params["head"], batch["labels"][:, 0] % 20)

    shapes = {
        "embedding": (vocab, width),
        "blocks": [{"kernel": (3, width, 2 * width)}] * depth,
        "head": (width, 20),
    }
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def patches(width=48, depth=6, size=16, optimizer="muon"):
    """A vision transformer that predicts the patches it sees."""

    def loss(params, images):
        n = images.shape[0]
        seen = images.reshape(n, size // 4, 4, size // 4, 4, 3).swapaxes(2, 3).reshape(n, -1, 48)
        x = chain(
            seen @ params["in"] + params["position"], [partial(block, p) for p in params["blocks"]]
        )
        return mse(x @ params["out"], seen)

    shapes = {
        "in": (48, width),
        "position": ((size // 4) ** 2, width),
        "blocks": [block_shapes(width)] * depth,
        "out": (width, 48),
    }
    return workload(
        loss, shapes, lambda key, n: jax.random.normal(key, (n, size, size, 3)), optimizer
    )


def read_again(
    width=32, depth=9, vocab=2000, readers=(0, 4), kind="rows", second=(), length=8, optimizer="sgd"
):
    """Layers far apart read the same table: rows of it, or its product with what arrives, or one
    after the other; others read a second table."""

    def look(table, x, tokens, i, place):
        if kind == "rows" or (kind == "both" and place % 2 == 0):
            return x + table[(tokens + i) % vocab]
        return x + jnp.tanh(x @ table[: 8 * width].T) @ table[: 8 * width]

    def loss(params, batch):
        x = params["start"][batch["tokens"] % 16]
        for i, p in enumerate(params["blocks"]):
            if i in readers:
                x = look(params["table"], x, batch["tokens"], i, readers.index(i))
            if i in second:
                x = look(params["second"], x, batch["labels"], i, second.index(i))
            x = feed_forward(p, x)
            x = mark(x) if i + 1 < depth else x
        return mse(x, 0.0)

    shapes = {
        "start": (16, width),
        "table": (vocab, width),
        "blocks": [feed_forward_shapes(width, 2 * width)] * depth,
    }
    shapes |= {"second": (vocab // 2, width)} if second else {}
    return workload(loss, shapes, tokens(length, vocab), optimizer)
