"""Verbs of the command line, run in the test's own process."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

from capture.cli.main import main
from docs.generate import DOCUMENTS


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
    document = json.loads(out)
    if document.get("status") != "error":
        assert set(document) == documented_keys(arguments[0]), "it is not what its page says"
    return code, document, err


def documented_keys(verb: str) -> set[str]:
    """What a verb's document has, by the page that is made of its dataclass."""
    verb = "plan" if verb == "osdp" else verb
    module, name = DOCUMENTS[f"capture {verb} --json"][0].split(":")
    return {field.name for field in fields(getattr(import_module(module), name))}
