"""The ``capture`` command as scripts see it: one JSON document, exit codes, and an answer where nothing
fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_here, run_json
from planned_model import BATCH, PROFILING, STORE, capture, rows
from processes import REPOSITORY, user_model
from timeouts import TIMEOUT_SECONDS

from capture.cli import stages
from capture.cli.main import main
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor

# ---- the path of a user --------------------------------------------------------------------------


def test_profile_says_what_it_measured(planned):
    made = planned.profile.document
    document = made["windows"]
    assert (document["num_layers"], document["num_parameters"], document["microbatch_sizes"]) == (
        8,
        8 * 16 * 16,
        [2],
    )
    assert made["failures"] == [] and document["source"]["backend"] == "compile:cpu"
    # Layers, pairs and one anchor, on one device or either way on two.
    assert document["num_measurements"] == (8 + 7 + 1) * 3
    low, high = document["interval_factors"]
    assert 0.5 < low <= 0.995 and 1.005 <= high < 1.5
    assert "compiled" in planned.profile.err and "stages in" in planned.profile.err
    assert len(planned.profile.err) < 4000, "a log file gets a line now and then, no bar that moves"


def test_plan_keeps_its_contract(planned):
    document = planned.plan.document
    assert document["status"] == "ok"
    stages = document["plan"]["stages"]
    assert [
        layer for stage in stages for layer in range(stage["layers"][0], stage["layers"][1] + 1)
    ] == list(range(8))
    assert all(
        stage["num_devices"] == stage["data_parallel"] * stage["tensor_parallel"]
        for stage in stages
    )
    assert (
        sum(stage["num_devices"] for stage in stages)
        == 2
        == len(document["plan"]["prediction"]["peak_bytes_per_device"])
    )
    assert document["search"]["algorithm"] == "minmax" and document["search"]["seconds"] >= 0
    assert document["why"]["summary"]
    written = json.loads((planned.directory / "plan.json").read_text())
    assert {key: value for key, value in document["plan"].items() if key != "workload"} == {
        k: v for k, v in written.items() if k != "workload"
    }
    assert written["workload"] == {"location": "tiny.py", "function": "model", "arguments": {}}


def test_predict_repeats_the_prediction_of_the_plan(planned):
    predicted = capture(
        planned.directory, "predict", "plan.json", "--profile", "profile.json"
    ).document
    assert predicted["prediction"] == planned.plan.document["plan"]["prediction"]


def test_run_measures_what_was_predicted_and_trains_like_one_device(planned):
    document = capture(planned.directory, "run", "plan.json", "--check", "--steps", "2").document
    predicted, measured = (
        document["predicted_peak_bytes_per_device"],
        document["measured_peak_bytes_per_device"],
    )
    assert predicted == planned.plan.document["plan"]["prediction"]["peak_bytes_per_device"]
    intervals = planned.plan.document["plan"]["prediction"]["interval_bytes_per_device"]
    for mine, truth, (low, high) in zip(predicted, measured, intervals, strict=True):
        assert abs(mine / truth - 1) < 0.02
        assert low <= truth <= high
    assert measured == document["replayed_peak_bytes_per_device"]
    assert "live arrays" in document["meter"] and document["ledger_checks"] > 10
    if (heap := document["allocator"]) is not None:  # glibc
        assert (
            heap["step_bytes"]
            == heap["peak_bytes"] - heap["before_bytes"]
            > 0.5 * heap["booked_bytes"]
            > 0
        )
    assert (
        len(document["losses"]) == len(document["reference_losses"]) == 2
        and document["losses"][1] < document["losses"][0]
    )
    assert (
        document["max_relative_loss_error"] < 1e-5
        and document["max_relative_gradient_error"] < 1e-4
    )
    assert re.fullmatch(r"[0-7]", document["worst_gradient"]), "a leaf of the user's parameters"


def test_explain_itemises_and_ranks_the_changes(inside_planned, capsys):
    asked = ("explain", "plan.json", *STORE)
    _, cut_short, _ = run_json(capsys, *asked, "--seconds", "0")
    code, document, _ = run_json(capsys, *asked)
    assert code == 0
    assert cut_short["stages"] == document["stages"] and document["untried"] == []
    from_store = {change["change"] for change in cut_short["changes"]}
    assert cut_short["untried"] and not from_store & set(cut_short["untried"])
    assert {change["change"] for change in document["changes"]} <= from_store | set(
        cut_short["untried"]
    )
    _, again, _ = run_json(capsys, *asked, "--seconds", "0")
    assert again["changes"] == document["changes"], "all of them are in the store by now"
    peak = document["needs"]["peak_bytes"]
    assert peak == max(document["peak_bytes_per_device"])
    assert all(
        sum(stage["parts_bytes"].values()) == stage["peak_bytes"] for stage in document["stages"]
    )
    saves = [change["saves_bytes"] for change in document["changes"]]
    assert saves == sorted(saves, reverse=True) and len(saves) >= 3
    assert all(
        change["peak_bytes"] + change["saves_bytes"] == peak for change in document["changes"]
    )
    assert document["found"] is None, "it was predicted"


@pytest.mark.slow
def test_evaluate_keeps_its_contract_for_both_modes(planned):
    document = capture(
        planned.directory,
        "evaluate",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--plans",
        "2",
        "--seed",
        "1",
        "-o",
        "evaluation.json",
    ).document
    shares = [f"within_{p}pct" for p in (2, 5, 11)]
    for mode in ("default", "paper"):
        found = document[mode]
        assert found["num_predictions"] > 0
        assert 0 <= found[shares[0]] <= found[shares[1]] <= found[shares[2]] <= 1
        assert 0 <= found["mean_abs_error_fraction"] <= found["max_abs_error_fraction"]
    assert 0 <= document["default"]["interval_coverage_fraction"] <= 1
    assert document["paper"]["interval_coverage_fraction"] is None  # the paper gives no interval
    assert document["default"]["within_11pct"] == 1
    assert document["num_failed_stages"] == 0
    written = json.loads((planned.directory / "evaluation.json").read_text())
    rows = written["predictions"]
    assert len(rows) == 2 * 2 * 2  # plans, schedules, devices
    assert sum(not row["compiled_before"] for row in rows) == document["default"]["num_predictions"]
    assert all(row["predicted_bytes"] > 0 and row["measured_bytes"] > 0 for row in rows)
    assert (
        sum(row["paper_predicted_bytes"] is None for row in rows)
        == document["paper"]["num_not_predictable"]
    )


@pytest.mark.slow
def test_the_truth_of_evaluate_is_no_prediction(inside_planned, capsys, monkeypatch):
    """A predictor that says twice as much is found to be wrong, and what it is held against
    stays."""
    asked = [
        "evaluate",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--plans",
        "3",
        "--quiet",
        "-o",
    ]

    def predictions(name):
        assert main([*asked, name]) == 0
        return json.loads((inside_planned / name).read_text())["predictions"]

    honest, predict = predictions("honest.json"), AdditivePredictor.predict

    def doubled(self, plan):
        found = predict(self, plan)
        return replace(
            found, peak_bytes_per_device=tuple(2 * peak for peak in found.peak_bytes_per_device)
        )

    monkeypatch.setattr(AdditivePredictor, "predict", doubled)
    wrong = predictions("wrong.json")
    assert [row["predicted_bytes"] for row in wrong] == [
        2 * row["predicted_bytes"] for row in honest
    ]
    assert [row["measured_bytes"] for row in wrong] == [row["measured_bytes"] for row in honest]
    capsys.readouterr()


@pytest.mark.slow
def test_evaluate_draws_plans_that_fit(inside_planned, capsys):
    limit = json.loads((inside_planned / "plan.json").read_text())["prediction"][
        "peak_bytes_per_device"
    ]
    asked = [
        "evaluate",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--plans",
        "2",
        "--quiet",
        "-o",
        "fitting.json",
    ]
    assert main([*asked, "--memory", str(max(limit) * 2)]) == 0
    peaks = [
        row["predicted_bytes"]
        for row in json.loads((inside_planned / "fitting.json").read_text())["predictions"]
    ]
    assert peaks and max(peaks) <= max(limit) * 2
    capsys.readouterr()
    assert main([*asked, "--memory", "1"]) == 2
    assert "[evaluate-memory]" in capsys.readouterr().err


def test_evaluate_asks_about_a_size_that_was_not_profiled(inside_planned, capsys):
    """Nothing of it was compiled before; the paper's mode knows the profiled size alone."""
    asked = ["evaluate", "tiny.py:model", *BATCH, *STORE, *PROFILING, "--plans", "1", "--json"]
    asked += ["--ask-size", "16", "--quiet"]
    assert main([*asked, "--default-only"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["asked_microbatch_size"] == 16
    assert 16 not in document["profiled_microbatch_sizes"]
    assert document["global_batch_size"] == 16 * document["num_microbatches"]
    found = document["default"]
    assert found["num_predictions"] == 2 * 2 and not found["num_compiled_before"]
    assert found["interval_coverage_fraction"] == 1
    assert main(asked) == 2
    assert "[evaluate-size]" in capsys.readouterr().err


def test_planning_from_a_profile_loads_no_jax_and_text_is_for_people(planned, tmp_path):
    command = [
        "plan",
        "tiny.py:model",
        *BATCH,
        "--profile",
        "profile.json",
        "--no-compile",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    code = (
        f"import sys\nfrom capture.cli.main import main\nassert main({command!r}) == 0\nassert "
        "'jax' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=planned.directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if " bytes" in line or "peak " in line]
    assert result.stdout.startswith("ok: ") and len(lines) == 2
    assert all("predicted, not compiled" in line for line in lines), "beside every peak"


def test_a_model_without_marks_is_planned_and_its_layers_are_said(inside_planned, capsys):
    """The plan holds the number, so that what reads it cuts alike; also a plan by hand, which need
    not know how layers were found."""
    Path("plain.py").write_text(
        user_model("tiny").replace('(checkpoint_name(x, "layer_boundary") if i else x)', "x")
    )
    asked = [
        "--cluster",
        "1x1",
        "--global-batch",
        "4",
        "--microbatches",
        "2",
        *STORE,
        "--neighbours",
        "1",
        "--calibration-plans",
        "0",
    ]
    code, out, err = run_here(
        capsys, "plan", "plain.py:model?layers=10", *asked, "-o", "plain.json"
    )
    assert code == 0, err
    assert (
        "cut into 10 layers of nearly equal work; --num-layers or marks in the model choose "
        "others\n"
    ) in out
    assert err.index("cutting the model into 10 layers of nearly") < err.index("compil")
    plan = Plan.load("plain.json")
    assert plan.auto_layers and plan.num_layers == 10
    from capture.runtime.pipeline import trace_for_plan

    workload = WorkloadSpec.parse("plain.py:model?layers=10").load()
    assert trace_for_plan(workload, plan).graph.model_hash == plan.model_hash
    by_hand = plan.with_(auto_layers=False, model_hash="", num_layers=5, stages=[Stage(0, 5, [0])])
    assert trace_for_plan(workload, by_hand).graph.num_layers == 5
    assert not Plan.load("plan.json").auto_layers


def test_a_plan_by_hand_is_predicted_for_reports_and_differences(inside_planned, capsys):
    """By a profile of the degrees of its stages, which is said; the prediction is that of the
    profile that is there."""
    by_hand = Plan.load("plan.json").with_(
        prediction=None, why=None, stages=[Stage(0, 8, [0, 1], StageChoice(tensor_parallel=2))]
    )
    by_hand.save("hand.json")
    assert (
        run_here(capsys, "predict", "hand.json", "--profile", "profile.json", "-o", "known.json")[0]
        == 0
    )
    profile = ["--profile", "profile.json", "--json"]
    code, out, _ = run_here(capsys, "report", "hand.json", *profile)
    known = Plan.load("known.json").prediction
    assert code == 0
    assert [stage["predicted_peak_bytes"] for stage in json.loads(out)["stages"]] == [
        stage.peak_bytes for stage in known.stages
    ]
    code, out, _ = run_here(capsys, "diff", "hand.json", "plan.json", *profile)
    assert code == 0 and known.peak_bytes == json.loads(out)["devices"][0]["peak_bytes"][0]


# ---- infeasible is a result ----------------------------------------------------------------------


def test_a_memory_limit_that_nothing_fits_is_a_document_and_writes_no_plan(
    inside_planned, capsys, tmp_path
):
    command = [
        "plan",
        "tiny.py:model",
        *BATCH,
        "--profile",
        "profile.json",
        "--memory",
        "1KB",
        "-o",
        str(tmp_path / "none.json"),
        "--json",
    ]
    code, out, _ = run_here(capsys, *command)
    document = json.loads(out)
    assert (
        code,
        document["status"],
        document["why"]["code"],
        document["why"]["memory_limit_bytes"],
    ) == (
        1,
        "infeasible",
        "memory-limit",
        1000,
    )
    assert document["why"]["least_peak_bytes"] == max(
        document["plan"]["prediction"]["peak_bytes_per_device"]
    )
    assert not (tmp_path / "none.json").exists()


def test_fewer_layers_than_stages_is_infeasible_also_where_the_interval_cannot_be_calibrated(
    inside_planned, capsys
):
    cluster = ["--cluster", "8x1", "--global-batch", "4", "--microbatches", "4"]
    code, out, _ = run_here(
        capsys, "plan", "tiny.py:model?layers=3", *cluster, *STORE, "--neighbours", "1", "--json"
    )
    assert (code, json.loads(out)["plan"], json.loads(out)["why"]["code"]) == (
        1,
        None,
        "too-few-layers",
    )


def test_a_profile_without_replicas_serves_a_plan_that_may_shard_parameters(inside_planned, capsys):
    profile = json.loads(Path("profile.json").read_text())
    alone = [
        row for row in profile["measurements"] if row["data_parallel"] * row["tensor_parallel"] == 1
    ]
    Path("alone.json").write_text(json.dumps({**profile, "measurements": alone}))
    asked = [
        "--cluster",
        "1x1",
        "--global-batch",
        "8",
        "--microbatches",
        "4",
        "--shard-params",
        "--json",
        *("-o", "sharded.json"),
    ]
    code, out, err = run_here(capsys, "plan", "tiny.py:model", *asked, "--profile", "alone.json")
    assert code == 0 and not json.loads(out)["plan"]["stages"][0]["shard_params"], err


def test_a_limit_below_the_state_is_answered_without_measuring(inside_planned, capsys, tmp_path):
    """Eight layers of 1 KiB with Adam: 4 KiB of parameters, gradients and state each, on two
    devices."""
    asked = [
        "plan",
        "tiny.py:model",
        *BATCH,
        "--store",
        str(tmp_path / "store"),
        "--workers",
        "0",
        "-o",
        str(tmp_path / "none.json"),
    ]
    code, out, err = run_here(capsys, *asked, "--memory", "16383", "--json")
    document = json.loads(out)
    why, change = document["why"], document["cheapest_change"]
    assert (code, why["code"], why["least_state_bytes"]) == (1, "memory-limit", 16384)
    assert (
        "parameters, gradients and optimizer state alone need at least 16.4 kB per device; limit "
        "16.4 kB\n"
    ) in err
    assert (change["change"], change["least_state_bytes"]) == ("--cluster 2x2", 8192)
    assert not rows(tmp_path / "store") and not (tmp_path / "none.json").exists()


def test_the_plain_answer_comes_before_anything_is_measured_for_a_change(
    inside_planned, capsys, monkeypatch
):
    made, make_profile = [], stages.make_profile

    def once(*arguments, **changes):
        if made:
            raise KeyboardInterrupt
        made.append(changes)
        return make_profile(*arguments, **changes)

    monkeypatch.setattr(stages, "make_profile", once)
    monkeypatch.setattr(stages, "LONG_SECONDS", -1.0)  # whatever the store has
    code, out, err = run_here(
        capsys,
        "plan",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--memory",
        "16384",
        "-o",
        "none.json",
    )
    assert code == 130 and made
    assert out.startswith("infeasible: Compiled, the plan needs ")
    asked = "--neighbours 1 --calibration-plans 1"
    assert f"{asked}: a profile is made first, " in err and f" min; without {asked} the plan" in err
    assert "looking for the cheapest change that fits" in err


def test_a_plan_written_by_hand_gets_its_prediction(inside_planned, capsys, tmp_path):
    path = tmp_path / "plan.json"
    document = json.loads(Path("plan.json").read_text())
    predicted = document.pop("prediction")["peak_bytes_per_device"]
    document["workload"]["location"] = str(inside_planned / "tiny.py")
    path.write_text(json.dumps(document))
    status, out, _ = run_here(capsys, "run", str(path), "--steps", "1", "--quiet")
    assert status == 0 and "capture predict PLAN --profile FILE -o PLAN" in out
    assert (
        run_here(capsys, "predict", str(path), "--profile", "profile.json", "-o", str(path))[0] == 0
    )
    assert json.loads(path.read_text())["prediction"]["peak_bytes_per_device"] == predicted
    status, out, _ = run_here(capsys, "run", str(path), "--steps", "1", "--quiet")
    assert status == 0 and "capture predict" not in out


def test_an_evaluation_of_stages_that_were_all_compiled_before_says_so(inside_planned, capsys):
    asked = ("evaluate", "tiny.py:model", "--cluster", "1x1", "--global-batch", "8")
    code, out, _ = run_here(
        capsys, *asked, "--microbatches", "4", *STORE, "--plans", "2", "--default-only"
    )
    assert code == 0 and "nothing was predicted: draw more plans" in out
    assert "paper" not in out
