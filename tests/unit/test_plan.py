"""Plans: all broken rules at once, word for word; the JSON form; files that move."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import messages, two_stages

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import REMAT_POLICIES, StageChoice
from capture.plan.prediction import Prediction, StagePrediction
from capture.plan.stage import Stage
from capture.plan.stages import Plan, batch_violations
from capture.plan.why import CompiledPlans, Front, FrontPoint, Why

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
    source=PARTS,
    interval_coverage=st.none() | st.floats(0, 1),
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
                    draw(st.sampled_from((*REMAT_POLICIES, "full:2"))),
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


def test_what_a_stage_keeps_on_its_host_is_in_files():
    first, second = two_stages().stages
    plan = two_stages(stages=(replace(first, offload=["optimizer", "optimizer"]), second))
    rows = plan.to_json()["stages"]
    assert rows[0]["offload"] == ["optimizer"] and "offload" not in rows[1]
    assert Plan.from_json(plan.to_json()) == plan != two_stages()
    assert messages(lambda: replace(first, offload=("activations", "weights"))) == [
        "a stage has offload=['activations', 'weights'], of which weights cannot rest on a host; "
        "give some of activations, optimizer. [plan-offload]"
    ]
    assert messages(lambda: plan.with_(cluster=Cluster((1, 3)))) == [
        "stage 0 has offload=['optimizer'] on devices of several nodes, and what rests is in the "
        "memory of one host; give it devices of one node. [plan-offload]"
    ]
    assert plan.with_(cluster=Cluster((2, 2))).host_of(second) == "host of node 1"


@given(plans())
def test_stages_cover_the_layers_and_the_devices_once(plan):
    layers = [i for stage in plan.stages for i in range(stage.first, stage.stop)]
    assert layers == list(range(plan.num_layers))
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
        "time": None,
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
        "schedule='zigzag' is unknown; choose one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, "
        "dualpipev, v-half. [plan-schedule]",
        "tensor_parallel_rule='most' is unknown; choose one of auto, largest. [plan-rule]",
        "stage 1 has layers=[2, 3] but must begin at layer 1 and hold at least one layer; stages "
        "cover the layers once, in order. "
        "[plan-layers]",
        "stages end before layer 6 of num_layers=7; they must cover every layer. [plan-layers]",
        "stage 0 uses device 4; a cluster 1x4 has devices 0 to 3. [plan-devices]",
        "device 0 is used by stage 0 and stage 1; once is allowed. [plan-devices]",
        "stage 0 has data_parallel=3 x tensor_parallel=1 on 2 devices; the product must be the "
        "number of devices. [plan-degrees]",
        "stage 1 has remat='some'; choose one of none, cheap, dots, full, or full:K for K "
        "layers. [plan-remat]",
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
