"""Verbs of the command line, run in the test's own process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capture.cli.main import main


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """A verb's exit code, standard output and standard error."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """A verb's exit code, its document and standard error."""
    code, out, err = run_here(capsys, *arguments, "--json")
    return code, json.loads(out), err
