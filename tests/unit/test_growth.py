"""What grows with the micro-batch is known from traces at other sizes, where it is the same."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from capture.model.workload import Workload
from capture.tracing import model as tracing
from capture.tracing import trace
from tests import pipeline_models, zoo_models
from tests.pipeline_models import mark


def resized(size_of):
    """Layers between which as many rows pass as a function of the micro-batch says."""

    def loss(params, x):
        for weights in params:
            rows = jnp.tanh(x @ weights)
            pads = ((0, size_of(len(x)) - len(x)), (0, 0))
            x = mark(jnp.pad(rows, pads))[: len(x)]
        return jnp.mean(x**2)

    def init(key):
        return [jax.random.normal(each, (4, 4)) for each in jax.random.split(key, 3)]

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 4)), optax.sgd(0.1))


MODELS = {
    "gpt": (lambda: zoo_models.load("gpt", "size=tiny&num_layers=3"), True),
    "wide_resnet": (lambda: zoo_models.load("wide_resnet"), True),
    "tied": (pipeline_models.tied, True),
    "padded": (lambda: resized(lambda n: -(-(n + 1) // 8) * 8), False),
    "padded by one": (lambda: resized(lambda n: n + 1), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_trace_at_another_size_is_the_same_with_and_without(name, monkeypatch):
    make, is_known = MODELS[name]
    doubled = []

    def counted(loss, flat):
        doubled.append(loss.microbatch_size)
        return grown_avals(loss, flat)

    grown_avals = tracing._grown_avals
    alone = {size: trace(make(), size) for size in (4, 8, 3)}
    monkeypatch.setattr(tracing, "_grown_avals", counted)
    model = make()
    for first, size in itertools.permutations(alone, 2):
        found = trace(model, size, others=[alone[first].growth])
        assert found.graph == alone[size].graph, (first, size)
        assert (size in doubled) != (is_known and size != 2 * first), (first, size)
        doubled.clear()
