"""Batches of several shapes in one training: the same as a plan of its own for each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import LENGTH, VOCAB, mark, mlp, pipeline, tied

from capture.errors import ExecutionError
from capture.model.workload import Workload
from capture.runtime.batch_shapes import BatchShapes
from capture.runtime.pipeline import pipeshard

PLAN = pipeline((2, 2), ((1, 1), (2, 1)), num_microbatches=2)


def tokens(num_examples: int, length: int):
    found = np.random.default_rng(length).integers(0, VOCAB, (2, num_examples, length), np.int32)
    return {"tokens": found[0], "labels": found[1]}


def of_length(length: int, num_examples: int) -> Workload:
    workload = tied(optax.adam(1e-2))
    return Workload(
        workload.loss_fn,
        workload.init,
        lambda key, n: jax.tree.map(lambda leaf: leaf[:n], tokens(num_examples, length)),
        workload.optimizer,
    )


@pytest.mark.slow
def test_a_training_of_several_shapes_is_that_of_a_plan_for_each():
    """Three shapes, one of them longer, one with fewer examples, that of the plan in between."""
    shapes = [(8, LENGTH), (8, LENGTH + 2), (4, LENGTH), (8, LENGTH)]
    train = BatchShapes(tied(optax.adam(1e-2)), PLAN, max_shapes=2)
    state = train.init(jax.random.key(0))
    alone = pipeshard(tied(optax.adam(1e-2)), PLAN)
    params, optimizer = alone.params(state), alone.optimizer_state(state)
    for i, (num_examples, length) in enumerate(shapes):
        key, batch = jax.random.key(i), tokens(num_examples, length)
        state, metrics = train(state, batch, key)
        step = pipeshard(
            of_length(length, num_examples), PLAN.with_(global_batch_size=num_examples)
        )
        own, expected = step(step.restore(params, optimizer), batch, key)
        params, optimizer = step.params(own), step.optimizer_state(own)
        assert metrics.loss == expected.loss
    for leaf, same in zip(
        jax.tree.leaves(train.planned.params(state)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(leaf, same)
    peaks = train.peak_bytes_per_device()
    assert len(peaks) == 3
    lengths = {shapes[0]: bytes_ for shapes, bytes_ in peaks.items()}
    assert lengths[8, LENGTH + 2] > lengths[8, LENGTH] > lengths[4, LENGTH]


def test_the_step_that_was_used_longest_ago_makes_room():
    train = BatchShapes(mlp(), PLAN, max_shapes=1)
    batches = {n: np.zeros((n, 16), np.float32) for n in (4, 8, 12)}
    four = train.step_of(batches[4])
    assert train.step_of(batches[4]) is four and train.step_of(batches[8]) is train.planned
    train.step_of(batches[12])
    assert train.step_of(batches[8]) is train.planned and train.step_of(batches[4]) is not four


def refused(train: BatchShapes, batch, code: str, words: str):
    with pytest.raises(ExecutionError, match=words) as raised:
        train.step_of(batch)
    assert {violation.code for violation in raised.value.violations} == {code}


def test_what_is_no_other_shape_is_refused():
    train = BatchShapes(tied(), PLAN, max_shapes=1)
    refused(train, [np.zeros((8, LENGTH), np.int32)], "run-batch", "only the sizes")
    flat = jax.tree.map(np.ravel, tokens(8, LENGTH))
    refused(train, flat, "run-batch", "only the sizes")
    refused(train, tokens(5, LENGTH), "run-batch", "multiple of 2")
    uneven = tokens(8, LENGTH) | {"labels": np.zeros((4, LENGTH), np.int32)}
    refused(train, uneven, "run-batch", "of each")
    with pytest.raises(ExecutionError, match="max_shapes=0"):
        BatchShapes(tied(), PLAN, max_shapes=0)


def test_a_loss_that_is_another_program_for_a_shape_is_refused():
    """Its short sequences read the second stage's parameter in the first."""

    def loss(params, x):
        early = x.shape[1] < 4
        x = jnp.tanh(x.sum(1) @ params[0] @ (params[1] if early else jnp.eye(8)))
        return jnp.mean(mark(x) ** 2 if early else (mark(x) @ params[1]) ** 2)

    workload = Workload(
        loss,
        lambda key: list(jax.random.normal(key, (2, 8, 8))),
        lambda key, n: jax.random.normal(key, (n, 4, 8)),
        optax.sgd(0.1),
    )
    train = BatchShapes(workload, pipeline((1, 1), ((1, 1), (1, 1))), max_shapes=1)
    refused(train, np.zeros((8, 2, 8), np.float32), "run-shape-layers", "8x2x8")
