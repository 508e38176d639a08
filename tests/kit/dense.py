"""Products of vectors: uneven, shared, gated, without parameters, with integers and booleans
between layers, with several losses."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from blocks import (
    chain,
    cross_entropy,
    dropout,
    feed_forward,
    feed_forward_shapes,
    hinge,
    mark,
    mse,
    norm,
    vectors,
    workload,
)

CLASSES = 10


def _classifier(widths, optimizer, activation=jax.nn.relu, loss=cross_entropy):
    """Layers of the given widths, each with a bias."""
    shapes = [{"w": (a, b), "b": (b,)} for a, b in zip(widths, [*widths[1:], CLASSES], strict=True)]

    def loss_fn(params, batch):
        steps = [lambda x, p=p: activation(x @ p["w"] + p["b"]) for p in params[:-1]]
        steps.append(lambda x: loss(x @ params[-1]["w"] + params[-1]["b"], batch["labels"]))
        return chain(batch["x"], steps)

    return workload(loss_fn, shapes, vectors(widths[0], CLASSES), optimizer)


def uneven(seed=0, depth=8, largest=256, optimizer="adam"):
    """Widths drawn anew for every layer."""
    drawn = np.random.default_rng(seed).integers(16, largest + 1, depth)
    return _classifier([int(w) for w in drawn], optimizer)


def alternating(narrow=16, wide=192, depth=8, optimizer="adam"):
    """Wide and narrow in turn."""
    return _classifier([wide if i % 2 else narrow for i in range(depth)], optimizer)


def pyramid(width=16, depth=7, optimizer="adamw"):
    """Twice as wide every other layer, with a hinge loss."""
    return _classifier([width << i // 2 for i in range(depth)], optimizer, jnp.tanh, hinge)


def one_huge(position=3, width=24, huge=1024, depth=7, optimizer="adam"):
    """Narrow layers and a single huge one, at any place."""
    return _classifier([huge if i == position else width for i in range(depth)], optimizer)


def without_parameters(width=48, depth=4, optimizer="adam"):
    """Layers that only normalise or activate between layers of products, and the loss alone at the
    end."""

    def loss(params, batch):
        x = batch["x"]
        for p in params["blocks"]:
            x = mark(x @ p)
            x = mark(norm(jax.nn.gelu(x)))
        return cross_entropy(mark(x @ params["head"]), batch["labels"])

    shapes = {"blocks": [(width, width)] * depth, "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def shared_norm(width=32, hidden=96, depth=7, optimizer="adamw"):
    """One gain and one bias for the norms of all layers."""

    def loss(params, batch):
        def step(x, p):
            return x + jax.nn.gelu((norm(x, params["gain"]) + params["bias"]) @ p["up"]) @ p["down"]

        steps = [partial(step, p=p) for p in params["blocks"]]
        x = chain(batch["x"], [*steps, lambda x: norm(x, params["gain"])])
        return cross_entropy(x @ params["head"], batch["labels"])

    blocks = [{"up": (width, hidden), "down": (hidden, width)}] * depth
    shapes = {"blocks": blocks, "gain": (width,), "bias": (width,), "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def one_matrix(width=128, depth=8, optimizer="sgd"):
    """Every layer reads the same large matrix, and a gain of its own."""

    def loss(params, batch):
        steps = [lambda x, g=g: x + jnp.tanh(norm(x, g) @ params["w"]) for g in params["gains"]]
        return cross_entropy(chain(batch["x"], steps) @ params["head"], batch["labels"])

    shapes = {"w": (width, width), "gains": [(width,)] * depth, "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def two_towers(left=64, right=32, depth=4, optimizer="adamw"):
    """One tower after the other; the first one's result waits, and a hinge on their product."""

    def loss(params, batch):
        def tower(x, weights):
            for p in weights:
                x = mark(jax.nn.relu(x @ p))
            return x

        a, b = (
            tower(batch["x"][:, :left], params["left"]),
            tower(batch["x"][:, left:], params["right"]),
        )
        score = jnp.sum((a @ params["join"]) * b, -1)
        return jnp.mean(jnp.maximum(0.0, 1.0 - score * (2.0 * (batch["labels"] % 2) - 1.0)))

    shapes = {
        "left": [(left, left)] * depth,
        "right": [(right, right)] * depth,
        "join": (left, right),
    }
    return workload(loss, shapes, vectors(left + right, CLASSES), optimizer)


