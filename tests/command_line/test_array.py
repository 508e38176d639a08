"""Arrays of models from the command line: planned for a target, run here, and what was planned is
what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from array_models import BATCH, array_plan, mlp, tiny_gpt

from capture import train_array
from capture.cli.main import main
from capture.errors import CaptureError
from capture.machine import target
from capture.model.workload import WorkloadSpec
from capture.plan.kinds import load_plan
from recommender.mutwo import mutwo

MODELS = Path(__file__).parents[1] / "array_models.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a target of this machine's platform that has rates: an H200's, slowed down."""
    monkeypatch.chdir(tmp_path)
    document = json.loads((Path(target.__file__).parent / "targets" / "h200.json").read_text())
    document |= {"name": "slow", "platform": "cpu", "compiler": {}}
    for rate in document["compute"]["flops_per_second"].values():
        rate["value"] *= 1e-5
    document["links"]["host"]["to_host"]["bytes_per_second"]["value"] *= 0.01
    Path("slow.json").write_text(json.dumps(document))
    return tmp_path


def asked(capsys, *arguments) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_sweep_is_planned_and_run_within_its_limit(folder, capsys):
    common = [
        "plan", f"{MODELS}:tiny_gpt?num_blocks=2", "--system", "mutwo", "--models", 2, "--vary",
        "learning_rate=0.3,0.03", "--vary", "seed=1", "--target", "slow.json",
        "--global-batch", BATCH, "--workers", 0, "--store", "store.sqlite",
    ]  # fmt: skip
    code, free = asked(capsys, *common)
    assert (code, free["status"]) == (0, "ok")
    names = {row["name"] for row in free["plan"]["candidates"]}
    assert names <= {"multiplexed 1+1", "all fused", "none fused"} and "all fused" in names
    assert {"sequential jit", "HFTA-NoMemOpt"} <= {row["name"] for row in free["baselines"]}
    fastest = min(free["plan"]["candidates"], key=lambda row: row["step_seconds"])
    assert free["needs"]["step_seconds"] == fastest["step_seconds"]
    limit = free["needs"]["peak_bytes"] * 3 // 5
    code, found = asked(capsys, *common, "--memory", limit)
    assert (code, found["status"]) == (0, "ok")
    assert found["needs"]["peak_bytes"] <= limit
    assert found["needs"]["step_seconds"] >= found["search"]["lower_bound_seconds"]
    code, ran = asked(capsys, "run", "plan.json", "--steps", 2, "--check")
    assert code == 0 and ran["is_target"]
    assert ran["predicted_peak_bytes_per_device"] == [found["needs"]["peak_bytes"]]
    assert ran["predicted_peak_bytes_per_device"] == ran["measured_peak_bytes_per_device"]
    assert ran["host"]["predicted_peak_bytes"] == ran["host"]["measured_peak_bytes"]
    assert ran["max_relative_loss_error"] < 1e-6
    assert [len(step) for step in ran["losses"]] == [2, 2]
    for verb in (["explain", "plan.json"], ["report", "plan.json"]):
        assert asked(capsys, *verb)[1]["kind"] == "array"
    assert asked(capsys, "diff", "plan.json", "plan.json")[1]["same_decision"]
    for algorithm in ("corrected", "paper"):
        code, theirs = asked(capsys, *common, "--memory", limit, "--algorithm", algorithm)
        assert theirs["search"]["algorithm"] == algorithm
        assert {row["order"] for row in theirs["plan"]["candidates"]} == {"multiplexed"}
        assert (code, theirs["status"]) in ((0, "ok"), (1, "infeasible"))
        if code == 0:
            assert theirs["needs"]["peak_bytes"] <= limit
            assert theirs["needs"]["step_seconds"] >= found["needs"]["step_seconds"]
    code, none = asked(capsys, *common, "--memory", 1000)
    assert (code, none["status"], none["why"]["code"]) == (1, "infeasible", "array-memory")
    assert none["why"]["least_peak_bytes"] > 1000


@pytest.mark.slow
def test_adapters_share_their_base(folder, capsys):
    code, found = asked(
        capsys, "plan", f"{MODELS}:tiny_lora", "--system", "mutwo", "--models", 2,
        "--shared", "base/*", "--target", "slow.json", "--global-batch", 1,
        "--workers", 0, "--store", "store.sqlite",
    )  # fmt: skip
    assert (code, found["plan"]["shared"]) == (0, ["base/*"])
    code, ran = asked(capsys, "run", "plan.json", "--steps", 2, "--check", "--save", "run")
    assert (
        code == 0
        and ran["predicted_peak_bytes_per_device"] == ran["measured_peak_bytes_per_device"]
    )
    assert ran["max_relative_loss_error"] < 1e-6
    code, later = asked(capsys, "run", "plan.json", "--steps", 1, "--restore", "run")
    assert code == 0 and later["num_steps"] == 3


