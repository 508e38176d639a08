"""``capture profile``: with events, resumed, incomplete, terminated in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_json
from processes import QUICK_CODE, REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.cli.main import main
from capture.cli.progress import Events, Tally
from capture.measured.store import Store

QUESTION = [
    "pipeline_models:mlp?num_blocks=2",
    "--cluster",
    "1x1",
    "--global-batch",
    "4",
    "--microbatches",
    "2",
]


SMALL = ["--neighbours", "1", "--calibration-plans", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def inside(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_a_profile_is_made_with_events_and_resumes(inside, capsys):
    command = ["profile", *QUESTION, *SMALL, "--store", "store.sqlite", "--workers", "0"]
    command += ["--quiet", "--events", "events.jsonl", "-o", "profiles/mlp.json"]
    code, document, _ = run_json(capsys, *command)
    assert (code, document["profile"]) == (0, "profiles/mlp.json") and Path(
        document["profile"]
    ).exists()
    lines = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "end" and lines[-1]["exit_code"] == 0
    done = {line["key"] for line in lines if line["event"] == "job" and line["state"] == "done"}
    assert done and done == set(Store(Path("store.sqlite")).get(done))
    progress = [line for line in lines if line["event"] == "progress"][-1]
    assert (
        progress["done"]
        == progress["total"]
        == sum(kind["total"] for kind in progress["kinds"].values())
    )
    run_json(capsys, *command)
    assert not [
        line
        for line in map(json.loads, Path("events.jsonl").read_text().splitlines()[len(lines) :])
        if line["event"] == "job"
    ]


def test_only_the_jobs_of_a_changed_layer_are_new(inside, capsys, monkeypatch):
    """Six equal layers; then the fifth is another one."""
    (inside / "wide.py").write_text(
        "import jax.numpy as jnp, optax\nfrom types import SimpleNamespace\nfrom "
        "jax.ad_checkpoint import checkpoint_name\n\n"
        "def model(odd=-1):\n"
        "    init = lambda key: [jnp.ones((8, 24 if i == odd else 16)) for i in range(6)]\n"
        "    def loss_fn(params, x):\n"
        "        for i, w in enumerate(params):\n"
        "            x = checkpoint_name(x, 'layer_boundary') if i else x\n"
        "            x = x + jnp.tanh(x @ w) @ w.T\n"
        "        return (x**2).mean()\n"
        "    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=lambda key, n: jnp.ones((n, "
        "8)), optimizer=optax.sgd(0.1))\n"
    )
    question = [
        *QUESTION[1:],
        "--neighbours",
        "1",
        "--calibration-plans",
        "0",
        "--store",
        "wide.sqlite",
        "--workers",
        "0",
    ]

    def windows(model: str) -> int:
        """Measure a model, and return the number of windows that the store did not have."""
        kinds = {}
        monkeypatch.setattr(
            Events, "progress", lambda self, kind, done, total: kinds.update({kind: total})
        )
        assert run_json(capsys, "profile", model, *question, "--quiet", "-o", "wide.json")[0] == 0
        return kinds.get("layer windows", 0)

    windows("wide.py:model")
    # At each of two micro-batch sizes: the layer alone, with the one before, with the one after
    # (the last).
    assert windows("wide.py:model?odd=4") == 2 * 3
    assert windows("wide.py:model") == 0


def test_a_profile_without_a_measurement_is_written_ends_with_1_and_names_it(
    inside, capsys, monkeypatch
):
    from capture.profiler.compile import CompileBackend

    programs_of = CompileBackend.programs

    def fail_on_the_first(self, config, **options):
        if (config.first, config.stop) == (0, 1):
            raise RuntimeError("no")
        return programs_of(self, config, **options)

    monkeypatch.setattr(CompileBackend, "programs", fail_on_the_first)
    command = [
        "profile",
        *QUESTION,
        *SMALL,
        "--store",
        "lacking.sqlite",
        "--workers",
        "0",
        "--quiet",
        "-o",
        "lacking.json",
    ]
    for _ in range(2):  # the second time it is known, and not tried
        code, document, _ = run_json(capsys, *command)
        assert (code, Path("lacking.json").exists()) == (1, True)
        assert (
            document["num_set_aside"] >= 2
            and "2 stages (all with layer 0; data parallel 1, " in document["failures"][0]
        )
        assert "M_i is not known of every layer (without layers 0 to 0)" in document["warnings"][-1]
    assert "capture store retry" in document["failures"][0]
    plan = ["plan", *QUESTION, "--profile", "lacking.json", "-o", "plan.json"]
    assert main(plan) == 2
    said = capsys.readouterr().err
    assert (
        said.endswith("lets it be tried again) [profile-missing]\n")
        and "target='cpu': no (set aside" in said
    )
    monkeypatch.undo()
    monkeypatch.chdir(inside)
    run_json(capsys, "store", "--store", "lacking.sqlite", "retry")
    assert run_json(capsys, *command)[0] == 0


def test_a_terminated_profile_ends_in_order(inside):
    """As Slurm does before the time is over: exit code 143, an event that says so, and no job left
    running."""
    env = environment_apart(REPOSITORY / "tests", xla_flags=QUICK_CODE)
    command = [
        sys.executable,
        "-m",
        "capture",
        "profile",
        "pipeline_models:mlp?num_blocks=8",
        *QUESTION[1:],
        "--quiet",
        "--workers",
        "1",
    ]
    command += ["--store", "terminated.sqlite", "--events", "terminated.jsonl"]
    process = subprocess.Popen(command, cwd=inside, env=env, stderr=subprocess.PIPE, text=True)
    events, deadline = inside / "terminated.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while (
        '"state": "done"' not in (events.read_text() if events.exists() else "")
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.endswith("terminated; finished measurements are kept, the same command resumes\n")
    assert json.loads(events.read_text().splitlines()[-1])["exit_code"] == 143
    states = {row.state for row in Store(inside / "terminated.sqlite").rows()}
    assert "done" in states and "running" not in states


# ---- progress ------------------------------------------------------------------------------------


def test_a_tally_knows_rate_and_time_left():
    seconds = [0.0]
    tally = Tally(clock=lambda: seconds[0])
    tally.note("a", 0, 10)
    assert tally.jobs_per_minute is None
    tally.note("b", 0, 20)
    seconds[0] = 30.0
    tally.note("a", 5, 10)
    assert (tally.done, tally.total) == (5, 30)
    assert tally.jobs_per_minute == 10
    assert tally.seconds_left == 150


def test_events_without_a_file_are_none(tmp_path):
    Events(None).say("end", exit_code=0)
    Events(tmp_path / "events").say("end", exit_code=0)
    assert json.loads((tmp_path / "events").read_text())["exit_code"] == 0
