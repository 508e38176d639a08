"""The page of a report: it fetches nothing, and a real browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_plans import GB, drawn, written_plan
from timeouts import TIMEOUT_SECONDS

from capture.report.data import report_facts
from capture.report.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


# ---- the page ------------------------------------------------------------------------------------


class References(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]


def test_the_page_fetches_nothing(facts):
    html = page(facts)
    references = References()
    references.feed(html)
    assert references.found == ["data:,"]
    assert "default-src 'none'" in html
    assert html.count("<script") - html.count("<script>") == 2, "the two of data"


def test_names_of_a_plan_cannot_end_the_script_or_become_elements():
    plan = written_plan()
    first, second = plan.prediction.stages
    notes = (
        replace(first, instant="</script><b>"),
        replace(second, parts_bytes={"</script><b>": 12 * GB}),
    )
    html = page(report_facts(plan.with_(prediction=replace(plan.prediction, stages=notes))))
    assert "</script><b>" not in html
    assert "\\u003c/script>\\u003cb>" in html


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(BROWSERS)} is on PATH, so nobody looked whether the "
            "page renders; install chromium"
        )
    return found


def rendered(html: str, folder: Path) -> tuple[str, list[str]]:
    """(the page's elements once its scripts have run, what they logged)."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
    ]
    command += [
        f"--user-data-dir={folder / 'browser'}",
        "--dump-dom",
        (folder / "report.html").as_uri(),
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, process.stderr
    return process.stdout, re.findall(r"CONSOLE:\d+\] (.*)", process.stderr)


@pytest.mark.parametrize("case", ["facts", "large", "written"])
def test_every_figure_renders_in_a_browser(case, request, tmp_path):
    facts = (
        report_facts(written_plan("cpu")) if case == "written" else request.getfixturevalue(case)
    )
    names = list(drawn(facts))
    dom, logged = rendered(page(facts), tmp_path)
    assert logged == []
    assert 'class="script-error"' not in dom
    assert f'data-drawn="{len(names)}"' in dom
    parts = re.split(r'<div class="figure[^>]* id="(\w+)"', dom)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(bodies) == names
    marks = {
        "stages": "<path",
        "peaks": "<path",
        "treemap": "<path",
        "errors": "<path",
        "memory": "<path",
        "front": "<path",
    }
    marks["schedule"] = "<image" if case == "large" else "<path"
    for name, body in bodies.items():
        assert 'class="main-svg"' in body, name
        plot = body[: body.index("<h2>")] if "<h2>" in body else body
        assert marks[name] in plot, name


def test_a_page_that_does_not_render_is_seen(facts, tmp_path):
    dom, logged = rendered(
        page(facts).replace("Plotly.newPlot(figure", "Plotly.nothing(figure"), tmp_path
    )
    assert (
        'class="script-error">A figure could not be drawn: Uncaught TypeError: Plotly.nothing is '
        "not a function"
    ) in dom
    assert "data-drawn" not in dom
    assert len(logged) == 1
