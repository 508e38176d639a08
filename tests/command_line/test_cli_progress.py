"""Progress of the command line, its defaults, and that nothing is lost when it is killed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from commands import run_here
from planned_model import BATCH, capture, rows, start
from processes import REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.cli import asked
from capture.cli.progress import progress
from capture.machine.cluster import Cluster


def test_progress_in_a_log_file_is_whole_lines(capsys):
    show = progress(SimpleNamespace(quiet=False))
    show("optimizer updates", 0, 1)
    for done in range(4):
        show("layer windows", done, 3)
    show("optimizer updates", 1, 1)
    assert capsys.readouterr().err == "compiling 1 of 4 stages\ncompiled 4 stages in 0 s\n"
    progress(SimpleNamespace(quiet=False))("stages of the plan", 1, 1)
    assert capsys.readouterr().err == "compiled 1 stage of the plan in 0 s\n"


def test_progress_of_rounds_of_one_kind_goes_on(capsys):
    show = progress(SimpleNamespace(quiet=False))
    for done in range(9):
        show("largest sizes", done, 8)
    for done in range(9, 17):
        show("largest sizes", done, 16)
    said = [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["measuring 1 of 8 layers", "measured 8 layers", "measured 16 layers"]


def test_progress_in_a_terminal_is_one_line():
    leader, follower = pty.openpty()
    program = REPOSITORY / "tests/programs/terminal_progress.py"
    subprocess.run(
        [sys.executable, program],
        stdout=follower,
        stderr=follower,
        env=environment_apart(),
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


# ---- nothing is lost -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_profile_resumes_and_measures_only_what_is_missing(planned, tmp_path):
    """Killed with worker processes, resumed without: they share the keys."""
    store = tmp_path / "store.sqlite"
    command = [
        "profile",
        str(planned.directory / "tiny.py") + ":model",
        *BATCH,
        "--store",
        str(store),
        "--neighbours",
        "1",
        "--calibration-plans",
        "0",
        # As in the profile of the planned model, which is for the paper's mode as well.
        "--remat",
        "none",
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
        json.loads((planned.directory / "profile.json").read_text()),
    )
    assert mine == theirs["measurements"]


def test_a_worker_that_dies_is_an_error_with_what_to_do(inside_planned, capsys, tmp_path):
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
        "error: 3 workers ended, one after the other, before they could take a job: "
        "its process ended "
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