@pytest.mark.slow
def test_models_of_other_batches_and_workloads_are_planned_and_run(folder, capsys):
    """Within a limit at which something has to move; and nothing is compiled for the report."""
    Path("sweep.json").write_text(
        json.dumps(
            [
                {"learning_rate": 0.3, "seed": 0},
                {"seed": 1, "batch_size": BATCH + 1},
                {"seed": 2, "workload": f"{MODELS}:mlp"},
                {"learning_rate": 0.1, "seed": 3},
            ]
        )
    )
    common = [
        "plan", f"{MODELS}:tiny_gpt?num_blocks=2", "--system", "mutwo", "--models", "sweep.json",
        "--trust", "--target", "slow.json", "--global-batch", BATCH, "--workers", 0, "--store", "store.sqlite",
    ]  # fmt: skip
    code, free = asked(capsys, *common)
    assert (code, free["status"]) == (0, "ok")
    names = {row["name"] for row in free["plan"]["candidates"]}
    assert names <= {
        f"{order} {sizes} and 1 and 1"
        for order in ("multiplexed", "in turn")
        for sizes in ("2", "1+1")
    } | {"none fused"}
    sizes = {row["name"]: row["sizes"] for row in free["baselines"]}
    assert sizes["one vmap"] == [2, 1, 1] and sizes["sequential jit"] == [1, 1, 1, 1]
    assert {(row["models"], row.get("task", 0)) for row in free["plan"]["saturation"]} == {
        (1, 0), (2, 0), (1, 1), (1, 2)
    }  # fmt: skip
    limit = free["needs"]["peak_bytes"] * 7 // 8
    code, found = asked(capsys, *common, "--memory", limit)
    assert (code, found["status"]) == (0, "ok")
    assert (
        found["plan"]["prediction"]["swapped_bytes"]
        + found["plan"]["prediction"]["recomputed_bytes"]
        > 0
    )
    assert found["needs"]["step_seconds"] >= found["search"]["lower_bound_seconds"]
    assert "3 programs" in found["why"]["summary"]
    code, ran = asked(capsys, "run", "plan.json", "--steps", 2, "--check", "--save", "run")
    assert code == 0 and ran["is_target"]
    assert ran["predicted_peak_bytes_per_device"] == [found["needs"]["peak_bytes"]]
    assert ran["predicted_peak_bytes_per_device"] == ran["measured_peak_bytes_per_device"]
    assert ran["host"]["predicted_peak_bytes"] == ran["host"]["measured_peak_bytes"]
    assert ran["max_relative_loss_error"] < 1e-6 and ran["max_relative_param_error"] < 1e-5
    code, later = asked(capsys, "run", "plan.json", "--steps", 1, "--restore", "run")
    assert code == 0 and later["num_steps"] == 3
    for verb in ("report", "explain --store store.sqlite --trace trace.json"):
        name, *more = verb.split()
        code, shown = asked(capsys, name, "plan.json", *more)
        assert code == 0 and shown["needs"]["peak_bytes"] == found["needs"]["peak_bytes"]
    assert main(["explain", "plan.json"]) == 0
    assert f"with batch_size={BATCH + 1}" in capsys.readouterr().out


@pytest.mark.slow
def test_models_of_other_workloads_are_planned_in_python(folder):
    """By names for objects, of which a plan knows no file."""
    models = [{"seed": 0}, {"seed": 1, "workload": "mlp", "learning_rate": 0.1}]
    workloads = {"mlp": mlp()}
    answer = mutwo(tiny_gpt(2), models, target="slow.json", batch_size=BATCH, workloads=workloads)
    assert answer.status == "ok" and answer.plan.workload is None
    assert [task.workload for task in answer.plan.trained] == ["", "mlp"]
    answer.plan.save("plan.json")
    plan = load_plan("plan.json")
    assert plan == answer.plan
    found = []
    for train in (answer.train(), train_array(tiny_gpt(2), plan, workloads=workloads)):
        given = [[of.batch(jax.random.key(0), BATCH) for of in (tiny_gpt(2), mlp())]]
        found += [list(losses) for _, losses in train(train.init(), given)]
    assert len(found) == 2 and found[0] == found[1]
    with pytest.raises(CaptureError, match="workload-name"):
        train_array(tiny_gpt(2), plan)


