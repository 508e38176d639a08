"""What one rounding makes of a training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from capture.runtime.reference import relative_errors, rounded


def test_a_rounding_is_of_the_largest_value_and_zeros_stay():
    gradients = {"w": jnp.array([2.0, 1e-9, 0.0]), "none": jnp.zeros(3)}
    assert rounded(gradients, 0) is gradients
    found = rounded(gradients, 3)
    eps = float(jnp.finfo(jnp.float32).eps)
    assert abs(float(found["w"][1])) == pytest.approx(6 * eps, rel=0.01)
    assert found["w"][2] == 0 and not found["none"].any()


def test_momentum_keeps_a_rounding_and_adam_enlarges_it():
    params = {"w": jnp.ones(3)}
    gradients = {"w": jnp.array([1.0, 3e-8, 0.0])}

    def error(optimizer: optax.GradientTransformation) -> float:
        moved = []
        for roundings in (0, 1):
            updates, _ = optimizer.update(
                rounded(gradients, roundings), optimizer.init(params), params
            )
            moved.append(jax.tree.map(jnp.add, params, updates))
        return relative_errors(moved[1], moved[0], 0.0)["w"]

    assert error(optax.sgd(0.1)) < 1e-7
    assert error(optax.adam(0.1)) > 1e-2
