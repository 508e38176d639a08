"""What compiled libraries write to file descriptor 2 goes to a file, what Python writes does not,
and the file is named when it matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import TIMEOUT_SECONDS

from capture.cli.library_log import KEPT_LOGS

REPOSITORY = Path(__file__).resolve().parents[2]
USUAL = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795.6 29870 cudart_stub.cc:31] Could not find cuda drivers on your machine, "
    b"GPU will not be used.\n"
)


def logged(cache: Path, body: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """A process that begins a log: how it ended, and the logs that are there then."""
    code = (
        "import os, subprocess, sys\nfrom capture.cli.library_log import LibraryLog\nlog = "
        f"LibraryLog.begin()\n{body}"
    )
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done, sorted(cache.glob("capture/logs/*"))


SPEAKING = """
worker = "import os; os.write(2, b'XLA of a worker\\\\n')"
subprocess.run([sys.executable, "-c", worker], check=True)
print("Python", file=sys.stderr)
"""


def test_a_failure_names_what_libraries_and_workers_said(tmp_path):
    done, (log,) = logged(tmp_path, f"{SPEAKING}log.end(failed=True)")
    assert done.stderr == f"Python\nwhat libraries and workers said is in {log}\n"
    assert log.read_text() == "XLA of a worker\n"


@pytest.mark.parametrize(
    "body", [f"{SPEAKING}log.end(failed=False)", f"os.write(2, {USUAL!r})\nlog.end(failed=True)"]
)
def test_nothing_is_left_without_a_failure_or_anything_to_read(tmp_path, body):
    done, logs = logged(tmp_path, body)
    assert logs == [] and done.stderr in ("Python\n", "")


def test_tracebacks_stay_on_standard_error(tmp_path):
    done, _ = logged(tmp_path, "raise RuntimeError('seen')")
    assert done.stderr.endswith("RuntimeError: seen\n")


def test_a_crash_names_the_log(tmp_path):
    """By the trace of the fatal signal, which lists the files of all threads."""
    done, (log,) = logged(tmp_path, "os.write(2, b'Check failed')\nos.abort()")
    assert done.returncode == -signal.SIGABRT and log.read_text() == "Check failed"
    assert "Fatal Python error: Aborted" in done.stderr and f'File "{log}", line' in done.stderr


def test_old_logs_are_removed(tmp_path):
    folder = tmp_path / "capture" / "logs"
    folder.mkdir(parents=True)
    for day in range(10, 10 + KEPT_LOGS + 5):
        (folder / f"2020-01-{day}T0000000000-1.log").write_text("old")
    _, logs = logged(tmp_path, f"{SPEAKING}log.end(failed=True)")
    assert (
        len(logs) == KEPT_LOGS
        and logs[0].name.startswith("2020-01-16")
        and logs[-1].read_text() == "XLA of a worker\n"
    )


def test_without_a_place_for_a_file_nothing_changes(tmp_path):
    (tmp_path / "capture").write_text("in the way")
    done, _ = logged(tmp_path, f"{SPEAKING}log.end(failed=True)")
    assert done.stderr == "XLA of a worker\nPython\n"
