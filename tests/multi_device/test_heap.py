"""A step adds no more to malloc's bytes than its booked bytes and the four parts beside them; without
the scratch of kernels it does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import mark, pipeline

from capture.model.workload import Workload
from capture.runtime.heap import OBJECT_BYTES, measure_heap
from capture.runtime.pipeline import pipeshard

#: From 24 on YNNPACK takes convolutions, and makes no patches.
CHANNELS = 16


def convolutional() -> Workload:
    """Two convolutions, whose patches are nine times their images."""

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return Workload(
        lambda params, x: jnp.mean(convolved(mark(convolved(x, params[0])), params[1])),
        lambda key: list(jax.random.normal(key, (2, 3, 3, CHANNELS, CHANNELS))),
        lambda key, n: jax.random.normal(key, (n, 32, 32, CHANNELS)),
        optax.sgd(0.1),
    )


def test_a_step_takes_no_more_than_its_parts_and_not_less_than_them_without_scratch():
    plan = pipeline((2,), ((1, 1),), global_batch_size=32, num_microbatches=4)
    step = pipeshard(convolutional(), plan)
    state = step.init(jax.random.key(0))
    batch = np.ones((32, 32, 32, CHANNELS), np.float32)
    state, _ = step(state, batch)
    found = []
    for _ in range(3):
        state, _, heap = measure_heap(step, state, batch)
        if heap is None:
            pytest.skip("this system's C library has no mallinfo2; glibc 2.33 and newer does")
        found.append(heap)
    assert all(heap.step_bytes <= heap.bound_bytes for heap in found)
    # Patches are what is largest.
    assert max(heap.step_bytes for heap in found) > heap.bound_bytes - heap.scratch_bytes
    assert heap.fed_bytes == 8 * 32 * 32 * CHANNELS * 4
    assert heap.object_bytes == OBJECT_BYTES and heap.unbounded == ()
    *_, heap = measure_heap(step, state, batch.astype(np.float64))
    assert heap.fed_bytes == 8 * 32 * 32 * CHANNELS * 4 + batch.nbytes * 3
