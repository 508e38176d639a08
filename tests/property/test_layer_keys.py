"""Keys of layers: equal for equal work, in every process, and different for all else."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from processes import REPOSITORY, environment_apart, output_of
from traced_models import B, traced

from capture.tracing import trace
from tests import tracing_models as models


def test_equal_blocks_have_equal_keys_and_others_do_not():
    keys = [layer.key for layer in trace(models.repeated(marked=True), B).graph.layers]
    # The first block reads the batch, the layer after the last mark is the loss.
    assert len(set(keys)) == 3 and len(set(keys[1:-1])) == 1
    model = trace(models.linen(num_blocks=4), B)
    assert len({layer.key for layer in model.graph.layers[1:4]}) == 1
    assert model.slice(1, 3).key == model.slice(2, 4).key != model.slice(1, 2).key
    scan_keys = [layer.key for layer in trace(models.scanned(num_layers=5), B).graph.layers]
    assert len(set(scan_keys[2:5])) == 1
    wider = trace(models.repeated(marked=True, width=8), B).graph
    assert wider.layers[1].key != keys[1]
    assert trace(models.repeated(marked=True), 2 * B).graph.layers[1].key != keys[1]


def test_a_parameter_that_layers_share_changes_the_stage_key():
    def make(indices):
        def loss(p, batch):
            h = batch[0]
            for i in indices:
                h = models.mark(jnp.tanh(h @ p[i]))
            return jnp.mean(h)

        return trace(
            models.workload(loss, lambda key: [jnp.eye(models.D)] * 3, models.vectors_batch), B
        )

    distinct, shared = make([0, 1, 2]), make([0, 1, 1])
    assert distinct.graph.layers[2].key == shared.graph.layers[2].key
    assert distinct.slice(1, 3).key != shared.slice(1, 3).key


def test_custom_rules_and_constants_are_part_of_the_key():
    same, other = trace(models.convnet(), B), trace(models.convnet(models.clipped_otherwise), B)
    assert [a.key == b.key for a, b in zip(same.graph.layers, other.graph.layers, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert same.graph.layers[1].key == same.graph.layers[2].key
    assert same.graph.model_hash != other.graph.model_hash

    def scaled(*tables):
        def loss(p, batch):
            h = batch[0] @ p
            for table in tables:
                h = models.mark(jnp.tanh(h * np.full(models.D, table, np.float32)))
            return jnp.mean(h)

        return trace(
            models.workload(loss, lambda key: jnp.eye(models.D), models.vectors_batch), B
        ).graph.layers

    keys = [layer.key for layer in scaled(1.0, 2.0, 2.0, 3.0)]
    assert keys[1] == keys[2] != keys[3]


def test_hashes_are_stable_over_processes():
    names = ["convnet", "linen-dropout-remat", "routed", "named-remat"]
    lines = []
    for seed in ("7", "8"):
        env = environment_apart(REPOSITORY / "tests", JAX_PLATFORMS="cpu", PYTHONHASHSEED=seed)
        lines += output_of("model_keys", *names, env=env).strip().splitlines()
    for name, line in zip(2 * names, lines, strict=True):
        model = traced(name)
        assert line.split() == [
            model.graph.model_hash,
            *[layer.key for layer in model.graph.layers],
            model.slice(1, 3).key,
        ]
