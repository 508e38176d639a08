"""Layers that are cut automatically: the blocks, their number, the best cuts."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_models import B, tensors_of

from capture.errors import TracingError
from capture.tracing import trace
from capture.tracing.cut import cheapest_path
from tests import tracing_models as models


def test_automatic_cutting_finds_the_blocks():
    model = trace(models.repeated(num_blocks=6), B, num_layers=6)
    assert [layer.params for layer in model.graph.layers] == [(2 * i, 2 * i + 1) for i in range(6)]
    assert all(len(model.graph.crossing(cut)) == 1 for cut in range(1, 6))
    keys = [layer.key for layer in model.graph.layers]
    assert len(set(keys)) == 3 and len(set(keys[1:-1])) == 1
    assert [
        len(layer.params) for layer in trace(models.repeated(num_blocks=6), B, 3).graph.layers
    ] == [4, 4, 4]
    assert trace(models.repeated(num_blocks=6), B, 1).graph.num_layers == 1


def test_automatic_cutting_unrolls_a_scan_only_if_it_must():
    whole = trace(models.scanned(marked=False), B, num_layers=1)
    assert [p.name for p in whole.graph.params] == ["head", "layers/b", "layers/w"]
    four = trace(models.scanned(marked=False), B, num_layers=4)
    assert len(four.graph.params) == 9


@pytest.mark.parametrize(
    ("blocks", "num_devices", "num_layers"),
    # The blocks themselves; a multiple that is enough for the devices; no more than 32, and then a
    # divisor; two products each, no more.
    [(12, 1, 12), (12, 16, 24), (5, 1, 10), (96, 8, 32), (40, 1, 20), (3, 1, 6), (1, 4, 2)],
)
def test_a_loss_without_marks_is_cut_into_a_sensible_number_of_layers(
    blocks, num_devices, num_layers
):
    def loss(params, batch):
        x = batch[0]
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x)

    def init(key):
        return [(jnp.zeros((models.D, 8)), jnp.zeros((8, models.D)))] * blocks

    workload = models.workload(loss, init, models.vectors_batch)
    model = trace(workload, B, num_devices=num_devices)
    assert model.auto_layers and model.graph.num_layers == num_layers
    if blocks == 12:
        same = trace(workload, B, model.graph.num_layers)
        assert (
            same.graph.model_hash
            == model.graph.model_hash
            == trace(workload, B, unmarked_layers=num_layers).graph.model_hash
        )
        assert trace(workload, 4 * B, num_devices=num_devices).graph.num_layers == num_layers


def test_the_number_sees_into_scans_and_leaves_marks_alone():
    assert trace(models.scanned(num_layers=16, marked=False), B).graph.num_layers == 16
    marked = trace(models.scanned(num_layers=4), B, num_devices=64)
    assert not marked.auto_layers
    assert marked.graph.num_layers == trace(models.scanned(num_layers=4), B).graph.num_layers


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 5), st.booleans()), min_size=2, max_size=8
    ),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_cheapest_path_is_the_best_of_all(steps, num_steps, tolerance):
    progress = [float(sum(f for f, _, _ in steps[:i])) for i in range(len(steps) + 1)]
    products = [sum(has for _, _, has in steps[:i]) for i in range(len(steps) + 1)]
    costs = [float(c) for _, c, _ in steps] + [0.0]
    mean = progress[-1] / num_steps
    least, most = mean / (1 + tolerance), mean * (1 + tolerance)
    feasible = {}
    for middle in combinations(range(1, len(steps)), num_steps - 1):
        path = [0, *middle, len(steps)]
        if all(
            least <= progress[b] - progress[a] <= most and products[a] < products[b]
            for a, b in pairwise(path)
        ):
            feasible[tuple(path)] = sum(costs[i] for i in middle)
    found = cheapest_path(progress, costs, num_steps, least, most, products)
    assert (found is None) == (not feasible)
    if found is not None:
        assert feasible[tuple(found)] == min(feasible.values())


@pytest.mark.parametrize(
    ("workload", "num_layers"),
    [
        (
            models.repeated(num_blocks=3),
            6,
        ),  # two products a block; the loss alone is no layer, nor is a ReLU
        (
            models.scanned(num_layers=3, marked=False),
            4,
        ),  # one an iteration, for which the scan is unrolled, and the head
        (models.lstm(), None),
    ],
)
def test_every_automatic_layer_has_a_product(workload, num_layers):
    if num_layers is None:
        with pytest.raises(TracingError) as error:
            trace(workload, B, 50)
        num_layers = int(re.search(r"give 1 to (\d+)", str(error.value))[1])
    for count in (num_layers - 1, num_layers):
        model = trace(workload, B, count)
        assert model.graph.num_layers == count
        for first in range(count):
            layer = model.slice(first, first + 1)
            args = [
                [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in group]
                for group in tensors_of(model, layer)
            ]
            assert layer.params and "dot_general" in str(jax.make_jaxpr(layer)(*args))
    with pytest.raises(
        TracingError, match=rf"give 1 to {num_layers}, or mark .*\[trace-num-layers\]"
    ):
        trace(workload, B, num_layers + 1)
