"""Recurrences over time inside of layers, and scans over layers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from blocks import (
    attention,
    attention_shapes,
    block,
    block_shapes,
    chain,
    cross_entropy,
    gru,
    gru_shapes,
    mark,
    mse,
    norm,
    over_time,
    tokens,
    vectors,
    workload,
)
from jax import lax


def gated_recurrent(width=32, depth=6, length=12, optimizer="adam"):
    """Gated recurrent units, one above the other, that predict their input."""

    def loss(params, x):
        return mse(chain(x, [partial(gru, p) for p in params["layers"]]) @ params["out"], x)

    shapes = {"layers": [gru_shapes(width, width)] * depth, "out": (width, width)}
    return workload(
        loss, shapes, lambda key, n: jax.random.normal(key, (n, length, width)), optimizer
    )


def recurrent_language_model(width=32, depth=5, vocab=1500, length=10, optimizer="clipped_adamw"):
    """Long short-term memory between a tied embedding and head, widths that differ."""

    def lstm(p, x):
        def cell(state, gates):
            h, c = state
            i, f, g, o = jnp.split(gates + h @ p["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], p["h"].shape[0]))
        return over_time(cell, (zeros, zeros), x @ p["x"])

    def loss(params, batch):
        x = chain(
            params["embedding"][batch["tokens"]], [partial(lstm, p) for p in params["layers"]]
        )
        return cross_entropy(x @ params["embedding"].T, batch["labels"])

    hidden = [width * (2 if i % 2 else 1) for i in range(depth)]
    hidden[-1] = width
    layers = [
        {"x": (a, 4 * b), "h": (b, 4 * b)}
        for a, b in zip([width, *hidden[:-1]], hidden, strict=True)
    ]
    return workload(
        loss, {"embedding": (vocab, width), "layers": layers}, tokens(length, vocab), optimizer
    )


def translator(width=32, depth=3, vocab=1000, length=8, tied=True, optimizer="adam"):
    """A recurrent encoder whose last state begins every layer of the decoder, which reads all
    states by attention."""

    def loss(params, batch):
        memory = params["embedding"][batch["tokens"]]
        for p in params["encoder"]:
            memory = mark(gru(p, memory))
        last = memory[:, -1]
        x = params["embedding" if tied else "target"][batch["labels"]]
        for p in params["decoder"]:
            x = mark(attention(p["attention"], gru(p["gru"], x, last), memory))
        return cross_entropy(
            (norm(x) @ (params["embedding"].T if tied else params["head"]))[:, :-1],
            batch["labels"][:, 1:],
        )

    decoder = [{"gru": gru_shapes(width, width), "attention": attention_shapes(width)}] * depth
    shapes = {
        "embedding": (vocab, width),
        "encoder": [gru_shapes(width, width)] * depth,
        "decoder": decoder,
    }
    if not tied:
        shapes |= {"target": (vocab, width), "head": (width, vocab)}
    return workload(loss, shapes, tokens(length, vocab), optimizer)


def state_space(width=24, depth=7, length=32, optimizer="lion"):
    """A linear recurrence per channel, made by an associative scan."""

    def step(p, x):
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]), x.shape)
        gate = jax.nn.silu(x @ p["gate"])
        _, h = lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x @ p["in"]), axis=1
        )
        return x + (h * gate) @ p["out"]

    def loss(params, x):
        return mse(chain(x, [partial(step, p) for p in params["blocks"]])[:, :-1], x[:, 1:])

    blocks = [
        {"decay": (width,), "gate": (width, width), "in": (width, width), "out": (width, width)}
    ] * depth
    return workload(
        loss,
        {"blocks": blocks},
        lambda key, n: jax.random.normal(key, (n, length, width)),
        optimizer,
    )


def scanned_layers(width=32, depth=8, vocab=500, length=8, optimizer="adamw"):
    """A scan over stacked layers, a mark in its body."""

    def loss(params, batch):
        def body(x, p):
            return mark(block(p, x, causal=True)), None

        x, _ = lax.scan(body, params["embedding"][batch["tokens"]], params["blocks"])
        return cross_entropy(x @ params["head"], batch["labels"])

    stacked = jax.tree.map(
        lambda shape: (depth, *shape),
        block_shapes(width),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return workload(
        loss,
        {"embedding": (vocab, width), "blocks": stacked, "head": (width, vocab)},
        tokens(length, vocab),
        optimizer,
    )


def scanned_groups(width=40, groups=3, per_group=3, optimizer="adam"):
    """A scan of scans, whose layers also return a term of the loss."""

    def loss(params, batch):
        def layer(x, p):
            x = mark(x + jnp.tanh(x @ p["up"]) @ p["down"])
            return x, jnp.mean(x**2)

        x, sizes = lax.scan(lambda x, p: lax.scan(layer, x, p), batch["x"], params["blocks"])
        return cross_entropy(x @ params["head"], batch["labels"]) + 0.01 * sizes.sum()

    blocks = {
        "up": (groups, per_group, width, 2 * width),
        "down": (groups, per_group, 2 * width, width),
    }
    return workload(loss, {"blocks": blocks, "head": (width, 10)}, vectors(width, 10), optimizer)


def checkpointed_scan(width=48, depth=8, optimizer="momentum"):
    """A scan over layers that are computed again on the way back."""

    def loss(params, batch):
        def body(x, p):
            x = jax.checkpoint(lambda x, p: x + jnp.tanh(norm(x) @ p["up"]) @ p["down"])(x, p)
            return mark(x), None

        x, _ = lax.scan(body, batch["x"], params["blocks"])
        return cross_entropy(x @ params["head"], batch["labels"])

    blocks = {"up": (depth, width, 3 * width), "down": (depth, 3 * width, width)}
    return workload(loss, {"blocks": blocks, "head": (width, 10)}, vectors(width, 10), optimizer)


def repeated_inside(width=32, depth=6, times=3, optimizer="adam"):
    """Each layer applies its weights several times, in a loop that stays closed."""

    def step(p, x):
        return lax.scan(lambda x, _: (norm(x + jnp.tanh(x @ p)), None), x, None, length=times)[0]

    def loss(params, batch):
        return cross_entropy(
            chain(batch["x"], [partial(step, p) for p in params["blocks"]]) @ params["head"],
            batch["labels"],
        )

    return workload(
        loss,
        {"blocks": [(width, width)] * depth, "head": (width, 10)},
        vectors(width, 10),
        optimizer,
    )
