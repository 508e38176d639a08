"""The pages are as short as promised, name what is there, and the generated ones are those that the
code makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import error_codes, generate

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"))
)
#: Paths below these are the repository's.
_PATH = re.compile(
    r"`((?:benchmarks|capture|docs|models|profiling_runs|recommender|tests)/[\w./-]*)[`:]"
)

#: Modules, and what is in them, by their dotted names.
_NAME = re.compile(r"`((?:capture|recommender|profiling_runs)(?:\.\w+)+)`")


@pytest.mark.parametrize("name", generate.PAGES)
def test_the_reference_is_what_the_code_makes(name):
    committed = (generate.REFERENCE / name).read_text(encoding="utf-8")
    assert committed == generate.PAGES[name](), f"docs/reference/{name} is old: make docs"


def test_the_reference_has_the_groups_of_options_and_nothing_hidden():
    page = generate.PAGES["commands.md"]()
    assert "SUPPRESS" not in page
    for title in ("Pipelines (--system capture):", "Packs (--system harmony):", "Model arrays (--"):
        assert f"\n{title}" in page


def test_the_readme_and_the_architecture_are_short():
    readme = (REPOSITORY / "README.md").read_bytes()
    assert len(readme.splitlines()) <= 120 and len(readme) <= 7 * 1024
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    here = (REPOSITORY / page).parent
    missing = [link for link in links(text) if not leads_somewhere(here, link)]
    if page != "CHANGELOG.md":  # which names what was
        missing += [path for path in _PATH.findall(text) if not (REPOSITORY / path).exists()]
        missing += [name for name in _NAME.findall(text) if not is_name(name)]
    assert not missing, f"{page} names what is not there: {missing}"


def links(text: str) -> list[str]:
    """Targets of a page's links that are not of the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|``?[^`]*``?", "", text, flags=re.S))
    return [link for link in found if "://" not in link]


def leads_somewhere(here: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if not path:
        return True  # within a page
    target = (here / path).resolve()
    return target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def is_name(name: str) -> bool:
    """Whether a dotted name is of a module, or of what the source of one has."""
    path, names = REPOSITORY, name.split(".")
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    source = path / (f"{names[0]}.py" if names else "__init__.py")
    if not source.exists():
        source = path / "__init__.py"
    else:
        names = names[1:]
    return not names or re.search(rf"\b{names[0]}\b", source.read_text()) is not None


def test_a_dead_link_is_seen():
    assert links("[a](b.md) and `[c](d.md)` and [e](https://f)") == ["b.md"]
    assert anchors("# One, two\n```\n# not one\n```\n") == {"one-two"}
    assert not leads_somewhere(REPOSITORY, "README.md#no-such-heading")
    assert is_name("capture.cli.main.VERBS") and is_name("capture.Plan")
    assert not is_name("capture.cli.no_such_verb") and not is_name("capture.no_such.module")


def test_codes_are_found_in_every_form_that_the_code_has():
    module = '''
def check(n, code):
    """Raises:
        PlanError: ``late-code``.
    """
    if n:
        raise PlanError.of(f"n={n} is {n + 1}.", "plan-n")
    yield Violation("helped", code)
    yield from check(n, "given-code")
    raise ValueError(f"no {n.x}. [ended-code]")

def late():
    name = "late-code"
    text = "Said later."
    return name, text, "utf-8"
'''
    found = {(said.code, said.kind, said.message) for said in error_codes.codes_of(module, "a.py")}
    assert found == {
        ("plan-n", "PlanError", "n={n} is {...}."),
        ("given-code", "", "helped"),
        ("ended-code", "", "no {n.x}."),
        ("late-code", "", "Said later."),
    }
