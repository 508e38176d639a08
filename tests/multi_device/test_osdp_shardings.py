"""Where a sharded task's arrays lie, from a task to its shardings, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from refusals import code_of
from sharded_models import HIDDEN, WIDTH, all_devices, mlp, operators_of, sharded_by

from capture.cli.main import main
from capture.errors import PlanError, WorkloadError
from capture.machine.cluster import Cluster
from capture.model.workload import Workload
from capture.plan.sharding import DP, ZDP, Mode, ShardingPlan
from capture.runtime.sharded import Sharded, shard
from capture.runtime.sharded.placement import SplitLeaf, check_partly
from recommender.osdp import ShardingQuestion
from recommender.osdp import osdp as verified_osdp
from recommender.osdp.recommendation import costs_of

# ---- where arrays lie ----------------------------------------------------------------------------


#: Plans by their estimate: what the compiler says of them is ``test_osdp_verified.py``'s.
osdp = partial(verified_osdp, verify=False)


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


def test_leaves_that_an_optimizer_asks_for_as_a_whole_are_not_held_in_two():
    workload, operators = operators_of("mlp")
    partly, whole = (sharded_by("mlp", Mode(4, k)).plan for k in (1, 4))
    lamb = replace(workload, optimizer=optax.lamb(1e-2))
    Sharded(lamb, whole, all_devices(), operators.traced)
    for one_by_one, refused in [(optax.lamb(1e-2), True), (optax.adam(1e-2), False)]:
        optimizer = optax.MultiSteps(one_by_one, 2)
        asking = replace(workload, optimizer=optimizer)
        codes = []
        for refuse in (
            lambda w=asking: Sharded(w, partly, all_devices(), operators.traced),
            lambda o=optimizer: check_partly(o, operators.traced, 8, 0),
        ):
            with nullcontext() if not refused else pytest.raises(WorkloadError) as caught:
                refuse()
            codes += caught.value.codes if refused else ()
        assert codes == ["optimizer-rows"] * 2 * refused
    check_partly(optax.lamb(1e-2), operators.traced, 8, 10**9)  # all are too small to be sharded
    question = ShardingQuestion(lamb, all_devices(), target="h100", smallest_bytes=0, partly=True)
    with pytest.raises(WorkloadError, match="optimizer-rows"):
        costs_of(question)


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
    assert code_of(lambda: shard(workload, of_chain, all_devices())) == "plan-other-model"
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
