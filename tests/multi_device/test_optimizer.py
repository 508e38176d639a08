"""The sliced optimizer against optax on the whole tree, for any partition of the parameters over
stages."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tracing_models

from capture.errors import WorkloadError
from capture.machine.cluster import Cluster
from capture.plan.stages import Plan, Stage
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer, TracedOptimizer
from capture.runtime.pipeline import pipeshard
from capture.tracing import trace

NUM_STEPS = 3


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_path(params):
    return {
        "decoder": {"w": "adam", "bias": "sgd"},
        "embed": "adam",
        "scale": "frozen",
        "head": "sgd",
    }


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "adamw-masked-decay": optax.adamw(1e-2, weight_decay=0.3, mask=is_matrix),
    "adamw-bfloat16-moment": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-3),
    "noisy-sgd": optax.noisy_sgd(0.1, key=7),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-1, 2, 10)),
    "clip-by-global-norm": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "clip-after-adam": optax.chain(
        optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-0.1)
    ),
    "clip-each": optax.chain(
        optax.clip_by_block_rms(0.5), optax.adaptive_grad_clip(0.1), optax.sgd(0.1)
    ),
    "multi-transform": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1), "frozen": optax.set_to_zero()}, by_path
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 5)
    ),
    "average": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "zero-nans": optax.chain(optax.zero_nans(), optax.adamw(1e-2)),
}


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "decoder": {"w": (8, 12), "bias": (12,)},
        "embed": (16, 8),
        "scale": (12,),
        "head": (8, 12),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return tree.unflatten(
        [jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    )


def gradients(params, step: int):
    return jax.tree.map(lambda p: jnp.sin(3 * p + step) * (1 + step), params)


def partitions(name: str, num_params: int) -> list[list[tuple[int, ...]]]:
    """A stage per parameter in any order, and a draw that may leave a stage without parameters."""
    draw = random.Random(name)
    stage_of = [draw.randrange(3) for _ in range(num_params)]
    return [
        [(p,) for p in draw.sample(range(num_params), num_params)],
        [tuple(p for p in range(num_params) if stage_of[p] == s) for s in range(3)],
    ]


def run_stages(sliced: SlicedOptimizer, params, num_steps: int):
    """Leaves of the parameters and of the state after some steps; what several stages hold must
    agree."""
    leaves = jax.tree.leaves(params)
    own = [[leaves[p] for p in stage.params] for stage in sliced.stages]
    states = [stage.init(values) for stage, values in zip(sliced.stages, own, strict=True)]
    for step in range(num_steps):
        whole = jax.tree.leaves(
            gradients(jax.tree.unflatten(jax.tree.structure(params), collect(sliced, own)), step)
        )
        grads = [[whole[p] for p in stage.params] for stage in sliced.stages]
        summaries = [
            stage.summarize(*args)
            for stage, *args in zip(sliced.stages, own, states, grads, strict=True)
        ]
        for stage, summary in zip(sliced.stages, summaries, strict=True):
            assert [(v.shape, v.dtype) for v in summary] == [
                (v.shape, v.dtype) for v in stage.summary
            ]
        results = [
            stage.update(own[s], states[s], grads[s], summaries[:s] + summaries[s + 1 :])
            for s, stage in enumerate(sliced.stages)
        ]
        own, states = [new for new, _ in results], [state for _, state in results]
    state: dict[int, np.ndarray] = {}
    for stage, values in zip(sliced.stages, states, strict=True):
        for k, value in zip(stage.state, values, strict=True):
            np.testing.assert_array_equal(state.setdefault(k, as_numpy(value)), as_numpy(value))
    assert sorted(state) == list(range(len(sliced.state_structs))), (
        "every leaf of the state is in some stage"
    )
    return collect(sliced, own), [state[k] for k in sorted(state)]


def as_numpy(value) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    )


def collect(sliced: SlicedOptimizer, own):
    found = {
        p: value
        for stage, values in zip(sliced.stages, own, strict=True)
        for p, value in zip(stage.params, values, strict=True)
    }
    return [found[p] for p in sorted(found)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name == "adafactor" else ())
        for name in OPTIMIZERS
    ],
)
def test_stages_together_do_what_optax_does(name, params):
    optimizer = OPTIMIZERS[name]
    expected, state = params, optimizer.init(params)
    for step in range(NUM_STEPS):
        updates, state = optimizer.update(gradients(expected, step), state, expected)
        expected = optax.apply_updates(expected, updates)
    traced = TracedOptimizer(optimizer, params)
    for partition in partitions(name, len(jax.tree.leaves(params))):
        sliced = SlicedOptimizer(traced, partition)
        found, found_state = run_stages(sliced, params, NUM_STEPS)
        close = partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-7)
        jax.tree.map(close, jax.tree.unflatten(jax.tree.structure(params), found), expected)
        jax.tree.map(close, found_state, list(map(as_numpy, jax.tree.leaves(state))))
        assert jax.tree.structure(sliced.unflatten_state(found_state)) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "name",
    ["momentum", "adamw", "lamb", "lion", "adafactor", "clip-by-global-norm", "multi-transform"],
)
def test_state_lives_with_its_parameter(name, params):
    """By name: the path of a state leaf ends in the path of its parameter."""
    traced = TracedOptimizer(OPTIMIZERS[name], params)
    sliced = SlicedOptimizer(traced, partitions(name, len(traced.params))[0])
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(
            traced.state_tree.unflatten(traced.state)
        )
    ]
    for k, (path, struct) in enumerate(zip(paths, traced.state, strict=True)):
        owners = [p for p, name in enumerate(traced.param_names) if path.endswith(name)]
        if owners and struct.size > 1:
            assert traced.param_of_state[k] == owners[0]
        holders = [stage.params for stage in sliced.stages if k in stage.state]
        assert holders == ([(owners[0],)] if owners and struct.size > 1 else holders)
        if not owners:
            assert len(holders) == len(sliced.stages), f"{path} belongs to no parameter"


def test_a_step_count_is_in_every_stage_and_moments_in_one(params):
    sliced = SlicedOptimizer(TracedOptimizer(optax.adam(1e-2), params), [(0, 1), (2,), (3, 4)])
    assert [stage.state for stage in sliced.stages] == [
        (0, 1, 2, 6, 7),
        (0, 3, 8),
        (0, 4, 5, 9, 10),
    ]
    assert [stage.summary for stage in sliced.stages] == [(), (), ()]
    assert [stage.stage_id for stage in sliced.stages[1].others] == [0, 2]


def test_a_global_norm_travels_as_one_small_value_per_parameter_at_most(params):
    sliced = SlicedOptimizer(
        TracedOptimizer(OPTIMIZERS["clip-by-global-norm"], params), [(0, 1), (2, 3), (4,)]
    )
    for stage in sliced.stages:
        assert 1 <= len(stage.summary) <= len(stage.params) and all(
            value.shape == () for value in stage.summary
        )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    ],
    ids=["finite", "multi"],
)
def test_an_update_that_needs_large_tensors_of_another_stage_is_refused(optimizer):
    """Both branch on all parameters at once, in one ``lax.cond``."""
    traced = TracedOptimizer(
        optimizer, {"a": jnp.ones((4, 100)), "b": jnp.ones((4, 100)), "c": jnp.ones(2)}
    )
    with pytest.raises(WorkloadError) as caught:
        SlicedOptimizer(traced, [(0,), (1, 2)])
    assert str(caught.value) == (
        "the optimizer needs a tensor of shape (4, 100) made from gradients of several pipeline "
        "stages (of ['a'], ['b'], ['c'], ...); only "
        "values of up to 256 elements, such as a global norm, travel between stages. Use a "
        "transformation that treats parameters "
        "separately, or a single stage. [optimizer-cross-stage]"
    )
    assert SlicedOptimizer(traced, [(0, 1, 2)]).stages[0].summary == ()


def test_a_large_gradient_of_another_stage_is_refused_even_if_no_state_needs_it():
    """Every parameter is moved by the gradient of the other."""
    swap = optax.stateless(lambda updates, params: {"a": updates["b"], "b": updates["a"]})
    with pytest.raises(WorkloadError) as caught:
        SlicedOptimizer(
            TracedOptimizer(swap, {"a": jnp.ones(300), "b": jnp.ones(300)}), [(0,), (1,)]
        )
    assert caught.value.codes == ("optimizer-cross-stage",)
    assert "a tensor of shape (300,)" in str(caught.value)
    small = SlicedOptimizer(
        TracedOptimizer(swap, {"a": jnp.ones(30), "b": jnp.ones(30)}), [(0,), (1,)]
    )
    assert [[value.shape for value in stage.summary] for stage in small.stages] == [
        [(30,)],
        [(30,)],
    ]


def test_every_parameter_belongs_to_a_stage(params):
    with pytest.raises(AssertionError, match="every parameter belongs to exactly one stage"):
        SlicedOptimizer(TracedOptimizer(optax.sgd(0.1), params), [(0, 1), (2, 3)])


def test_equal_keys_mean_the_same_update(params):
    names = TracedOptimizer(optax.adamw(1e-2), params).param_names
    assert names == [
        "['decoder']['bias']",
        "['decoder']['w']",
        "['embed']",
        "['head']",
        "['scale']",
    ]

    def keys(name):
        return dict(zip(names, TracedOptimizer(OPTIMIZERS[name], params).param_keys, strict=True))

    plain, masked, labelled = keys("adamw"), keys("adamw-masked-decay"), keys("multi-transform")
    assert plain["['decoder']['w']"] == plain["['head']"], "the same shape and rule"
    assert len(set(plain.values())) == 3
    assert masked["['decoder']['w']"] == masked["['head']"]
    assert masked["['decoder']['bias']"] != plain["['decoder']['bias']"], "no decay under the mask"
    assert labelled["['decoder']['w']"] != labelled["['head']"], "adam and sgd"
    assert keys("adamw") == plain, "stable from one trace to the next"


def test_keys_tell_equal_shapes_under_a_mask_apart():
    params = {"decayed": jnp.ones((4, 4)), "plain": jnp.ones((4, 4)), "plain too": jnp.ones((4, 4))}
    mask = {"decayed": True, "plain": False, "plain too": False}
    decayed, plain, plain_too = TracedOptimizer(optax.adamw(1e-2, mask=mask), params).param_keys
    assert decayed != plain == plain_too


def copying(update):
    """A transformation that holds a copy of the parameters, and changes it so."""

    def changed(updates, state, params):
        return updates, jax.tree.map(update, state, params)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.array, params), changed)


@pytest.mark.parametrize(
    "update", [lambda old, new: 0.9 * old + 0.1 * new, lambda old, new: old], ids=["mean", "first"]
)
def test_keys_know_of_state_that_no_parameter_reads(update):
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4))}
    plain = TracedOptimizer(optax.adam(1e-2), params)
    with_copies = TracedOptimizer(optax.chain(optax.adam(1e-2), copying(update)), params)
    assert plain.param_keys[0] == plain.param_keys[1]
    assert with_copies.param_keys[0] == with_copies.param_keys[1] != plain.param_keys[0]


def test_keys_of_stages_without_parameters_know_the_state_that_all_share(params):
    adam, sgd, schedule = (
        TracedOptimizer(OPTIMIZERS[name], params).shared_key
        for name in ("adamw", "sgd", "schedule")
    )
    assert len({adam, sgd, schedule}) == 3
    assert adam == TracedOptimizer(optax.adam(1e-2), params).shared_key, "a count alone"


ONE_BY_ONE = (
    "sgd",
    "momentum",
    "adamw",
    "lion",
    "schedule",
    "clip-by-global-norm",
    "average",
    "zero-nans",
)
AS_A_WHOLE = ("adafactor", "lamb", "clip-each", "adamw-masked-decay")


@pytest.fixture(scope="module")
def scanned():
    """Two leaves that are stacked over four layers, along their first and their last dimension."""
    return trace(tracing_models.scanned(), 4)


@pytest.mark.parametrize("name", [*ONE_BY_ONE, "injected", "noisy-sgd", "multi-steps"])
def test_a_stacked_leaf_is_updated_layer_by_layer_where_that_is_the_same(scanned, name):
    several = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)
    optimizer = several if name == "multi-steps" else OPTIMIZERS[name]
    assert len(traced_optimizer(optimizer, scanned).params) == 4 + 4 + 1


def handing_on(norm):
    """A transformation that divides by what it made of the gradients a step before, and holds it in
    two places."""

    def update(updates, state, params):
        old, new = jax.tree.map(norm, updates), state[0]
        return jax.tree.map(jnp.divide, updates, state[1]), (old, new)

    ones = partial(jax.tree.map, lambda leaf: jnp.ones(()))
    return optax.GradientTransformation(lambda params: (ones(params),) * 2, update)


#: Muon takes a stack of vectors for a matrix, and leaves a stack of matrices to Adam. One
#: ``lax.cond`` does what the last two do to all parameters.
AS_A_WHOLE_TOO = {
    "muon": optax.contrib.muon(1e-3),
    "several-lamb": optax.MultiSteps(optax.lamb(1e-2), every_k_schedule=2),
    "finite-lamb": optax.apply_if_finite(optax.lamb(1e-2), 3),
    "handed-on": handing_on(jnp.linalg.norm),
}


@pytest.mark.parametrize("name", [*AS_A_WHOLE, *AS_A_WHOLE_TOO])
def test_a_stacked_leaf_that_is_updated_as_a_whole_is_refused(scanned, name):
    optimizer = {**OPTIMIZERS, **AS_A_WHOLE_TOO}[name]
    with pytest.raises(WorkloadError) as caught:
        traced_optimizer(optimizer, scanned)
    assert caught.value.codes == ("optimizer-stacked",)
    assert "over 4 layers" in str(caught.value)


def test_a_pipeline_refuses_an_optimizer_that_would_train_a_stack_otherwise():
    workload = replace(tracing_models.scanned(), optimizer=optax.lamb(1e-2))
    stages = (Stage(0, 2, (0,)), Stage(2, 5, (1,)))
    plan = Plan(Cluster((2,)), 5, stages, 8, 2, "1f1b")
    with pytest.raises(WorkloadError, match="optimizer-stacked"):
        pipeshard(workload, plan, fast_compile=True)
