"""Sharding plans as programs: the same loss and gradients as plain data parallelism, the
collectives of the plan, and where arrays lie."""

from __future__ import annotations

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from capture.cli.main import main
from capture.compiler.work import work_of_module
from capture.errors import CaptureError, PlanError, WorkloadError
from capture.machine.cluster import Cluster
from capture.model.workload import Workload, WorkloadSpec
from capture.plan.sharding import DP, ZDP, Mode, ShardingPlan
from capture.runtime.sharded import Sharded, shard
from capture.runtime.sharded.placement import SplitLeaf
from capture.tracing.operators import TracedOperators, traced_operators
from recommender.osdp import ShardingQuestion
from recommender.osdp import osdp as verified_osdp

#: Plans by their estimate: what the compiler says of them is ``test_osdp_verified.py``'s.
osdp = partial(verified_osdp, verify=False)

ROWS, WIDTH, HIDDEN = 40, 24, 56


def mlp(scan: bool = False) -> Workload:
    """A table, products of uneven sizes, one of them with its weights transposed, biases that eight
    devices do not divide, a tied head."""

    def init(key):
        keys = iter(jax.random.split(key, 8))
        params = {
            "table": jax.random.normal(next(keys), (ROWS, WIDTH)),
            "up": {
                "w": jax.random.normal(next(keys), (HIDDEN, WIDTH)),
                "b": jax.random.normal(next(keys), (HIDDEN,)),
            },
            "down": {
                "w": jax.random.normal(next(keys), (HIDDEN, 7, 8)),
                "b": jax.random.normal(next(keys), (7,)),
            },
            "out": jax.random.normal(next(keys), (7, 8, WIDTH)),
        }
        return (
            {**params, "layers": jax.random.normal(next(keys), (3, WIDTH, WIDTH))}
            if scan
            else params
        )

    def loss(p, batch):
        x = p["table"][batch["tokens"]]
        x = jnp.tanh(x @ p["up"]["w"].T + p["up"]["b"])
        x = jnp.tanh(jnp.einsum("btd,dhk->bthk", x, p["down"]["w"]) + p["down"]["b"][:, None])
        x = jnp.einsum("bthk,hkd->btd", x, p["out"]) / 8
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
        scores = x @ p["table"].T / 8
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
        return (
            jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]))
            + 1e-4 * penalty
        )

    def batch(key, n):
        return {
            name: jax.random.randint(k, (n, 5), 0, ROWS)
            for name, k in zip(("tokens", "labels"), jax.random.split(key), strict=True)
        }

    return Workload(loss, init, batch, optax.adamw(1e-2))


def convolutions() -> Workload:
    """Two convolutions, the second in two groups, and a head, the activations between them
    rematerialised by the model."""

    def init(key):
        a, b, c = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(a, (3, 3, 3, 16)),
            "second": jax.random.normal(b, (3, 3, 8, 16)),
            "head": jax.random.normal(c, (16, 10)),
        }

    def loss(p, batch):
        def convolved(x, kernel, groups):
            return jax.lax.conv_general_dilated(
                x,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        @jax.checkpoint
        def both(p, x):
            return jnp.tanh(convolved(jnp.tanh(convolved(x, p["first"], 1)), p["second"], 2))

        return jnp.mean((both(p, batch["x"]).mean((1, 2)) @ p["head"]) ** 2)

    return Workload(
        loss, init, lambda key, n: {"x": jax.random.normal(key, (n, 6, 6, 3))}, optax.sgd(1e-2)
    )


WORKLOADS = {
    "mlp": mlp,
    "scan": lambda: mlp(scan=True),
    "convolutions": convolutions,
    "gpt": lambda: WorkloadSpec.parse(
        "models/gpt.py:gpt?size=tiny&num_layers=1&dtype=bfloat16"
    ).load(),
    "moe": lambda: WorkloadSpec.parse("models/moe.py:moe?size=tiny&num_layers=2").load(),
}


@cache
def operators_of(name: str) -> tuple[Workload, TracedOperators]:
    workload = WORKLOADS[name]()
    return workload, traced_operators(workload, name)


def sharded_by(
    name: str, *modes: Mode, mesh: Mesh | None = None, smallest_bytes: int = 0, **options: bool
) -> Sharded:
    """A workload with its operators in these modes in turn."""
    workload, operators = operators_of(name)
    names = [operator.name for operator in operators.model.blocks[0].operators]
    chosen = tuple(modes[i % len(modes)] for i in range(len(names)))
    plan = ShardingPlan(
        2,
        chosen,
        1.0,
        1,
        1.0,
        tuple(names),
        operators.names,
        smallest_bytes=smallest_bytes,
        **options,
    )
    return Sharded(workload, plan, mesh or all_devices(), operators.traced)


def all_devices() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


def two_nodes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "data"))


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


