"""Stages that keep activations or optimizer state on their hosts, executed: the same numbers, and in
both memories what is booked."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from pipeline_models import mlp, pipeline

from capture.plan.stages import Plan
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import PipelinedStep, pipeshard

BOTH = ("activations", "optimizer")
SIZES = {"num_microbatches": 8, "global_batch_size": 64}
FOUR, TWO = ((1, 1),) * 4, ((1, 1),) * 2

PLANS = {
    "gpipe": lambda: pipeline((2, 2), ((2, 1), (1, 2)), schedule="gpipe", **SIZES),
    "1f1b": lambda: pipeline((1, 1, 1, 1), FOUR, **SIZES),
    "interleaved": lambda: pipeline((1, 1, 1, 1), TWO, schedule="interleaved", **SIZES),
    "zb-h1": lambda: pipeline((1, 1, 1, 1), FOUR, schedule="zb-h1", **SIZES),
}


def offloading(plan: Plan, *ways: str) -> Plan:
    return plan.with_(stages=[replace(stage, offload=ways) for stage in plan.stages])


def trained(step: PipelinedStep, workload) -> tuple[list[float], list[np.ndarray], int]:
    """Losses of two updates, each checked before every instruction, the parameters behind them, and
    the most that a host held."""
    state, losses, ledger = step.init(jax.random.key(0)), [], step.replay()
    for n in range(2):
        batch = workload.batch(jax.random.key(1 + n), step.plan.global_batch_size)
        measured = measure_step(step, state, batch, strict=True)
        assert measured.live_peak_bytes_per_device == ledger.peak_bytes_per_device
        assert measured.host_peak_bytes == ledger.peak_of("host").peak_bytes
        state, losses = measured.state, [*losses, measured.loss]
    loss = step.evaluate(state, workload.batch(jax.random.key(9), 64)).loss
    leaves = [*jax.tree.leaves(step.params(state)), *jax.tree.leaves(step.optimizer_state(state))]
    return [*losses, loss], leaves, measured.host_peak_bytes


@pytest.mark.parametrize(
    "name",
    [
        "gpipe",
        pytest.param("1f1b", marks=pytest.mark.exhaustive),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("interleaved", "zb-h1")),
    ],
)
def test_the_same_is_computed_with_less_on_devices(name):
    workload, plan = mlp(optax.adam(1e-2)), PLANS[name]()
    alone, step = (pipeshard(workload, of) for of in (plan, offloading(plan, *BOTH)))
    (losses, leaves, nothing), (same, found, on_host) = (
        trained(of, workload) for of in (alone, step)
    )
    assert losses == same and all(map(np.array_equal, leaves, found))
    assert nothing == 0 < on_host
    before, now = (of.replay().peak_bytes_per_device for of in (alone, step))
    assert all(a < b for a, b in zip(now, before, strict=True))
    # The gradients alone, where a step is left in its middle.
    batch, params = workload.batch(jax.random.key(1), 64), workload.init(jax.random.key(0))
    pairs = (jax.tree.leaves(of.first_gradients(params, batch)) for of in (alone, step))
    assert all(map(np.array_equal, *pairs))


def test_a_step_that_runs_ahead_waits_for_its_copies():
    """Without a meter, so that nothing else makes it wait."""
    workload, plan = mlp(optax.adam(1e-2)), PLANS["gpipe"]()
    losses = []
    for of in (plan, offloading(plan, *BOTH)):
        step = pipeshard(workload, of)
        state = step.init(jax.random.key(0))
        for bound in (True, False):
            step.bound_run_ahead = bound
            state, metrics = step(state, workload.batch(jax.random.key(1), 64))
            losses.append(metrics.loss)
    assert losses[:2] == losses[2:]
