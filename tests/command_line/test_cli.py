"""The ``capture`` command as scripts see it: one JSON document, exit codes, error codes, and
nothing lost when it is killed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from timeouts import TIMEOUT_SECONDS

from capture.cli import asked, plan
from capture.cli.main import _show_warning, main
from capture.cli.progress import progress
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor

REPOSITORY = Path(__file__).resolve().parents[2]

WORKLOAD = '''
import multiprocessing, os
from types import SimpleNamespace

import jax, jax.numpy as jnp, optax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 16

def model(layers=8, scalar=True, dies=False):
    """Equal layers: few different stages to compile."""
    if dies and multiprocessing.parent_process() is not None:
        os._exit(3)

    def init(key):
        return [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, layers)]

    def loss_fn(params, batch):
        x = batch["x"]
        for i, w in enumerate(params):
            x = jnp.tanh((checkpoint_name(x, "layer_boundary") if i else x) @ w)
        losses = ((x - batch["y"]) ** 2).mean(-1)
        return losses.mean() if scalar else losses

    def batch(key, n):
        return dict(zip("xy", jax.random.normal(key, (2, n, WIDTH))))

    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.adam(1e-2))
'''

# Micro-batches of two examples: half of one cannot be split over two devices, so a single size is
# profiled.
BATCH = ["--cluster", "1x2", "--global-batch", "8", "--microbatches", "4"]
STORE = ["--store", "store.sqlite", "--workers", "0"]
PROFILING = ["--neighbours", "1", "--calibration-plans", "1"]


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(directory / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "capture", *arguments],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def capture(directory: Path, *arguments: str, code: int = 0) -> SimpleNamespace:
    """Run a verb with ``--json`` in a process of its own."""
    process = start(directory, *arguments, "--json")
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == code, f"{arguments} ended with {process.returncode}\n{out}\n{err}"
    return SimpleNamespace(document=json.loads(out) if code < 2 else None, out=out, err=err)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> SimpleNamespace:
    """A directory in which the model was profiled, in the paper's way too, and planned for two
    devices."""
    directory = tmp_path_factory.mktemp("cli")
    (directory / "tiny.py").write_text(WORKLOAD)
    profile = capture(
        directory,
        "profile",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--mode",
        "paper",
        "-o",
        "profile.json",
    )
    plan = capture(
        directory, "plan", "tiny.py:model", *BATCH, "--profile", "profile.json", "-o", "plan.json"
    )
    return SimpleNamespace(directory=directory, profile=profile, plan=plan)


@pytest.fixture
def inside(done, monkeypatch) -> Path:
    """That directory, as the working directory of this process."""
    monkeypatch.chdir(done.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(done.directory / "cache"))
    return done.directory


# ---- the path of a user --------------------------------------------------------------------------


def test_profile_says_what_it_measured(done):
    document = done.profile.document
    assert (document["num_layers"], document["num_parameters"], document["microbatch_sizes"]) == (
        8,
        8 * 16 * 16,
        [2],
    )
    assert document["failures"] == [] and document["provenance"]["backend"] == "compile:cpu"
    # Layers, pairs and one anchor, on one device or either way on two.
    assert document["num_measurements"] == (8 + 7 + 1) * 3
    low, high = document["interval_factors"]
    assert 0.5 < low <= 0.995 and 1.005 <= high < 1.5
    assert "compiled" in done.profile.err and "stages in" in done.profile.err
    assert len(done.profile.err) < 4000, "a log file gets a line now and then, no bar that moves"


def test_plan_keeps_its_contract(done):
    document = done.plan.document
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
        == len(document["prediction"]["peak_bytes_per_device"])
    )
    assert document["search"]["algorithm"] == "minmax" and document["search"]["seconds"] >= 0
    assert document["why"]["summary"]
    written = json.loads((done.directory / "plan.json").read_text())
    assert {key: value for key, value in document["plan"].items() if key != "workload"} == {
        k: v for k, v in written.items() if k != "workload"
    }
    assert written["workload"] == {"location": "tiny.py", "function": "model", "arguments": {}}


def test_predict_repeats_the_prediction_of_the_plan(done):
    predicted = capture(
        done.directory, "predict", "plan.json", "--profile", "profile.json"
    ).document
    assert predicted["prediction"] == done.plan.document["prediction"]


def test_run_measures_what_was_predicted_and_trains_like_one_device(done):
    document = capture(done.directory, "run", "plan.json", "--check", "--steps", "2").document
    predicted, measured = (
        document["predicted_peak_bytes_per_device"],
        document["measured_peak_bytes_per_device"],
    )
    assert predicted == done.plan.document["prediction"]["peak_bytes_per_device"]
    intervals = done.plan.document["prediction"]["interval_bytes_per_device"]
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
        len(document["loss"]) == len(document["reference_loss"]) == 2
        and document["loss"][1] < document["loss"][0]
    )
    assert (
        document["max_relative_loss_error"] < 1e-5
        and document["max_relative_gradient_error"] < 1e-4
    )
    assert re.fullmatch(r"[0-7]", document["worst_gradient"]), "a leaf of the user's parameters"


def test_explain_itemises_and_ranks_the_changes(done):
    document = capture(done.directory, "explain", "plan.json", *STORE).document
    assert document["peak_bytes"] == max(document["peak_bytes_per_device"])
    assert all(
        sum(stage["parts_bytes"].values()) == stage["peak_bytes"] for stage in document["stages"]
    )
    saves = [change["saves_bytes"] for change in document["changes"]]
    assert saves == sorted(saves, reverse=True) and len(saves) >= 3
    assert all(
        change["peak_bytes"] + change["saves_bytes"] == document["peak_bytes"]
        for change in document["changes"]
    )


def test_evaluate_keeps_its_contract_for_both_modes(done):
    document = capture(
        done.directory,
        "evaluate",
        "tiny.py:model",
        *BATCH,
        *STORE,
        *PROFILING,
        "--plans",
        "4",
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
    written = json.loads((done.directory / "evaluation.json").read_text())
    rows = written["predictions"]
    assert len(rows) == 4 * 2 * 2  # plans, schedules, devices
    assert sum(not row["compiled_before"] for row in rows) == document["default"]["num_predictions"]
    assert all(row["predicted_bytes"] > 0 and row["measured_bytes"] > 0 for row in rows)
    assert (
        sum(row["paper_predicted_bytes"] is None for row in rows)
        == document["paper"]["num_not_predictable"]
    )


def test_the_truth_of_evaluate_is_no_prediction(inside, capsys, monkeypatch):
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
        return json.loads((inside / name).read_text())["predictions"]

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


def test_evaluate_draws_plans_that_fit(inside, capsys):
    limit = json.loads((inside / "plan.json").read_text())["prediction"]["peak_bytes_per_device"]
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
        "fitting.json",
    ]
    assert main([*asked, "--memory", str(max(limit) * 2)]) == 0
    peaks = [
        row["predicted_bytes"]
        for row in json.loads((inside / "fitting.json").read_text())["predictions"]
    ]
    assert peaks and max(peaks) <= max(limit) * 2
    capsys.readouterr()
    assert main([*asked, "--memory", "1"]) == 2
    assert "[evaluate-memory]" in capsys.readouterr().err


def test_planning_from_a_profile_loads_no_jax_and_text_is_for_people(done, tmp_path):
    command = [
        "plan",
        "tiny.py:model",
        *BATCH,
        "--profile",
        "profile.json",
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
        cwd=done.directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ok: ") and "peak per device" in result.stdout


def test_a_model_without_marks_is_planned_and_its_layers_are_said(inside, capsys):
    """The plan holds the number, so that what reads it cuts alike; also a plan by hand, which need
    not know how layers were found."""
    Path("plain.py").write_text(
        WORKLOAD.replace('(checkpoint_name(x, "layer_boundary") if i else x)', "x")
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
    plan = Plan.load("plain.json")
    assert plan.auto_layers and plan.num_layers == 10
    from capture.runtime.pipeline import trace_for_plan

    workload = WorkloadSpec.parse("plain.py:model?layers=10").load()
    assert trace_for_plan(workload, plan).graph.model_hash == plan.model_hash
    by_hand = plan.with_(auto_layers=False, model_hash="", num_layers=5, stages=[Stage(0, 5, [0])])
    assert trace_for_plan(workload, by_hand).graph.num_layers == 5
    assert not Plan.load("plan.json").auto_layers


def test_a_plan_by_hand_is_predicted_for_reports_and_differences(inside, capsys):
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
    profiling = [*STORE, "--neighbours", "1", "--calibration-plans", "0", "--json"]
    code, out, err = run_here(capsys, "report", "hand.json", *profiling)
    assert (
        code == 0
        and (
            "the plan has no prediction and there is no --profile: profiling tiny.py:model for "
            "its stages\n"
        )
        in err
    )
    known = Plan.load("known.json").prediction
    assert [stage["predicted_peak_bytes"] for stage in json.loads(out)["stages"]] == [
        stage.peak_bytes for stage in known.stages
    ]
    code, out, _ = run_here(capsys, "diff", "hand.json", "plan.json", *profiling)
    assert code == 0 and known.peak_bytes == json.loads(out)["devices"][0]["peak_bytes"][0]


# ---- infeasible is a result ----------------------------------------------------------------------


def run_here(capsys, *arguments: str) -> tuple[int, str, str]:
    """A verb in this process: exit code, standard output, standard error."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_a_memory_limit_that_nothing_fits_is_a_document_and_writes_no_plan(
    inside, capsys, tmp_path
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
        document["prediction"]["peak_bytes_per_device"]
    )
    assert not (tmp_path / "none.json").exists()


