"""The page of a report: it fetches nothing, and a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

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
    html = page(facts).html(facts.headroom)
    references = References()
    references.feed(html)
    assert references.found == ["data:,"]
    assert "default-src 'none'" in html
    assert "<script" not in html


def test_names_of_a_plan_cannot_become_elements():
    plan = written_plan()
    first, second = plan.prediction.stages
    notes = (
        replace(first, instant="</script><b>"),
        replace(second, parts_bytes={"</script><b>": 12 * GB}),
    )
    named = report_facts(plan.with_(prediction=replace(plan.prediction, stages=notes)))
    assert "</script><b>" not in page(named).html(None)


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"no browser: none of {', '.join(BROWSERS)} is on PATH, so nobody looked whether the "
            "page renders; install chromium"
        )
    return found


#: Measures a page once it is laid out: what is wider than the window, and per figure its size and
#: the words that lie outside it.
MEASURE = """<script>
const figures = [...document.querySelectorAll(".figure > svg")].map(svg => {
  const box = svg.viewBox.baseVal, outside = [];
  for (const text of svg.querySelectorAll("text")) {
    const words = text.getBoundingClientRect(), all = svg.getBoundingClientRect();
    if (words.left < all.left - 1 || words.right > all.right + 1 || words.top < all.top - 1 ||
        words.bottom > all.bottom + 1) outside.push(text.textContent);
  }
  return {name: svg.parentElement.id, marks: svg.querySelectorAll("rect, path, circle").length,
    width: svg.clientWidth, height: svg.clientHeight, outside};
});
document.body.dataset.measured = JSON.stringify({figures,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth});
</script>"""


def rendered(html: str, folder: Path, width: int = 1400) -> tuple[str, list[str]]:
    """(the page's elements once its scripts have run, what they logged)."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
        f"--window-size={width},900",
    ]
    command += [
        f"--user-data-dir={folder / 'browser'}",
        "--dump-dom",
        (folder / "report.html").as_uri(),
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, process.stderr
    return process.stdout, re.findall(r"CONSOLE:\d+\] (.*)", process.stderr)


def measured(html: str, folder: Path, width: int) -> dict[str, Any]:
    """What ``MEASURE`` finds in a window of so many pixels."""
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    dom, logged = rendered(without_policy.replace("</body>", f"{MEASURE}</body>"), folder, width)
    assert logged == []
    return json.loads(unescape(re.search(r'data-measured="([^"]*)"', dom)[1]))


@pytest.mark.parametrize("width", [500, 1400])
@pytest.mark.parametrize("case", ["facts", "large", "written"])
def test_every_figure_is_drawn_and_no_word_is_cut_off(case, width, request, tmp_path):
    facts = (
        report_facts(written_plan("cpu")) if case == "written" else request.getfixturevalue(case)
    )
    html = page(facts).html(facts.headroom)
    assert len(html) < 1.5e6 and "<script" not in html
    found = measured(html, tmp_path, width)
    assert found["overflow"] == 0
    assert [figure["name"] for figure in found["figures"]] == list(drawn(facts))
    for figure in found["figures"]:
        assert figure["marks"] > 0, figure
        assert figure["width"] >= min(width - 60, 760) and figure["height"] > 80, figure
        assert figure["outside"] == [], figure


def test_a_word_that_is_cut_off_is_seen(facts, tmp_path):
    html = (
        page(facts).html(facts.headroom).replace(">stage 0</text>", f">{'stage 0' * 30}</text>", 1)
    )
    found = measured(html, tmp_path, 1400)
    assert any(figure["outside"] for figure in found["figures"])