@pytest.mark.parametrize("mode", [DP, ZDP, Mode(4, 4), Mode(4, 1), Mode(3, 2)], ids=str)
def test_loss_and_gradients_are_those_of_plain_data_parallelism(mode):
    check("mlp", sharded_by("mlp", mode))


@pytest.mark.parametrize(
    ("name", "modes", "look_ahead", "tolerance"),
    [
        ("mlp", (ZDP, DP, Mode(4, 4)), True, 2e-5),
        ("convolutions", (Mode(2, 2), ZDP, DP), True, 2e-5),
        (
            "gpt",
            (Mode(3, 3), DP, ZDP, Mode(4, 1)),
            False,
            0.1,
        ),  # in bfloat16, where slices and devices are summed up in another order
        ("moe", (ZDP, DP, Mode(2, 2)), False, 2e-5),
    ],
)
def test_operators_in_several_modes(name, modes, look_ahead, tolerance):
    check(name, sharded_by(name, *modes, look_ahead=look_ahead), tolerance)


def test_rematerialised_operators():
    check("mlp", sharded_by("mlp", Mode(3, 1), remat=True))


@pytest.mark.parametrize(
    ("name", "modes", "remat"), [("scan", (Mode(4, 4),), False), ("mlp", (ZDP, Mode(3, 3)), True)]
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


# ---- collectives ---------------------------------------------------------------------------------


def chain() -> Workload:
    """Three products with square weights, and nothing else to communicate but the loss."""

    def loss(p, batch):
        x = batch["x"]
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    return Workload(
        loss,
        lambda key: [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 3)],
        lambda key, n: {"x": jax.random.normal(key, (n, 64))},
        optax.sgd(1e-2),
    )


WORKLOADS["chain"] = chain


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


# ---- where arrays lie ----------------------------------------------------------------------------


def test_shardings_of_parameters_and_of_the_optimizer():
    sharded = sharded_by("mlp", ZDP)
    shardings = sharded.shardings(jax.eval_shape(operators_of("mlp")[0].init, jax.random.key(0)))
    axes = ("data",)
    assert jax.tree.map(lambda s: s.spec, shardings) == {
        "table": PartitionSpec(axes),
        "up": {"w": PartitionSpec(axes), "b": PartitionSpec(axes)},
        "down": {"w": PartitionSpec(axes), "b": PartitionSpec()},  # 7 elements
        "out": PartitionSpec(
            None, axes
        ),  # [7, 8, 24]: its first dimension that eight devices divide
    }
    assert sharded.replicated == ("down/b",)
    adam = sharded.opt_state_shardings[0]
    assert adam.mu == adam.nu == shardings and adam.count.spec == PartitionSpec()
    split = sharded_by("mlp", Mode(4, 4)).shardings()
    assert split["up"]["w"].spec == PartitionSpec(axes) and split["down"][
        "w"
    ].spec == PartitionSpec(axes)
    assert split["table"].spec == PartitionSpec(axes)  # read as a table and as a product: not split
    small = sharded_by("mlp", ZDP, smallest_bytes=WIDTH * HIDDEN * 4 + 1)
    assert set(small.replicated) == {"down/b", "out", "table", "up/b", "up/w"}


def test_a_leaf_of_which_a_part_is_sharded_is_two():
    sharded = sharded_by("mlp", Mode(4, 1))
    params = operators_of("mlp")[0].init(jax.random.key(0))
    split = sharded.split(params)
    assert isinstance(split["up"]["w"], SplitLeaf) and not isinstance(split["table"], SplitLeaf)
    assert split["up"]["w"].replicated.shape == (HIDDEN, 18) and split["up"]["w"].sharded.shape == (
        HIDDEN,
        6,
    )
    jax.tree.map(np.testing.assert_array_equal, sharded.join(split), params)
    adam = sharded.opt_state_shardings[0]
    assert adam.mu["up"]["w"] == sharded.shardings()["up"]["w"]
    whole = sharded_by("mlp", Mode(4, 4)).split(params)
    assert jax.tree.structure(whole) == jax.tree.structure(params)


# ---- from a task ---------------------------------------------------------------------------------


