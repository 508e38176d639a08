"""``capture plan`` with prices, failures and several targets."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from capture.cli import targets
from capture.cli.main import main
from capture.errors import ProfileError
from capture.plan.kinds import load_plan
from capture.quantities import format_rate
from recommender.plan_report import PlanReport, TargetsReport
from tests import user_models
from tests.planned_model import STORE

GPT = "capture.cli.tiny_gpt:gpt?num_blocks=2"
TINY = f"{user_models.__path__[0]}/tiny.py:model?layers=2"
OPEN = ["--cluster", "1x2", "--global-batch", "8"]
H100 = ["--target", "h100"]
NARROW = ["--microbatches", "2", "--remat", "none", "--no-shard-optimizer", "--schedule", "1f1b"]
QUICK = ["--quick", *NARROW, *STORE]
FAILURES = ["--mtbf", "50000h", "--disk-rate", "2GB/s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("money")


@pytest.fixture
def asked(folder, monkeypatch, capsys):
    """Ask ``capture plan``: its exit code, its document (with ``--json``) or what it prints, and
    what was said on the way."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in arguments else out, err

    return run


def test_a_compiled_plan_says_its_cost_its_use_of_devices_and_its_saves(asked):
    """Of examples, as this model has no tokens; the state is that of one device's restore."""
    code, found, _ = asked(
        TINY, *OPEN, *H100, *NARROW, *STORE, "--price", "2.5/h", *FAILURES, "--json"
    )
    assert code == 0 and set(found) == {field.name for field in fields(PlanReport)}
    account, time, proven = found["account"], found["plan"]["time"], found["why"]["proven"]
    assert account["num_devices"] == 2 and account["per"] == "examples"
    assert account["step_seconds"] == time["step_seconds"]
    assert account["model_flops_utilization"] == time["model_flops_utilization"] > 0
    assert account["tokens_per_second"] is time["tokens_per_second"] is None
    assert account["dollars_per_step"] == pytest.approx(2.5 * 2 * time["step_seconds"] / 3600)
    saving = account["saving"]
    million = account["dollars_per_step"] / 8 * 1e6 / saving["goodput_fraction"]
    assert account["dollars_per_million"] == pytest.approx(million)
    least = proven["trail"][-1]["least_step_seconds"] / time["step_seconds"]
    assert account["least_dollars_per_million"] == pytest.approx(least * million)
    assert saving["mtbf_seconds"] == 50000 * 3600 / 2
    assert saving["state_bytes"] == 3 * 2 * 16 * 16 * 4, "weights and Adam's two moments"
    assert saving["save_seconds"] == pytest.approx(6144 / 2e9)
    steps = saving["interval_seconds"] / time["step_seconds"]
    assert account["save_every_steps"] == max(1, round(steps))
    assert load_plan("plan.json").time.model_flops_utilization == time["model_flops_utilization"]


def test_verify_and_report_say_the_cost_that_the_plan_was_made_with(asked, capsys):
    terms = ["--price", "h100=2.5/h", *FAILURES]
    _, found, _ = asked(TINY, *OPEN, *H100, *NARROW, *STORE, *terms, "-o", "priced.json", "--json")
    planned = found["account"]
    main(["verify", "priced.json", *STORE, "--json"])
    verified = json.loads(capsys.readouterr().out)["account"]
    assert verified == planned
    main(["verify", "priced.json", *STORE])
    assert f"${format_rate(planned['dollars_per_step'])} per step, $" in capsys.readouterr().out
    # Without the model nobody knows what failures undo: of a million nothing is said.
    main(["report", "priced.json", "--json"])
    shown = json.loads(capsys.readouterr().out)["account"]
    assert shown["dollars_per_step"] == planned["dollars_per_step"]
    assert shown["dollars_per_million"] is shown["saving"] is None
    _, found, _ = asked(
        TINY, *OPEN, *H100, *NARROW, *STORE, "--price", "2", "-o", "priced.json", "--json"
    )
    main(["report", "priced.json", "--json"])
    assert json.loads(capsys.readouterr().out)["account"] == found["account"]
    main(["report", "priced.json", "-o", "page.html"])
    assert "per million examples (2 devices" in Path("page.html").read_text()
    assert asked(TINY, *OPEN, *H100, *QUICK, "--price", "2", "-o", "quick.json")[0] == 0
    capsys.readouterr()
    main(["report", "quick.json"])
    assert " per step (2 devices" in capsys.readouterr().out, "of an estimate, without examples"


