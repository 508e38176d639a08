"""Differences of plans: what is named, devices side by side, and the command word for word."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_plans import GB, planted_profile, predicted_plan, verified, written_plan

from capture.cli.main import main
from capture.documents import read
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.prediction import Prediction
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import Bracket, Proven, Why
from capture.report.data import report_facts
from capture.report.difference import DeviceGroup, Difference, device_groups, differences


def run(arguments, capsys):
    code = main(arguments)
    return code, *capsys.readouterr()


def merged(plan: Plan) -> Plan:
    """The written plan with one stage on all of its devices, and the prediction that goes with
    it."""
    note = {
        "peak_bytes": 30 * GB,
        "interval_bytes": [29 * GB, 31 * GB],
        "instant": "update",
        "parts_bytes": {"parameters": 30 * GB},
    }
    prediction = read(
        {
            **plan.prediction.to_json(),
            "peak_bytes_per_device": [30 * GB] * 3,
            "stages": [{**note, "layers_bytes": [{}] * 3}],
        },
        Prediction,
    )
    return plan.with_(
        stages=(Stage(0, 3, (0, 1, 2), StageChoice(1, 3)),),
        prediction=prediction,
        num_microbatches=6,
    )


def test_a_plan_does_not_differ_from_itself():
    plan = written_plan()
    assert differences(plan, verified(plan)) == [], "a verification is no decision"


@pytest.mark.parametrize(
    ("change", "name", "first", "second"),
    [
        ({"schedule": "gpipe"}, "schedule", "1f1b", "gpipe"),
        ({"cluster": Cluster((3,), "h100")}, "target", "a100-40g", "h100"),
        ({"cluster": Cluster((2, 1), "a100-40g")}, "cluster", "1x3", "2+1"),
        ({"auto_layers": True}, "auto_layers", False, True),
        ({"tensor_parallel_rule": "largest"}, "tensor_parallel_rule", "auto", "largest"),
        ({"model_hash": "abc"}, "model_hash", "", "abc"),
        ({"workload": None}, "workload", "models/gpt.py:gpt?size=2.6B", None),
    ],
)
def test_a_single_change_is_a_single_difference(change, name, first, second):
    plan = written_plan()
    assert differences(plan, plan.with_(**change)) == [Difference(name, first, second)]


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [({"remat": "dots"}, "full", "dots"), ({"shard_optimizer": True}, False, True)],
    ids=["remat", "shard"],
)
def test_an_option_of_a_stage_is_named_with_its_stage(change, first, second):
    plan = written_plan()
    other = plan.with_(
        stages=(
            plan.stages[0],
            replace(plan.stages[1], choice=replace(plan.stages[1].choice, **change)),
        )
    )
    (name,) = change
    assert differences(plan, other) == [Difference(f"stages[1].{name}", first, second)]


def test_dependent_facts_are_named_beside_what_was_changed():
    plan = written_plan()
    found = {
        difference.name: (difference.first, difference.second)
        for difference in differences(plan, merged(plan))
    }
    assert found == {
        "num_microbatches": (3, 6),
        "microbatch_size": (8, 4),
        "num_stages": (2, 1),
        "stages[0].layers": ([0, 1], [0, 2]),
        "stages[0].devices": ([0, 1], [0, 1, 2]),
        "stages[0].data_parallel": (2, 1),
        "stages[0].tensor_parallel": (1, 3),
        "stages[1]": (plan.stages[1].to_json(), None),
    }


def test_devices_are_grouped_by_the_stages_of_both_plans():
    plan = written_plan()
    groups = device_groups(report_facts(plan), report_facts(merged(plan)))
    assert groups == [
        DeviceGroup((0, 1), (0, 0), (24 * GB, 30 * GB)),
        DeviceGroup((2, 2), (1, 0), (12 * GB, 30 * GB)),
    ]
    assert [group.change_bytes for group in groups] == [6 * GB, 18 * GB]


@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5),
)
def test_groups_cover_the_devices_of_the_larger_cluster_once(one, other):
    first, second = (report_facts(chain_plan(degrees)) for degrees in (one, other))
    groups = device_groups(first, second)
    covered = [
        device for group in groups for device in range(group.devices[0], group.devices[1] + 1)
    ]
    assert covered == list(range(max(sum(one), sum(other))))
    for group in groups:
        for device in range(group.devices[0], group.devices[1] + 1):
            for side, facts in enumerate((first, second)):
                known = device < facts.plan.cluster.num_devices
                assert group.peak_bytes[side] == (
                    facts.plan.prediction.peak_bytes_per_device[device] if known else None
                )
                assert group.stage_ids[side] == (
                    next(s for s, t in enumerate(facts.plan.stages) if device in t.devices)
                    if known
                    else None
                )


def chain_plan(degrees: list[int]) -> Plan:
    """Stages of a layer each on so many devices; stage s needs s + 1 bytes per device."""
    ends = [sum(degrees[: s + 1]) for s in range(len(degrees))]
    stages = tuple(
        Stage(s, s + 1, tuple(range(end - d, end)), StageChoice(1, d))
        for s, (d, end) in enumerate(zip(degrees, ends, strict=True))
    )
    notes = [
        {
            "peak_bytes": s + 1,
            "interval_bytes": [s, s + 2],
            "instant": "update",
            "parts_bytes": {"parameters": s + 1},
            "layers_bytes": [{}],
        }
        for s in range(len(degrees))
    ]
    per_device = [s + 1 for s, d in enumerate(degrees) for _ in range(d)]
    prediction = {
        "peak_bytes_per_device": per_device,
        "interval_coverage": None,
        "source": {},
        "stages": notes,
    }
    return Plan(
        Cluster((sum(degrees),)),
        len(degrees),
        stages,
        4,
        2,
        prediction=read(prediction, Prediction),
    )


# ---- the command ---------------------------------------------------------------------------------

TEXT = """\
differs                                                   A     B
num microbatches                                          3     6
microbatch size                                           8     4
num stages                                                2     1
stage 0 layers                                          0-1   0-2
stage 0 devices                                         0-1   0-2
stage 0 data parallel                                     2     1
stage 0 tensor parallel                                   1     3
stage 1                  layers 2 on devices 2, dp 1 x tp 1  none

