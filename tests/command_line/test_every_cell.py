"""Every kind of plan in every column: each cell of the table in ``ARCHITECTURE.md`` is checked, by
what the registry says of it."""

from __future__ import annotations

import re

import pytest
from cells import CELLS, Case, written
from processes import REPOSITORY

from capture.plan.kinds import COLUMNS, KINDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all cells: a plan is searched once."""
    path = tmp_path_factory.mktemp("cells")
    written(path)
    return path


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", KINDS)
def test_a_cell(name, column, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    CELLS[column](Case(KINDS[name], capsys))


def test_the_table_says_what_the_registry_does():
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \|$",
        text.partition("What each kind of plan can do")[2].partition("##")[0],
        re.M,
    )
    (_, *header), _, *table = [row.split(" | ") for row in rows]
    assert header == [*COLUMNS] and [row[0] for row in table] == [*KINDS]
    for name, *cells in table:
        lacks = KINDS[name].lacks
        assert cells == [f"no: {lacks[column]}" if column in lacks else "yes" for column in COLUMNS]


def test_a_reason_has_five_words_at_most_and_is_of_a_column():
    for kind in KINDS.values():
        assert kind.lacks.keys() <= COLUMNS.keys()
        assert all(len(why.split()) <= 5 for why in kind.lacks.values())
