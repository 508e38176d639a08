"""The parts of a page that is made from the code."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any


def heading(title: str, source: str) -> list[str]:
    return [f"# {title}", "", f"*Made by `make docs` from {source}; do not edit.*", ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [
        [" ".join(str(cell).replace("``", "`").split()).replace("|", "\\|") for cell in row]
        for row in rows
    ]
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
        *(f"| {' | '.join(row)} |" for row in cells),
        "",
    ]


def prose(docstring: str) -> list[str]:
    """A docstring: its paragraphs, and what is indented or tabulated in it as it is."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        plain = not re.search(r"^ |\S  +\S", paragraph, re.M)
        said = re.sub(r"``(.+?)``", r"`\1`", paragraph)
        lines += [said, ""] if plain else ["```text", textwrap.dedent(paragraph), "```", ""]
    return "\n".join(lines[:-1]).replace("```\n\n```text\n", "\n").split("\n")


def page(lines: Sequence[Any]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
