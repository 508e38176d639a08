"""Plans of two kinds in one kind of file: both are read, in both schemas, and every verb takes them
or says what to use instead."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from array_models import array_plan
from processes import user_model
from refusals import code_of

from capture import (
    CaptureError,
    Cluster,
    Plan,
    Profile,
    ShardingPlan,
    WorkloadSpec,
    load_plan,
    pipeshard,
    to_alpa,
)
from capture.cli.main import main
from capture.errors import PlanError
from capture.machine.server import SERVERS_FOLDER, Server
from capture.machine.target import TARGETS_FOLDER, Target
from capture.measured.layer_profile import LayerProfile
from capture.plan.kinds import KINDS
from capture.plan.packs import PacksPlan
from capture.plan.sharding import DP, ZDP, OperatorCost
from capture.plan.task_graph import Configuration, Packs
from capture.predictor import AdditivePredictor
from tests.synthetic_profiles import Planted, hybrid

FILES = Path(__file__).parents[1] / "recorded" / "files"
PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"


def sharding_plan(**changes) -> ShardingPlan:
    """Of a product between an embedding and a head."""
    fields = {
        "batch_size": 2,
        "modes": (DP, ZDP),
        "step_seconds": 0.002,
        "peak_bytes": 3000,
        "examples_per_second": 4000.0,
        "names": ("embedding", "head"),
        "params": (("embedding",), ("head/kernel", "head/bias")),
        "workload": WorkloadSpec("tiny.py", "model", {"depth": 3}),
        "cluster": Cluster((4,), "h100"),
        "costs": (
            OperatorCost(400, 1600.0, 10.0, 0.5e-3, {"parameters": 400, "optimizer": 1600}),
            OperatorCost(4000, 800.0, 20.0, 1.5e-3, {"parameters": 500, "temporaries": 500}),
        ),
    }
    return ShardingPlan(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sharding_plan().save("b.json")
    replace(sharding_plan(), modes=(DP, DP), peak_bytes=6000, compiled_peak_bytes=7000).save(
        "a.json"
    )
    return tmp_path


def test_a_file_says_its_kind_and_is_read_from_another_folder(folder):
    written = json.loads(Path("b.json").read_text())
    assert (written["schema_version"], written["kind"]) == (2, "sharding")
    assert written["cluster"] == {"nodes": [4], "target_per_node": ["h100"]}
    assert load_plan("b.json") == ShardingPlan.load("b.json") == sharding_plan()
    (folder / "plans").mkdir()
    sharding_plan().save("plans/b.json")
    assert json.loads(Path("plans/b.json").read_text())["workload"]["location"] == "../tiny.py"
    os.chdir("plans")
    assert str(load_plan("b.json").workload) == "../tiny.py:model?depth=3"


@pytest.mark.parametrize(
    ("name", "kind"), [("two", Plan), ("hand", Plan), ("sharding", ShardingPlan)]
)
def test_schema_1_of_both_kinds_is_read(name, kind):
    path = FILES / f"{name}.plan.json"
    assert json.loads(path.read_text())["schema_version"] == 1
    plan = load_plan(path)
    assert isinstance(plan, kind) and kind.from_json(plan.to_json()) == plan
    assert plan.to_json()["schema_version"] == 2 and plan.to_json()["kind"] in KINDS


def test_files_of_another_kind_or_of_none(folder):
    stages = Plan.load(FILES / "two.plan.json").to_json()
    Path("other.json").write_text(json.dumps({**stages, "kind": "other"}))
    Path("none.json").write_text("[]")
    assert code_of(lambda: load_plan("other.json")) == "plan-kind"
    assert code_of(lambda: load_plan("none.json")) == "plan-schema"
    assert code_of(lambda: load_plan("missing.json")) == "plan-file"
    assert code_of(lambda: Plan.load("b.json")) == "plan-kind"
    assert code_of(lambda: ShardingPlan.from_json(stages)) == "osdp-plan-kind"


def test_a_plan_of_a_newer_version_is_refused_by_name(folder):
    configuration = Configuration(Packs(1, ((0, 1),)), Packs(1, ((0, 1), (1, 2))))
    packs = PacksPlan(Server.load("gtx1080ti-x4"), 2, 4, "pp", configuration)
    stages = Plan.load(FILES / "two.plan.json")
    for plan in (stages, sharding_plan(), packs, array_plan()):
        Path("new.json").write_text(json.dumps({**plan.to_json(), "schema_version": 9}))
        with pytest.raises(PlanError, match=r"^'new.json': .*update capture. \[.*plan-schema\]$"):
            load_plan("new.json")


@pytest.mark.parametrize(
    ("load", "file", "message"),
    [
        (load_plan, "profile", "is a profile; give a plan, which capture plan and capture osdp "),
        (load_plan, "target", "is a target file; give a plan, which"),
        (load_plan, "layers", "is a layer profile; give a plan, which"),
        (Profile.load, "plan", "is a plan; give a profile, which capture profile writes."),
        (Profile.load, "layers", "is a layer profile; give a profile, which"),
        (LayerProfile.load, "profile", "is a profile; give a layer profile, which capture profile"),
        (Target.load, "server", "is a server file; give a target file, which is written by hand"),
        (Server.load, "target", "is a target file; give a server file, which is written by hand"),
    ],
)
def test_a_file_of_another_kind_says_what_it_is(load, file, message):
    path = {
        "profile": FILES / "uneven.profile.json",
        "plan": FILES / "two.plan.json",
        "layers": PROFILES / "toy6.json",
        "target": TARGETS_FOLDER / "h100.json",
        "server": SERVERS_FOLDER / "gtx1080ti-x4.json",
    }[file]
    with pytest.raises(CaptureError, match=r"-kind\]$") as error:
        load(str(path))
    assert str(error.value).startswith(f"{str(path)!r} {message}")


def said(capsys, *arguments: str) -> tuple[int, str]:
    code = main([*arguments])
    out, err = capsys.readouterr()
    return code, out if "--json" in arguments else out + err


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (
            "predict b.json --profile p.json",
            "which this does not take. capture run, verify, explain, report",
        ),
        (
            "export packs.json --to alpa",
            "which this does not take. capture run, verify, explain, report",
        ),
        (
            "predict array.json --profile p.json",
            "which this does not take. capture run, verify, explain, report and diff take it",
        ),
        ("run array.json --hosts local", "'array': an array is one device. Leave it out."),
        ("run packs.json --ray local", "--ray is not for plans of kind 'packs': packs stream"),
        ("report b.json --trace t.json", "--trace: capture report does not read it with a plan "),
        ("report b.json --profile p.json", "--profile: capture report does not read it"),
        ("explain b.json --workload other.py:model", "--workload: capture explain does not read"),
        ("explain packs.json --workload other.py:model", "does not read it with a plan of kind 'p"),
        ("explain array.json --workload other.py:model --store s", "--workload, --store: capture"),
        ("report packs.json --profile p.json", "--profile: capture report does not read it"),
        ("diff b.json stages.json", "of kind 'sharding', and 'stages.json' of kind 'stages'; com"),
    ],
)
def test_what_has_no_meaning_is_refused_and_says_what_to_use(folder, capsys, arguments, instead):
    Path("stages.json").write_text((FILES / "two.plan.json").read_text())
    configuration = Configuration(Packs(1, ((0, 1),)), Packs(1, ((0, 1), (1, 2))))
    PacksPlan(Server.load("gtx1080ti-x4"), 2, 4, "pp", configuration).save("packs.json")
    array_plan().save("array.json")
    code, text = said(capsys, *arguments.split())
    assert code == 2 and instead in text and "[plan-kind]" in text


def test_python_refuses_it_with_the_code(folder):
    plan = sharding_plan()
    predictor = AdditivePredictor(Planted(4).profile(hybrid(2)))
    for call in (lambda: to_alpa(plan), lambda: pipeshard(None, plan)):
        assert code_of(call) == "plan-kind"
    assert code_of(lambda: predictor.predict(plan)) == "plan-kind"


def test_operators_are_shown(folder, capsys):
    code, text = said(capsys, "explain", "b.json")
    lines = text.splitlines()
    header = "operator mode parameters resident transient at the peak time"
    assert code == 0 and lines[0].split() == header.split()
    heaviest = "embedding DP 400 B 1.6 kB 10 B 2 kB 500 µs"
    assert lines[1].split() == heaviest.split(), "heaviest first"
    assert "At the estimated peak: parameters 900 B, optimizer 1.6 kB, temporaries 500 B." in text
    assert "fits by extrapolation" in text, "an estimate that nobody compiled never just fits"
    last = [line.split() for line in lines[3:5]]
    assert last[0] == ["all", "operators", "-", "4.4", "kB", "2.4", "kB", "-", "3", "kB", "2", "ms"]
    assert last[1] == ["peak", "per", "device", "(estimated)", "-", "-", "-", "-", "3", "kB", "-"]
    compiled = said(capsys, "report", "a.json")[1]
    assert [line.split() for line in compiled.splitlines() if line.startswith(("of", "peak"))] == [
        ["of", "none", "of", "them", "-", "-", "-", "-", "4", "kB", "-"],
        ["peak", "per", "device", "(compiled)", "-", "-", "-", "-", "7", "kB", "-"],
    ]
    code, text = said(capsys, "report", "a.json", "--memory", "5kB", "--json")
    facts = json.loads(text)
    needs = facts["needs"]
    assert needs["headroom"]["verdict"] == "does not fit" and needs["peak_bytes"] == 7000
    assert [row["mode"] for row in facts["operators"]] == ["DP", "DP"]
    assert facts["operators"][1]["cost"]["seconds"] == 1.5e-3
    old = str(FILES / "sharding.plan.json")
    for verb in ("report", "explain"):
        code, text = said(capsys, verb, old)
        assert code == 0 and "plans of earlier versions do not say" in text
    assert "earlier versions" not in said(capsys, "explain", "b.json")[1]
    assert said(capsys, "report", "b.json", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert all(f'id="{name}"' in page for name in ("at_peak", "resident_bytes")) and "head" in page


def test_two_plans_are_compared(folder, capsys):
    code, text = said(capsys, "diff", "a.json", "b.json")
    assert code == 0 and text.splitlines()[1].split() == ["operators[1]", "head", "DP", "ZDP"]
    peaks = next(line for line in text.splitlines() if line.startswith("peak per device"))
    assert peaks.split() == [
        "peak",
        "per",
        "device",
        "7",
        "kB",
        "(compiled)",
        "3",
        "kB",
        "(estimated,",
        "not",
        "compiled)",
    ]
    assert json.loads(said(capsys, "diff", "a.json", "a.json", "--json")[1])["same_decision"]


@pytest.mark.parametrize(("one", "other"), [*product(KINDS, KINDS)])
def test_plans_of_one_kind_are_compared_within_a_limit_and_others_refused(
    folder, capsys, one, other
):
    configuration = Configuration(Packs(1, ((0, 1),)), Packs(1, ((0, 1), (1, 2))))
    plans = {
        "stages": Plan.load(FILES / "h100.plan.json"),
        "sharding": sharding_plan(),
        "packs": PacksPlan(Server.load("gtx1080ti-x4"), 2, 4, "pp", configuration),
        "array": array_plan(),
    }
    plans[one].save("one.json")
    plans[other].save("other.json")
    code, text = said(capsys, "diff", "one.json", "other.json", "--memory", "8GB")
    if one == other:
        assert code == 0 and text.startswith("the plans decide alike")
    else:
        named = f"'one.json' is a plan of kind {one!r}, and 'other.json' of kind {other!r}"
        assert (code, text) == (2, f"error: {named}; compare plans of one kind. [plan-kind]\n")


def test_a_sharding_plan_is_compiled_and_run(folder, capsys):
    """Its loss is that of one device, over steps that update every parameter."""
    import jax

    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    from capture.tracing.operators import traced_operators

    Path("tiny.py").write_text(user_model("chain"))
    spec = WorkloadSpec("tiny.py", "model", {"depth": 3})
    operators = traced_operators(spec.load(), "traced")
    names = tuple(operator.name for operator in operators.model.operators)
    plan = sharding_plan(
        modes=(ZDP, DP, ZDP)[: len(names)],
        names=names,
        params=operators.names,
        costs=(),
        cluster=Cluster((4,), "cpu"),
        model_hash=operators.traced.graph.model_hash,
    )
    plan.save("b.json")
    code, text = said(
        capsys, "run", "b.json", "--trust", "--steps", "3", "--check", "--json", "--quiet"
    )
    facts = json.loads(text)
    assert code == 0, text
    assert facts["max_relative_loss_error"] < 1e-5
    assert len(set(facts["losses"])) == 3 and facts["losses"][0] > facts["losses"][2]
    code, text = said(capsys, "verify", "b.json", "--trust", "-o", "c.json", "--json")
    (peak,) = set(json.loads(text)["peak_bytes_per_device"])
    assert code == 0 and facts["measured_peak_bytes_per_device"] == [peak] * 4
    assert facts["replayed_peak_bytes_per_device"] == [peak] * 4 and facts["ledger_checks"] == 5
    assert (
        facts["is_target"] and facts["allocator"]["step_bytes"] <= facts["allocator"]["bound_bytes"]
    )
    assert load_plan("c.json") == replace(plan, compiled_peak_bytes=peak)
    replace(plan, model_hash="of another").save("e.json")
    code, text = said(capsys, "verify", "e.json", "--trust")
    assert code == 2 and "[plan-other-model]" in text
    replicated = replace(plan, modes=(DP,) * len(names))
    replicated.save("d.json")
    (more,) = set(
        json.loads(said(capsys, "verify", "d.json", "--trust", "--json")[1])[
            "peak_bytes_per_device"
        ]
    )
    assert more > peak, "sharded parameters are held once"
    assert said(capsys, "verify", str(FILES / "sharding.plan.json"))[0] == 2


@pytest.mark.parametrize(
    ("kind", "verb"), [(kind, verb) for kind in KINDS.values() for verb in kind.verbs]
)
def test_what_a_verb_does_with_a_kind_is_there(kind, verb):
    assert callable(kind.verb(verb).load())


def test_a_verb_that_a_kind_does_not_have_is_refused_with_those_that_it_has():
    with pytest.raises(PlanError, match=r"'array'.*run, verify, explain, report and diff take it"):
        KINDS["array"].verb("predict")
