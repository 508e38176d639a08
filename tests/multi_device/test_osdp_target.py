"""Sharding plans compiled for an H100 that is not there: the collectives of the plan, when they
run, and what slices save."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import output_of

REPOSITORY = Path(__file__).resolve().parents[2]


# What its tests share is compiled by one worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("osdp target")]


@pytest.fixture(scope="module")
def compiled():
    if not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        pytest.skip(
            "the compiler of cuda targets is not installed: pip install 'capture-jax[cuda-targets]'"
        )
    return json.loads(output_of("osdp_collectives").splitlines()[-1])


WEIGHTS = 4096 * 4096 * 4


@pytest.mark.parametrize(("mode", "slices"), [("ZDP", 1), ("ZDP 4/4", 4), ("ZDP 16/16", 16)])
def test_weights_are_gathered_forwards_and_backwards_and_gradients_scattered(
    compiled, mode, slices
):
    sent = compiled[mode]["sent"]
    # The first operator's input needs no gradient.
    assert sent["all-gather"]["bytes"] == 5 * WEIGHTS
    assert sent["reduce-scatter"]["bytes"] == 3 * WEIGHTS
    if slices < 16:  # small slices may be joined
        assert (sent["all-gather"]["count"], sent["reduce-scatter"]["count"]) == (
            5 * slices,
            3 * slices,
        )
    assert sent["all-reduce"]["bytes"] < 1000  # the loss


def test_looking_ahead_gathers_beside_the_product_before_and_needs_no_more_memory(compiled):
    """Three gathers forwards and two backwards; those run beside the gradient of their own
    weights."""
    assert compiled["ZDP"]["products"] == [0, 0, 0, 1, 1]
    assert compiled["ZDP ahead"]["products"] == [0, 1, 1, 1, 1]
    assert compiled["ZDP ahead"]["sent"] == compiled["ZDP"]["sent"]
    assert compiled["ZDP ahead"]["bytes"] == pytest.approx(compiled["ZDP"]["bytes"], rel=1e-4)


def test_replicated_weights_are_reduced(compiled):
    sent = compiled["DP"]["sent"]
    assert (
        set(sent) == {"all-reduce"}
        and 3 * WEIGHTS <= sent["all-reduce"]["bytes"] < 3 * WEIGHTS + 1000
    )


def test_what_is_gathered_falls_with_the_slices(compiled):
    """Beside the shards: the slice of the weights and its gradient, and some examples."""
    state = 3 * WEIGHTS // 8
    beside = {
        mode: (compiled[mode]["bytes"] - state) / WEIGHTS
        for mode in ("ZDP", "ZDP 4/4", "ZDP 16/16")
    }
    assert 2.0 <= beside["ZDP"] < 2.6
    assert beside["ZDP 4/4"] < beside["ZDP"] - 1.2
    assert beside["ZDP 16/16"] < beside["ZDP 4/4"] - 0.2