def test_fewer_layers_than_stages_is_infeasible_also_where_the_interval_cannot_be_calibrated(
    inside, capsys
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


def test_a_profile_without_replicas_serves_a_plan_that_may_shard_parameters(inside, capsys):
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
    ]
    code, out, err = run_here(capsys, "plan", "tiny.py:model", *asked, "--profile", "alone.json")
    assert code == 0 and not json.loads(out)["plan"]["stages"][0]["shard_params"], err


def test_a_limit_below_the_state_is_answered_without_measuring(inside, capsys, tmp_path):
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
    why = json.loads(out)["why"]
    assert (code, why["code"], why["least_state_bytes"]) == (1, "memory-limit", 16384)
    assert (
        "parameters, gradients and optimizer state alone need at least 16.4 kB per device; limit "
        "16.4 kB\n"
    ) in err
    assert (
        why["cheapest_change"]["change"] == "--cluster 2x2"
        and why["cheapest_change"]["least_state_bytes"] == 8192
    )
    assert not rows(tmp_path / "store") and not (tmp_path / "none.json").exists()


def test_the_plain_answer_comes_before_anything_is_measured_for_a_change(
    inside, capsys, monkeypatch
):
    made, make_profile = [], plan.make_profile

    def once(*arguments, **changes):
        if made:
            raise KeyboardInterrupt
        made.append(changes)
        return make_profile(*arguments, **changes)

    monkeypatch.setattr(plan, "make_profile", once)
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
    assert out.startswith("infeasible: The least peak of any plan is ") and "peak per device" in out
    assert "looking for the cheapest change that fits" in err


