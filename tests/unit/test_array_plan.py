"""Plans of arrays of models: what they refuse, and how they are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import codes_of

from capture import Cluster, WorkloadSpec
from capture.cli.array import Varied, models_of
from capture.plan.array import (
    ArrayPlan,
    ArrayPrediction,
    ArrayTask,
    Decision,
    Member,
    Saturation,
)
from capture.plan.kinds import load_plan
from capture.plan.why import Why

PLAN = ArrayPlan(
    cluster=Cluster((1,), "h200"),
    batch_size=4,
    models=(Member(0, {"learning_rate": 0.1}), Member(1), Member(2)),
    partition=((0, 2), (1,)),
    order="multiplexed",
    decisions=(
        (Decision("layer 0 maps 0", "swap", 2), Decision("layer 1 maps 0", "recompute")),
        (),
    ),
    memory_limit_bytes=1000,
    shared=("base/*",),
    num_layers=2,
    workload=WorkloadSpec("tiny.py", "model", {"depth": 3}),
    prediction=ArrayPrediction(900, {"parameters": 900}, 100, 0.5, 10, 20, 30),
    why=Why("fast", num_choices=2),
    candidates=({"name": "all fused", "fits": False},),
)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read == replace(PLAN, workload=read.workload)
    assert (read.prediction, read.why) == (PLAN.prediction, PLAN.why)
    assert read.candidates == PLAN.candidates and read.known_peak_bytes == 900
    assert str(read.headroom(1000)).startswith("fits: 100 B of 1 kB left")


def test_models_may_train_something_else(tmp_path, monkeypatch):
    """A batch or a workload of their own, whose path is seen from the plan's file; files of equal
    models say nothing of it."""
    other = ArrayTask(4, "zoo/mlp.py:mlp?width=8", 2, "abc")
    plan = replace(
        PLAN,
        models=(Member(0), Member(1, workload=other.workload), Member(2, batch_size=4)),
        tasks=(other,),
        shared=(),
        saturation=(Saturation(1, 0.5), Saturation(1, 0.25, 1)),
    )
    own = ArrayTask(4)
    assert plan.trained == (own, other, own)
    assert [(task.num_layers, task.model_hash) for task in plan.trained[:2]] == [
        (2, ""),
        (2, "abc"),
    ]
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    plan.save("plans/plan.json")
    written = json.loads(Path("plans/plan.json").read_text())
    assert written["models"][1]["workload"] == "../zoo/mlp.py:mlp?width=8"
    assert written["tasks"][0]["model_hash"] == "abc" and written["saturation"][1]["task"] == 1
    read = load_plan("plans/plan.json")
    assert read == plan and read.trained[1].model_hash == "abc"
    assert read.saturation == plan.saturation
    same = replace(
        plan, models=(Member(0), Member(1), Member(2)), tasks=(), saturation=(Saturation(1, 0.5),)
    )
    written = same.to_json()
    assert "tasks" not in written and set(written["models"][0]) == {"seed", "hyperparameters"}
    assert set(written["saturation"][0]) == {"models", "seconds"}
    named = replace(
        plan, models=(Member(0), Member(1, workload=str(PLAN.workload)), Member(2)), tasks=()
    )
    assert set(named.trained) == {own}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"models": (), "partition": ()}, "array-models"),
        ({"partition": ((0, 1), (1, 2))}, "array-partition"),
        ({"partition": ((0, 1, 2), ())}, "array-partition"),
        ({"partition": ((0, 1, 2),), "decisions": ()}, "array-order"),
        ({"order": "backwards"}, "array-order"),
        ({"decisions": ((),)}, "array-decisions"),
        ({"decisions": ((Decision("a", "swap"),) * 2, ())}, "array-decisions"),
        ({"decisions": ((Decision("a", "swap", -1),), ())}, "array-size"),
        ({"batch_size": 0}, "array-size"),
        ({"models": (Member(0), Member(1), Member(2, batch_size=0))}, "array-size"),
        ({"models": (Member(0), Member(1), Member(2, batch_size="8"))}, "array-size"),
        ({"models": (Member(0), Member(1), Member(2, workload=3))}, "array-models"),
        ({"models": (Member(0), Member(1), Member(2, batch_size=8))}, "array-tasks"),
        ({"models": (Member(0), Member(1, workload="a.py:b"), Member(2))}, "array-tasks"),
        ({"cluster": Cluster((2,), "h200")}, "array-size"),
    ],
)
def test_what_breaks_a_rule_is_refused(changes, code):
    assert code in codes_of(lambda: replace(PLAN, **changes))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d.update(schema_version=9), "array-plan-schema"),
        (lambda d: d.update(kind="packs"), "array-plan-kind"),
        (lambda d: d.pop("models"), "array-plan-corrupt"),
        (lambda d: d.update(modles=[]), "array-plan-corrupt"),
    ],
)
def test_a_wrong_document_is_refused(change, code):
    document = PLAN.to_json()
    change(document)
    assert code in codes_of(lambda: ArrayPlan.from_json(document))


def test_models_are_every_combination_of_what_varies(tmp_path):
    varied = [("learning_rate", (0.1, 0.2)), ("seed", (0.0, 1.0))]
    found = models_of("4", [Varied(*each) for each in varied])
    assert [(m.seed, dict(m.hyperparameters)) for m in found] == [
        (0, {"learning_rate": 0.1}),
        (1, {"learning_rate": 0.1}),
        (0, {"learning_rate": 0.2}),
        (1, {"learning_rate": 0.2}),
    ]
    assert models_of("2", []) == [Member(0), Member(1)]
    sizes = models_of(None, [Varied("batch_size", (2.0, 4.0))])
    assert [repr(m.batch_size) for m in sizes] == ["2", "4"]
    file = tmp_path / "sweep.json"
    file.write_text('[{"learning_rate": 0.5, "seed": 3}]')
    assert models_of(str(file), []) == [Member(3, {"learning_rate": 0.5})]
    file.write_text('[{"batch_size": 8, "workload": "a.py:b"}]')
    assert models_of(str(file), []) == [Member(0, {}, 8, "a.py:b")]


@pytest.mark.parametrize(
    ("models", "varied", "code"),
    [
        (None, [], "array-models"),
        ("3", [("seed", (0.0, 1.0))], "array-vary"),
        ("many", [("seed", (0.0, 1.0))], "array-vary"),
        (None, [("seed", (0.0,)), ("seed", (1.0,))], "array-vary"),
        (None, [("seed", (0.0, 0.0))], "array-vary"),
        (None, [("seed", (0.5,))], "array-vary"),
        (None, [("batch_size", (0.5,))], "array-vary"),
        (None, [("learning_rate", (float("nan"),))], "array-vary"),
        ("none.json", [], "array-models"),
        ("none.json", [("seed", (0.0,))], "array-vary"),
    ],
)
def test_models_that_are_not_named_are_refused(models, varied, code):
    assert code in codes_of(lambda: models_of(models, [Varied(*each) for each in varied]))
