"""Plans as files: paths of their workload, fields that are missing or wrong, defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_examples import messages, two_stages

from capture.errors import ClusterError, PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.report.difference import Difference, describe_value, differences

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
        "line 1 column 22 (char 21). Correct it, or make the plan again with capture plan. [plan-corrupt]"
    ]
    path.write_bytes(b"\xff\xfe\x00")
    assert messages(lambda: Plan.load(path))[0].endswith("[plan-corrupt]")


@pytest.mark.parametrize(
    ("document", "version"),
    [({"schema_version": 0}, "0"), ({}, "None"), ([], "None"), ("plan", "None"), (None, "None")],
)
def test_another_schema_version(document, version):
    assert messages(lambda: Plan.from_json(document)) == [
        f"plan has schema_version={version}; this version of capture reads 1 and 2. Correct it, "
        "or make the plan again with capture plan. [plan-schema]"
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
        "plan is not one: stages[1].devices is missing. Correct it, or make the plan again with capture plan. "
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
        (("offload",), ["activations"], "offload is no field; each of 'stages' may have it"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(path, value, wrong):
    document = two_stages().to_json()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert messages(lambda: Plan.from_json(document)) == [
        f"plan is not one: {wrong}. Correct it, or make the plan again with capture plan. [plan-corrupt]"
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


def test_only_what_is_split_along_the_sequence_says_so():
    plan = two_stages()
    assert "sequence_parallel" not in plan.to_json()["stages"][0]
    split = replace(plan.stages[0], choice=replace(plan.stages[0].choice, sequence_parallel=True))
    document = split.to_json()
    assert document["sequence_parallel"] is True and Stage.from_json(document) == split
    assert "activations split along the sequence" in str(split.choice)
    [found] = differences(plan, plan.with_(stages=(split, *plan.stages[1:])))
    assert found == Difference("stages[0].sequence_parallel", False, True)


def test_what_rests_on_a_host_is_a_difference():
    plan = two_stages()
    resting = replace(plan.stages[1], offload=("activations", "optimizer"))
    [found] = differences(plan, plan.with_(stages=(plan.stages[0], resting)))
    assert found == Difference("stages[1].offload", [], ["activations", "optimizer"])
    said = [describe_value(found.name, value) for value in (found.first, found.second)]
    assert said == ["nothing", "activations, optimizer"]


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
