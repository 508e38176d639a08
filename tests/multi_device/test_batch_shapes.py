"""Batches of several shapes in one training: a step for each, on one state."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from pipeline_models import LENGTH, VOCAB, pipeline, tied

from capture.model.workload import Workload
from capture.runtime.pipeline import pipeshard

PLAN = pipeline((2, 2), ((1, 1), (2, 1)), num_microbatches=2)


def tokens(num_examples: int, length: int):
    found = np.random.default_rng(length).integers(0, VOCAB, (2, num_examples, length), np.int32)
    return {"tokens": found[0], "labels": found[1]}


def step_of(num_examples: int, length: int):
    workload = tied(optax.adam(1e-2))
    task = Workload(
        workload.loss_fn,
        workload.init,
        lambda key, n: jax.tree.map(lambda leaf: leaf[:n], tokens(num_examples, length)),
        workload.optimizer,
    )
    return pipeshard(task, PLAN.with_(global_batch_size=num_examples, model_hash=None))


@pytest.mark.slow
def test_steps_of_several_shapes_share_a_state():
    """Three shapes, one of them longer, one with fewer examples, that of the plan in between."""
    shapes = [(8, LENGTH), (8, LENGTH + 2), (4, LENGTH), (8, LENGTH)]
    steps = {shape: step_of(*shape) for shape in dict.fromkeys(shapes)}
    planned = steps[8, LENGTH]
    state = planned.init(jax.random.key(0))
    params, optimizer = planned.params(state), planned.optimizer_state(state)
    for i, shape in enumerate(shapes):
        key, batch = jax.random.key(i), tokens(*shape)
        state, metrics = steps[shape](state, batch, key)
        own, expected = steps[shape](steps[shape].restore(params, optimizer), batch, key)
        params, optimizer = steps[shape].params(own), steps[shape].optimizer_state(own)
        assert metrics.loss == expected.loss
    for leaf, same in zip(
        jax.tree.leaves(planned.params(state)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(leaf, same)