def test_the_printed_answer_has_tokens_use_and_cost_beside_every_step(asked):
    code, out, _ = asked(GPT, *OPEN, *H100, *QUICK, "--price", "2.5", *FAILURES)
    lines = out.splitlines()
    [step] = [line for line in lines if line.startswith("step ")]
    assert code == 0 and "(estimated), " in step and " tokens/s, " in step and " MFU" in step
    [cost] = [line for line in lines if line.startswith("$")]
    assert "per million tokens, failures included (2 devices; no plan" in cost
    assert any("a failure every 25,000 h" in line and "--save-every" in line for line in lines)
    assert "| $" not in out and not any("money" in line for line in lines)


def test_a_compiled_front_has_tokens_and_use_of_each_step(asked):
    code, out, _ = asked(TINY, *OPEN, *H100, *NARROW, *STORE, "--price", "2.5")
    assert code == 0
    [header] = [line.split() for line in out.splitlines() if line.startswith("plan   ")]
    assert header[:6] == ["plan", "peak", "step", "MFU", "$/M", "examples"]
    [step] = [line for line in out.splitlines() if line.startswith("step ")]
    assert " (simulated), " in step and " TFLOPS per device, MFU " in step


def test_the_cheapest_part_of_the_cluster_is_asked_for(asked):
    code, found, _ = asked(
        GPT, *OPEN, *H100, *QUICK, "--price", "2", "--objective", "cost", "--json"
    )
    costs = {e["num_devices"]: e["account"]["dollars_per_million"] for e in found["attempts"]}
    assert code == 0 and sorted(costs) == [1, 2]
    chosen = found["account"]
    assert chosen["dollars_per_million"] == min(costs.values()) == costs[chosen["num_devices"]]
    seconds = {e["num_devices"]: e["step_seconds"] for e in found["attempts"]}
    assert seconds[2] < seconds[1] and chosen["num_devices"] == 1, "both are shown"
    assert sum(found["plan"]["cluster"]["nodes"]) == 1


def test_targets_stand_side_by_side_and_one_that_fails_loses_no_other(asked, folder):
    prices = "h100=2.5/h,v5p=4.2/h,v6e=2.7/h"
    cluster = ["--cluster", "2x2x1", "--global-batch", "8", "--targets", "v5p,h100,TPU v6e"]
    code, found, _ = asked(GPT, *cluster, *QUICK, "--price", prices, "--json")
    assert code == 0 and set(found) == {field.name for field in fields(TargetsReport)}
    good, *bad = found["targets"]
    assert [each["target"] for each in found["targets"]] == ["v5p", "h100", "v6e"]
    assert all("[cluster-s" in each["failure"] and each["asked"] is None for each in bad)
    assert good["failure"] == "" and good["smallest"]["cluster"] == "1x1"
    account = good["asked"]["account"]
    step = 4.2 * account["num_devices"] * account["step_seconds"] / 3600
    assert account["dollars_per_step"] == pytest.approx(step)
    assert found["written"] == {"plan of v5p": "plan-v5p.json"}
    plan = load_plan("plan-v5p.json")
    assert plan.cluster.target == "v5p" and plan.asked["price"] == "4.2"
    assert "targets" not in plan.asked


def test_the_cheapest_of_all_targets_and_clusters_is_chosen_and_all_are_shown(asked):
    prices = ["--price", "h100=2,v6e=1000,h200=9", "--objective", "cost"]
    cluster = ["--cluster", "1x2", "--global-batch", "8", "--targets", "h200,v6e,h100"]
    code, out, _ = asked(GPT, *cluster, *QUICK, *prices)
    rows = [line.split() for line in out.splitlines() if " ok " in line]
    costs = [float(row[-1]) for row in rows]
    assert code == 0 and costs == sorted(costs) and len(set(costs)) > 1
    every = sorted((target, on) for target in ("h100", "h200", "v6e") for on in ("1x1", "1x2"))
    assert sorted((row[0], row[1]) for row in rows) == every
    assert f"cheapest of all, on {rows[0][1]}: {rows[0][0]}" in out.splitlines()
    code, found, _ = asked(GPT, *cluster, *QUICK, *prices, "--json")
    assert found["best"] == rows[0][0] == "h100"
    assert [each["target"] for each in found["targets"]] == ["h200", "v6e", "h100"]
    assert [part["cluster"] for part in found["targets"][0]["parts"]] == ["1x1", "1x2"]


def test_an_error_in_one_answer_loses_no_other(asked, monkeypatch):
    answer = targets._answer

    def fails(target, *question):
        if target == "v6e":
            raise ProfileError.of("a worker died.", "profile-worker")
        return answer(target, *question)

    monkeypatch.setattr(targets, "_answer", fails)
    code, found, _ = asked(GPT, *OPEN, *QUICK, "--targets", "v6e,h100", "--json")
    failed, good = found["targets"]
    assert code == 0 and failed["failure"] == "a worker died. [profile-worker]"
    assert good["asked"]["status"] == "ok" and [*found["written"]] == ["plan of h100"]
    code, found, _ = asked(GPT, *OPEN, *QUICK, "--targets", "v6e", "--json")
    assert code == 3 and found["errors"][0]["code"] == "profile-worker", "all of them failed"