devices  stage A  stage B  peak A  peak B  change
0-1            0        0   24 GB   30 GB   +6 GB
2              1        0   12 GB   30 GB  +18 GB

                                   A                  B
target                      a100-40g           a100-40g
peak per device    24 GB (predicted)  30 GB (predicted)
headroom                     12.1 GB            6.05 GB
headroom at worst            11.6 GB            5.05 GB
verdict                         fits               fits
pipeline bubble     25% (unit times)    0% (unit times)
A has no step time: no step of it was simulated; capture verify PLAN -o PLAN adds one, or give \
--profile FILE, of capture profile.
B has no step time: no step of it was simulated; capture verify PLAN -o PLAN adds one, or give \
--profile FILE, of capture profile.
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = written_plan()
    plan.save("a.json")
    merged(plan).save("b.json")


def test_the_text_word_for_word(files, capsys):
    assert run(["diff", "a.json", "b.json"], capsys) == (0, TEXT, "")


def test_a_target_without_rates_is_why_a_plan_has_no_seconds(files, capsys):
    written_plan("cpu").save("a.json")
    _, out, _ = run(["diff", "a.json", "b.json"], capsys)
    assert "A has no step time: the target 'cpu' has no rates" in out
    assert "B has no step time: no step of it was simulated" in out


def test_a_plan_that_was_not_compiled_has_the_seconds_of_its_search(files, capsys):
    found = Bracket(1.0, 0, 5, 5, False, expected_step_seconds=0.25)
    quick = written_plan().with_(why=Why("estimated", proven=Proven(None, (found,), "compiles")))
    quick.save("a.json")
    _, out, _ = run(["diff", "a.json", "b.json"], capsys)
    assert re.search(r"step time \(estimated\) +250 ms +-", out) and "A has no step time" not in out
    assert re.search(r"pipeline bubble +25% \(unit times\)", out)
    _, out, _ = run(["report", "a.json"], capsys)
    assert "step 250 ms (estimated; bubble: unit times)" in out
    compiled = replace(found, compiled=True, expected_step_seconds=None)
    quick.with_(why=Why("compiled", proven=Proven(0.0, (compiled,)))).save("a.json")
    assert "A has no step time" in run(["diff", "a.json", "b.json"], capsys)[1]


def test_plans_that_decide_alike_are_said_to(files, capsys):
    code, out, _ = run(["diff", "a.json", "a.json"], capsys)
    assert code == 0
    assert out.startswith(
        "the plans decide alike\n\ndevices  stage A  stage B  peak A  peak B  change\n0-1         "
        "   0        0   24 GB"
    )
    assert out.count("     0 B\n") == 2


def test_step_times_come_from_the_profile(tmp_path, monkeypatch, capsys):
    """More micro-batches of the same size keep more devices busy: fewer waits, more examples in a
    second."""
    monkeypatch.chdir(tmp_path)
    profile = planted_profile(4)
    few, many = (
        predicted_plan(profile, [2, 2], (4,), StageChoice(2, 1), num_microbatches=count)
        for count in (2, 8)
    )
    profile.save("profile.json")
    few.save("few.json")
    verified(many).save("many.json")
    code, out, _ = run(
        ["diff", "few.json", "many.json", "--profile", "profile.json", "--memory", "8GB", "--json"],
        capsys,
    )
    document = json.loads(out)
    first, second = document["plans"]
    expected = [report_facts(plan, profile).schedule for plan in (few, many)]
    assert code == 0
    assert [first["step_seconds"], second["step_seconds"]] == [
        schedule.step_seconds for schedule in expected
    ]
    assert second["step_seconds"] < 4 * first["step_seconds"]
    assert second["bubble_fraction"] < first["bubble_fraction"]
    assert [plan["peak_is"] for plan in document["plans"]] == ["predicted", "compiled"]
    assert [plan["headroom"]["memory_limit_bytes"] for plan in document["plans"]] == [8 * GB] * 2
    assert {d["name"]: (d["first"], d["second"]) for d in document["differences"]} == {
        "global_batch_size": (32, 128),
        "num_microbatches": (2, 8),
    }
    assert not document["same_decision"]


def test_three_profiles_for_two_plans_are_refused(files, capsys):
    arguments = ["diff", "a.json", "b.json", *["--profile", "profile.json"] * 3]
    assert run(arguments, capsys) == (
        2,
        "",
        "error: --profile was given 3 times; give it once for both plans, or twice: first for A, "
        "then for B. [diff-profiles]\n",
    )


def test_plans_that_cannot_be_predicted_are_refused_at_once_and_by_name(files, capsys):
    for name in ("bare.json", "other.json"):
        written_plan("cpu").with_(prediction=None, workload=None).save(name)
    message = (
        "the plan has no prediction, which is what is shown; add it with capture predict PLAN "
        "--profile FILE -o PLAN, from the FILE that capture profile makes of the model."
    )
    assert run(["diff", "bare.json", "other.json"], capsys) == (
        2,
        "",
        f"error: 'bare.json': {message} [report-prediction]\nerror: 'other.json': {message} "
        "[report-prediction]\n",
    )