def test_from_a_task_to_shardings(tmp_path):
    workload = mlp()
    everything = osdp(
        ShardingQuestion(workload, all_devices(), target="h100", batch_size=2, smallest_bytes=0)
    )
    assert everything.status == "ok" and set(everything.plan.modes) == {DP}
    tight = osdp(
        ShardingQuestion(
            workload,
            all_devices(),
            everything.plan.peak_bytes * 0.75,
            target="h100",
            batch_size=2,
            smallest_bytes=0,
        )
    )
    assert tight.plan.peak_bytes <= everything.plan.peak_bytes * 0.75
    assert (
        tight.plan.sharded_fraction > 0 and tight.plan.step_seconds > everything.plan.step_seconds
    )
    assert all(mode.num_sharded in (0, mode.num_slices) for mode in tight.plan.modes)
    specs = jax.tree.map(lambda s: s.spec, shard(workload, tight.plan, all_devices()).shardings())
    assert set(jax.tree.leaves(specs)) > {PartitionSpec()}
    assert sum(cost.seconds for cost in tight.plan.costs) == pytest.approx(tight.plan.step_seconds)
    assert sum(sum(cost.at_peak.values()) for cost in tight.plan.costs) == tight.plan.peak_bytes
    tight.plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == tight.plan
    cluster = osdp(
        ShardingQuestion(
            workload,
            Cluster((4, 4), "h100"),
            "80GB",
            max_batch_size=4,
            smallest_bytes=0,
            overlap_fraction=0.5,
        )
    )
    assert cluster.plan.look_ahead and not tight.plan.look_ahead
    over_nodes = shard(workload, cluster.plan, Cluster((4, 4), "h100"))
    assert dict(over_nodes.mesh.shape) == {"node": 2, "data": 4}
    assert over_nodes.batch_sharding.spec == PartitionSpec(("node", "data"))


def test_the_steps_of_a_scan_get_one_mode():
    workload = mlp(scan=True)
    whole = osdp(
        ShardingQuestion(workload, all_devices(), target="h100", batch_size=1, smallest_bytes=0)
    ).plan.peak_bytes
    for fraction in (0.9, 0.8, 0.7):
        found = osdp(
            ShardingQuestion(
                workload,
                all_devices(),
                whole * fraction,
                target="h100",
                batch_size=1,
                smallest_bytes=0,
            )
        )
        modes = {found.plan.mode_of_param[f"layers[{i}]"] for i in range(3)}
        assert len(modes) == 1 and found.plan.peak_bytes <= whole * fraction
        shard(workload, found.plan, all_devices()).shardings()


def test_what_does_not_fit_says_so():
    found = osdp(
        ShardingQuestion(mlp(), all_devices(), 1000, target="h100", batch_size=3, smallest_bytes=0)
    )
    assert found.status == "infeasible" and found.plan is None
    assert found.why.summary.startswith("3 examples per device: ") and str(found).startswith(
        "infeasible: 3 examples"
    )
    with pytest.raises(PlanError, match=r"there is no plan to shard by: .*\[osdp-infeasible\]$"):
        shard(mlp(), found.plan, all_devices())


def code_of(function) -> str:
    with pytest.raises(CaptureError) as caught:
        function()
    (code,) = caught.value.codes
    return code


@pytest.mark.parametrize(("smallest_bytes", "partly"), [(256, False), (0, False), (0, True)])
def test_steps_of_a_scan_get_modes_that_can_be_emitted(smallest_bytes, partly):
    """Arrays of the steps belong to different operators: the normalisation of a step to what comes
    before its first product."""

    def loss(p, batch):
        def layer(x, own):
            return x + jnp.tanh((x * own["scale"]) @ own["up"]) @ own["down"], None

        return jnp.mean(jax.lax.scan(layer, batch["x"] @ p["first"], p["layers"])[0] ** 2)

    layers = {"scale": jnp.ones((3, 8)), "up": jnp.ones((3, 8, 64)), "down": jnp.ones((3, 64, 8))}
    workload = Workload(
        loss,
        lambda key: {"first": jnp.ones((8, 8)), "layers": layers},
        lambda key, n: {"x": jnp.ones((n, 8))},
        optax.adam(0.1),
    )
    options = {
        "target": "h100",
        "batch_size": 1,
        "smallest_bytes": smallest_bytes,
        "partly": partly,
    }
    most = osdp(ShardingQuestion(workload, all_devices(), **options)).plan.peak_bytes
    seen = set()
    for fraction in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        found = osdp(ShardingQuestion(workload, all_devices(), most * fraction, **options))
        if found.plan is not None:
            seen.add(str(shard(workload, found.plan, all_devices()).shardings()))
    assert len(seen) > 1


