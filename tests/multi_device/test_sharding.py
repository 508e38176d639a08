"""Parameters split over the mesh axis ``model``: every stage agrees, shared parameters follow their
first layer, bytes add up."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from capture.model.graph import Tensor
from capture.model.workload import Workload
from capture.partition import sharding
from capture.partition.sharding import ModelSharding
from capture.partition.walk import MIN_SHARDED_SIZE
from capture.tracing import trace
from capture.tracing.slices import struct_of

WIDTH, HIDDEN, NUM_BLOCKS = 64, 128, 3


def mark(x):
    return checkpoint_name(x, "layer_boundary")


def tied_mlp() -> Workload:
    """Equal residual blocks; the matrix that the first layer cuts by columns is one that the last
    layer would cut by rows."""

    def init(key):
        shapes = {f"in{i}": (WIDTH, HIDDEN) for i in range(NUM_BLOCKS)} | {
            f"out{i}": (HIDDEN, WIDTH) for i in range(NUM_BLOCKS)
        }
        shapes |= {
            "tied": (WIDTH, HIDDEN),
            "back": (HIDDEN, WIDTH),
            "square": (WIDTH, WIDTH),
            "gain": (WIDTH,),
        }
        return {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(params, x):
        h = mark(jax.nn.relu(x @ params["tied"]) @ params["back"] * params["gain"])
        for i in range(NUM_BLOCKS):
            h = mark(h + jax.nn.relu(h @ params[f"in{i}"]) @ params[f"out{i}"])
        return jnp.mean(jax.nn.relu(h @ params["square"]) @ params["tied"])

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, WIDTH)), optax.sgd(0.1))


@pytest.fixture(scope="module")
def traced():
    return trace(tied_mlp(), 8)


def specs_by_name(traced, degree, rule="auto"):
    names = [p.name for p in traced.graph.params]
    return dict(zip(names, ModelSharding(traced, rule).specs(degree), strict=True))


def test_a_shared_parameter_is_split_as_its_first_layer_wants_it(traced):
    model = ModelSharding(traced)
    names = [p.name for p in traced.graph.params]
    tied, last = names.index("tied"), traced.graph.layers[-1]
    assert tied in last.params and tied in traced.graph.layers[0].params
    assert model.specs(4)[tied] == P(None, "model")
    alone = dict(zip(last.params, model._layer_specs(last.layer_id, 4), strict=True))
    assert alone[tied] == P("model", None)


def test_equal_layers_are_split_equally_and_walked_once(traced, monkeypatch):
    walked = []

    def counting(*args):
        walked.append(args)
        return original(*args)

    original = sharding.parameter_specs
    monkeypatch.setattr(sharding, "parameter_specs", counting)
    model = ModelSharding(traced)
    specs = dict(zip([p.name for p in traced.graph.params], model.specs(4), strict=True))
    for i in range(NUM_BLOCKS):
        assert specs[f"in{i}"] == P(None, "model") and specs[f"out{i}"] == P("model", None)
    assert (
        len(walked) == len({layer.key for layer in traced.graph.layers}) < traced.graph.num_layers
    )
    model.specs(4)
    assert len(walked) == len({layer.key for layer in traced.graph.layers})


def test_specs_by_name_reach_one_of_several_equal_layers(traced):
    specs = specs_by_name(traced, 4, {r"in1": P("model", None)})
    assert (specs["in0"], specs["in1"], specs["in2"]) == (
        P(None, "model"),
        P("model", None),
        P(None, "model"),
    )


@pytest.mark.parametrize("rule", ["auto", "largest"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_bytes_are_those_of_the_shards(traced, rule, degree):
    model, params = ModelSharding(traced, rule), traced.graph.params
    cut = [any(spec) for spec in model.specs(degree)]
    assert model.param_bytes((degree, 1)) == tuple(
        p.nbytes // (degree if c else 1) for p, c in zip(params, cut, strict=True)
    )
    matrices = [len(p.shape) == 2 for p in params]
    assert cut == (matrices if degree > 1 else [False] * len(params))
    assert sum(model.param_bytes((1, 1))) == 4 * traced.graph.num_parameters
    assert all(
        math.prod(p.shape) >= MIN_SHARDED_SIZE
        for p, matrix in zip(params, matrices, strict=True)
        if matrix
    )


def test_structures_of_tensors():
    assert struct_of(Tensor("a", (2, 3), "bfloat16")) == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert struct_of(Tensor("key", (), "key<fry>")) == jax.eval_shape(lambda: jax.random.key(0))
