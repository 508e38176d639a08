"""Functions of the library take few arguments: more are a question, and have a type."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_PARAMETERS = 8


@pytest.mark.parametrize("package", ["capture", "recommender", "profiling_runs"])
def test_no_function_has_more_than_eight_parameters(package):
    found = []
    for path in (REPOSITORY / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
                if len(names) > MOST_PARAMETERS:
                    found.append(f"{path.relative_to(REPOSITORY)}: {node.name} has {len(names)}")
    assert not found
