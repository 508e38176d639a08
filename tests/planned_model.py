"""The model of ``tests/user_models/tiny.py`` on the command line: its questions, verbs in a process
of their own."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from processes import QUICK_CODE, environment_apart
from timeouts import TIMEOUT_SECONDS

# Micro-batches of two examples: half of one cannot be split over two devices, so a single size is
# profiled.
BATCH = ["--cluster", "1x2", "--global-batch", "8", "--microbatches", "4"]


STORE = ["--store", "store.sqlite", "--workers", "0"]


PROFILING = ["--neighbours", "1", "--calibration-plans", "1"]


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    env = environment_apart(xla_flags=QUICK_CODE, XDG_CACHE_HOME=str(directory / "cache"))
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