@pytest.mark.slow
def test_a_sweep_is_planned_from_what_a_worker_has_executed(folder, capsys):
    """Seconds of this machine; a second question executes nothing and has the same answer."""
    common = [
        "plan", f"{MODELS}:tiny_gpt?num_blocks=2", "--system", "mutwo", "--models", 2,
        "--backend", "run", "--memory", "60kB", "--global-batch", BATCH, "--store", "store.sqlite",
    ]  # fmt: skip
    code, found = asked(capsys, *common)
    assert (code, found["status"]) == (0, "ok")
    plan, needs = found["plan"], found["needs"]
    assert (
        needs["seconds_are"] == "simulated"
        and plan["seconds_from"] == "executions on cpu (median of 3)"
    )
    assert needs["peak_bytes"] <= 60_000
    _, again = asked(capsys, *common, "--workers", 0)
    assert again["needs"]["step_seconds"] == needs["step_seconds"]
    _, jobs = asked(capsys, "store", "ls", "--store", "store.sqlite")
    assert jobs
    code, ran = asked(capsys, "run", "plan.json", "--steps", 2)
    assert (
        code == 0
        and ran["predicted_peak_bytes_per_device"] == ran["measured_peak_bytes_per_device"]
    )


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--models", "3", "--vary", "seed=0,1"], "array-vary"),
        (["--vary", "learning_rat=0.1,0.2"], "array-hyperparameter"),
        (["--vary", "seed=0,1", "--shared", "base/*"], "array-shared"),
        (["--vary", "seed=0,1", "--schedule", "gpipe"], "plan-system"),
        (["--vary", "seed=0,1", "--target", "cpu"], "devices-no-rates"),
        (["--vary", "seed=0,1", "--target", "cpu", "--backend", "run"], "array-limit"),
        (["--vary", "seed=0,1", "--backend", "alpa"], "array-backend"),
        (["--vary", "seed=0,1", "--global-batch", "0"], "array-size"),
        (["--vary", "seed=0", "--algorithm", "paper"], "search-algorithm"),
        (["--vary", "seed=0,1", "--algorithm", "wide"], "search-algorithm"),
    ],
)
def test_wrong_questions_are_refused(folder, capsys, more, code):
    given = ["plan", f"{MODELS}:tiny_gpt?num_blocks=2", "--system", "mutwo"]
    if "--target" not in more:
        given += ["--target", "slow.json"]
    given += ["--store", "store.sqlite"]
    exit_code, document = asked(capsys, *given, *more)
    assert exit_code == 2
    assert [error["code"] for error in document["errors"]] == [code]
    if code == "array-hyperparameter":
        assert "Did you mean learning_rate?" in document["errors"][0]["message"]


@pytest.mark.parametrize(
    ("rows", "more", "code"),
    [
        ([{"batch_size": 0}, {}], [], "array-size"),
        ([{"batch_size": "8"}, {}], [], "array-size"),
        ([{"workload": "mlp"}, {}], [], "workload-name"),
        ([{"workload": "none.py:mlp"}, {}], [], "workload-file"),
        ([{"workload": f"{MODELS}:none"}, {}], [], "workload-function"),
        ([{"workload": f"{MODELS}:tiny_gpt"}, {}], ["--shared", "base/*"], "array-tasks"),
        ([{"batch_size": 3}, {}], ["--shared-batches"], "array-tasks"),
        ([{"batch_size": 3, "b1": 0.5}, {}], [], "array-hyperparameter"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(folder, capsys, rows, more, code):
    Path("sweep.json").write_text(json.dumps(rows))
    exit_code, document = asked(
        capsys, "plan", f"{MODELS}:tiny_gpt?num_blocks=1", "--system", "mutwo", "--models",
        "sweep.json", "--target", "slow.json", "--store", "store.sqlite", "--global-batch", BATCH,
        "--trust", *more,
    )  # fmt: skip
    assert exit_code == 2
    assert [error["code"] for error in document["errors"]] == [code]


@pytest.mark.slow
def test_an_array_is_saved_as_it_goes_and_traced(folder, capsys):
    """Its training is that of every kind of plan: what it says of malloc, and its checkpoints."""
    plan = array_plan(workload=WorkloadSpec.parse(f"{MODELS}:tiny_gpt?num_blocks=1"))
    plan.save("plan.json")
    run = ["run", "plan.json", "--trust"]
    code, whole = asked(capsys, *run, "--steps", 4)
    assert code == 0 and whole["dispatch_seconds"] > 0
    assert 0 < whole["allocator"]["step_bytes"] <= whole["allocator"]["bound_bytes"]
    often = [*run, "--save", "run", "--save-every", 1]
    code, first = asked(capsys, *often, "--steps", 3, "--trace", "trace.json")
    assert code == 0 and sorted(path.name for path in Path("run").iterdir()) == ["2", "3"]
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {"forward", "backward"} <= {event.get("cat") for event in events}
    code, later = asked(capsys, *often, "--steps", 1, "--restore", "run")
    assert (code, later["num_steps"]) == (0, 4)
    assert first["losses"] + later["losses"] == whole["losses"]
    for words, code in [
        (["--steps", "2", "--trace", "trace.json"], "run-trace"),
        (["--seed", "1"], "array-run"),
    ]:
        assert main([*run, *words]) == 2
        assert f"[{code}]" in capsys.readouterr().err