# ---- bad input -----------------------------------------------------------------------------------

PLAN = ["plan", "tiny.py:model", "--profile", "profile.json"]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("plan-batch", [*PLAN, "--cluster", "1x2", "--global-batch", "10", "--microbatches", "4"]),
        ("plan-batch", [*PLAN, "--cluster", "1x2", "--microbatches", "0"]),
        ("target-unknown", [*PLAN, *BATCH, "--target", "h900"]),
        ("cluster-syntax", [*PLAN, "--cluster", "two"]),
        ("cluster-nodes", [*PLAN, "--cluster", "2x0"]),
        ("memory-syntax", [*PLAN, *BATCH, "--memory", "much"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--objective", "pareto"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "mcap", "--objective", "throughput"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--mode", "paper"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--merge-layers", "2"]),
        ("recommend-objective", [*PLAN, *BATCH, "--objective", "pareto", "--mode", "paper"]),
        ("profile-no-times", [*PLAN, *BATCH, "--algorithm", "autostage"]),
        ("profile-choice", [*PLAN, *BATCH, "--remat", "full"]),
        ("profile-choice", [*PLAN, *BATCH, "--shard-params"]),
        ("profile-file", ["plan", "tiny.py:model", *BATCH, "--profile", "missing.json"]),
        ("file", [*PLAN, *BATCH, "-o", "missing/plan.json"]),
        ("store-corrupt", ["profile", "tiny.py:model", *BATCH, "--store", "tiny.py"]),
        ("option-number", ["profile", "tiny.py:model", *BATCH, "--neighbours", "0"]),
        ("option-number", ["run", "plan.json", "--steps", "0"]),
        ("option-number", ["evaluate", "tiny.py:model", *BATCH, "--plans", "some"]),
        ("workload-name", ["profile", "tiny.py", *BATCH, *STORE]),
        ("workload-file", ["profile", "missing.py:model", *BATCH, *STORE]),
        ("workload-function", ["profile", "tiny.py:modal", *BATCH, *STORE]),
        ("workload-arguments", ["profile", "tiny.py:model?depth=3", *BATCH, *STORE]),
        ("workload-module", ["profile", "no_such_module:model", *BATCH, *STORE]),
        ("plan-file", ["run", "missing.json"]),
        ("plan-file", ["explain", "missing.json"]),
        ("profile-file", ["predict", "plan.json", "--profile", "missing.json"]),
        (
            "profile-measured",
            ["plan", "tiny.py:model", *BATCH, "--profile", "profile.json", "--neighbours", "1"],
        ),
        (
            "profile-choice",
            [
                "plan",
                "tiny.py:model",
                *BATCH,
                "--profile",
                "profile.json",
                "--tensor-parallel-rule",
                "largest",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:2] + value[-2:]),
)
def test_bad_input_ends_with_2_and_one_message_with_its_code(inside, capsys, code, arguments):
    status, out, err = run_here(capsys, *arguments, "--json")
    assert status == 2
    if code == "option-number":  # refused before it is known that a document is wanted
        assert out == ""
    else:
        document = json.loads(out)
        assert (document["status"], [error["code"] for error in document["errors"]]) == (
            "error",
            [code],
        )
    (message,) = [line for line in err.splitlines() if "error: " in line]
    assert message.endswith(f"[{code}]")
    assert "Traceback" not in err


def test_a_loss_that_is_no_scalar_is_refused(inside, capsys):
    status, out, err = run_here(
        capsys, "profile", "tiny.py:model?scalar=false", *BATCH, *STORE, "--quiet"
    )
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: .*scalar.* \[[a-z-]+\]\n", err)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"schema_version": 9}, "plan-schema"),
        ({"stages": 3}, "plan-corrupt"),
        ({"num_layers": 9}, "plan-layers"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(inside, capsys, tmp_path, changes, code):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(Path("plan.json").read_text()) | changes))
    for arguments in (
        ["run", str(path)],
        ["predict", str(path), "--profile", "profile.json"],
        ["explain", str(path), *STORE],
    ):
        status, out, err = run_here(capsys, *arguments)
        assert (
            (status, out) == (2, "") and err.startswith("error: ") and err.endswith(f"[{code}]\n")
        )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "profile-corrupt"),
        ('{"schema_version": 1}', "profile-corrupt"),
        ('{"schema_version": 9}', "profile-schema"),
    ],
)
def test_a_profile_that_is_none_is_refused(inside, capsys, tmp_path, content, code):
    path = tmp_path / "profile.json"
    path.write_text(content)
    for arguments in (
        ["predict", "plan.json", "--profile", str(path)],
        ["plan", "tiny.py:model", *BATCH, "--profile", str(path)],
    ):
        status, out, err = run_here(capsys, *arguments)
        assert (
            (status, out) == (2, "") and err.startswith("error: ") and err.endswith(f"[{code}]\n")
        )


