"""A worker that is killed leaves nothing in the temporary directory."""

from __future__ import annotations

import tempfile

import pytest
from timeouts import TIMEOUT_SECONDS

from capture.errors import ProfileError
from capture.model.workload import WorkloadSpec
from profiling_runs.jobs import Setting
from profiling_runs.pools.local import LocalPool

MODEL = """
import tempfile
from pathlib import Path

def model():
    Path(__file__).with_name("made").write_text(tempfile.mkdtemp(prefix="capture-kernels-"))
    raise ValueError("of the model")
"""


def test_what_a_killed_worker_wrote_is_gone(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "model.py").write_text(MODEL)
    spec = WorkloadSpec(str(tmp_path / "model.py"), "model")
    worker = LocalPool(Setting(spec), 1, TIMEOUT_SECONDS).launch()
    with pytest.raises(ProfileError, match="of the model"):
        worker.receive()
    assert [path.name.startswith("capture-worker-") for path in folder.iterdir()] == [True]
    assert str(next(folder.iterdir())) in (tmp_path / "made").read_text()
    worker.kill()
    assert not list(folder.iterdir())
