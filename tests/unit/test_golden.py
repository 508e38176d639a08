"""What the readers of XLA's texts get from a dump of every supported version of jaxlib, and from
the one that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import pytest

from capture.compiler.text import INSTRUCTION
from tests.golden.make import FILES, FOLDER, answers, dump

VERSIONS = sorted(path.name for path in FOLDER.glob("jaxlib-*"))
INSTALLED = f"jaxlib-{jaxlib.version.__version__}"


def golden(version: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts and the answers."""
    folder = FOLDER / version
    texts = {name: (folder / f"{name}.txt").read_text() for name in FILES}
    return texts, json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_readers_get_what_they_must(version):
    texts, expected = golden(version)
    assert answers(texts, work=version == INSTALLED) == {
        name: answer for name, answer in expected.items() if name != "work" or version == INSTALLED
    }, "a program's work is counted by the jaxlib that is installed, which reads its own texts"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_instruction_is_taken_apart(version):
    body = golden(version)[0]["program"].partition("\n%")[2]
    lines = [line for line in body.splitlines() if line.startswith("  ") and " = " in line]
    assert len(lines) == len(INSTRUCTION.findall(body)) > 20


def test_the_installed_compiler_writes_what_was_recorded():
    assert INSTALLED in VERSIONS, (
        f"no dump of {INSTALLED} is recorded: python -m tests.golden.make, and look at its answers"
    )
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    found, expected = answers(dump()), golden(INSTALLED)[1]
    for buffer in [*found["buffers"], *expected["buffers"]]:
        buffer["source"] = Path(buffer["source"]).name.partition(":")[0]  # lines move
    assert found == expected
