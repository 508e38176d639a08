"""Small models of all kinds of operators, sharded over the devices of a test."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from capture.model.workload import Workload, WorkloadSpec
from capture.plan.sharding import Mode, ShardingPlan
from capture.runtime.sharded import Sharded
from capture.tracing.operators import TracedOperators, traced_operators

ROWS, WIDTH, HIDDEN = 40, 24, 56


def mlp(scan: bool = False) -> Workload:
    """A table, products of uneven sizes, one of them with its weights transposed, biases that eight
    devices do not divide, a tied head."""

    def init(key):
        keys = iter(jax.random.split(key, 8))
        params = {
            "table": jax.random.normal(next(keys), (ROWS, WIDTH)),
            "up": {
                "w": jax.random.normal(next(keys), (HIDDEN, WIDTH)),
                "b": jax.random.normal(next(keys), (HIDDEN,)),
            },
            "down": {
                "w": jax.random.normal(next(keys), (HIDDEN, 7, 8)),
                "b": jax.random.normal(next(keys), (7,)),
            },
            "out": jax.random.normal(next(keys), (7, 8, WIDTH)),
        }
        return (
            {**params, "layers": jax.random.normal(next(keys), (3, WIDTH, WIDTH))}
            if scan
            else params
        )

    def loss(p, batch):
        x = p["table"][batch["tokens"]]
        x = jnp.tanh(x @ p["up"]["w"].T + p["up"]["b"])
        x = jnp.tanh(jnp.einsum("btd,dhk->bthk", x, p["down"]["w"]) + p["down"]["b"][:, None])
        x = jnp.einsum("bthk,hkd->btd", x, p["out"]) / 8
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
        scores = x @ p["table"].T / 8
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
        return (
            jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]))
            + 1e-4 * penalty
        )

    def batch(key, n):
        return {
            name: jax.random.randint(k, (n, 5), 0, ROWS)
            for name, k in zip(("tokens", "labels"), jax.random.split(key), strict=True)
        }

    return Workload(loss, init, batch, optax.adamw(1e-2))


def convolutions() -> Workload:
    """Two convolutions, the second in two groups, and a head, the activations between them
    rematerialised by the model."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(a, (3, 3, 3, 16)),
            "second": jax.random.normal(b, (3, 3, 8, 16)),
            "head": jax.random.normal(c, (16, 10)),
        }

    def loss(p, batch):
        def convolved(x, kernel, groups):
            return jax.lax.conv_general_dilated(
                x,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        @jax.checkpoint
        def both(p, x):
            return jnp.tanh(convolved(jnp.tanh(convolved(x, p["first"], 1)), p["second"], 2))

        return jnp.mean((both(p, batch["x"]).mean((1, 2)) @ p["head"]) ** 2)

    return Workload(
        loss, init, lambda key, n: {"x": jax.random.normal(key, (n, 6, 6, 3))}, optax.sgd(1e-2)
    )


WORKLOADS = {
    "mlp": mlp,
    "scan": lambda: mlp(scan=True),
    "convolutions": convolutions,
    "gpt": lambda: WorkloadSpec.parse(
        "models/gpt.py:gpt?size=tiny&num_layers=1&dtype=bfloat16"
    ).load(),
    "moe": lambda: WorkloadSpec.parse("models/moe.py:moe?size=tiny&num_layers=2").load(),
}


@cache
def operators_of(name: str) -> tuple[Workload, TracedOperators]:
    workload = WORKLOADS[name]()
    return workload, traced_operators(workload, name)


def sharded_by(
    name: str, *modes: Mode, mesh: Mesh | None = None, smallest_bytes: int = 0, **options: bool
) -> Sharded:
    """A workload with its operators in these modes in turn."""
    workload, operators = operators_of(name)
    names = [operator.name for operator in operators.model.blocks[0].operators]
    chosen = tuple(modes[i % len(modes)] for i in range(len(names)))
    plan = ShardingPlan(
        2,
        chosen,
        1.0,
        1,
        1.0,
        tuple(names),
        operators.names,
        smallest_bytes=smallest_bytes,
        **options,
    )
    return Sharded(workload, plan, mesh or all_devices(), operators.traced)


def all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


def two_nodes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "data"))


# ---- collectives ---------------------------------------------------------------------------------


def chain() -> Workload:
    """Three products with square weights, and nothing else to communicate but the loss."""

    def loss(p, batch):
        x = batch["x"]
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    return Workload(
        loss,
        lambda key: [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 3)],
        lambda key, n: {"x": jax.random.normal(key, (n, 64))},
        optax.sgd(1e-2),
    )


WORKLOADS["chain"] = chain
