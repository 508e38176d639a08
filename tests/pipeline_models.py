"""Tiny models and plans for the runtime's tests: compiling takes nearly all of their time, so they
are as small as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from capture.machine.cluster import Cluster
from capture.model.workload import Workload
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.stage import Stage
from capture.plan.stages import Plan

WIDTH, VOCAB, LENGTH = 16, 32, 4


def mark(x):
    return checkpoint_name(x, "layer_boundary")


def _normals(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def mlp(optimizer=None, num_blocks: int = 4) -> Workload:
    """Residual blocks of two products, one layer each; the cheapest model that tensor parallelism
    splits."""

    def init(key):
        blocks = [
            _normals(k, {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)})
            for k in jax.random.split(key, num_blocks)
        ]
        return [block | {"bias": jnp.zeros(4 * WIDTH)} for block in blocks]

    def loss(params, x):
        for i, block in enumerate(params):
            x = x + jax.nn.relu(x @ block["up"] + block["bias"]) @ block["down"]
            x = mark(x) if i + 1 < num_blocks else x
        return jnp.mean(jnp.tanh(x) ** 2)

    return Workload(
        loss, init, lambda key, n: jax.random.normal(key, (n, WIDTH)), optimizer or optax.sgd(0.1)
    )


def bare(optimizer=None) -> Workload:
    """Four layers, of which one has parameters: sorting, a product, an activation, the loss
    alone."""

    def loss(params, batch):
        x = mark(mark(jnp.sort(batch)) @ params["w"])
        return jnp.mean(mark(jnp.tanh(x)) ** 2)

    init = partial(_normals, shapes={"w": (2 * WIDTH, 2 * WIDTH)})
    return Workload(
        loss,
        init,
        lambda key, n: jax.random.normal(key, (n, 2 * WIDTH)),
        optimizer or optax.sgd(0.1),
    )


def tied(optimizer=None, dropout: bool = True) -> Workload:
    """A tied embedding at both ends, a skip from the first layer to the last, dropout, and a
    parameter that the loss does not read."""

    def init(key):
        return _normals(
            key,
            {
                "embedding": (VOCAB, WIDTH),
                "a": (WIDTH, WIDTH),
                "b": (WIDTH, WIDTH),
                "c": (2 * WIDTH, WIDTH),
                "unread": (3,),
            },
        )

    def loss_with_key(params, batch, key):
        first = mark(jnp.tanh(params["embedding"][batch["tokens"]]))
        x = mark(jnp.tanh(first @ params["a"]))
        if dropout:
            x = x * jax.random.bernoulli(key, 0.8, x.shape)
        x = mark(x + jnp.sin(x @ params["b"]))
        x = jnp.tanh(jnp.concatenate([x, first], -1) @ params["c"])
        logits = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(logits, batch["labels"][..., None], -1))

    def loss_without_key(params, batch):
        return loss_with_key(params, batch, None)

    def batch(key, n):
        tokens, labels = (
            jax.random.randint(k, (n, LENGTH), 0, VOCAB) for k in jax.random.split(key)
        )
        return {"tokens": tokens, "labels": labels}

    return Workload(
        loss_with_key if dropout else loss_without_key, init, batch, optimizer or optax.sgd(0.1)
    )


def taught(stops: str = "output", num_blocks: int = 3) -> Workload:
    """A student beside a teacher that does not learn: no gradient flows through the teacher's
    parameters, its ``output``, or the class that it would choose (``choice``)."""
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}

    def init(key):
        keys = jax.random.split(key, 2 * num_blocks)
        blocks = [_normals(k, shapes) for k in keys]
        return {"student": blocks[:num_blocks], "teacher": blocks[num_blocks:]}

    def block(params, x):
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    def loss(params, x):
        teacher = params["teacher"]
        teacher = jax.lax.stop_gradient(teacher) if stops == "parameters" else teacher
        seen = x
        for i, (own, other) in enumerate(zip(params["student"], teacher, strict=True)):
            x, seen = block(own, x), block(other, seen)
            x = mark(x) if i + 1 < num_blocks else x
        if stops == "choice":
            return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(len(x)), jnp.argmax(seen, axis=-1)])
        return jnp.mean((x - (jax.lax.stop_gradient(seen) if stops == "output" else seen)) ** 2)

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, WIDTH)), optax.sgd(0.1))


def pipeline(
    layers: Sequence[int],
    degrees: Sequence[tuple[int, int]],
    *,
    schedule: str = "1f1b",
    remat: str = "none",
    shard_optimizer: bool = False,
    shard_params: bool = False,
    global_batch_size: int = 8,
    num_microbatches: int = 4,
) -> Plan:
    """A plan by the number of layers of its stages and the (data, tensor) parallel degrees of its
    groups of devices."""
    stages, first, device = [], 0, 0
    first_device = [sum(a * b for a, b in degrees[:g]) for g in range(len(degrees))]
    placement = SCHEDULES[schedule].placement(len(degrees))
    for count, group in zip(layers, placement, strict=True):
        data, tensor = degrees[group]
        device = first_device[group]
        devices = tuple(range(device, device + data * tensor))
        shared = (shard_optimizer and data > 1, shard_params and data > 1)
        stages.append(
            Stage(first, first + count, devices, StageChoice(data, tensor, remat, *shared))
        )
        first += count
    num_devices = sum(data * tensor for data, tensor in degrees)
    return Plan(
        Cluster((num_devices,)), first, tuple(stages), global_batch_size, num_microbatches, schedule
    )
