"""A run that is interrupted says what it has saved and the command that goes on; folders of
checkpoints that cannot be used are refused before anything is compiled; and nothing is left of what
was interrupted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from array_models import array_plan
from commands import run_here
from planned_model import BATCH
from processes import REPOSITORY, environment_apart, user_model
from timeouts import TIMEOUT_SECONDS

import capture.runtime.multiplexed
import capture.runtime.pipeline
import capture.runtime.training
from capture.cli import run
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan

MODELS = REPOSITORY / "tests/pipeline_models.py"
FILES = REPOSITORY / "tests/recorded/files"
OFTEN = ("--save", "my run", "--save-every", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """With the plan of a model of two layers on one device."""
    monkeypatch.chdir(tmp_path)
    Plan(
        cluster=Cluster((1,)),
        num_layers=2,
        stages=(Stage(0, 2, (0,), StageChoice()),),
        global_batch_size=8,
        num_microbatches=2,
        workload=WorkloadSpec.parse(f"{MODELS}:mlp?num_blocks=2"),
    ).save(Path("plan.json"))


def checkpoint(directory: str, step: int, **metadata) -> None:
    """Make one that is complete, as far as a folder tells."""
    path = Path(directory, str(step), "metadata", "metadata")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema_version": 1, "num_steps": step, **metadata}))


def interrupted(monkeypatch, capsys, *options: str, saved: int = 0) -> str:
    """Return the last line of a run that is interrupted when it has saved a step."""

    def train(*_, **__):
        if saved:
            checkpoint(options[options.index("--save") + 1], saved)
        raise KeyboardInterrupt

    monkeypatch.setattr(capture.runtime.training, "train", train)
    monkeypatch.setattr(run, "run_on_this_machine", train)
    code, out, err = run_here(capsys, "run", "plan.json", "--trust", *options)
    assert (code, out) == (130, "")
    return err.splitlines()[-1]


def test_an_interrupted_run_goes_on_by_the_command_that_it_says(capsys, monkeypatch):
    asked = ("run", "plan.json", "--trust", "--seed", "3", "--steps", "4", "--quiet", "--json")
    _, whole, _ = run_here(capsys, *asked)
    with monkeypatch.context() as patch:

        def say(options, text):
            if text.startswith("step 3"):
                raise KeyboardInterrupt

        patch.setattr(run, "say", say)
        code, out, err = run_here(capsys, *asked, *OFTEN)
    said, _, command = err.strip().partition(". To go on: ")
    assert (code, out, said) == (130, "", "interrupted; step 2 is saved in 'my run'")
    _, *arguments = shlex.split(command)
    code, rest, _ = run_here(capsys, *arguments)
    assert code == 0 and json.loads(rest)["losses"] == json.loads(whole)["losses"][2:]
    assert json.loads(rest)["saved"] == "my run/4"


@pytest.mark.parametrize(
    ("options", "saved", "says"),
    [
        (
            [*OFTEN, "--check", "--trace", "t.json", "--steps=9"],
            8,
            "interrupted; step 8 is saved in 'my run'. To go on: capture run plan.json --trust "
            "--steps 1 --save 'my run' --restore 'my run' --save-every 2",
        ),
        (
            ["--save", "my run", "--steps", "9"],
            9,
            "interrupted; step 9 is saved in 'my run', which was the last step that was asked for",
        ),
        (
            ["--check"],
            0,
            "interrupted; nothing was saved (--save DIR --save-every K saves as it goes). To start "
            "again: capture run plan.json --trust --check",
        ),
        (
            [*OFTEN, "--hosts", "local", "--steps", "12"],
            6,
            "interrupted; step 6 is saved in 'my run'. To go on: capture run plan.json --trust "
            "--steps 6 --save 'my run' --restore 'my run' --save-every 2 --hosts local",
        ),
        (
            ["--save", "new", "--save-every", "2", "--restore", "old", "--steps", "10"],
            8,
            "interrupted; step 8 is saved in 'new'. To go on: capture run plan.json --trust "
            "--steps 6 --save new --restore new --save-every 2",
        ),
        (
            ["--save", "old", "--save-every", "2", "--rest", "old", "--steps", "10"],
            0,
            "interrupted; nothing was saved since step 4. To start again: capture run plan.json "
            "--trust --steps 10 --save old --restore old --save-every 2",
        ),
    ],
)
def test_what_was_saved_is_said(capsys, monkeypatch, options, saved, says):
    if "old" in options:
        checkpoint("old", 4)
    assert interrupted(monkeypatch, capsys, *options, saved=saved) == says


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([*OFTEN], "checkpoint-exists"),
        ([*OFTEN, "--steps", "9"], "checkpoint-exists"),
        (["--save", "my run"], "checkpoint-exists"),
        (["--restore", "nowhere"], "checkpoint-missing"),
        (["--restore", "."], "checkpoint-missing"),
        (["--restore", "array"], "checkpoint-models"),
        (["--save", "plan.json"], "option-output"),
    ],
)
@pytest.mark.parametrize("where", [[], ["--hosts", "local"]])
def test_a_folder_that_cannot_be_used_is_refused_first(capsys, monkeypatch, options, code, where):
    checkpoint("my run", 3)
    checkpoint("array", 2, num_models=3)
    monkeypatch.setattr(run, "_run", None)
    status, _, err = run_here(capsys, "run", "plan.json", *where, *options)
    assert status == 2 and err.endswith(f"[{code}]\n")


def test_a_checkpoint_of_one_model_does_not_begin_all_models_of_an_array(capsys, monkeypatch):
    """With its parameters they would have its learning rate, too."""
    array_plan().save(Path("array.json"))
    checkpoint("one", 2)
    monkeypatch.setattr(run, "_run", None)
    status, _, err = run_here(capsys, "run", "array.json", "--restore", "one")
    assert (status, err) == (
        2,
        "error: the checkpoint is of one model, and the training is of 4: each would get the same "
        "parameters and hyperparameters. Restore a checkpoint of an array, or begin without one; "
        "in Python, init_from takes parameters for each model. [checkpoint-models]\n",
    )


def test_a_checkpoint_of_another_model_is_refused_before_the_step_is_traced(capsys, monkeypatch):
    monkeypatch.setattr(capture.runtime.pipeline, "pipeshard", None)
    params = {"[0]['bias']": [[64], "float32"]}
    checkpoint("other", 2, params=params, optimizer={})
    status, _, err = run_here(capsys, "run", "plan.json", "--trust", "--restore", "other")
    assert status == 2
    assert "the checkpoint has no [0]['down'] and the model [0]['down'] float32[" in err
    assert "[checkpoint-other-model]" in err and "checkpoint-other-optimizer" not in err


def test_a_checkpoint_of_other_models_is_refused_before_the_array_is_compiled(capsys, monkeypatch):
    monkeypatch.setattr(capture.runtime.multiplexed, "train_array", None)
    models = REPOSITORY / "tests/array_models.py"
    array_plan(workload=WorkloadSpec.parse(f"{models}:mlp")).save(Path("array.json"))
    shapes = {"a": [4, 6], "b": [6, 6], "c": [6, 1]}
    params = {f"[{m}]['{n}']": [shape, "float32"] for m in range(4) for n, shape in shapes.items()}
    params["[2]['c']"] = [[6, 2], "float32"]
    del params["[1]['a']"]  # as of a parameter that all share
    checkpoint("other", 2, num_models=4, params=params, optimizer={})
    status, _, err = run_here(capsys, "run", "array.json", "--trust", "--restore", "other")
    assert (status, err.splitlines()[-1]) == (
        2,
        "error: the checkpoint has [2]['c'] float32[6, 2] and the model [2]['c'] float32[6, 1]. "
        "[checkpoint-other-model]",
    )


#: A model that makes, where it is loaded, what a compiling process makes; in a worker it never ends.
COMPILING = """
import tempfile
import time
from multiprocessing import parent_process
from pathlib import Path