def test_a_plan_of_a_model_that_was_edited_since_is_refused(inside, capsys, tmp_path):
    (tmp_path / "edited.py").write_text(WORKLOAD.replace("jnp.tanh", "jnp.sin"))
    for arguments in (["run", "plan.json"], ["explain", "plan.json", *STORE]):
        status, out, err = run_here(capsys, *arguments, "--workload", f"{tmp_path}/edited.py:model")
        assert (status, out) == (2, "")
        assert re.search(r"^error: .* \[plan-other-model\]$", err, re.MULTILINE), err


def test_a_plan_written_by_hand_gets_its_prediction(inside, capsys, tmp_path):
    path = tmp_path / "plan.json"
    document = json.loads(Path("plan.json").read_text())
    predicted = document.pop("prediction")["peak_bytes_per_device"]
    document["workload"]["location"] = str(inside / "tiny.py")
    path.write_text(json.dumps(document))
    status, out, _ = run_here(capsys, "run", str(path), "--steps", "1", "--quiet")
    assert status == 0 and "capture predict PLAN --profile FILE -o PLAN" in out
    assert (
        run_here(capsys, "predict", str(path), "--profile", "profile.json", "-o", str(path))[0] == 0
    )
    assert json.loads(path.read_text())["prediction"]["peak_bytes_per_device"] == predicted
    status, out, _ = run_here(capsys, "run", str(path), "--steps", "1", "--quiet")
    assert status == 0 and "capture predict" not in out


