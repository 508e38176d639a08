"""Tiny models that cut in every way a real one may: skips, ties, scans, keys, constants, custom
rules, three ways to write a module."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from capture.model.workload import Workload

D = 4  # width
V = 7  # vocabulary
T = 5  # sequence length


def mark(x):
    return checkpoint_name(x, "layer_boundary")


def workload(loss_fn, init, batch) -> Workload:
    return Workload(loss_fn, init, batch, optax.sgd(0.1))


def tokens_batch(key, n):
    inputs, labels = (jax.random.randint(k, (n, T), 0, V) for k in jax.random.split(key))
    return {"tokens": inputs, "labels": labels}


def vectors_batch(key, n):
    return jax.random.normal(key, (n, D)), jnp.arange(n) % 3


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def normals(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def named_remat() -> Workload:
    """Layers that keep some of their values by name, as users choose them for ``jax.checkpoint``."""
    names = ["first", "second", "third", "fourth"]

    def layer(p, h):
        for name in names:
            h = checkpoint_name(jnp.tanh(h @ p), name)
        return h

    kept = jax.checkpoint_policies.save_only_these_names(*names[:3], "of no value")

    def loss(p, batch):
        inputs, labels = batch
        h = inputs
        for each in p.values():
            h = mark(jax.checkpoint(layer, policy=kept)(each, h))
        return cross_entropy(h, labels)

    return workload(loss, lambda key: normals(key, a=(D, D), b=(D, D), c=(D, D)), vectors_batch)


def unet() -> Workload:
    """Long skips and a tied embedding."""

    def init(key):
        return normals(
            key,
            emb=(V, D),
            pos=(T, D),
            d0=(D, D),
            d1=(D, D),
            mid=(D, D),
            u1=(2 * D, D),
            u0=(2 * D, D),
            gain=(D,),
        )

    def loss(p, batch):
        h = p["emb"][batch["tokens"]] + p["pos"]
        s0 = jnp.tanh(h @ p["d0"])
        h = mark(s0)
        s1 = jax.nn.relu(s0 @ p["d1"])  # the skip reads the value by its unmarked name
        h = mark(s1 + h)
        h = mark(jnp.sin(h @ p["mid"]))
        h = mark(jnp.tanh(jnp.concatenate([h, s1], -1) @ p["u1"]))
        h = mark(jnp.tanh(jnp.concatenate([h, s0], -1) @ p["u0"]))
        return cross_entropy((h * p["gain"]) @ p["emb"].T, batch["labels"])

    return workload(loss, init, tokens_batch)


def lstm() -> Workload:
    """Two recurrent layers, each a scan over time that stays closed."""

    def init(key):
        return [normals(k, w=(2 * D, 4 * D), b=(4 * D,)) for k in jax.random.split(key, 2)]

    def layer(p, xs):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], D))
        return lax.scan(cell, (zeros, zeros), xs)[1]

    def loss(p, batch):
        xs, ys = batch
        h = jnp.moveaxis(xs, 1, 0)
        for layer_params in p[:-1]:
            h = mark(layer(layer_params, h))
        return jnp.mean((jnp.moveaxis(layer(p[-1], h), 0, 1) - ys) ** 2)

    def batch(key, n):
        return tuple(jax.random.normal(k, (n, T, D)) for k in jax.random.split(key))

    return workload(loss, init, batch)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1.0, 1.0)


# Not the true gradient, so that losing the rule shows.
clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (0.5 * g,))


@jax.custom_vjp
def clipped_otherwise(x):
    return jnp.clip(x, -1.0, 1.0)


clipped_otherwise.defvjp(lambda x: (clipped_otherwise(x), None), lambda _, g: (0.25 * g,))


def convnet(second_rule=clipped) -> Workload:
    def init(key):
        return normals(key, stem=(3, 3, 2, D), c1=(3, 3, D, D), c2=(3, 3, D, D), head=(D, 3))

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p, batch):
        h = mark(conv(batch["image"], p["stem"]))
        h = mark(h + clipped(conv(h, p["c1"])))
        h = mark(h + second_rule(conv(h, p["c2"])))
        return cross_entropy(h.mean((1, 2)) @ p["head"], batch["label"])

    def batch(key, n):
        return {"image": jax.random.normal(key, (n, 4, 4, 2)), "label": jnp.arange(n) % 3}

    return workload(loss, init, batch)


class Block(nn.Module):
    """A Transformer block; ``mark_inside`` puts the boundary inside whatever wraps the block."""

    dropout: float = 0.0
    mark_inside: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        mask = jnp.tril(jnp.ones((T, T), bool))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(h, mask=mask)
        h = nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x)))
        x = x + nn.Dropout(self.dropout, deterministic=self.dropout == 0)(nn.Dense(D)(h))
        return (mark(x), None) if self.mark_inside else (x, None)


class Transformer(nn.Module):
    num_blocks: int = 2
    dropout: float = 0.0
    remat: bool = False
    stacked: bool = False
    mark_inside: bool = False

    @nn.compact
    def __call__(self, tokens):
        emb = nn.Embed(V, D)
        x = emb(tokens) + self.param("pos", nn.initializers.normal(0.5), (T, D))
        block = nn.remat(Block) if self.remat else Block
        if self.stacked:
            split = {"params": True, "dropout": True}
            block = nn.scan(
                block, variable_axes={"params": 0}, split_rngs=split, length=self.num_blocks
            )
            x, _ = block(self.dropout, self.mark_inside)(x, None)
        else:
            for _ in range(self.num_blocks):
                x, _ = block(self.dropout, self.mark_inside)(x)
                x = x if self.mark_inside else mark(x)
        return emb.attend(nn.LayerNorm()(x))


def linen(**options) -> Workload:
    model = Transformer(**options)

    def init(key):
        return model.init(key, jnp.zeros((1, T), jnp.int32))["params"]

    def loss(p, batch):
        return cross_entropy(model.apply({"params": p}, batch["tokens"]), batch["labels"])

    def loss_with_key(p, batch, key):
        return cross_entropy(
            model.apply({"params": p}, batch["tokens"], rngs={"dropout": key}), batch["labels"]
        )

    return workload(loss_with_key if options.get("dropout") else loss, init, tokens_batch)


def nnx_mlp() -> Workload:
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])
            self.head = nnx.Linear(D, 3, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = mark(x + nnx.silu(layer(x)))
            return self.head(x)

    graphdef = nnx.split(nnx.eval_shape(lambda: Mlp(nnx.Rngs(0))))[0]

    def loss(p, batch):
        return cross_entropy(nnx.merge(graphdef, p)(batch[0]), batch[1])

    return workload(loss, lambda key: nnx.state(Mlp(nnx.Rngs(key))), vectors_batch)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "steps"], meta_fields=["scale"]
)
@dataclass
class Dense:
    """A module that is a pytree, as in Equinox; ``steps`` is an integer leaf among the
    parameters."""

    weight: jax.Array
    steps: jax.Array
    scale: float

    def __call__(self, x):
        return jnp.tanh(x @ self.weight * self.scale) + self.steps


def pytree_module() -> Workload:
    def init(key):
        return [
            Dense(jax.random.normal(k, (D, D)), jnp.int32(i), 0.5)
            for i, k in enumerate(jax.random.split(key, 3))
        ]

    def loss(model, batch):
        h = mark(model[0](batch[0]))
        h = mark(model[1](h))
        return cross_entropy(model[2](h)[:, :3], batch[1])

    return workload(loss, init, vectors_batch)


def scanned(num_layers=4, marked=True, dtype=jnp.float32, penalty=0.0) -> Workload:
    """``lax.scan`` over stacked layers, weights cast on the way, one leaf stacked along its last
    dimension, per-layer results collected."""

    def init(key):
        return {
            "layers": normals(key, w=(num_layers, D, D), b=(D, num_layers)),
            "head": jax.random.normal(key, (D, 3)),
        }

    def loss(p, batch):
        def body(x, w_b):
            w, b = w_b
            x = x + jnp.tanh(x @ w + b)
            x = mark(x) if marked else x
            return x, jnp.mean(x**2)

        w, b = p["layers"]["w"].astype(dtype), jnp.moveaxis(p["layers"]["b"].astype(dtype), -1, 0)
        x, norms = lax.scan(body, batch[0].astype(dtype), (w, b))
        decay = penalty * jnp.sum(p["layers"]["w"] ** 2) if penalty else 0.0
        return (
            cross_entropy(x.astype(jnp.float32) @ p["head"], batch[1])
            + 0.1 * norms.astype(jnp.float32).sum()
            + decay
        )

    return workload(loss, init, vectors_batch)


def repeated(num_blocks=6, marked=False, width=16) -> Workload:
    """Identical blocks of two matrix products."""

    def init(key):
        return [
            normals(k, up=(width, 4 * width), down=(4 * width, width))
            for k in jax.random.split(key, num_blocks)
        ]

    def loss(p, x):
        for block in p:
            x = x + jax.nn.relu(x @ block["up"]) @ block["down"]
            x = mark(x) if marked else x
        return jnp.mean(x**2)

    return workload(loss, init, lambda key, n: jax.random.normal(key, (n, width)))


def routed() -> Workload:
    """Integers, a key and a constant table cross boundaries; a mask is used by every layer; a remat
    region holds a mark."""
    table = np.linspace(0.0, 1.0, T * D, dtype=np.float32).reshape(T, D)

    def init(key):
        return normals(key, emb=(V, D), route=(D, 3), experts=(3, D, D), out=(D, V))

    def loss(p, batch, key):
        keep = (batch["tokens"] > 0)[..., None]
        h = (p["emb"][batch["tokens"]] + table) * keep
        choice = jnp.argmax(h @ p["route"], -1)
        key, noise_key = jax.random.split(key)
        h = mark(h)

        @jax.checkpoint
        def two(h, experts):
            h = mark(jnp.tanh(jnp.einsum("btd,btde->bte", h, experts[choice])))
            return jnp.sin(h @ experts[0]) * keep

        h = two(h, p["experts"]) + 0.1 * jax.random.normal(noise_key, h.shape)
        h = mark(h * (choice[..., None] + 1)) * jax.random.bernoulli(key, 0.9, h.shape)
        return cross_entropy((h * table) @ p["out"], batch["labels"])

    return workload(loss, init, tokens_batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled_noise(x, key, scale):
    return x + scale * jax.random.normal(key, x.shape)


scaled_noise.defvjp(
    lambda x, key, scale: (scaled_noise(x, key, scale), None), lambda scale, _, g: (g, None)
)


def control() -> Workload:
    """Scans in a scan and in reverse, marks in pairs and at both ends, branches, loops, jit in jit,
    effects, a rule with a key."""

    def init(key):
        return {
            **normals(key, groups=(2, 2, D, D), back=(1, D, D), w=(D, D), head=(D, 3)),
            "gain": jnp.float32(1.0),
        }

    @jax.jit
    def inner(x, w):
        return jax.jit(lambda x: mark(jnp.tanh(x @ w)))(x) * 2

    def loss(p, batch, key):
        x, labels = mark(batch)  # nothing before it: no cut

        def group(x, ws):
            return lax.scan(lambda x, w: (mark(x + jnp.sin(x @ w)), None), x, ws)[0], x.mean()

        x, means = lax.scan(group, x, p["groups"])
        x, _ = lax.scan(
            lambda x, w: (lax.cond(x.mean() > 0, jnp.sin, jnp.cos, x @ w), None),
            x,
            p["back"],
            reverse=True,
        )
        x, means = mark((x, means))  # one boundary
        x = lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x), x)
        jax.debug.callback(lambda _: None, x.mean())
        x = scaled_noise(inner(x, p["w"]), key, 0.1) * p["gain"]
        return mark(cross_entropy(x @ p["head"], labels) + means.sum())

    return workload(loss, init, vectors_batch)
