"""A layer without parameters, a pooling between convolutions, as a stage of its own: it has the
optimizer state that is of no parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.model.workload import Workload
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.profiler.compile import CompileBackend
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.pipeline import pipeshard
from capture.runtime.reference import ReferenceStep, max_relative_error
from profiling_runs.evaluate import EvaluationQuestion, evaluate
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion

#: A state leaf of each follows from the gradients of all parameters.
OPTIMIZERS = {
    "prodigy": lambda: optax.contrib.prodigy(),
    "dowg": lambda: optax.contrib.dowg(),
}


def pooled(optimizer: str) -> Workload:
    """Convolution, pooling, two products."""

    def mark(x):
        return checkpoint_name(x, "layer_boundary")

    def loss(params, batch):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=dims
        )
        x = mark(jax.nn.relu(x))
        window = (1, 2, 2, 1)
        x = mark(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID"))
        x = mark(jnp.tanh(x.reshape(len(x), -1) @ params["up"]))
        return jnp.mean((x @ params["down"] - batch["y"]) ** 2)

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"conv": (3, 3, 2, 4), "up": (16, 8), "down": (8, 1)}
        return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}

    def batch(key, size):
        return {"x": jax.random.normal(key, (size, 4, 4, 2)), "y": jnp.ones((size, 1))}

    return Workload(loss, init, batch, OPTIMIZERS[optimizer]())


@pytest.mark.parametrize(
    "optimizer", ["prodigy", pytest.param("dowg", marks=pytest.mark.exhaustive)]
)
def test_a_pooling_is_a_stage_of_its_own_with_any_optimizer(optimizer):
    workload = pooled(optimizer)
    stages = (Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 4, (2,)))
    step = pipeshard(workload, Plan(Cluster((3,)), 4, stages, 8, 2, "1f1b"), fast_compile=True)
    assert not step.stages[1].params
    batch, key = workload.batch(jax.random.key(1), 8), jax.random.key(2)
    state = step.init(jax.random.key(0))
    reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
    expected, optimizer_state = reference.init(step.params(state))
    for _ in range(2):
        loss, _ = reference.loss_and_gradients(expected, batch, key)
        meter = LiveArrayMeter.of(step, strict=True)
        state, metrics = step(state, batch, key, observer=meter)
        assert metrics.loss == pytest.approx(float(loss), rel=1e-5)
        del metrics
        meter.finish()
        expected, optimizer_state, _ = reference(expected, optimizer_state, batch, key)
    assert max_relative_error(step.params(state), expected, 1e-3) < 1e-4


@pytest.mark.slow
def test_a_pooling_compiles_alone_in_every_remat():
    backend = CompileBackend(pooled("prodigy"))
    for remat in ("none", "dots", "cheap", "full"):
        alone = backend.measure(StageConfig(1, 2, StageChoice(remat=remat), 4))
        assert alone.optimizer_bytes > 0


def test_a_stage_of_all_parameters_sums_up_for_one_without():
    workload = pooled("prodigy")

    def loss(params, batch):
        return jnp.mean(checkpoint_name(workload.loss_fn(params, batch), "layer_boundary"))

    backend = CompileBackend(Workload(loss, workload.init, workload.batch, workload.optimizer))
    num_layers = backend.traced(4).graph.num_layers
    whole, but_last = (
        StageConfig(0, stop, StageChoice(), 4) for stop in (num_layers, num_layers - 1)
    )
    assert num_layers == 5 and len(backend.programs(but_last).owned) == 3
    assert backend.measure_update(whole).summary_bytes == 0
    assert backend.measure_update(but_last).summary_bytes > 0
    assert backend.update_key(whole) != backend.update_key(but_last)


def test_keys_of_a_stage_without_parameters_know_the_optimizer():
    """Its count, learning rate and so on are part of every stage's state."""
    config = StageConfig(1, 2, StageChoice(), 4)
    counting, other = (CompileBackend(pooled(name)) for name in OPTIMIZERS)
    assert not counting.programs(config).owned
    assert counting.update_key(config) != other.update_key(config)
    assert counting.key(config) != other.key(config)


@pytest.mark.slow
def test_predictions_of_it_are_evaluated():
    one = (StageChoice(),)
    profile = ProfileQuestion(pooled("prodigy"), Cluster((3,)), 4, choices=one, calibration_plans=0)
    question = EvaluationQuestion(profile, 2, ("1f1b",), num_plans=3, paper=False)
    found = evaluate(question, open_measurements(profile))
    assert not found.num_failed_stages and not found.profile.failures
    errors = [outcome.error for outcome in found.default]
    assert errors and np.abs(errors).max() < 0.05