def test_progress_in_a_log_file_is_whole_lines(capsys):
    show = progress(SimpleNamespace(quiet=False))
    show("optimizer updates", 0, 1)
    for done in range(4):
        show("layer windows", done, 3)
    show("optimizer updates", 1, 1)
    assert capsys.readouterr().err == "compiling 1 of 4 stages\ncompiled 4 stages in 0 s\n"


def test_progress_in_a_terminal_is_one_line():
    code = """
from types import SimpleNamespace
from capture.cli.progress import clear_line, progress
show = progress(SimpleNamespace(quiet=False))
windows = [("layer windows", done) for done in range(3)]
for kind, done in (("optimizer updates", 0), *windows):
    show(kind, done, 2)
clear_line()
print("error: none")
"""
    leader, follower = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=follower,
        stderr=follower,
        env=env,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    shown = os.read(leader, 10_000).decode().replace("\r\n", "\n")
    os.close(leader), os.close(follower)
    lines = shown.replace("\x1b[K", "").split("\r")
    assert lines[0] == "compiling 0 of 2 stages: optimizer updates"
    assert (
        lines[3] == "compiling 2 of 4 stages: each layer, alone and with its neighbours"
        and shown.count("\n") == 1
    )
    assert shown.endswith("\r\x1b[Kerror: none\n"), "what comes between stands on a line of its own"


def test_a_plan_made_from_objects_asks_for_its_workload(inside, capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(Path("plan.json").read_text()) | {"workload": None}))
    status, _, err = run_here(capsys, "run", str(path))
    assert status == 2 and err == (
        "error: the plan was made from Python objects and names no workload; give --workload. "
        "[plan-workload]\n"
    )


def test_a_plan_needs_as_many_layers_as_evaluate_draws_stages(inside, capsys):
    cluster = ["--cluster", "8x1", "--global-batch", "4", "--microbatches", "4"]
    status, _, err = run_here(
        capsys,
        "evaluate",
        "tiny.py:model?layers=3",
        *cluster,
        *STORE,
        "--neighbours",
        "1",
        "--quiet",
    )
    assert status == 2 and err.endswith("[sampling-empty]\n")


def test_an_unknown_verb_and_the_version(capsys):
    assert run_here(capsys, "guess")[0] == 2
    assert run_here(capsys, "--version")[:2] == (0, "capture 0.1.0\n")


# ---- nothing is lost -----------------------------------------------------------------------------