def autoencoder(width=128, code=8, depth=4, optimizer="adam"):
    """Down to a small code and up again; the last layer reads the input."""
    sizes = np.geomspace(width, code, depth + 1).astype(int).tolist()
    shapes = list(pairwise(sizes))
    shapes += [(b, a) for a, b in reversed(shapes)]

    def loss(params, x):
        return mse(chain(x, [lambda h, p=p: jax.nn.elu(h @ p) for p in params]), x)

    return workload(loss, shapes, vectors(width), optimizer)


def gated(width=48, hidden=128, depth=7, optimizer="lion"):
    """Products of two products."""

    def loss(params, batch):
        def step(x, p):
            h = norm(x, p["gain"])
            return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

        return cross_entropy(
            chain(batch["x"], [partial(step, p=p) for p in params["blocks"]]) @ params["head"],
            batch["labels"],
        )

    shape = {
        "gain": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    return workload(
        loss,
        {"blocks": [shape] * depth, "head": (width, CLASSES)},
        vectors(width, CLASSES),
        optimizer,
    )


def tables(fields=6, rows=2000, width=16, depth=4, optimizer="adafactor"):
    """Many large tables of categories, each in a layer of its own that adds to what was read, then
    a small network."""

    def loss(params, batch):
        x = 0.0
        for i, table in enumerate(params["tables"]):
            x = mark(x + jnp.tanh(table[batch["ids"][:, i]]))
        x = chain(x, [lambda x, p=p: feed_forward(p, x) for p in params["blocks"]])
        return mse((x @ params["head"])[:, 0], batch["y"])

    def batch(key, n):
        return {
            "ids": jax.random.randint(key, (n, fields), 0, rows),
            "y": jax.random.normal(key, (n,)),
        }

    blocks = [feed_forward_shapes(width, 4 * width)] * depth
    shapes = {
        "tables": [(rows * (1 + i % 2), width) for i in range(fields)],
        "blocks": blocks,
        "head": (width, 1),
    }
    return workload(loss, shapes, batch, optimizer)


def low_rank(width=96, rank=4, depth=8, optimizer="adamw"):
    """Products that are not trained, and small ones beside them that are."""

    def loss(params, batch):
        steps = [
            lambda x, p=p: x + jnp.tanh(x @ jax.lax.stop_gradient(p["w"]) + (x @ p["a"]) @ p["b"])
            for p in params["blocks"]
        ]
        return cross_entropy(chain(batch["x"], steps) @ params["head"], batch["labels"])

    shape = {"w": (width, width), "a": (width, rank), "b": (rank, width)}
    return workload(
        loss,
        {"blocks": [shape] * depth, "head": (width, CLASSES)},
        vectors(width, CLASSES),
        optimizer,
    )


def routed(width=40, experts=4, depth=6, optimizer="adam"):
    """The expert of every example, an integer, and whether it is used at all, a boolean, are chosen
    once and cross all layers."""

    def loss(params, batch):
        x = batch["x"]
        scores = x @ params["route"]
        choice, used = jnp.argmax(scores, -1), scores.max(-1) > 0
        auxiliary = jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)
        x = mark(jnp.tanh(x))
        for p in params["experts"]:
            every = jnp.einsum("bd,edf->bef", x, p)
            picked = jnp.take_along_axis(every, choice[:, None, None], 1)[:, 0]
            x = mark(jnp.where(used[:, None], x + jnp.tanh(picked), x))
        return cross_entropy(x @ params["head"], batch["labels"]) + 0.01 * auxiliary

    shapes = {
        "route": (width, experts),
        "experts": [(experts, width, width)] * depth,
        "head": (width, CLASSES),
    }
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def masked(width=64, depth=7, optimizer="adam"):
    """Every layer makes a boolean mask for the next one and counts what it drops, in integers."""

    def loss(params, batch):
        x, keep, dropped = batch["x"], batch["x"] > -1, jnp.zeros(batch["x"].shape[0], jnp.int32)
        for p in params["blocks"]:
            x = jnp.where(keep, x, 0.0) + jax.nn.relu(x @ p)
            keep, dropped = x < 3, dropped + jnp.sum(~keep, -1)
            x, keep, dropped = mark((x, keep, dropped))
        return hinge(x @ params["head"] / (1 + dropped[:, None]), batch["labels"])

    return workload(
        loss,
        {"blocks": [(width, width)] * depth, "head": (width, CLASSES)},
        vectors(width, CLASSES),
        optimizer,
    )


