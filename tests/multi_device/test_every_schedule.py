"""Every schedule with every remat, with and without sequence parallelism: the step of one device,
and the ledger is what is live before every instruction."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import optax
import pytest
from pipeline_models import mark, pipeline
from test_pipeline import compare

from capture.model.workload import Workload
from capture.plan.choices import REMAT_POLICIES
from capture.plan.schedule import SCHEDULES
from capture.runtime.meter import measure_step

WIDTH, LENGTH, NUM_LAYERS = 16, 4, 4

REMATS = REMAT_POLICIES

#: Of a schedule that no other test executes.
SAMPLE = ("zb-h1", "cheap", True)
#: Schedules of which other tests, or the sample, execute steps in the default command.
EXECUTED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
#: Of two layers per stage, one of each kind: with split backward passes and activations; without.
MIXTURES = [("zb-h1", "full:1", True), ("gpipe", "full:1", False)]


def gated() -> Workload:
    """Blocks that normalise, gate and project the vectors of a sequence, one layer each."""

    def init(key):
        shapes = {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        return [
            {"scale": jnp.ones(WIDTH)}
            | {
                name: jax.random.normal(jax.random.fold_in(key, 3 * i + j), shape) / 5
                for j, (name, shape) in enumerate(shapes.items())
            }
            for i in range(NUM_LAYERS)
        ]

    def loss(params, x):
        for i, p in enumerate(params):
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
            x = x + (jax.nn.gelu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
            x = mark(x) if i + 1 < NUM_LAYERS else x
        return jnp.mean(jnp.tanh(x) ** 2)

    return Workload(
        loss, init, lambda key, n: jax.random.normal(key, (n, LENGTH, WIDTH)), optax.adam(0.01)
    )


def _marks(case: tuple[str, str, bool]):
    """One in default tests; of every schedule that these do not execute one is slow, with a remat
    each, and the mixture with split backward passes."""
    if case == SAMPLE:
        return ()
    if case in MIXTURES:
        return pytest.mark.slow if case == MIXTURES[0] else pytest.mark.exhaustive
    schedule, remat, sequence_parallel = case
    number = list(SCHEDULES).index(schedule)
    chosen = (REMATS[number % len(REMATS)], number // 2 % 2 == 1)
    is_slow = schedule not in EXECUTED and chosen == (remat, sequence_parallel)
    return pytest.mark.slow if is_slow else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("schedule", "remat", "sequence_parallel"),
    [
        pytest.param(*case, marks=_marks(case))
        for case in [*product(SCHEDULES, REMATS, (False, True)), *MIXTURES]
    ],
)
def test_a_step_is_that_of_one_device_and_its_ledger(schedule, remat, sequence_parallel):
    """On eight devices: two groups of two replicas on two devices each."""
    per_group = SCHEDULES[schedule].stages_per_group
    count = NUM_LAYERS // (2 * per_group)
    plan = pipeline((count,) * (2 * per_group), ((2, 2),) * 2, schedule=schedule, remat=remat)
    plan = plan.with_(
        stages=tuple(
            replace(stage, choice=replace(stage.choice, sequence_parallel=sequence_parallel))
            for stage in plan.stages
        )
    )
    workload = gated()
    step = compare(workload, plan, num_steps=1)
    split = any(v is not None for stage in step.stages for v in stage._split_runs)
    assert split == sequence_parallel
    state = step.init(jax.random.key(0))
    batch = workload.batch(jax.random.key(1), plan.global_batch_size)
    measured = measure_step(step, state, batch, jax.random.key(2), strict=True)
    assert measured.peak_bytes_per_device == step.replay().peak_bytes_per_device
    assert measured.num_checks > len(step.program.instructions)
