"""A parameter that holds integers, such as a permutation, has a gradient of zeros in every system:
each trains as one device does, and the integers stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import WIDTH, mark, pipeline
from sharded_models import WORKLOADS, sharded_by
from test_pipeline import compare

from capture.model.workload import Workload
from capture.plan.sharding import ZDP
from capture.runtime.fused import Fuser
from capture.runtime.gradients import loss_and_gradients
from capture.runtime.reference import rounded


def permuted() -> Workload:
    """Two layers; the second begins with a permutation of the features, a parameter."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        up, down = (jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in (a, b))
        return {"up": up, "order": jax.random.permutation(c, WIDTH), "down": down}

    def loss(params, x):
        x = mark(jnp.tanh(x @ params["up"]))
        return jnp.mean((x[:, params["order"]] @ params["down"] - 1) ** 2)

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, WIDTH)), optax.adam(0.01))


WORKLOADS["permuted"] = permuted


def test_stages_train_as_one_device():
    step = compare(permuted(), pipeline((1, 1), ((2, 1), (1, 1))))
    state = step.init(jax.random.key(0))
    begun = np.asarray(step.params(state)["order"])
    state, _ = step(state, permuted().batch(jax.random.key(1), step.plan.global_batch_size))
    np.testing.assert_array_equal(step.params(state)["order"], begun)


def test_sharded_parameters_train_as_one_device():
    workload = permuted()
    sharded = sharded_by("permuted", ZDP)
    params, state = sharded.init(jax.random.key(0))
    expected = workload.init(jax.random.key(0))
    expected_state = workload.optimizer.init(expected)
    for n in range(2):  # the state of the integers keeps its type
        batch = workload.batch(jax.random.key(n), 8)
        batch = jax.device_put(batch, sharded.batch_sharding)
        wanted, gradients = loss_and_gradients(workload.loss_fn)(expected, batch)
        updates, expected_state = workload.optimizer.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state, loss = sharded.step(params, state, batch)
        assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_array_equal(sharded.join(params)["order"], expected["order"])


def test_arrays_update_no_integers():
    fused = Fuser(permuted(), 4).of(2)
    assert fused.program.avals[fused.params[1]].dtype == jnp.int32


def test_rounded_gradients_leave_integers():
    gradients = {"order": jnp.zeros(3, jnp.int32), "up": jnp.ones(3)}
    off = rounded(gradients, 1)
    assert off["order"] is gradients["order"]
    assert (off["up"] != 1).all()
