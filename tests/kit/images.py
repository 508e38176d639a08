"""Convolutions: growing channels, skips over many cuts, depthwise, dilated, dense connections."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from blocks import chain, conv, cross_entropy, doubled, halved, images, mark, mse, norm, workload

CLASSES = 10


def vgg(channels=8, levels=3, hidden=128, size=16, optimizer="momentum"):
    """Two convolutions, half the size, twice the channels; then two wide products."""

    def loss(params, batch):
        x = batch["x"]
        for p in params["levels"]:
            x = mark(jax.nn.relu(conv(x, p["a"])))
            x = mark(halved(jax.nn.relu(conv(x, p["b"]))))
        x = mark(jax.nn.relu(x.reshape(x.shape[0], -1) @ params["hidden"]))
        return cross_entropy(x @ params["head"], batch["labels"])

    widths = [3, *(channels << i for i in range(levels))]
    kernels = [{"a": (3, 3, a, b), "b": (3, 3, b, b)} for a, b in pairwise(widths)]
    shapes = {
        "levels": kernels,
        "hidden": ((size >> levels) ** 2 * widths[-1], hidden),
        "head": (hidden, CLASSES),
    }
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)


def skips(channels=8, levels=3, size=16, optimizer="adam"):
    """Down and up again; every size's result waits for the way back."""

    def loss(params, batch):
        x, waiting = batch["x"], []
        for p in params["down"]:
            x = mark(jax.nn.silu(conv(x, p)))
            waiting.append(x)
            x = halved(x)
        x = mark(jax.nn.silu(conv(x, params["middle"])))
        for p in params["up"]:
            x = mark(jax.nn.silu(conv(jnp.concatenate([doubled(x), waiting.pop()], -1), p)))
        return mse(conv(x, params["out"]), batch["x"])

    widths = [channels << i for i in range(levels)]
    down = [(3, 3, a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)]
    up = [
        (3, 3, b + below, b)
        for b, below in zip(reversed(widths), [2 * widths[-1], *reversed(widths[1:])], strict=True)
    ]
    shapes = {
        "down": down,
        "middle": (3, 3, widths[-1], 2 * widths[-1]),
        "up": up,
        "out": (1, 1, channels, 3),
    }
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)


def depthwise(channels=16, depth=7, size=12, optimizer="adamw"):
    """A convolution per channel, then products over channels."""

    def step(p, x):
        h = conv(x, p["space"], groups=channels)
        return x + jax.nn.relu6(norm(h) @ p["up"]) @ p["down"]

    def loss(params, batch):
        x = chain(conv(batch["x"], params["stem"]), [partial(step, p) for p in params["blocks"]])
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["labels"])

    blocks = [
        {
            "space": (3, 3, 1, channels),
            "up": (channels, 4 * channels),
            "down": (4 * channels, channels),
        }
    ] * depth
    shapes = {"stem": (3, 3, 3, channels), "blocks": blocks, "head": (channels, CLASSES)}
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)


def residual(channels=8, levels=3, size=16, optimizer="momentum"):
    """Blocks of two convolutions with a norm, every other one with a stride and a projection."""

    def block(x, p, stride):
        h = conv(jax.nn.relu(norm(x, p["gain"])), p["a"], stride)
        h = conv(jax.nn.relu(norm(h)), p["b"])
        return (conv(x, p["skip"], stride) if "skip" in p else x) + h

    def loss(params, batch):
        steps = [partial(block, p=p, stride=2 if "skip" in p else 1) for p in params["blocks"]]
        x = chain(conv(batch["x"], params["stem"]), steps)
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["labels"])

    blocks, width = [], channels
    for _ in range(levels):
        blocks.append({"gain": (width,), "a": (3, 3, width, width), "b": (3, 3, width, width)})
        wide = 2 * width
        blocks.append(
            {
                "gain": (width,),
                "a": (3, 3, width, wide),
                "b": (3, 3, wide, wide),
                "skip": (1, 1, width, wide),
            }
        )
        width = wide
    shapes = {"stem": (3, 3, 3, channels), "blocks": blocks, "head": (width, CLASSES)}
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)


def connected(growth=8, depth=7, size=12, optimizer="adam"):
    """Every layer appends channels to all that was made so far, so that more crosses every cut."""

    def loss(params, batch):
        x = conv(batch["x"], params["stem"])
        for p in params["blocks"]:
            x = mark(jnp.concatenate([x, jax.nn.relu(conv(norm(x), p))], -1))
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["labels"])

    blocks = [(3, 3, growth * (1 + i), growth) for i in range(depth)]
    shapes = {"stem": (3, 3, 3, growth), "blocks": blocks, "head": (growth * (1 + depth), CLASSES)}
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)


def dilated(channels=16, depth=7, length=64, optimizer="lion"):
    """One-dimensional, each layer sees twice as far and adds to a sum that all of them make."""

    def loss(params, batch):
        x, total = batch["x"] @ params["stem"], 0.0
        for i, p in enumerate(params["blocks"]):
            a, b = jnp.split(conv(x, p["kernel"], dilation=1 << i % 4), 2, -1)
            h = jnp.tanh(a) * jax.nn.sigmoid(b)
            x, total = x + h @ p["out"], total + h @ p["skip"]
            x, total = mark((x, total))
        return mse(jax.nn.relu(total) @ params["head"], batch["x"])

    def batch(key, n):
        return {"x": jax.random.normal(key, (n, length, 4))}

    blocks = [
        {
            "kernel": (2, channels, 2 * channels),
            "out": (channels, channels),
            "skip": (channels, channels),
        }
    ] * depth
    return workload(
        loss, {"stem": (4, channels), "blocks": blocks, "head": (channels, 4)}, batch, optimizer
    )


def image_autoencoder(channels=8, levels=3, size=16, optimizer="adam"):
    """Strided convolutions down, repeated pixels up, with a term for the size of the code."""

    def loss(params, batch):
        x = batch["x"]
        for p in params["down"]:
            x = mark(jax.nn.leaky_relu(conv(x, p, 2)))
        code = jnp.mean(x**2)
        for p in params["up"]:
            x, code = mark((jax.nn.leaky_relu(conv(doubled(x), p)), code))
        return mse(x, batch["x"]) + 0.1 * code

    widths = [3, *(channels << i for i in range(levels))]
    pairs = list(pairwise(widths))
    shapes = {
        "down": [(3, 3, a, b) for a, b in pairs],
        "up": [(3, 3, b, a) for a, b in reversed(pairs)],
    }
    return workload(loss, shapes, images(size, 3, CLASSES), optimizer)
