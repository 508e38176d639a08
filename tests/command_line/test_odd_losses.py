"""Every verb that traces a loss says when it is no mean over the examples, or no number: what is
run beside one device that splits the batch alike does not show it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import run_here, run_json
from processes import user_model

TARGET = Path(__file__).parents[1] / "recorded" / "files" / "cpu_like.json"
NOT_A_MEAN = "a sum over the examples, not a mean. [workload-split]"
BEGINS_AS_NONE = "The loss is nan with the parameters of init"
PLAN = {
    "cluster": {"nodes": [1], "target_per_node": ["cpu"]},
    "num_layers": 2,
    "global_batch_size": 4,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "stages": [{"layers": [0, 1], "devices": [0]}],
}
HERE = ("--workers", "0", "--store", "store.sqlite")
VERBS = {
    "run": ("run", "plan.json", "--trust", "--steps", "2", "--check"),
    "verify": ("verify", "plan.json", "--trust", *HERE),
    "explain": ("explain", "plan.json", "--trust", "--seconds", "0", *HERE),
    "osdp": ("osdp", "WORKLOAD", "--cluster", "1x2", "--target", "cpu_like.json", "--no-verify"),
    "packs": (
        *("plan", "WORKLOAD", "--system", "harmony", "--target", "cpu_like.json", "--no-verify"),
        *("--global-batch", "4", "--stride", "2", *HERE),
    ),
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What a verb says of a loss: its document's warnings, and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(TARGET, "cpu_like.json")
    Path("odd.py").write_text(user_model("odd_losses"))

    def said(verb: str, loss: str) -> tuple[dict, str]:
        workload = f"odd.py:model?loss={loss}"
        named = {"location": "odd.py", "function": "model", "arguments": {"loss": loss}}
        Path("plan.json").write_text(json.dumps({"schema_version": 1, "workload": named, **PLAN}))
        command = [workload if word == "WORKLOAD" else word for word in VERBS[verb]]
        code, document, err = run_json(capsys, *command)
        assert code == 0, err
        return document, err

    return said


@pytest.mark.parametrize("verb", VERBS)
def test_a_sum_is_warned_of(said, verb):
    document, err = said(verb, "sum")
    (warning,) = document["warnings"]
    assert warning.endswith(NOT_A_MEAN) and (verb == "run") == ("warning: " in err)


@pytest.mark.parametrize("verb", ["verify", "run"])
def test_a_mean_is_what_was_asked_for(said, verb):
    assert said(verb, "mean")[0]["warnings"] == []


def test_a_loss_that_begins_as_no_number_is_warned_of(said):
    (warning,) = said("verify", "root")[0]["warnings"]
    assert warning.startswith(BEGINS_AS_NONE) and warning.endswith("[workload-loss]")


def test_a_run_says_at_once_that_its_loss_is_no_number_and_no_check_passes(said, capsys):
    document, err = said("run", "root")
    (warning,) = document["warnings"]
    assert warning.startswith("the loss of step 1 is nan: nothing is learned")
    lines = err.splitlines()
    before = lines[lines.index(f"warning: {warning}") - 1]
    assert before.startswith("step 1: loss nan, ")
    # JSON has no infinity.
    assert document["max_relative_loss_error"] is document["max_relative_gradient_error"] is None
    _, out, _ = run_here(capsys, *VERBS["run"])
    assert f"warning: {warning}" in out and "largest relative error: loss inf" in out


@pytest.mark.parametrize(("microbatches", "differs"), [(1, False), (2, True)])
def test_a_check_says_where_roundings_do_not_explain_gradients(said, capsys, microbatches, differs):
    """A constant that a backward pass adds is as large for every micro-batch as for all."""
    Path("injected.py").write_text(user_model("injected"))
    named = {"location": "injected.py", "function": "model", "arguments": {}}
    plan = {"schema_version": 1, "workload": named, **PLAN, "num_microbatches": microbatches}
    Path("plan.json").write_text(json.dumps(plan))
    _, out, _ = run_here(capsys, *VERBS["run"])
    assert ("this step trains another function than one device" in out) == differs
    _, document, _ = run_json(capsys, *VERBS["verify"])
    assert [warning[-19:] for warning in document["warnings"]] == ["[workload-gradient]"]
    _, document, _ = run_json(capsys, *VERBS["run"])
    error, most = document["max_relative_gradient_error"], document["gradient_rounding_error"]
    assert (error > most) == differs and 1e-3 < most < 1e-2
