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
from array_models import BATCH, SEQUENCE, array_plan, checked, measured, mlp, tiny_gpt, tiny_lora

from capture.errors import CaptureError
from capture.model.workload import takes_key
from capture.plan.array import Decision, Member
from capture.runtime import checkpoint
from capture.runtime.array_batches import step_key
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.step.multiplexed import peak_of
from capture.step.sub_array import movable

#: GPTs of batches of 2, 2 and 3 examples, and multilayer perceptrons of 4.
MEMBERS = (
    Member(0, {"learning_rate": 0.3}),
    Member(1, {"learning_rate": 0.03}, 4, "mlp"),
    Member(2, {"momentum": 0.5}, batch_size=BATCH),
    Member(3, batch_size=3),
    Member(4, batch_size=4, workload="mlp"),
)
PLAN = array_plan(models=MEMBERS, partition=((1, 4), (0, 2), (3,)))
WORKLOADS = {"mlp": mlp()}


@cache
def trained() -> ArrayTraining:
    """All tests train with its programs."""
    return train_array(tiny_gpt(2), PLAN, workloads=WORKLOADS, fast_compile=True)


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


@cache
def alone(model: int, num_steps: int) -> tuple[list[float], dict]:
    """Losses and parameters of a model by itself, with plain JAX."""
    train, member = trained(), MEMBERS[model]
    workload = train.fuser(model).workload

    @jax.jit
    def update(params, state, *given):
        loss, grads = jax.value_and_grad(workload.loss_fn)(params, *given)
        updates, state = workload.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, losses = workload.init(jax.random.key(member.seed)), []
    state = workload.optimizer.init(params)
    values = {name: jnp.float32(value) for name, value in member.hyperparameters.items()}
    state = state._replace(hyperparams={**state.hyperparams, **values})
    for t, batch in enumerate(batches(train, num_steps)):
        keys = [jax.random.fold_in(step_key(member, t), 0)] if takes_key(workload) else []
        params, state, loss = update(params, state, batch[model], *keys)
        losses.append(float(loss))
    return losses, params


def run(train: ArrayTraining, state, num_steps: int, first: int = 0) -> tuple:
    """The state behind the last of some updates, and all losses."""
    losses = []
    for later, found in train(state, batches(train.of_state(state), num_steps, first)):
        losses.append(list(found))
        state = later
    return state, losses


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, atol=1e-5 * np.abs(b).max(initial=1e-3), rtol=0) for a, b in pairs)


@pytest.mark.parametrize("order", ["multiplexed", "in turn"])
def test_each_model_trains_as_it_does_alone(order):
    """With everything swapped, within the least limit; the ledger is equal to live arrays before
    every instruction."""
    arrays = trained().arrays
    assert [array.num_layers for array in arrays] == [3, 2, 2]
    decisions = tuple(
        tuple(Decision(a.bundles[n].name, "swap") for n in movable(a)) for a in arrays
    )
    plan = replace(PLAN, order=order, decisions=decisions, memory_limit_bytes=1)
    (limit, *_) = peak_of(trained().of(plan).replay(), 0)
    train = trained().of(replace(plan, memory_limit_bytes=limit))
    found, state, losses = measured(train, batches(train, 3))
    for model in range(len(MEMBERS)):
        expected, params = alone(model, 3)
        assert [step[model] for step in losses] == pytest.approx(expected, rel=1e-6)
        assert same(train.params(state, model), params)
    assert found.num_checks > 0 and found.peak_bytes_per_device == (limit,)
    assert found.host_peak_bytes == peak_of(train.replay(), "host")[0] > 0


