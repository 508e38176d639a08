"""What is remembered of splits of one program."""

import jax
import jax.numpy as jnp

from capture.partition.spread import Spread
from capture.partition.walk import followed_dims


def in_heads(x, y):
    """The 8 is in no value outside of the body."""
    _, rows = jax.lax.scan(lambda c, row: (c, row.reshape(8, 3, 7).reshape(24, 7)), 0.0, y)
    return x.reshape(24, 5, 12, 7).T, rows, jnp.pad(x, ((0, 6), (0, 0)))[:9]


def test_a_split_is_followed_as_far_as_its_degree_divides():
    closed = jax.make_jaxpr(in_heads)(jnp.zeros((24, 420)), jnp.zeros((2, 24, 7)))
    spread, different = Spread(closed.jaxpr), set()
    for inputs in ((0, None), (1, 0), (1, None), (None, 1)):
        for degree in (2, 3, 4, 5, 6, 7, 8, 12, 24, 2, 3):
            found = spread.dims(inputs, degree, "axis")
            assert found == followed_dims(closed.jaxpr, inputs, degree, "axis"), (inputs, degree)
            different.add((inputs, tuple(found.values())))
    assert len(different) > 8
