"""Raises where it is told to."""

from types import SimpleNamespace

import jax.numpy as jnp


def refuse():
    raise ValueError(
        "size='xl' is no size; give small. [broken-size]\ndepth=0 is none; give 1. [broken-depth]"
    )


def model(broken="lookup"):
    if broken == "codes":
        refuse()
    if broken == "constructor":
        return {}["x"]

    def init(key):
        return jnp.ones(3) @ jnp.ones(4) if broken == "init" else jnp.ones((4, 4))

    def batch(key, n):
        return open("no data") if broken == "batch" else jnp.ones((n, 4))

    def loss_fn(params, batch):
        return (batch @ params).sum() + [][1]

    return SimpleNamespace(
        init=init, batch=batch, loss_fn=loss_fn, optimizer=SimpleNamespace(init=0, update=0)
    )
