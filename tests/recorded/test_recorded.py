"""Answers that were recorded, to the byte: plans, peaks, seconds, steps, and the programs that the
compiler is given.

A sample by default; ``make recorded`` compares all. Where an answer is changed on purpose, ``python
-m tests.recorded.record CASE`` writes it anew, and the difference of ``record.json`` is what has to
be explained.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.recorded.bench import Case, apart
from tests.recorded.cases import CASES
from tests.recorded.record import load, versions

RECORD = load()


@cache
def made_apart() -> dict[str, Any]:
    return apart([name for name, case in CASES.items() if case.apart])


def facts(case: Case) -> dict[str, Any]:
    if case.compiles and versions() != RECORD["versions"]:
        pytest.skip(
            f"recorded with {RECORD['versions']}, and other versions compile other programs"
        )
    if case.apart and not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        pytest.skip(
            "the compiler of cuda targets is not installed: pip install 'capture-jax[cuda-targets]'"
        )
    return made_apart()[case.name] if case.apart else case.facts()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=() if c.sample else pytest.mark.recorded)
        for c in CASES.values()
    ],
)
def test_the_answer_is_the_recorded_one(case):
    found, recorded = facts(case), RECORD["cases"][case.name]
    different = {
        key: (recorded.get(key), found.get(key))
        for key in {**recorded, **found}
        if recorded.get(key) != found.get(key)
    }
    said = "\n".join(
        f"{key}\n  recorded {before}\n  found    {now}" for key, (before, now) in different.items()
    )
    why = " (the model of times decides here)" * case.timed
    assert not different, f"{case.name}{why}: other answers than recorded\n{said}"


def test_every_case_is_recorded_and_no_other():
    assert list(RECORD["cases"]) == list(CASES)