def test_what_is_refused(tmp_path):
    workload, _ = operators_of("mlp")
    sharded = sharded_by("mlp", ZDP)
    params, batch = (
        jax.eval_shape(workload.init, jax.random.key(0)),
        workload.batch(jax.random.key(0), 8),
    )
    assert code_of(lambda: osdp(ShardingQuestion(workload, all_devices()))) == "osdp-target"
    wrong = {"memory_limit": 0, "batch_size": 2.5, "granularities": (), "smallest_bytes": -1}
    with pytest.raises(PlanError) as error:
        osdp(ShardingQuestion(workload, Cluster((8,), "h100"), **wrong))
    assert error.value.codes == (
        "osdp-limit",
        "osdp-batch-size",
        "osdp-granularity",
        "osdp-smallest",
    )
    assert (
        code_of(lambda: osdp(ShardingQuestion(workload, Cluster((8,), "h100"), dtype="fp8")))
        == "osdp-dtype"
    )
    assert code_of(lambda: osdp(ShardingQuestion(workload, 8))) == "osdp-where"
    bare = Workload(
        lambda p, batch: jnp.mean(batch["labels"] * 1.0),
        lambda key: {},
        workload.batch,
        workload.optimizer,
    )
    assert code_of(lambda: osdp(ShardingQuestion(bare, Cluster((8,), "h100")))) == "trace-params"
    assert (
        "smaller than smallest_bytes=1,048,576"
        in osdp(
            ShardingQuestion(workload, all_devices(), 1, target="h100", batch_size=1)
        ).why.summary
    )
    assert (
        code_of(
            lambda: osdp(
                ShardingQuestion(workload, all_devices(), target="h100", devices_per_node=3)
            )
        )
        == "osdp-nodes"
    )
    for_16 = osdp(ShardingQuestion(workload, Cluster((16,), "h100"), max_batch_size=1)).plan
    assert code_of(lambda: shard(workload, for_16, Cluster((16,), "h100"))) == "osdp-devices"
    assert code_of(lambda: sharded_by("mlp", Mode(1, 1, 4))) == "osdp-mesh"
    assert code_of(lambda: sharded_by("scan", ZDP, DP)) == "osdp-scan"
    of_chain = sharded_by("chain", DP).plan
    assert code_of(lambda: shard(workload, of_chain, all_devices())) == "osdp-plan-params"
    with pytest.raises(
        PlanError, match=r"'down/w' has shape none and should have \(56, 7, 8\); .*\[osdp-params\]$"
    ):
        sharded.shardings({**params, "down": {"b": params["down"]["b"]}})
    for has_aux, result, message in (
        (
            False,
            (0.0, jnp.zeros(3)),
            r"the loss returns 2 arrays of shapes \(\), \(3,\); .* pass has_aux=True to "
            r"transform\. \[osdp-loss\]",
        ),
        (
            True,
            (jnp.zeros(3), 0.0),
            r"the loss is 1 array of shape \(3,\); return one scalar\. \[osdp-loss\]",
        ),
        (
            True,
            0.0,
            r"has_aux=True, but the loss returns 1 array of shape \(\); return \(loss, aux\)\. "
            r"\[osdp-loss\]",
        ),
    ):
        with pytest.raises(WorkloadError, match=message):
            jax.eval_shape(
                sharded.transform(lambda p, b, result=result: result, has_aux), params, batch
            )
    with pytest.raises(
        WorkloadError, match=r"the loss scans over other parameters .*\[osdp-loss\]"
    ):
        jax.eval_shape(
            sharded_by("scan", ZDP).transform(workload.loss_fn),
            operators_of("scan")[1].traced.params_struct,
            batch,
        )
    data = json.loads(json.dumps(sharded.plan.to_json()))
    assert ShardingPlan.from_json(data) == sharded.plan
    assert (
        code_of(lambda: ShardingPlan.from_json({**data, "schema_version": 9})) == "osdp-plan-schema"
    )
    data["operators"][0]["mode"]["num_sharded"] = 5
    assert code_of(lambda: ShardingPlan.from_json(data)) == "osdp-plan-corrupt"
    assert code_of(lambda: ShardingPlan.load(tmp_path / "none.json")) == "osdp-plan-file"


def test_from_the_command_line(capsys, tmp_path):
    command = [
        "osdp",
        "models/gpt.py:gpt?size=tiny&num_layers=2",
        "--cluster",
        "1x8",
        "--target",
        "h100",
        "--batch",
        "2",
    ]
    assert (
        main(
            [
                *command,
                "--no-verify",
                "--memory",
                "1GB",
                "--overlap",
                "0.5",
                "-o",
                str(tmp_path / "plan.json"),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    header = "operator mode parameters resident transient at the peak time"
    assert printed.splitlines()[0].split() == header.split()
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert (
        f"{len(plan.modes)} operators: {len(plan.modes)} DP; 2 examples per device" in printed
        and plan.look_ahead
    )
    assert main([*command, "--no-verify", "--memory", "1kB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "infeasible"


def test_smaller_parameters_are_sharded_where_they_are_asked_to_be(capsys, tmp_path):
    command = ["osdp", "capture.cli.tiny_gpt:gpt", "--cluster", "1x4", "--target", "h100"]
    command += ["--memory", "6MB", "--no-verify", "-o", str(tmp_path / "plan.json")]
    assert main(command) == 1 and "no parameter can be sharded" in capsys.readouterr().out
    assert main([*command, "--smallest", "4KiB"]) == 0
    assert ShardingPlan.load(tmp_path / "plan.json").smallest_bytes == 4096
