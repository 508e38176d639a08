"""What papers add to the verbs is found by its name, and nothing else of the library knows it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from capture.registered import REGISTERED

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "capture" / "papers"


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in REGISTERED.items() for name in names]
)
def test_every_name_is_that_of_something_in_the_papers(part, name):
    assert callable(REGISTERED[part][name].load())
    assert REGISTERED[part][name].path.startswith("capture.papers.")


def imported(node: ast.AST) -> list[str]:
    """Names of modules, and of what is taken from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_no_module_of_the_library_imports_a_paper_for_its_types_either():
    """The import contract leaves out what stands behind TYPE_CHECKING."""
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in ("capture", "recommender", "profiling_runs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if PAPERS not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported(node)
        if name.startswith("capture.papers")
    ]
    assert found == []
