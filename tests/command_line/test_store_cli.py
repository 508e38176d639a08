"""The verb ``store``: lists, exports, imports, merges and forgets measurements."""

from __future__ import annotations

import json
import socket
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_json

from capture.cli.main import main
from capture.measured.claims import name_of_process
from capture.measured.store import Store
from capture.papers.capture.execution import Executed
from capture.papers.capture.run import RunBackend
from profiling_runs.batch import Batch
from profiling_runs.jobs import Job, Outcome
from profiling_runs.pools.pool import Here

AGO = (("now", 0), ("two days", 2))

# ---- the store -----------------------------------------------------------------------------------


class Refusing:
    """A backend whose compiler refuses every job."""

    def measure(self, config):
        raise RuntimeError("no room for it")


@pytest.fixture
def filled(tmp_path) -> Path:
    store = Store(tmp_path / "filled.sqlite")
    store.put(
        "aa",
        {"bytes": 1},
        provenance={"backend": "compile:cpu", "target": "cpu", "versions": {"jax": "0.0.1"}},
        seconds=1.0,
    )
    jobs = [Job("bb", None, "stage", "layer windows")]
    list(Batch(jobs, store, {"backend": "compile:cpu"}).run(lambda: Here(Refusing())))
    store.close()
    return tmp_path / "filled.sqlite"


def test_ls_show_and_retry(filled, capsys):
    store = ["store", "--store", str(filled)]
    listed = run_json(capsys, *store, "ls")[1]
    assert listed["num_measurements"] == 1
    assert {(job["state"], job["count"]) for job in listed["jobs"]} == {
        ("done", 1),
        ("set aside", 1),
    }
    aside = run_json(capsys, *store, "ls", "--state", "set aside")[1]["keys"]["bb"]
    assert aside["attempts"] == 2 and "RuntimeError: no room" in aside["error"]
    shown = run_json(capsys, *store, "show", "b")[1]["row"]
    assert "Traceback" in shown["traceback"] and shown["value"] is None
    assert main([*store, "retry", "a"]) == 2  # is done
    assert capsys.readouterr().err.endswith("[store-key]\n")
    assert run_json(capsys, *store, "retry", "b")[1]["num_retried"] == 1
    assert run_json(capsys, *store, "ls", "--state", "set aside")[1]["keys"] == {}
    assert main([*store, "show", "c"]) == 2
    assert capsys.readouterr().err.endswith("[store-key]\n")


def test_ls_tells_jobs_of_a_process_that_is_gone_from_those_that_run(tmp_path, capsys):
    store, gone = Store(tmp_path / "s.sqlite"), subprocess.Popen(["true"])
    gone.wait()
    host, today = socket.gethostname(), datetime.now(UTC)
    ago = {name: f"{today - timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}" for name, days in AGO}
    claims = {
        "here": (name_of_process(), ago["now"]),
        "gone": (f"{host}:{gone.pid}", ago["now"]),
        "number taken by another": (name_of_process(), ago["two days"]),
        "elsewhere": ("another:1", ago["now"]),
        "elsewhere, given up": ("another:1", ago["two days"]),
    }
    store.enqueue({key: {"kind": "layer windows"} for key in claims})
    for key, (worker, since) in claims.items():
        store.start(key, worker)
        store._database.execute("UPDATE jobs SET updated = ? WHERE key = ?", (since, key))
    ls = ["store", "--store", str(store.path), "ls"]
    assert set(run_json(capsys, *ls, "--state", "running")[1]["keys"]) == {"here", "elsewhere"}
    lost = {"gone", "number taken by another", "elsewhere, given up"}
    assert set(run_json(capsys, *ls, "--state", "interrupted")[1]["keys"]) == lost
    counts = {job["state"]: job["count"] for job in run_json(capsys, *ls)[1]["jobs"]}
    assert counts == {"running": 2, "interrupted": 3}
    jobs = [Job("gone", None, "stage", "layer windows")]
    list(Batch(jobs, store, {}).run(lambda: Here(Refusing())))
    (row,) = store.rows(key_prefix="gone")
    assert row.attempts, "it was taken again"


