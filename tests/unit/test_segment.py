"""Segments of a loss, one after the other, are its gradient: with a skip over all of them, a tied
parameter, and one that no layer reads."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_models import tied

from capture.tracing import trace
from capture.tracing.segment import Segment

SIZE = 2


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
def test_chained_segments_give_the_gradient_of_the_loss(cuts):
    workload = tied(dropout=False)
    traced, tree = trace(workload, SIZE), workload.init(jax.random.key(0))
    batch = workload.batch(jax.random.key(1), SIZE)
    leaves, params = traced.batch_leaves(batch), jax.tree.leaves(traced.split_params(tree))
    spans = pairwise(cuts)
    segments = [
        Segment(traced.graph, traced.slice(*span), traced.graph.crossing(span[0])) for span in spans
    ]
    values: dict[int, jax.Array] = {}
    backward = []
    for segment in segments:
        layers = segment.layers

        def run(own, given, layers=layers):
            inputs = [given[v] for v in layers.inputs]
            return layers(own, inputs, [leaves[b] for b in layers.batch])

        made, pull = segment.forward(
            run, [params[p] for p in layers.params], {v: values[v] for v in segment.given}
        )
        values |= made
        backward.append(pull)
    loss, expected = jax.value_and_grad(workload.loss_fn)(tree, batch)
    assert values[segments[-1].outputs[0]] == pytest.approx(float(loss), rel=1e-6)
    arrived = {v: jnp.ones_like(values[v]) for v in segments[-1].outputs}
    found = [np.zeros(param.shape) for param in params]
    for segment, pull in zip(segments[::-1], backward[::-1], strict=True):
        of = segment.outputs if segment.is_last else segment.cotangents
        of_params, of_inputs = segment.gradients(pull, [arrived[v] for v in of])
        arrived = dict(zip(segment.inputs, of_inputs, strict=True))
        for param, gradient in zip(segment.layers.params, of_params, strict=True):
            found[param] += gradient
    for own, want in zip(found, jax.tree.leaves(traced.split_params(expected)), strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-7)
