"""What the split of an input can reach in a program, and what it cannot."""

import jax
import jax.numpy as jnp
import pytest

from capture.partition.split_reach import SplitReach
from capture.tracing.dataflow import DataFlow

WIDE = jnp.ones((6, 8))  # of an input: rows are examples, columns features


def reached(function, *args, split):
    """Of every result, whether a split of dimensions of the arguments may reach it."""
    flow = DataFlow(jax.make_jaxpr(function)(*args))
    found = SplitReach(flow.jaxpr).of([(flow.inputs[i], dim) for i, dim in split])
    return [v in found for v in flow.outputs]


def feed_forward(x, up, down):
    hidden = jnp.tanh(x @ up)
    return hidden, hidden @ down


def test_features_inside_are_split_and_the_stream_is_not():
    args = WIDE, jnp.ones((8, 32)), jnp.ones((32, 8))
    assert reached(feed_forward, *args, split=[(1, 1), (2, 0)]) == [True, False]
    assert reached(feed_forward, *args, split=[(0, 0)]) == [True, True]


def test_a_gradient_of_a_weight_is_not_split_as_the_examples_are():
    def loss(x, up, down):
        return feed_forward(x, up, down)[1].sum()

    args = WIDE, jnp.ones((8, 32)), jnp.ones((32, 8))
    assert reached(jax.grad(loss, (0, 1, 2)), *args, split=[(0, 0)]) == [True, False, False]


def test_one_element_that_is_broadcast_joins_nothing():
    def shifted(x, bias):
        return x + bias[None, :], (x + bias[None, :]).mean(1, keepdims=True) * x

    assert reached(shifted, WIDE, jnp.ones(8), split=[(1, 0)]) == [True, True]
    rows = jnp.ones((6, 1))
    assert reached(lambda x, y: (x.sum(1), x + y), WIDE, rows, split=[(0, 1)]) == [False, True]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.reshape(3, 2, 8).sum(2), True),
        (lambda x: x.reshape(6, 2, 4).sum(0), False),
        (lambda x: x.T[:4].sum(0), True),
        (lambda x: jnp.concatenate([x, x]).max(0), False),
        (lambda x: jax.lax.scan(lambda c, row: (c + row, row.sum()), x[0], x)[0], True),
        (lambda x: jnp.sort(x, 1).sum(0), False),
        (lambda x: jax.lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME")[0, 0], True),
    ],
    ids=["merged", "apart", "transposed", "stacked", "loop", "sorted", "window"],
)
def test_rows_are_followed(function, expected):
    assert reached(function, WIDE, split=[(0, 0)]) == [expected]


def test_a_table_is_looked_up_without_its_split():
    def looked_up(table, words):
        return table[words]

    table, words = jnp.ones((50, 8)), jnp.zeros((6, 5), int)
    assert reached(looked_up, table, words, split=[(0, 0)]) == [False]
    assert reached(looked_up, table, words, split=[(0, 1)]) == [True]
    assert reached(looked_up, table, words, split=[(1, 0)]) == [True]
    gradient = jax.grad(lambda t, w: (looked_up(t, w) ** 2).sum())
    assert reached(gradient, table, words, split=[(1, 0)]) == [False]