from capture.compiler.target_compiler import TargetCompiler
from tiny import model as tiny

compiler = TargetCompiler.__new__(TargetCompiler)


def model():
    Path(compiler._scratch.name, "kernels").touch()
    if parent_process() is not None:
        tempfile.mkdtemp()
        Path(__file__).with_name("compiles").touch()
        time.sleep(10_000)
    return tiny()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_plan_that_is_interrupted_leaves_nothing_in_the_temporary_directory(tmp_path, sent):
    Path("tiny.py").write_text(user_model("tiny"))
    Path("compiling.py").write_text(COMPILING)
    folder = tmp_path / "temporary"
    folder.mkdir()
    question = ["compiling.py:model", *BATCH, "--store", "s.sqlite", "--workers", "1"]
    command = subprocess.Popen(
        [sys.executable, "-m", "capture", "plan", *question, "-o", "found.json"],
        env=environment_apart(tmp_path, TMPDIR=str(folder), XDG_CACHE_HOME=str(tmp_path)),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + TIMEOUT_SECONDS
    while not Path("compiles").exists() and time.monotonic() < end and command.poll() is None:
        time.sleep(0.05)
    assert sorted(path.name[:15] for path in folder.iterdir()) == [
        "capture-kernels",  # the command's
        "capture-worker-",
    ]
    os.killpg(command.pid, sent)
    _, said = command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == 130, said
    assert not list(folder.iterdir())
