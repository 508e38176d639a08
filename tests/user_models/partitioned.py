"""Layers of an operation with a split rule of its own."""

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning

from capture.model.workload import Workload


def scaled(x):
    return x if "fast" in {"slow", "fast", "exact", "other"} else 1.0 * x


def partition(mesh, arguments, result):
    return mesh, scaled, result.sharding, (arguments[0].sharding,)


operation = custom_partitioning(lambda x: x * 1.0)
operation.def_partition(partition, sharding_rule="b k -> b k", need_replication_factors=("k",))


@jax.custom_vjp
def op(x):
    return operation(x)


op.defvjp(lambda x: (operation(x), None), lambda _, g: (operation(g),))


def model():
    def loss(w, x):
        for i in range(3):
            x = op(checkpoint_name(x, "layer_boundary") if i else x) @ w[i]
        return (x**2).mean()

    init, batch = lambda key: jnp.ones((3, 8, 8)), lambda key, n: jnp.ones((n, 8))
    return Workload(loss, init, batch, optax.sgd(0.1))
