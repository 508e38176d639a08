"""Plans: all broken rules at once, word for word; the JSON form; files that move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import ClusterError, PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.stage import Stage
from capture.plan.stages import REMAT_POLICIES, Plan, batch_violations
from capture.plan.why import CompiledPlans, Front, FrontPoint, Why


def two_stages(**changes) -> Plan:
    stages = (
        Stage(0, 2, (0, 1), StageChoice(data_parallel=2)),
        Stage(2, 3, (2, 3), StageChoice(tensor_parallel=2)),
    )
    return Plan(
        **{
            "cluster": Cluster((4,)),
            "num_layers": 3,
            "stages": stages,
            "global_batch_size": 16,
            "num_microbatches": 4,
        }
        | changes
    )


def messages(call) -> list[str]:
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value).splitlines()


NUMBERS = st.integers(0, 10**12)
PARTS = st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)
PREDICTIONS = st.builds(
    Prediction,
    st.lists(
        st.builds(
            StagePrediction,
            NUMBERS,
            st.tuples(NUMBERS, NUMBERS),
            st.text(max_size=3),
            PARTS,
            st.lists(PARTS, max_size=2).map(tuple),
            st.booleans(),
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple),
    PARTS,
    st.none() | st.floats(0, 1),
)
WHYS = st.builds(Why, st.text(max_size=3), num_choices=st.none() | NUMBERS) | st.builds(
    Why,
    st.text(max_size=3),
    code=st.text(max_size=3),
    memory_limit_bytes=st.none() | NUMBERS,
    stage_id=st.none() | NUMBERS,
    verified=st.none() | st.builds(CompiledPlans, NUMBERS, st.booleans(), st.text(max_size=3)),
    front=st.none()
    | st.builds(
        Front,
        st.just((FrontPoint(3, 0.5, 0.0, (Stage(0, 2, (0, 1), StageChoice(2)),)),)),
        st.booleans(),
    ),
)


@st.composite
def plans(draw) -> Plan:
    """Any valid plan."""
    num_stages = draw(st.integers(1, 4))
    stages, layer, device = [], 0, 0
    for _ in range(num_stages):
        num_layers, data_parallel, tensor_parallel = (
            draw(st.integers(1, 3)),
            draw(st.sampled_from([1, 2, 4])),
            draw(st.integers(1, 3)),
        )
        degree = data_parallel * tensor_parallel
        stages.append(
            Stage(
                layer,
                layer + num_layers,
                tuple(draw(st.permutations(range(device, device + degree)))),
                StageChoice(
                    data_parallel,
                    tensor_parallel,
                    draw(st.sampled_from(REMAT_POLICIES)),
                    draw(st.booleans()),
                ),
            )
        )
        layer, device = layer + num_layers, device + degree
    num_microbatches = draw(st.integers(1, 5))
    split = draw(st.integers(1, device))
    return Plan(
        cluster=Cluster(
            (device,) if split == device else (split, device - split),
            draw(st.sampled_from(["cpu", "a100-40g"])),
        ),
        num_layers=layer,
        stages=tuple(stages),
        global_batch_size=4 * num_microbatches * draw(st.integers(1, 3)),
        num_microbatches=num_microbatches,
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        auto_layers=draw(st.booleans()),
        tensor_parallel_rule=draw(st.sampled_from(["auto", "largest"])),
        model_hash=draw(st.text("0123456789abcdef", max_size=16)),
        workload=draw(
            st.none()
            | st.just(
                WorkloadSpec(
                    "models/gpt.py", "gpt", {"size": "tiny", "tied": True, "depth": 3, "rate": 0.1}
                )
            )
        ),
        prediction=draw(st.none() | PREDICTIONS),
        why=draw(st.none() | WHYS),
    )


@given(plans())
def test_json_round_trip(plan):
    document = json.loads(json.dumps(plan.to_json()))
    again = Plan.from_json(document)
    assert again == plan
    assert (again.prediction, again.why) == (plan.prediction, plan.why), (
        "these do not count in the comparison"
    )
    assert again.to_json() == document


@given(plans())
def test_stages_cover_the_layers_and_the_devices_once(plan):
    assert [plan.stage_of_layer(i) for i in range(plan.num_layers)] == sorted(
        plan.stage_of_layer(i) for i in range(plan.num_layers)
    )
    assert sum(stage.stop - stage.first for stage in plan.stages) == plan.num_layers
    assert sorted(d for stage in plan.stages for d in stage.devices) == list(
        range(plan.cluster.num_devices)
    )
    assert plan.microbatch_size * plan.num_microbatches == plan.global_batch_size
    assert plan.schedule_table.num_stages == plan.num_stages


def test_the_document_names_its_units_and_what_follows_from_the_fields():
    document = two_stages().to_json()
    assert document == {
        "schema_version": 2,
        "kind": "stages",
        "workload": None,
        "model_hash": "",
        "cluster": {"nodes": [4], "target_per_node": ["cpu"]},
        "num_layers": 3,
        "auto_layers": False,
        "global_batch_size": 16,
        "num_microbatches": 4,
        "microbatch_size": 4,
        "schedule": "1f1b",
        "tensor_parallel_rule": "auto",
        "stages": [
            {
                "layers": [0, 1],
                "num_devices": 2,
                "devices": [0, 1],
                "data_parallel": 2,
                "tensor_parallel": 1,
            }
            | {"remat": "none", "shard_optimizer": False, "shard_params": False},
            {
                "layers": [2, 2],
                "num_devices": 2,
                "devices": [2, 3],
                "data_parallel": 1,
                "tensor_parallel": 2,
            }
            | {"remat": "none", "shard_optimizer": False, "shard_params": False},
        ],
        "prediction": None,
        "why": None,
        "verification": None,
    }


# ---- broken rules --------------------------------------------------------------------------------


def test_all_violations_are_reported_at_once():
    stages = (
        Stage(0, 1, (0, 4), StageChoice(data_parallel=3)),
        Stage(2, 4, (0,), StageChoice(remat="some")),
        Stage(4, 6, (1, 2, 3), StageChoice(data_parallel=3)),
    )
    call = lambda: Plan(  # noqa: E731
        Cluster((4,)), 7, stages, 16, 4, schedule="zigzag", tensor_parallel_rule="most"
    )
    assert messages(call) == [
        "schedule='zigzag' is unknown; choose one of gpipe, 1f1b. [plan-schedule]",
        "tensor_parallel_rule='most' is unknown; choose one of auto, largest. [plan-rule]",
        "stage 1 has layers=[2, 3] but must begin at layer 1 and hold at least one layer; stages "
        "cover the layers once, in order. "
        "[plan-layers]",
        "stages end before layer 6 of num_layers=7; they must cover every layer. [plan-layers]",
        "stage 0 uses device 4; a cluster 1x4 has devices 0 to 3. [plan-devices]",
        "device 0 is used by stage 0 and stage 1; once is allowed. [plan-devices]",
        "stage 0 has data_parallel=3 x tensor_parallel=1 on 2 devices; the product must be the "
        "number of devices. [plan-degrees]",
        "stage 1 has remat='some'; choose one of none, cheap, dots, full. [plan-remat]",
        "microbatch_size=4 (global batch 16 / 4 micro-batches) is not divisible by "
        "data_parallel=3 of stage 2; lower the degree or the "
        "number of micro-batches. [plan-batch]",
    ]


def test_codes_can_be_read_by_scripts():
    with pytest.raises(PlanError) as caught:
        two_stages(schedule="zigzag", num_microbatches=3)
    assert caught.value.codes == ("plan-batch", "plan-schedule")


@pytest.mark.parametrize(
    ("global_batch_size", "num_microbatches", "expected"),
    [
        (
            16,
            3,
            "global_batch_size=16 is not divisible by num_microbatches=3; 15 would be. "
            "[plan-batch]",
        ),
        (
            3,
            4,
            "global_batch_size=3 is not divisible by num_microbatches=4; 4 would be. [plan-batch]",
        ),
        (0, 4, "global_batch_size=0 and num_microbatches=4 must both be at least 1. [plan-batch]"),
        (
            16,
            0,
            "global_batch_size=16 and num_microbatches=0 must both be at least 1. [plan-batch]",
        ),
    ],
)
def test_batches(global_batch_size, num_microbatches, expected):
    assert messages(
        lambda: two_stages(global_batch_size=global_batch_size, num_microbatches=num_microbatches)
    ) == [expected]
    assert [
        str(violation) for violation in batch_violations(global_batch_size, num_microbatches)
    ] == [expected]


def test_more_stages_than_layers():
    stages = tuple(Stage(s, s + 1, (s,)) for s in range(3))
    assert messages(lambda: Plan(Cluster((3,)), 2, stages, 4, 4)) == [
        "num_stages=3 is more than num_layers=2; every stage needs a layer: use fewer stages or "
        "cut the model into more layers "
        "(--num-layers). [plan-stages]"
    ]


def test_idle_devices():
    assert messages(lambda: two_stages(cluster=Cluster((4, 2)))) == [
        "devices [4, 5] of the cluster 4+2 are not used; every device must hold a stage. "
        "[plan-devices]"
    ]


@pytest.mark.parametrize("layers", [((0, 2), (2, 2)), ((0, 2), (1, 3)), ((1, 2), (2, 3))])
def test_layers_that_are_missing_empty_or_twice(layers):
    stages = (Stage(*layers[0], (0,)), Stage(*layers[1], (1,)))
    with pytest.raises(PlanError) as caught:
        Plan(Cluster((2,)), 3, stages, 4, 4)
    assert set(caught.value.codes) == {"plan-layers"}


def test_no_stages():
    assert messages(lambda: Plan(Cluster((1,)), 2, (), 4, 4)) == [
        "stages end before layer 0 of num_layers=2; they must cover every layer. [plan-layers]",
        "devices [0] of the cluster 1x1 are not used; every device must hold a stage. "
        "[plan-devices]",
    ]


def test_negative_degrees_do_not_cancel():
    assert messages(
        lambda: Plan(Cluster((1,)), 1, (Stage(0, 1, (0,), StageChoice(-1, -1)),), 4, 4)
    ) == [
        "stage 0 has data_parallel=-1 x tensor_parallel=-1 on 1 devices; the product must be the "
        "number of devices. [plan-degrees]"
    ]


def test_a_changed_copy_is_validated_again():
    assert two_stages().with_(num_microbatches=8).microbatch_size == 2
    assert messages(lambda: two_stages().with_(num_microbatches=16))[0].startswith(
        "microbatch_size=1 (global batch 16 / 16 micro-batches)"
    )


# ---- files ---------------------------------------------------------------------------------------


def test_a_plan_finds_its_workload_from_another_directory(tmp_path, monkeypatch):
    for folder in ("models", "plans", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "net.py").write_text("")
    monkeypatch.chdir(tmp_path)
    plan = two_stages(workload=WorkloadSpec("models/net.py", "net", {"size": "tiny"}))
    plan.save(Path("plans/plan.json"))
    assert json.loads(Path("plans/plan.json").read_text())["workload"] == {
        "location": "../models/net.py",
        "function": "net",
        "arguments": {"size": "tiny"},
    }
    assert Plan.load(Path("plans/plan.json")) == plan
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = Plan.load(tmp_path / "plans" / "plan.json")
    assert moved.workload == WorkloadSpec("../models/net.py", "net", {"size": "tiny"})
    assert moved.workload.location and Path(moved.workload.location).is_file()


def test_a_plan_and_its_model_may_move_together(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "net.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    two_stages(workload=WorkloadSpec("net.py", "net")).save(Path("plan.json"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    assert Plan.load(Path("there/plan.json")).workload == WorkloadSpec("there/net.py", "net")


def test_files_that_are_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    assert messages(lambda: Plan.load(path)) == [f"plan {str(path)!r} does not exist. [plan-file]"]
    path.write_text('{"schema_version": 1,')
    assert messages(lambda: Plan.load(path)) == [
        f"plan {str(path)!r} is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 22 (char 21). Make the plan again with capture plan. [plan-corrupt]"
    ]
    path.write_bytes(b"\xff\xfe\x00")
    assert messages(lambda: Plan.load(path))[0].endswith("[plan-corrupt]")


@pytest.mark.parametrize(
    ("document", "version"),
    [({"schema_version": 3}, "3"), ({}, "None"), ([], "None"), ("plan", "None"), (None, "None")],
)
def test_another_schema_version(document, version):
    assert messages(lambda: Plan.from_json(document)) == [
        f"plan has schema_version={version}; this version of capture reads 1 and 2. Make the "
        "plan again with capture plan. [plan-schema]"
    ]


def test_mixed_targets():
    document = two_stages(cluster=Cluster((2, 2), "h100")).to_json()
    document["cluster"]["target_per_node"] = ["h100", "a100"]
    assert messages(lambda: Plan.from_json(document)) == [
        "plan mixes the targets ['a100', 'h100']; one target per plan for now. [plan-mixed-targets]"
    ]


def test_a_missing_field_is_named():
    document = two_stages().to_json()
    del document["stages"][1]["devices"]
    assert messages(lambda: Plan.from_json(document)) == [
        "plan is not one: stages[1].devices is missing. Make the plan again with capture plan. "
        "[plan-corrupt]"
    ]


@pytest.mark.parametrize(
    ("path", "value", "wrong"),
    [
        (("stages", 0, "layers"), [0], "stages[0].layers has 1 items and must have 2"),
        (("stages", 0, "layers"), [0, 1, 2], "stages[0].layers has 3 items and must have 2"),
        (
            ("stages", 0, "layers"),
            ["0", "1"],
            "stages[0].layers[0] is '0' and must be a whole number",
        ),
        (
            ("stages", 0, "layers"),
            [0, 1.0],
            "stages[0].layers[1] is 1.0 and must be a whole number",
        ),
        (
            ("stages", 0, "devices"),
            [0, True],
            "stages[0].devices[1] is True and must be a whole number",
        ),
        (("stages", 0, "devices"), 0, "stages[0].devices is 0 and must be a list"),
        (
            ("stages", 0, "shard_optimizer"),
            1,
            "stages[0].shard_optimizer is 1 and must be true or false",
        ),
        (("stages", 0), None, "stages[0] is None and must be an object"),
        (("stages",), 3, "stages is 3 and must be a list"),
        (("cluster",), None, "cluster is None and must be an object"),
        (("cluster", "nodes"), ["4"], "cluster.nodes[0] is '4' and must be a whole number"),
        (
            ("cluster", "target_per_node"),
            [],
            "cluster.target_per_node is empty and must have a target for every node",
        ),
        (
            ("cluster", "target_per_node"),
            [["cpu"]],
            "cluster.target_per_node[0] is ['cpu'] and must be a text",
        ),
        (("num_microbatches",), None, "num_microbatches is None and must be a whole number"),
        (("num_microbatches",), 4.0, "num_microbatches is 4.0 and must be a whole number"),
        (("num_layers",), "3", "num_layers is '3' and must be a whole number"),
        (("schedule",), [], "schedule is [] and must be a text"),
        (
            ("workload",),
            "models/gpt.py:gpt",
            "workload is 'models/gpt.py:gpt' and must be an object",
        ),
        (("workload",), {"location": "models/gpt.py"}, "workload.function is missing"),
        (("stages", 0, "remt"), "full", "stages[0].remt is no field; 'remat' is"),
        (("xyz",), "red", "xyz is no field"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(path, value, wrong):
    document = two_stages().to_json()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert messages(lambda: Plan.from_json(document)) == [
        f"plan is not one: {wrong}. Make the plan again with capture plan. [plan-corrupt]"
    ]


def test_parameters_are_split_with_their_optimizer_state():
    with pytest.raises(PlanError, match="plan-shard-params"):
        two_stages().with_(
            stages=tuple(
                replace(stage, choice=replace(stage.choice, shard_params=True))
                for stage in two_stages().stages
            )
        )


def test_a_plan_written_by_hand_may_leave_out_what_has_a_default():
    document = two_stages().to_json()
    optional = (
        "schedule",
        "auto_layers",
        "tensor_parallel_rule",
        "model_hash",
        "workload",
        "microbatch_size",
    )
    for key in (*optional, "prediction", "why", "verification"):
        del document[key]
    for stage in document["stages"]:
        for key in ("num_devices", "remat", "shard_optimizer", "shard_params"):
            del stage[key]
    assert Plan.from_json(document) == two_stages()


def test_sequences_become_tuples_and_a_plan_has_a_hash():
    stage = Stage(0, 2, range(2), StageChoice(data_parallel=2))
    assert stage.devices == (0, 1)
    plan = two_stages(
        stages=[stage, Stage(2, 3, (2, 3), StageChoice(tensor_parallel=2))],
        workload=WorkloadSpec("net.py", "net", {"depth": 3}),
    )
    assert hash(plan) == hash(two_stages(workload=plan.workload)) and plan == two_stages(
        workload=plan.workload
    )


@pytest.mark.parametrize(
    ("layers", "devices", "message"),
    [
        (
            (0, "2"),
            (0,),
            "a stage has (first, stop)=(0, '2'); give a sequence of whole numbers. [plan-layers]",
        ),
        (
            (0, 1.5),
            (0,),
            "a stage has (first, stop)=(0, 1.5); give a sequence of whole numbers. [plan-layers]",
        ),
        ((0, 2), 2, "a stage has devices=2; give a sequence of whole numbers. [plan-devices]"),
    ],
)
def test_a_stage_of_other_types_is_refused(layers, devices, message):
    assert messages(lambda: Stage(*layers, devices)) == [message]


def test_codes_of_the_constructor_pass_through_a_document():
    document = two_stages().to_json()
    document["num_microbatches"] = 3
    with pytest.raises(PlanError) as caught:
        Plan.from_json(document)
    assert caught.value.codes == ("plan-batch",)
    document["cluster"]["nodes"] = [0]
    with pytest.raises(ClusterError):
        Plan.from_json(document)