def deep_supervision(width=48, classes=200, depth=7, optimizer="momentum"):
    """Every layer has a head of its own whose loss is added to a sum that crosses the cuts."""

    def loss(params, batch):
        x, total = batch["x"], 0.0
        for p in params:
            x = feed_forward(p["block"], x)
            total = total + cross_entropy(x @ p["head"], batch["labels"])
            x, total = mark((x, total))
        return total / len(params)

    shapes = [{"block": feed_forward_shapes(width, 2 * width), "head": (width, classes)}] * depth
    return workload(loss, shapes, vectors(width, classes), optimizer)


def branches(width=48, depth=6, optimizer="adam"):
    """The labels say which layer's matrix each layer multiplies by, and whether the sizes of all of
    them count: branches that read all parameters."""

    def loss(params, batch):
        chosen, matrices = batch["labels"].sum(), params["matrices"]

        def layer(i, x):
            which = [lambda w, x, k=k: jnp.tanh(x @ w[k]) for k in range(depth)]
            return jax.lax.switch((chosen + i) % depth, which, matrices, x)

        x = chain(batch["x"], [partial(layer, i) for i in range(depth)])
        penalty = jax.lax.cond(
            chosen % 2 == 0, lambda w: sum(jnp.sum(m**2) for m in w), lambda w: 0.0, matrices
        )
        return cross_entropy(x @ params["head"], batch["labels"]) + 1e-3 * penalty

    shapes = {"matrices": [(width, width)] * depth, "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def noisy(width=64, hidden=160, depth=7, optimizer="clipped_adamw"):
    """Dropout with a random key in every layer."""

    def loss(params, batch, key):
        keys = jax.random.split(key, depth)
        steps = [
            lambda x, p=p, k=k: dropout(feed_forward(p, x), k)
            for p, k in zip(params["blocks"], keys, strict=True)
        ]
        return cross_entropy(chain(batch["x"], steps) @ params["head"], batch["labels"])

    shapes = {"blocks": [feed_forward_shapes(width, hidden)] * depth, "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def hypernetwork(width=16, code=32, depth=6, optimizer="adam"):
    """The first layer makes a matrix per example that all others multiply by."""

    def loss(params, batch):
        x = batch["x"]
        matrix = (jnp.tanh(x @ params["code"]) @ params["weights"]).reshape(-1, width, width)
        x = mark(jnp.tanh(x))
        for p in params["blocks"]:
            x = mark(x + jnp.tanh(jnp.einsum("bd,bde->be", x, matrix) @ p))
        return mse(x, batch["x"])

    shapes = {
        "code": (width, code),
        "weights": (code, width * width),
        "blocks": [(width, width)] * depth,
    }
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)


def half_precision(width=64, hidden=192, depth=7, optimizer="adamw"):
    """Computed in bfloat16 from parameters in float32."""

    def loss(params, batch):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = chain(
            batch["x"].astype(jnp.bfloat16),
            [lambda x, p=p: feed_forward(p, x) for p in low["blocks"]],
        )
        return cross_entropy(x @ low["head"], batch["labels"])

    shapes = {"blocks": [feed_forward_shapes(width, hidden)] * depth, "head": (width, CLASSES)}
    return workload(loss, shapes, vectors(width, CLASSES), optimizer)
