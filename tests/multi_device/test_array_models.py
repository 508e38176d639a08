"""What models of an array share is there once; models come and go, and move to other arrays or a
training alone, as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
from array_models import BATCH, array_plan, batches_of, checked, tiny_lora
from pipeline_models import pipeline

from capture import pipeshard
from capture.errors import CaptureError, ExecutionError, PlanError, WorkloadError
from capture.plan.array import Decision, Member
from capture.runtime import checkpoint
from capture.runtime.checkpoint_models import Models, Sources, by_path
from capture.runtime.fused import Fuser
from capture.runtime.multiplexed import ArrayTraining, train_array
from capture.step.multiplexed import peak_of

MEMBERS = tuple(Member(seed, {"learning_rate": 0.3 / (1 + seed)}) for seed in range(3))
PLAN = array_plan(models=MEMBERS, partition=((0, 2), (1,)), shared=("base/*",))


@cache
def trained() -> ArrayTraining:
    """All tests train with its programs."""
    return train_array(tiny_lora(), PLAN, fast_compile=True)


def batches(num_steps: int, models=range(3), first: int = 0) -> list[list]:
    """The same ones for a model, whatever others there are."""
    found = batches_of(trained().fuser(0).workload, first + num_steps, 5)
    return [[step[model] for model in models] for step in found[first:]]


def run(train: ArrayTraining, state, given) -> tuple:
    """The state behind the last of some updates, and all losses."""
    losses = []
    for later, found in train(state, given):
        losses.append(list(found))
        state = later
    return state, losses


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, atol=1e-6 * np.abs(b).max(initial=1e-3), rtol=0) for a, b in pairs)


def test_shared_parameters_are_there_once_and_products_with_them_are_one():
    """Each model draws its own dropout, and is clipped by its own norm."""
    document = checked(train_array(tiny_lora(noisy=True), PLAN, fast_compile=True))
    assert document["max_relative_loss_error"] < 1e-6
    assert document["max_relative_param_error"] < 1e-5
    assert document["measured_peak_bytes_per_device"] == document["replayed_peak_bytes_per_device"]
    train = trained()
    base = jax.tree.leaves(train.fuser(0).traced.params_struct["base"])
    booked = peak_of(train.replay(), 0)[2]["shared parameters"]
    assert booked == sum(4 * leaf.size for leaf in base)
    array = train.fuser(0).of(2)
    shared = {array.params[p] for p in train.fuser(0).optimizer.shared}
    products = [
        op.params["dimension_numbers"][1]
        for op in array.program.ops
        if op.primitive.name == "dot_general" and shared.intersection(op.reads)
    ]
    # With the rows of both models: three forward; backward nothing asks for those of the table.
    assert len(products) == 5 and set(products) == {((), ())}


def test_a_predicate_names_what_patterns_do():
    of_predicate = Fuser(tiny_lora(), BATCH, shared=lambda path: path.startswith("base/"))
    assert of_predicate.optimizer.shared == trained().fuser(0).optimizer.shared


def test_what_cannot_be_shared_is_refused():
    given = tiny_lora()
    labels = {"base": "base", "own": "own"}
    frozen_late = optax.chain(
        optax.adam(0.1), optax.masked(optax.set_to_zero(), {"base": True, "own": False})
    )
    reads_all = optax.chain(optax.clip_by_global_norm(1.0), given.optimizer)
    decayed = optax.multi_transform(
        {"own": optax.sgd(0.1), "base": optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1))}, labels
    )  # fmt: skip
    for shared, optimizer, error, code in [
        (["base/*", "bose/*"], given.optimizer, PlanError, "array-shared"),
        (["*"], given.optimizer, PlanError, "array-shared"),
        (["base/*"], optax.sgd(0.1), WorkloadError, "array-shared-updated"),
        (["base/*"], frozen_late, WorkloadError, "array-shared-updated"),
        (["base/*"], reads_all, WorkloadError, "array-shared-updated"),
        (["base/*"], decayed, WorkloadError, "array-shared-updated"),
    ]:
        with pytest.raises(error) as raised:
            Fuser(replace(given, optimizer=optimizer), BATCH, shared=shared)
        assert raised.value.codes == (code,)
    train = trained()
    with pytest.raises(ExecutionError, match="array-shared-values"):
        train.init_from([given.init(jax.random.key(seed)) for seed in range(3)])


def test_models_that_go_leave_the_others_as_they_are():
    """And one that comes in the middle begins there as it does alone."""
    train = trained()
    expected, losses = run(train, train.init(), batches(4))
    state, _ = run(train, train.init(), batches(2))
    ahead, _ = next(iter(train(train.init(), batches(2))))
    with pytest.raises(ExecutionError, match="array-ahead"):
        train.drop(ahead, [0])
    left = train.drop(state, [2])
    assert [member.seed for member in left.plan.models] == [0, 1] and left.num_steps == 2
    with pytest.raises(ExecutionError, match="array-state"):
        next(train(state, batches(1)))
    left, _ = run(train, left, batches(1, (0, 1), 2))
    more = train.add(left, [{"seed": 7, "learning_rate": 0.2}])
    assert more.plan.partition == ((0, 2), (1,)) and more.num_steps == 3
    # The smallest takes the next one, and the first of equally small ones.
    assert train.add(train.init(), [MEMBERS[0]]).plan.partition == ((0, 2), (1, 3))
    begun = train.params(more, 2)
    assert same(begun["own"], tiny_lora().init(jax.random.key(7))["own"])
    assert same(begun["base"], train.params(more, 0)["base"])
    end, last = run(train, more, batches(1, (0, 1, 4), 3))
    for model in (0, 1):
        assert last[0][model] == pytest.approx(losses[3][model], rel=1e-6)
        assert same(train.params(end, model), train.params(expected, model))
        assert same(train.optimizer_state(end, model), train.optimizer_state(expected, model))
    alone = train.of(replace(PLAN, models=(Member(7, {"learning_rate": 0.2}),), partition=((0,),), order="in turn", decisions=()))  # fmt: skip
    single, _ = run(alone, alone.init_from([begun]), batches(1, (4,), 3))
    assert same(train.params(end, 2), alone.params(single, 0))
    for refused, code in [
        (lambda: train.drop(end, [3]), "array-count"),
        (lambda: train.drop(end, [0, 1, 2]), "array-models"),
        (lambda: train.add(end, [{"b1": 0.5}]), "array-hyperparameter"),
    ]:
        with pytest.raises(CaptureError) as raised:
            refused()
        assert code in raised.value.codes


def test_decisions_go_with_the_models():
    """To a sub-array of another size; one that is left alone takes no turns."""
    train = trained()
    names = [bundle.name for bundle in train.arrays[0].bundles if " maps " in bundle.name]
    plan = replace(PLAN, decisions=(tuple(Decision(name, "swap") for name in names), ()))
    moved = train.of(plan)
    state = moved.drop(moved.init(), [1, 2])
    assert (state.plan.partition, state.plan.order) == (((0,),), "in turn")
    assert {d.choice for d in state.plan.decisions[0]} == {"swap"}
    expected, _ = run(train, train.drop(train.init(), [1, 2]), batches(2, (0,)))
    found, _ = run(moved, state, batches(2, (0,)))
    assert same(moved.params(found, 0), train.params(expected, 0))


def test_checkpoints_move_to_other_arrays_and_to_a_training_alone(tmp_path):
    train = trained()
    state, _ = run(train, train.init(), batches(2))
    checkpoint.save(train, state, tmp_path)
    saved = [(train.params(state, m), train.optimizer_state(state, m)) for m in range(3)]
    fewer = train.of(replace(PLAN, models=MEMBERS[1:], partition=((0,), (1,)), order="in turn", decisions=()))  # fmt: skip
    apart = train.of(replace(PLAN, partition=((0,), (1, 2)), order="in turn", decisions=()))
    for other, models in ((apart, None), (fewer, [1, 2])):
        restored = checkpoint.restore(other, tmp_path, models=models)
        assert restored.num_steps == 2
        for m, of in enumerate(models or range(3)):
            assert same((other.params(restored, m), other.optimizer_state(restored, m)), saved[of])
    plan = pipeline(
        [train.fuser(0).traced.graph.num_layers],
        [(1, 1)],
        global_batch_size=BATCH,
        num_microbatches=1,
    )
    single = pipeshard(train.fuser(0).workload, plan, fast_compile=True)
    alone = checkpoint.restore(single, tmp_path, models=[2])
    assert same((single.params(alone), single.optimizer_state(alone)), saved[2])
    for step, models in ((single, None), (fewer, None), (fewer, [2, 3])):
        with pytest.raises(ExecutionError, match="checkpoint-models"):
            checkpoint.restore(step, tmp_path, models=models)
    checkpoint.save(single, alone, tmp_path / "alone")
    with pytest.raises(ExecutionError, match="checkpoint-models"):
        checkpoint.restore(fewer, tmp_path / "alone")
    of_one = train.of(replace(PLAN, models=MEMBERS[2:], partition=((0,),), order="in turn", decisions=()))  # fmt: skip
    from_one = checkpoint.restore(of_one, tmp_path / "alone")
    assert same((of_one.params(from_one, 0), of_one.optimizer_state(from_one, 0)), saved[2])


def test_what_models_have_of_their_own_is_not_read_as_shared():
    train = trained()
    params, states = (by_path(of[0]) for of in Models(train).structs)
    metadata = {"num_models": 3, "params": {}, "optimizer": {}}
    for model in range(3):
        metadata["params"] |= {f"[{model}]{path}": leaf for path, leaf in params.items()}
        metadata["optimizer"] |= {f"[{model}]{path}": leaf for path, leaf in states.items()}
    models = Models(train)
    found = Sources(models.structs, metadata, [2, 0, 1], models.shared)
    extra = set(found.saved[0]) - set(found.expected[0])
    assert extra == {f"[{m}]{path}" for m in (0, 1) for path in params if "base" in path}
    assert found.paths[0][1]["['base']['head']"] == "[2]['base']['head']"
    assert found.paths[0][1]["['own'][0]['a']"] == "[0]['own'][0]['a']"