def rows(store: Path, of: str = "") -> dict[str, float]:
    """Measurements by key, with what each took; only those whose value has a certain entry."""
    if not store.exists():
        return {}
    try:
        return dict(
            sqlite3.connect(store, timeout=TIMEOUT_SECONDS).execute(
                "SELECT key, seconds FROM measurements WHERE value LIKE ?", (f"%{of}%",)
            )
        )
    except sqlite3.OperationalError:  # the table is being made
        return {}


def test_a_killed_profile_resumes_and_measures_only_what_is_missing(done, tmp_path):
    """Killed with worker processes, resumed without: they share the keys."""
    store = tmp_path / "store.sqlite"
    command = [
        "profile",
        str(done.directory / "tiny.py") + ":model",
        *BATCH,
        "--store",
        str(store),
        "--neighbours",
        "1",
        "--calibration-plans",
        "0",
        "--remat",
        "none",  # as in the paper's mode
    ]
    process = start(tmp_path, *command, "--workers", "1")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(rows(store)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    # Returns once the worker, which holds the other end, has ended as well.
    process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGKILL
    before = rows(store)
    assert len(before) >= 3
    resumed = capture(tmp_path, *command, "--workers", "0", "--events", "events.jsonl")
    after = rows(store)
    assert before.items() <= after.items()
    assert len(after) > len(before), "it was killed too late to tell"
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    totals = [
        event["kinds"]["layer windows"]["total"] for event in events if event["event"] == "progress"
    ]
    windows_before = [key for key in before if key in rows(store, "residual_bytes")]
    assert totals[-1] == len(rows(store, "residual_bytes")) - len(windows_before)
    assert re.sub(r"compil(ing|ed) \d+ .*\n", "", resumed.err) == "", (
        "nothing but progress, in words"
    )
    again = capture(tmp_path, *command, "--workers", "0")
    assert rows(store) == after and again.err == ""
    mine, theirs = (
        json.loads((tmp_path / "profile.json").read_text())["measurements"],
        json.loads((done.directory / "profile.json").read_text()),
    )
    assert mine == theirs["measurements"]


def test_a_worker_that_dies_is_an_error_with_what_to_do(inside, capsys, tmp_path):
    command = [
        "profile",
        "tiny.py:model?dies=true",
        *BATCH,
        "--store",
        str(tmp_path / "store"),
        "--workers",
        "1",
        "--quiet",
    ]
    status, out, err = run_here(capsys, *command)
    assert (status, out) == (3, "")
    assert err.startswith(
        "error: 3 workers ended, one after the other, before they could take a job (out of "
        "memory?): its process ended "
    )
    assert err.endswith("[profile-worker]\n")


# ---- options -------------------------------------------------------------------------------------


def test_the_store_is_in_the_cache_folder_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        asked.open_store(SimpleNamespace(store=None)).path == tmp_path / "capture" / "store.sqlite"
    )
    assert asked.open_store(SimpleNamespace(store=tmp_path / "mine")).path == tmp_path / "mine"


def test_one_device_is_planned_for_where_no_cluster_is_named_and_that_is_said(capsys):
    options = SimpleNamespace(cluster=None, target="CPU", quiet=False)
    assert asked.read_cluster(vars(options)) == Cluster((1,), "cpu")
    asked.say_one_device(options)
    assert (
        capsys.readouterr().err
        == "for one device (--cluster 1x1); --cluster NxG is for N nodes of G devices\n"
    )


def test_a_batch_defaults_to_sixteen_examples_per_microbatch():
    assert asked.read_batch({"global_batch": None, "microbatches": 4}) == (64, 4)


def test_quiet_progress_says_nothing(capsys):
    progress(SimpleNamespace(quiet=True))("work", 0, 3)
    progress(SimpleNamespace(quiet=False))("work", 3, 3)
    out, err = capsys.readouterr()
    assert out == "" and err.count("work") <= 2