def test_models_come_go_and_are_restored_as_what_they_are(tmp_path):
    train = trained()
    expected, losses = run(train, train.init(), 3)
    state, _ = run(train, train.init(), 2)
    checkpoint.save(train, state, tmp_path)
    left = train.drop(state, [2, 3, 4])
    assert left.plan.partition == ((1,), (0,)) and left.plan.order == "multiplexed"
    more = train.add(left, [{"seed": 9, "workload": "mlp", "batch_size": 4}])
    assert more.plan.partition == ((1, 2), (0,))
    assert same(train.params(more, 2), mlp().init(jax.random.key(9)))
    end, last = run(train, more, 1, first=2)
    fewer = train.of(replace(PLAN, models=MEMBERS[:2], partition=((1,), (0,)), decisions=()))
    again, found = run(fewer, checkpoint.restore(fewer, tmp_path, models=[0, 1]), 1, first=2)
    for model in (0, 1):
        assert last[0][model] == pytest.approx(losses[2][model], rel=1e-6)
        assert found[0][model] == pytest.approx(losses[2][model], rel=1e-6)
        for of, reached in ((train, end), (fewer, again)):
            assert same(of.params(reached, model), train.params(expected, model))
            assert same(of.optimizer_state(reached, model), train.optimizer_state(expected, model))
    for refused, code in [
        (lambda: checkpoint.restore(fewer, tmp_path, models=[1, 0]), "checkpoint-other-model"),
        (lambda: train.add(end, [{"batch_size": 3}]), "array-tasks"),
        (lambda: train.add(end, [{"batch_size": 0}]), "array-size"),
        (lambda: train.add(end, [{"momentum": 0.1, "workload": "mlp", "batch_size": 4}]), "array-hyperparameter"),
        (lambda: train.init_from([train.params(end, m) for m in (0, 0, 0, 0, 0)]), "run-params"),
    ]:  # fmt: skip
        with pytest.raises(CaptureError) as raised:
            refused()
        assert code in raised.value.codes


def test_what_several_programs_cannot_share_is_refused():
    """Batches of other shapes or other leaves; and an unknown name."""
    plan = array_plan(models=MEMBERS[:1] * 2, partition=((0,), (1,)), shared_batches=True)
    for second, code in [
        (Member(1, batch_size=3), "array-tasks"),
        (Member(1, workload="mlp"), "array-tasks"),
        (Member(1, workload="mpl"), "workload-name"),
    ]:
        with pytest.raises(CaptureError) as raised:
            train_array(
                tiny_gpt(1), replace(plan, models=(MEMBERS[0], second)), workloads=WORKLOADS
            )
        assert raised.value.codes == (code,)


@pytest.mark.slow
def test_what_is_alike_in_several_programs_is_there_once():
    """A batch that another model reads, too; the base of adapters, whatever their batches."""
    members = (Member(0), Member(1, workload="tied"))
    plan = array_plan(models=members, partition=((0,), (1,)), shared_batches=True)
    tied = {"tied": tiny_gpt(3, tied=True)}
    train = train_array(tiny_gpt(2), plan, workloads=tied, fast_compile=True)
    document = checked(train)
    leaf_bytes = BATCH * SEQUENCE * 4  # two leaves, and at most two updates at once
    assert document["replayed_parts_bytes"]["shared batch"] in (2 * leaf_bytes, 4 * leaf_bytes)
    members = tuple(Member(n, {"learning_rate": 0.1}, batch_size=2 + n) for n in range(2))
    plan = array_plan(models=members, partition=((0,), (1,)), shared=("base/*",))
    adapters = checked(train_array(tiny_lora(), plan, fast_compile=True))
    base = jax.tree.leaves(jax.eval_shape(tiny_lora().init, jax.random.key(0))["base"])
    shared = adapters["replayed_parts_bytes"]["shared parameters"]
    assert shared == sum(4 * leaf.size for leaf in base)
    for one in (document, adapters):
        assert one["max_relative_loss_error"] < 1e-6
        assert one["max_param_error_in_roundings"] < 2 and one["ledger_checks"] > 0
        assert one["measured_peak_bytes_per_device"] == one["replayed_peak_bytes_per_device"]
