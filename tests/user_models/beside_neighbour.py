"""Workloads, and what is none, in a file that imports one beside it."""

from types import SimpleNamespace

from neighbour import SCALE


def model(size="tiny", depth=2):
    optimizer = SimpleNamespace(init=None, update=None)
    return SimpleNamespace(
        loss_fn=lambda p, b: 0,
        init=None,
        batch=None,
        optimizer=optimizer,
        size=size,
        depth=depth,
        scale=SCALE,
    )


def broken():
    return SimpleNamespace(loss_fn=None, optimizer=None)


def no_optimizer():
    return SimpleNamespace(loss_fn=None, init=None, batch=None, optimizer="adam")


def _private():
    pass
