"""A sweep over what an optimizer does not take says which line of the user's file to change."""

from __future__ import annotations

import re

import pytest

from capture.model.workload import WorkloadSpec
from capture.plan.array import Member
from capture.runtime.layerwise import LayerwiseOptimizer, hyperparameter_violations
from capture.tracing import trace

MODEL = """import jax.numpy as jnp
import optax
from capture import Workload

def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)

def model():
    def init(key):
        return {"w": jnp.ones((4, 4))}
    optimizer = OPTIMIZER
    return Workload(loss_fn, init, lambda key, size: jnp.ones((size, 4)), optimizer)
"""


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """What is said of a sweep over learning rates with an optimizer, written in a file."""
    monkeypatch.chdir(tmp_path)

    def ask(optimizer: str, file: str) -> list[str]:
        (tmp_path / file).write_text(MODEL.replace("OPTIMIZER", optimizer))
        workload = WorkloadSpec(file, "model").load()
        known = LayerwiseOptimizer(workload, trace(workload, 2, 1))
        members = [Member(0, {"learning_rate": rate}) for rate in (0.1, 0.2)]
        return [violation.message for violation in hyperparameter_violations(known, members)]

    return ask


@pytest.mark.parametrize(
    "optimizer",
    [
        "optax.adam(1e-3)",
        "optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(learning_rate=0.1, momentum=0.9))",
    ],
)
def test_the_line_to_change_is_named_and_works(refused, optimizer):
    [said] = refused(optimizer, "before.py")
    found = re.search(r"nothing; write (.*) in line 11 of before.py\.$", said)
    assert found, said
    old = found[1].replace("optax.inject_hyperparams(", "").replace(")", "", 1)
    assert old in optimizer
    assert refused(optimizer.replace(old, found[1]), "after.py") == []


def test_without_one_such_line_an_example_is_given(refused):
    several = "optax.adam(1e-3) if True else optax.sgd(1e-3)"
    for file, optimizer in (("none.py", "optax.identity()"), ("two.py", several)):
        [said] = refused(optimizer, file)
        assert "make it with optax.inject_hyperparams(optax.adam)(learning_rate=...)" in said


def test_a_rate_that_a_schedule_overwrites_is_refused(refused):
    schedule = "optax.linear_schedule(1.0, 0.0, 10)"
    [said] = refused(f"optax.inject_hyperparams(optax.sgd)({schedule})", "scheduled.py")
    assert "computes from a schedule at every update" in said
    assert refused("optax.inject_hyperparams(optax.sgd)(0.1)", "number.py") == []
