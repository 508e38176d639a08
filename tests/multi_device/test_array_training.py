"""Several models that are trained as one program, multiplexed, swapped and recomputed, train as each
does alone, and hold what is booked."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
from array_models import (
    BATCH,
    MEMBERS,
    SEQUENCE,
    alone,
    array_plan,
    batches_of,
    checked,
    measured,
    tiny_gpt,
)
from tracing_models import scanned

from capture.errors import CaptureError
from capture.plan.array import ArrayPlan, Decision
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.step.multiplexed import peak_of
from capture.step.sub_array import movable, recomputable

NUM_STEPS = 3


@cache
def plain() -> tuple[ArrayTraining, list, list]:
    """In turn, with everything retained: its training, losses and parameters."""
    training = train_array(tiny_gpt(2), array_plan(order="in turn"), fast_compile=True)
    return training, *run(training)


def run(training: ArrayTraining) -> tuple[list, list]:
    """Losses and parameters after some steps."""
    losses, batches = [], batches_of(training.fuser(0).workload, NUM_STEPS)
    for later, found in training(training.init(), batches):
        losses.append(list(found))
        state = later
    return losses, [training.params(state, model) for model in range(len(MEMBERS))]


def drawn(plan: ArrayPlan, seed: int) -> ArrayPlan:
    """With random decisions."""
    rng, array = np.random.default_rng(seed), plain()[0].arrays[0]
    again = recomputable(array)
    decisions = []
    for _ in plan.partition:
        own = []
        for number in movable(array):
            choices = ["retain", "swap", "recompute"][: 3 if number in again else 2]
            choice, ahead = str(rng.choice(choices)), int(rng.integers(0, 3))
            if choice != "retain":
                behind = (None, 0, 2)[number % 3] if choice == "swap" else None
                own.append(Decision(array.bundles[number].name, choice, ahead, behind))
        decisions.append(tuple(own))
    return replace(plan, decisions=tuple(decisions))


def equal(one: list, other: list) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def test_each_model_trains_as_it_does_alone():
    _, losses, params = plain()
    for model, (expected, expected_params) in enumerate(alone(NUM_STEPS, num_blocks=2)):
        assert [step[model] for step in losses] == pytest.approx(expected, rel=1e-6)
        for a, b in zip(
            jax.tree.leaves(params[model]), jax.tree.leaves(expected_params), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("order", "seed"), [("multiplexed", 0), ("in turn", 1)])
def test_what_is_swapped_and_made_again_has_the_same_bits(order, seed):
    training, *expected = plain()
    plan = drawn(array_plan(order=order), seed)
    assert {d.choice for own in plan.decisions for d in own} == {"swap", "recompute"}
    free = training.of(plan)
    peak = peak_of(free.replay(), 0)[0]
    tight = peak_of(free.of(limited(plan, 1)).replay(), 0)[0]
    assert tight < peak
    limit = (tight + peak) // 2
    bounded = training.of(limited(plan, limit))
    assert peak_of(bounded.replay(), 0)[0] <= limit
    assert equal([*run(bounded)], expected)


def limited(plan: ArrayPlan, nbytes: int) -> ArrayPlan:
    return replace(plan, memory_limit_bytes=nbytes)


def test_device_and_host_hold_what_is_booked_before_every_instruction():
    training, *expected = plain()
    plan = drawn(array_plan(), 2)
    ledgers = training.of(limited(plan, 1)).replay()
    tight = training.of(limited(plan, peak_of(ledgers, 0)[0]))
    found, state, losses = measured(tight, batches_of(tight.fuser(0).workload, NUM_STEPS))
    params = [tight.params(state, model) for model in range(len(MEMBERS))]
    assert equal([losses, params], expected)
    counts = [len(built.instructions) + 1 for built in tight.steps.all]
    assert found.num_checks == counts[0] + 2 * counts[1] + counts[2]
    assert found.peak_bytes_per_device == (peak_of(tight.replay(), 0)[0],)
    assert found.host_peak_bytes == peak_of(tight.replay(), "host")[0] > 0


def test_equal_layers_compile_once():
    """Forward and backward of the first layer, of those between, and of the last, whatever the
    order and however many sub-arrays of a size."""
    deep = train_array(tiny_gpt(4), array_plan(), fast_compile=True)
    for plan in (array_plan(), array_plan(order="in turn")):
        deep.of(plan).replay()
        assert len(deep.programs.executables) == 6


def test_nothing_compiles_after_the_first_update(caplog):
    training = plain()[0].of(drawn(array_plan(), 3))
    counts = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _, found in training(training.init(), batches_of(training.fuser(0).workload, 3)):
            assert len(list(found)) == len(MEMBERS)
            counts.append(sum("Compiling" in record.message for record in caplog.records))
    assert counts[0] > 0 and counts[1:] == counts[:1] * 2


def test_a_state_that_is_ahead_goes_on():
    """A loop that stops keeps the batch that was read already."""
    training, *expected = plain()
    ahead = training.of(array_plan())
    batches = batches_of(ahead.fuser(0).workload, NUM_STEPS)
    state, found = next(iter(ahead(ahead.init(), batches[:2])))
    losses = [list(found)]
    assert state.ahead is not None and state.num_steps == 1
    for later, found in ahead(state, batches[2:]):
        losses.append(list(found))
        state = later
    assert state.ahead is None and state.num_steps == NUM_STEPS
    assert equal([losses, [ahead.params(state, m) for m in range(4)]], expected)


def test_batches_parameters_and_optimizer_states_are_of_each_model():
    """Shared batches are stored once; a tied table is updated with the gradients of both ends, and
    what the loss does not read is updated, too."""
    workload = tiny_gpt(2, tied=True, dead=True)
    plan = array_plan(shared_batches=True, partition=((0, 2), (3,), (1,)))
    training = train_array(workload, plan, fast_compile=True)
    training.replay()
    num_compiled, document = len(training.programs.executables), checked(training)
    assert document["max_relative_loss_error"] < 1e-6
    assert document["max_relative_param_error"] < 1e-5
    worst = document["worst_param"]
    assert worst["leaf"] in {"table", "unread"} or worst["leaf"].startswith("blocks/")
    assert 0 < document["max_param_error_in_roundings"] < 1 and worst["model"] in range(4)
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
    leaf_bytes = BATCH * SEQUENCE * 4  # two leaves, and at most two updates at once
    assert document["replayed_parts_bytes"]["shared batch"] in (2 * leaf_bytes, 4 * leaf_bytes)
    assert len(training.programs.executables) == num_compiled


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (
            {"models": (replace(MEMBERS[0], hyperparameters={"b1": 0.5}), *MEMBERS[1:])},
            "array-hyperparameter",
        ),
        ({"decisions": ((Decision("layer 9 maps 0", "swap"),), ())}, "array-bundle"),
        ({"model_hash": "other"}, "plan-other-model"),
        ({"memory_limit_bytes": 1000}, "array-device-memory"),
    ],
)
def test_plans_that_this_model_cannot_run_are_refused(change, code):
    training = plain()[0]
    with pytest.raises(CaptureError) as error:
        other = training.of(array_plan(**change))
        next(other(other.init(), batches_of(training.fuser(0).workload, 1)))
    assert error.value.codes == (code,)


def test_wrong_batches_states_and_optimizers_are_refused():
    training = plain()[0]
    (batches,) = batches_of(training.fuser(0).workload, 1)
    state = training.init()
    for wrong, code in [
        (batches[:3], "array-count"),
        (
            [batches[0]] * 3 + [training.fuser(0).workload.batch(jax.random.key(0), BATCH + 1)],
            "run-batch",
        ),
    ]:
        with pytest.raises(CaptureError) as error:
            training.advance(state, wrong)
        assert set(error.value.codes) == {code}
    training.advance(state, batches)
    for refused in (lambda: training.advance(state, batches), lambda: training.finish(state)):
        with pytest.raises(CaptureError) as error:
            refused()
        assert error.value.codes == ("array-state",)
    given = tiny_gpt(2)

    def drawn(params, batch):
        noise = jax.random.uniform(jax.random.key(0, impl="rbg"))
        return given.loss_fn(params, batch) + 0 * noise

    with pytest.raises(CaptureError, match="array-key"):
        train_array(replace(given, loss_fn=drawn), array_plan())
    with pytest.raises(CaptureError, match="optimizer-stacked"):
        train_array(replace(scanned(), optimizer=optax.lamb(1e-2)), array_plan())