def test_ls_names_what_belongs_to_no_job(tmp_path, capsys):
    store = Store(tmp_path / "s.sqlite")
    store.put("of an older version", 1, provenance={"target": "cpu"}, seconds=0.0)
    outcome = Outcome(Job("run", None, "run", "runs of plans"), 1, stored_key="replay of it")
    store.enqueue({"run": {"kind": "runs of plans"}})
    Batch([], store, {"target": "cpu"})._judge(outcome)
    runs = RunBackend.__new__(RunBackend)
    runs.compiler, runs.memory_limit_bytes = SimpleNamespace(store=store), None
    runs.__dict__["provenance"], runs.key = {"target": "cpu"}, lambda run: "executed"
    runs.keep(None, Executed((1,), "a meter"), 0.0)
    listed = run_json(capsys, "store", "--store", str(store.path), "ls")[1]["jobs"]
    counts = {(job["kind"], job["target"]): job["count"] for job in listed}
    assert counts == {
        ("measurement", "cpu"): 1,
        ("runs of plans", ""): 1,  # the job
        ("runs of plans", "cpu"): 1,  # what it has measured
        ("executed in place", "cpu"): 1,
    }


def test_export_import_and_merge_keep_everything(filled, tmp_path, capsys):
    run_json(capsys, "store", "--store", str(filled), "export", str(tmp_path / "all.jsonl"))
    for action, source in (("import", tmp_path / "all.jsonl"), ("merge", filled)):
        other = tmp_path / f"{action}.sqlite"
        mine = Store(other)
        mine.put("cc", 3, provenance={}, seconds=0.0)
        mine.close()
        said = run_json(capsys, "store", "--store", str(other), action, str(source))[1]
        assert (said["num_added"], said["different"]) == (1, [])
        rows = {row.key: row for row in Store(other).rows()}
        assert set(rows) == {"aa", "bb", "cc"}
        assert {key: rows[key] for key in ("aa", "bb")} == {
            row.key: row for row in Store(filled).rows()
        }


def test_a_measurement_with_another_value_is_named_and_stays(filled, tmp_path, capsys):
    other = Store(tmp_path / "other.sqlite")
    other.put("aa", {"bytes": 2}, provenance={}, seconds=0.0)
    other.close()
    merge = ("merge", str(tmp_path / "other.sqlite"))
    said = run_json(capsys, "store", "--store", str(filled), *merge)[1]
    assert (said["num_added"], said["different"]) == (0, ["aa"])
    assert Store(filled).get(["aa"]) == {"aa": {"bytes": 1}}


def test_gc_forgets_what_is_said_and_nothing_else(filled, capsys):
    store = ["store", "--store", str(filled), "gc"]
    said = run_json(capsys, *store, "--older-than", "1", "--dry-run")[1]
    assert (said["num_removed"], said["dry_run"]) == (1, True)
    assert run_json(capsys, *store, "--older-than", "1")[1]["num_removed"] == 1
    assert [row.key for row in Store(filled).rows()] == ["aa"]
    assert run_json(capsys, *store, "--other-versions")[1]["num_removed"] == 1
    assert len(Store(filled)) == 0


def test_a_line_that_is_no_row_is_refused_and_nothing_imported(filled, tmp_path, capsys):
    run_json(capsys, "store", "--store", str(filled), "export", str(tmp_path / "all.jsonl"))
    good = (tmp_path / "all.jsonl").read_text()
    wrong_type = json.dumps({**json.loads(good.splitlines()[0]), "provenance": []})
    for line, says in (
        ('{"key": 1}', "key is 1 and must be a text"),
        (wrong_type, "provenance is []"),
    ):
        (tmp_path / "all.jsonl").write_text(f"{good}{line}\n")
        assert (
            main(
                [
                    "store",
                    "--store",
                    str(tmp_path / "new.sqlite"),
                    "import",
                    str(tmp_path / "all.jsonl"),
                ]
            )
            == 2
        )
        err = capsys.readouterr().err
        assert says in err and err.endswith("[store-import]\n")
    assert (
        main(
            [
                "store",
                "--store",
                str(tmp_path / "none.sqlite"),
                "import",
                str(tmp_path / "missing.jsonl"),
            ]
        )
        == 2
    )
    assert (
        capsys.readouterr().err.endswith("[store-file]\n")
        and not (tmp_path / "none.sqlite").exists()
    )
    assert main(["store", "--store", str(tmp_path / "new.sqlite"), "import", str(filled)]) == 2
    assert "is a store; take what it has with capture store merge" in capsys.readouterr().err
    assert len(Store(tmp_path / "new.sqlite")) == 0