BROKEN = """
import jax.numpy as jnp
from types import SimpleNamespace
def refuse():
    raise ValueError("size='xl' is no size; give small. [broken-size]\\ndepth=0 is none; give 1. [broken-depth]")
def model(broken="lookup"):
    if broken == "codes":
        refuse()
    if broken == "constructor":
        return {}["x"]
    def init(key):
        return jnp.ones(3) @ jnp.ones(4) if broken == "init" else jnp.ones((4, 4))
    def batch(key, n):
        return open("no data") if broken == "batch" else jnp.ones((n, 4))
    def loss_fn(params, batch):
        return (batch @ params).sum() + [][1]
    return SimpleNamespace(init=init, batch=batch, loss_fn=loss_fn, optimizer=SimpleNamespace(init=0, update=0))
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("constructor", "broken.py:10 in model: KeyError: 'x'"),
        (
            "init",
            "broken.py:12 in init: TypeError: dot_general requires contracting dimensions to have "
            "the same shape, got (3,) and (4,).",
        ),
        (
            "batch",
            "broken.py:14 in batch: FileNotFoundError: [Errno 2] No such file or directory: 'no "
            "data'",
        ),
        ("loss", "broken.py:16 in loss_fn: IndexError: list index out of range"),
    ],
)
def test_an_exception_of_the_model_says_where_in_its_file(inside, capsys, tmp_path, where, said):
    (inside / "broken.py").write_text(BROKEN)
    status, out, err = run_here(
        capsys, "profile", f"broken.py:model?broken={where}", *BATCH, *STORE, "--quiet", "--json"
    )
    assert (status, json.loads(out)["errors"]) == (2, [{"code": "exception", "message": said}])
    first, begin, frame = err.splitlines()[:3]
    assert first == f"error: {said} [exception]" and begin.startswith("Traceback")
    assert "broken.py" in frame, "what calls the model is of no interest"


def test_what_python_cannot_read_is_named_by_its_line(inside, capsys):
    (inside / "unreadable.py").write_text("\ndef model(:\n")
    status, _, err = run_here(capsys, "profile", "unreadable.py:model", *BATCH, *STORE, "--quiet")
    assert (
        status == 2
        and err.startswith("error: ")
        and "unreadable.py:2: SyntaxError: invalid syntax [exception]\n" in err
    )


def test_a_warning_is_a_line_that_names_a_file_of_the_users_alone(inside, capsys):
    for file in (str(inside / "tiny.py"), asked.__file__):
        _show_warning("mind this", UserWarning, file, 3)
    assert capsys.readouterr().err == "warning: tiny.py:3: mind this\nwarning: mind this\n"


def test_codes_of_a_model_are_its_own_and_need_no_traceback(inside, capsys):
    (inside / "broken.py").write_text(BROKEN)
    status, out, err = run_here(
        capsys, "profile", "broken.py:model?broken=codes", *BATCH, *STORE, "--quiet", "--json"
    )
    assert (status, [error["code"] for error in json.loads(out)["errors"]]) == (
        2,
        ["broken-size", "broken-depth"],
    )
    assert err == (
        "error: size='xl' is no size; give small. [broken-size]\nerror: depth=0 is none; give "
        "1. [broken-depth]\n"
    )


@pytest.mark.parametrize(
    "arguments", [["tiny.py:model?width=24"], ["tiny.py:model", "--num-layers", "9"]]
)
def test_a_profile_of_another_model_is_refused(inside, capsys, arguments):
    status, _, err = run_here(capsys, "plan", *arguments, *BATCH, "--profile", "profile.json")
    assert status == 2 and err.endswith("[profile-other-model]\n")


def test_an_option_that_a_verb_does_not_know_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "tiny.py:model", "--clutser", "1x2"])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(
        "capture plan: error: unrecognized arguments: --clutser 1x2; did you mean --cluster?\n"
    )


def test_an_evaluation_of_stages_that_were_all_compiled_before_says_so(inside, capsys):
    asked = ("evaluate", "tiny.py:model", "--cluster", "1x1", "--global-batch", "8")
    code, out, _ = run_here(
        capsys, *asked, "--microbatches", "4", *STORE, "--plans", "2", "--default-only"
    )
    assert code == 0 and "nothing was predicted: draw more plans" in out
    assert "paper" not in out
