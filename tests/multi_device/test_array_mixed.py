"""Models of one array that are other programs: of another batch size, or other models altogether.
Each trains as it does alone, and what is booked is what there is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from array_models import array_plan, tiny_gpt, tiny_lora

from capture.errors import CaptureError
from capture.model.workload import Workload
from capture.plan.array import ArrayPlan, Decision, Member
from capture.runtime import checkpoint
from capture.runtime.array_check import run_array
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.step.sub_array import movable

#: Of batches of 2, 3 and 2 examples.
MEMBERS = (
    Member(0, {"learning_rate": 0.3}),
    Member(1, {"learning_rate": 0.1}, batch_size=3),
    Member(2, {"momentum": 0.5}, batch_size=2),
)
PLAN = array_plan(models=MEMBERS, partition=((0, 2), (1,)))


def mlp() -> Workload:
    """Another model, of other numbers of layers and leaves of a batch, and another optimizer."""

    def init(key):
        return {
            "a": jax.random.normal(key, (4, 6)),
            "b": jax.random.normal(key, (6, 1)),
        }

    def loss_fn(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden, 0)
        return jnp.mean(batch["weight"][:, None] * (hidden @ params["b"] - batch["y"]) ** 2)

    def batch(key, size):
        x = jax.random.normal(key, (size, 4))
        return {"weight": jnp.abs(x[:, 0]), "x": x, "y": x.sum(1, keepdims=True)}

    return Workload(loss_fn, init, batch, optax.inject_hyperparams(optax.adam)(learning_rate=0.01))


#: Two GPTs, and two multilayer perceptrons.
BOTH = array_plan(
    models=(
        Member(0, {"learning_rate": 0.3}),
        Member(1, {"learning_rate": 0.03}, workload="mlp", batch_size=4),
        Member(2),
        Member(3, workload="mlp", batch_size=4),
    ),
    partition=((1, 3), (0,), (2,)),
)
WORKLOADS = {"mlp": mlp()}


@cache
def trained() -> ArrayTraining:
    return train_array(tiny_gpt(2), BOTH, workloads=WORKLOADS, fast_compile=True)


def batches(train: ArrayTraining, num_steps: int, first: int = 0) -> list[list]:
    """By the seeds of the models, whoever else there is."""
    plan = train.plan
    return [
        [
            train.fuser(m).workload.batch(jax.random.key(100 * t + one.seed), task.batch_size)
            for m, (one, task) in enumerate(zip(plan.models, plan.trained, strict=True))
        ]
        for t in range(first, first + num_steps)
    ]


def run(train: ArrayTraining, state, num_steps: int, first: int = 0) -> tuple:
    losses, own = [], train.of_state(state)
    for later, found in train(state, batches(own, num_steps, first)):
        losses.append(list(found))
        state = later
    return state, losses


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, atol=1e-6 * np.abs(b).max(initial=1e-3), rtol=0) for a, b in pairs)


def swapping(plan: ArrayPlan, train: ArrayTraining) -> ArrayPlan:
    """Everything swapped, as far as the limit asks."""
    chosen = tuple(
        tuple(Decision(array.bundles[n].name, "swap") for n in movable(array))
        for array in train.of(plan).arrays
    )
    return replace(plan, decisions=chosen)


@pytest.mark.parametrize("order", ["multiplexed", "in turn"])
def test_models_of_other_batches_train_as_they_do_alone(order):
    document = run_array(replace(PLAN, order=order), tiny_gpt(2), 2, check=True, fast_compile=True)
    assert document["max_relative_loss_error"] < 1e-6
    assert document["max_relative_param_error"] < 1e-5
    assert document["ledger_checks"] > 0
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
    assert document["num_compiled_after_first_step"] == 0


@pytest.mark.parametrize("order", ["multiplexed", "in turn"])
def test_other_models_train_as_they_do_alone(order):
    """Some of their feature maps swapped; the shorter one is spread over the longer one."""
    plan = swapping(replace(BOTH, order=order), trained())
    document = run_array(plan, tiny_gpt(2), 3, check=True, workloads=WORKLOADS, fast_compile=True)
    assert document["max_relative_loss_error"] < 1e-6
    assert document["max_param_error_in_roundings"] < 2
    assert document["moved_bytes"]["to_host"] > 0
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
    assert document["host"]["measured_peak_bytes"] > 0


def test_models_come_go_and_are_restored_as_what_they_are(tmp_path):
    train = trained()
    expected, losses = run(train, train.init(), 3)
    state, _ = run(train, train.init(), 2)
    checkpoint.save(train, state, tmp_path)
    left = train.drop(state, [2, 3])
    assert left.plan.partition == ((1,), (0,)) and left.plan.order == "multiplexed"
    more = train.add(left, [{"seed": 9, "workload": "mlp", "batch_size": 4}])
    assert more.plan.partition == ((1, 2), (0,))
    begun = train.params(more, 2)
    assert same(begun, mlp().init(jax.random.key(9)))
    end, last = run(train, more, 1, first=2)
    assert last[0][:2] == pytest.approx(losses[2][:2], rel=1e-6)
    for model in (0, 1):
        assert same(train.params(end, model), train.params(expected, model))
        assert same(train.optimizer_state(end, model), train.optimizer_state(expected, model))
    other = train.of(replace(BOTH, models=BOTH.models[:2], partition=((1,), (0,)), decisions=()))
    for models in ([0, 1], [2, 3]):
        restored = checkpoint.restore(other, tmp_path, models=models)
        again, found = run(other, restored, 1, first=2)
        if models == [0, 1]:
            assert found[0] == pytest.approx(losses[2][:2], rel=1e-6)
            assert same(other.params(again, 1), train.params(expected, 1))
    for refused, code in [
        (lambda: checkpoint.restore(other, tmp_path, models=[1, 0]), "checkpoint-other-model"),
        (lambda: train.add(end, [{"batch_size": 4}]), "array-tasks"),
        (lambda: train.add(end, [{"batch_size": 0}]), "array-size"),
        (lambda: train.add(end, [{"momentum": 0.1, "workload": "mlp", "batch_size": 4}]), "array-hyperparameter"),
    ]:  # fmt: skip
        with pytest.raises(CaptureError) as raised:
            refused()
        assert code in raised.value.codes


def test_what_several_programs_cannot_share_is_refused():
    """Batches of other shapes; and what is alike is there once."""
    members = (Member(0), Member(1, workload="tied"))
    plan = array_plan(models=members, partition=((0,), (1,)), shared_batches=True)
    tied = {"tied": tiny_gpt(2, tied=True), "deep": tiny_gpt(3)}
    document = run_array(plan, tiny_gpt(2), 2, check=True, workloads=tied, fast_compile=True)
    assert document["max_relative_loss_error"] < 1e-6
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
    for second in (Member(1, batch_size=3), Member(1, workload="mlp")):
        wrong = replace(plan, models=(members[0], second))
        with pytest.raises(CaptureError) as raised:
            train_array(tiny_gpt(2), wrong, workloads=WORKLOADS)
        assert raised.value.codes == ("array-tasks",)
    with pytest.raises(CaptureError) as raised:
        train_array(tiny_gpt(2), replace(plan, models=(members[0], Member(1, workload="deeper"))), workloads=tied)  # fmt: skip
    assert raised.value.codes == ("workload-name",)


def test_adapters_of_other_batches_share_their_base():
    """Parameters that all have alike are there once, whatever the batches."""
    members = tuple(Member(n, {"learning_rate": 0.1}, batch_size=2 + n) for n in range(2))
    plan = array_plan(models=members, partition=((0,), (1,)), shared=("base/*",))
    document = run_array(plan, tiny_lora(), 2, check=True, fast_compile=True)
    assert document["max_relative_loss_error"] < 1e-6
    base = jax.tree.leaves(jax.eval_shape(tiny_lora().init, jax.random.key(0))["base"])
    shared = document["replayed_parts_bytes"]["shared parameters"]
    assert shared == sum(4 * leaf.size for leaf in base)
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
