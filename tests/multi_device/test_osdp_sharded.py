"""Sharding plans as programs: the same loss and gradients as plain data parallelism, the
collectives of the plan, and where arrays lie."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from sharded_models import operators_of, sharded_by, two_nodes

from capture.compiler.work import work_of_module
from capture.plan.sharding import DP, ZDP, Mode
from capture.runtime.sharded import Sharded


@cache
def expected(name: str):
    """Parameters, batch, loss and gradients, on one device."""
    workload, _ = operators_of(name)
    params, batch = workload.init(jax.random.key(0)), workload.batch(jax.random.key(1), 16)
    return params, batch, *jax.jit(jax.value_and_grad(workload.loss_fn))(params, batch)


def check(name: str, sharded: Sharded, tolerance: float = 2e-5) -> None:
    params, batch, loss, gradients = expected(name)
    held = jax.device_put(sharded.split(params), sharded.shardings())
    step = jax.jit(
        jax.value_and_grad(sharded.transform(operators_of(name)[0].loss_fn)),
        out_shardings=(None, sharded.shardings()),
    )
    found, of_params = step(held, jax.device_put(batch, sharded.batch_sharding))
    same((found, sharded.join(of_params)), (loss, gradients), tolerance)


def same(found, wanted, tolerance: float = 2e-5) -> None:
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        scale = max(float(jnp.abs(theirs).max()), 1e-6)
        np.testing.assert_allclose(
            ours, theirs, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param((DP,), marks=pytest.mark.exhaustive),
        (ZDP,),
        (Mode(4, 4), Mode(4, 1), Mode(3, 2)),
        pytest.param((Mode(4, 1), Mode(3, 2), Mode(4, 4)), marks=pytest.mark.exhaustive),
        pytest.param((Mode(3, 2), Mode(4, 4), Mode(4, 1)), marks=pytest.mark.exhaustive),
    ],
    ids=lambda modes: ", ".join(map(str, modes)),
)
def test_loss_and_gradients_are_those_of_plain_data_parallelism(modes):
    check("mlp", sharded_by("mlp", *modes))


@pytest.mark.parametrize(
    ("name", "modes", "look_ahead", "tolerance"),
    [
        ("mlp", (ZDP, DP, Mode(4, 4)), True, 2e-5),
        ("convolutions", (Mode(2, 2), ZDP, DP), True, 2e-5),
        # In bfloat16, where slices and devices are summed up in another order.
        pytest.param("gpt", (Mode(3, 3), DP, ZDP, Mode(4, 1)), False, 0.1, marks=pytest.mark.slow),
        pytest.param("moe", (ZDP, DP, Mode(2, 2)), False, 2e-5, marks=pytest.mark.slow),
    ],
)
def test_operators_in_several_modes(name, modes, look_ahead, tolerance):
    check(name, sharded_by(name, *modes, look_ahead=look_ahead), tolerance)


def test_rematerialised_operators():
    check("mlp", sharded_by("mlp", Mode(3, 1), remat=True))


@pytest.mark.parametrize(
    ("name", "modes", "remat"),
    [
        pytest.param("scan", (Mode(4, 4),), False, marks=pytest.mark.slow),
        ("mlp", (ZDP, Mode(3, 3)), True),
    ],
)
def test_auxiliary_results(name, modes, remat):
    """Of some operators and of none, of the batch alone, parameters as they are held and as they
    are read, numbers, and a key."""
    workload, _ = operators_of(name)

    def loss_fn(p, batch, key):
        hidden = jax.nn.relu(p["table"][batch["tokens"]] @ p["up"]["w"].T)
        aux = {
            "hidden": hidden,
            "best": jnp.argmax(hidden, -1),
            "num_tokens": jnp.sum(batch["tokens"] >= 0),
            "batch": batch,
            "params": (p, p["up"]["w"].T.astype(jnp.bfloat16), jnp.sum(p["out"])),
            "numbers": (3, 2.5, True, jnp.arange(3), None),
            "key": jax.random.split(key)[0],
        }
        return workload.loss_fn(p, batch), aux

    params, batch, loss, gradients = expected(name)
    sharded, key = sharded_by(name, *modes, remat=remat), jax.random.key(2)
    wanted = jax.jit(loss_fn)(params, batch, key)[1]
    step = jax.jit(jax.value_and_grad(sharded.transform(loss_fn, has_aux=True), has_aux=True))
    (found, aux), of_params = step(
        jax.device_put(params, sharded.shardings()),
        jax.device_put(batch, sharded.batch_sharding),
        key,
    )
    same((found, of_params), (loss, gradients))
    assert jax.tree.structure(aux) == jax.tree.structure(wanted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), aux) == jax.tree.map(
        lambda x: (x.shape, x.dtype), wanted
    )
    assert aux.pop("key") == wanted.pop("key")
    same(aux, wanted)


def test_shared_inside_a_node():
    sharded = sharded_by("mlp", Mode(1, 1, 4), Mode(2, 2, 4), ZDP, mesh=two_nodes())
    assert sharded.shardings()["table"].spec == PartitionSpec(("data",))
    check("mlp", sharded)


def test_steps_of_training_are_the_same():
    workload, _ = operators_of("mlp")
    sharded = sharded_by("mlp", ZDP, Mode(3, 3), DP, Mode(4, 1))

    @jax.jit
    def plain_step(params, state, batch):
        loss, gradients = jax.value_and_grad(workload.loss_fn)(params, batch)
        updates, state = workload.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train(step, params, state, place):
        losses = []
        for i in range(4):
            batch = jax.device_put(workload.batch(jax.random.key(i), 16), place)
            params, state, loss = step(params, state, batch)
            losses.append(float(loss))
        return params, losses

    params = workload.init(jax.random.key(0))
    wanted, losses = train(plain_step, params, workload.optimizer.init(params), None)
    found, found_losses = train(
        sharded.step, *sharded.init(jax.random.key(0)), sharded.batch_sharding
    )
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(sharded.join(found)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("mode", "options", "gathers", "nbytes"),
    [
        (DP, {}, 0, 0),
        (
            ZDP,
            {},
            5,
            64 * 64 * 4,
        ),  # the first operator's input needs no gradient, so its weights are gathered once
        (Mode(4, 4), {}, 5 * 4, 64 * 16 * 4),
        (Mode(4, 1), {"look_ahead": True}, 5, 64 * 16 * 4),
        (
            ZDP,
            {"remat": True},
            7,
            64 * 64 * 4,
        ),  # and once more where the forward pass is repeated, not for the last operator
    ],
)
def test_parameters_are_gathered_as_planned(mode, options, gathers, nbytes):
    workload, _ = operators_of("chain")
    assert gathered(sharded_by("chain", mode, **options), workload.loss_fn) == (
        {nbytes: gathers} if gathers else {}
    )


def test_what_only_auxiliary_results_need_is_not_taken_backwards():
    workload, _ = operators_of("chain")

    def loss_fn(p, batch):
        return workload.loss_fn(p, batch), jnp.sin(batch["x"] @ p[0]) @ p[1]

    assert gathered(sharded_by("chain", ZDP), loss_fn, has_aux=True) == {64 * 64 * 4: 5 + 2}


def gathered(sharded: Sharded, loss_fn, has_aux: bool = False) -> dict[int, int]:
    """How many gathers of so many bytes are in the step of ``chain``."""
    workload, _ = operators_of("chain")
    params, batch = (
        jax.eval_shape(workload.init, jax.random.key(0)),
        jax.eval_shape(lambda key: workload.batch(key, 16), jax.random.key(0)),
    )
    structs = [
        jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(sharded.split, params),
            sharded.shardings(),
        ),
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded.batch_sharding), batch
        ),
    ]
    step = jax.jit(
        jax.value_and_grad(sharded.transform(loss_fn, has_aux), has_aux=has_aux),
        out_shardings=(None, sharded.shardings()),
    )
    (module,) = step.lower(*structs).compile().runtime_executable().hlo_modules()
    return {c.nbytes: c.count for c in work_of_module(module).collectives if c.kind == "all-gather"}