def test_a_saved_answer_of_several_is_asked_again_alone(asked):
    targets = ["--targets", "h100,v6e", "--price", "h100=2,v6e=3", *FAILURES]
    code, out, _ = asked(GPT, *OPEN, *QUICK, *targets)
    assert code == 0
    header, *rows = out.splitlines()
    columns = "target on status peak step tokens/s MFU $/M tokens"
    assert header.split() == columns.split()
    assert [row.split()[:2] for row in rows[:4]] == [
        ["h100", "1x1"],
        ["h100", "1x2"],
        ["v6e", "1x1"],
        ["v6e", "1x2"],
    ]
    assert rows[4] == "cheapest on what was asked for: v6e"
    code, found, _ = asked("plan-v6e.json", "--trust", *QUICK, "--json")
    assert code == 0 and load_plan("plan.json").cluster.target == "v6e"
    assert found["account"]["saving"]["mtbf_seconds"] == 25000 * 3600


def test_a_file_asks_with_the_same_names(asked, folder):
    (folder / "question.toml").write_text(
        f'''
        workload = "{GPT}"
        cluster = "1x2"
        global_batch = 8
        targets = ["h100", "v6e"]
        price = "h100=2.5,v6e=2.7"
        objective = "cost"
        mtbf = "50000h"
        disk_rate = "2GB/s"
        '''
    )
    code, found, _ = asked("question.toml", "--trust", *QUICK, "--json")
    assert code == 0
    for each, price in zip(found["targets"], (2.5, 2.7), strict=True):
        assert each["smallest"]["cluster"] == "1x1"
        account = each["asked"]["account"]
        dollars = price * account["num_devices"] * account["step_seconds"] / 3600
        assert account["dollars_per_step"] == pytest.approx(dollars)


def test_costs_are_there_of_a_plan_from_a_profile(asked):
    windows = ["--neighbours", "1", "--calibration-plans", "0"]
    code, found, _ = asked(
        TINY, *OPEN, *H100, *NARROW, *windows, *STORE, "--price", "2.5", "--json"
    )
    account, time = found["account"], found["plan"]["time"]
    assert code == 0 and found["why"].get("proven") is None
    assert account["dollars_per_step"] == pytest.approx(2.5 * 2 * time["step_seconds"] / 3600)
    assert account["least_dollars_per_million"] is None


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["--target", "h100", "--objective", "cost"], "money-price"),
        (["--target", "h100", "--mtbf", "50000h"], "money-terms"),
        (["--target", "h100", "--disk-rate", "2GB/s"], "money-terms"),
        (["--target", "h100", "--price", "0"], "money-number"),
        (["--target", "h100", "--price=-2"], "money-number"),
        (["--target", "h100", "--price", "v6e=2,h100=1"], "money-price"),
        (["--targets", "h100,v6e", "--price", "v6e=2"], "money-price"),
        (["--targets", "h100,nope"], "target-unknown"),
        (["--targets", "h100,cpu"], "money-terms"),
        (["--targets", "h100", "--target", "v6e"], "money-targets"),
        (["--targets", "h100", "--smallest-cluster"], "money-targets"),
        (["--price", "2", "--microbatches", "4"], "money-terms"),
        (
            ["--target", "h100", "--price", "2", "--objective", "cost", "--smallest-cluster"],
            "plan-extent",
        ),
        (
            ["--target", "h100", "--price", "2", "--objective", "cost", "--mode", "paper"],
            "plan-algorithm",
        ),
        (["--target", "h100", *FAILURES, "--algorithm", "minmax"], "plan-algorithm"),
        (["--targets", "h100", "--algorithm", "minmax"], "plan-algorithm"),
        (["--system", "osdp", "--price", "2"], "plan-system"),
    ],
)
def test_what_contradicts_or_lacks_something_is_refused_at_once(asked, given, code):
    rc, document, err = asked(GPT, *OPEN, *given, "--json")
    assert rc == 2 and code in [each["code"] for each in document["errors"]]
    assert "traced" not in err


def test_changes_that_are_tried_may_have_smaller_micro_batches_than_replicas(asked):
    narrow = ["--microbatches", "2", "--remat", "none", "--schedule", "1f1b", "--memory", "2MB"]
    code, found, _ = asked(GPT, "--cluster", "1x2", "--global-batch", "4", *H100, *narrow, *STORE)
    assert code == 1 and "no single change of those that were tried fits" in found
