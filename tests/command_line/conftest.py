"""A small model that was profiled and planned on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from planned_model import BATCH, PROFILING, STORE, capture
from processes import made_once, user_model

from capture.model.trust import remember


def profile_and_plan(directory: Path) -> None:
    """The model, profiled in the paper's way too, planned for two devices; what was said is kept
    beside them."""
    (directory / "tiny.py").write_text(user_model("tiny"))
    question = ["tiny.py:model", *BATCH]
    out = ["--mode", "paper", "-o", "profile.json"]
    said = [
        capture(directory, "profile", *question, *STORE, *PROFILING, *out),
        capture(
            directory,
            "plan",
            *question,
            "--profile",
            "profile.json",
            "--no-compile",
            "-o",
            "plan.json",
        ),
    ]
    (directory / "said.json").write_text(json.dumps([vars(one) for one in said]))


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> SimpleNamespace:
    """A directory of the model with its profile and its plan, of this module alone; and what was
    said when they were made."""
    made = made_once(tmp_path_factory, "planned", profile_and_plan)
    directory = tmp_path_factory.mktemp("planned") / "here"
    shutil.copytree(made, directory)
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # here it is another file than the one it was made of
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        remember(str(directory / "tiny.py"), "model")
    profile, plan = (
        SimpleNamespace(**one) for one in json.loads((directory / "said.json").read_text())
    )
    return SimpleNamespace(directory=directory, profile=profile, plan=plan)


@pytest.fixture
def inside_planned(planned, monkeypatch) -> Path:
    """That directory, as the working directory of this process."""
    monkeypatch.chdir(planned.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(planned.directory / "cache"))
    return planned.directory
