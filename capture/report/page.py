"""One HTML file with everything in it: it opens without a network, and its own policy forbids one.

Figures are SVG, and the page needs no script. An interactive page brings plotly.js along (5 MB).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from capture.errors import CaptureError
from capture.extras import install_command
from capture.plan.headroom import Headroom
from capture.report.data import ReportFacts
from capture.report.figure import Figure
from capture.report.figures import figures
from capture.report.palette import INK
from capture.report.svg import WIDTH, draw
from capture.report.words import HEADER, paragraph, rows, title

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = f"""
body {{ margin: 0 auto; max-width: 1160px; padding: 24px; color: {INK}; background: white;
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 24px; line-height: 1.3; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 18px; margin: 36px 0 0; }}
p {{ margin: 8px 0; max-width: 900px; }}
.lead {{ font-size: 17px; }}
.caption, footer {{ color: #52606D; font-size: 14px; }}
.verdict {{ display: inline-block; padding: 2px 10px; border-radius: 4px; font-weight: 600;
  background: #E4E7EB; }}
.figure, .wide {{ width: 100%; overflow-x: auto; }}
.figure > svg {{ display: block; width: 100%; min-width: 760px; max-width: {WIDTH}px; }}
table {{ border-collapse: collapse; margin: 16px 0 4px; font-size: 14px;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px; text-align: right; border-bottom: 1px solid #E4E7EB;
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
.script-error {{ color: #B00020; white-space: pre-wrap; }}
"""

# Everything that goes wrong is shown in the page and in its text, where a reader and a test see it.
_SCRIPT = """
function failed(message) {
  const line = document.createElement("p");
  line.className = "script-error";
  line.textContent = "A figure could not be drawn: " + message;
  document.body.prepend(line);
}
window.addEventListener("error", event => failed(event.message));
window.addEventListener("unhandledrejection", event => failed(event.reason));
const figures = JSON.parse(document.getElementById("figures").textContent);
const base = JSON.parse(document.getElementById("base-layout").textContent);
let left = figures.length;
for (const figure of figures) {
  const layout = Object.assign({}, base, figure.layout);
  for (const axis of ["xaxis", "yaxis"])
    layout[axis] = Object.assign({automargin: true, gridcolor: "#E4E7EB"}, figure.layout[axis]);
  Plotly.newPlot(figure.name, figure.traces, layout, {responsive: true, displayModeBar: false})
    .then(() => { left -= 1; if (left === 0) document.body.dataset.drawn = figures.length; });
}
"""

_HOW_TO_LOOK = (
    " Rest the pointer on a mark to read its numbers; --interactive makes a page that zooms. Made "
    "with capture report."
)
_HOW_TO_MOVE = (
    " In figures, drag to zoom and double-click to zoom out; click a name in a legend to hide it. "
    "Made with capture report."
)
_BASE_LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "color": INK, "size": 13},
    "margin": {"l": 70, "r": 20, "t": 40, "b": 50},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "legend": {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1.02,
        "yanchor": "bottom",
        "traceorder": "normal",
    },
    "hoverlabel": {"align": "left"},
}


def page(facts: ReportFacts, *, interactive: bool = False) -> str:
    """Return the report of a plan of stages as one HTML file.

    Args:
        facts: What it shows.
        interactive: Let readers zoom and hide: with plotly.js in the page.

    Raises:
        CaptureError: ``report-plotly`` if plotly is needed and not installed.
    """
    return render(
        title(facts),
        paragraph(facts),
        facts.headroom,
        html_table(HEADER, rows(facts)),
        figures(facts),
        _footer(facts),
        interactive=interactive,
    )


def render(
    heading: str,
    lead: str,
    room: Headroom | None,
    table: str,
    shown: Sequence[Figure],
    footer: str,
    *,
    interactive: bool = False,
) -> str:
    """Return the HTML of a heading, a paragraph, whether the plan fits, a table (HTML already) and
    figures."""
    sections = "".join(
        (
            f'<h2>{escape(figure.title)}</h2><p class="caption">{escape(figure.caption)}</p><div '
            f'class="figure" id="{figure.name}">{"" if interactive else draw(figure)}</div>\n'
        )
        for figure in shown
    )
    scripts = _scripts(shown) if interactive else ""
    verdict = ""
    if room is not None:
        color = {"fits": "#CDE7D8", "does not fit": "#F8C9C9"}.get(room.verdict, "#FCE8B2")
        words = escape(room.verdict)
        verdict = f'<span class="verdict" style="background: {color}">{words}</span>\n'
    policy = _POLICY + "; script-src 'unsafe-inline'" * interactive
    footer += _HOW_TO_MOVE if interactive else _HOW_TO_LOOK
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(heading)}</title><link rel="icon" '
        f'href="data:,"><style>{_STYLE}</style></head>\n<body>'
        f'<h1>{escape(heading)}</h1>\n{verdict}<p class="lead">{escape(lead)}</p>\n<div '
        f'class="wide">{table}</div>\n{sections}'
        f"<footer><p>{escape(footer)}</p></footer>\n{scripts}</body></html>\n"
    )


def _scripts(shown: Sequence[Figure]) -> str:
    data = [
        {"name": figure.name, "traces": figure.traces, "layout": figure.layout} for figure in shown
    ]
    return (
        f'<script type="application/json" id="base-layout">{_json(_BASE_LAYOUT)}</script>\n'
        f'<script type="application/json" id="figures">{_json(data)}</script>\n'
        f"<script>{_plotly()}</script>\n<script>{_SCRIPT}</script>"
    )


def _json(data: object) -> str:
    """Return JSON that cannot end the script element it stands in."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise CaptureError.of(
            "plotly is not installed, and --interactive draws the page with it: "
            f"{install_command('report')}. Without --interactive, figures are SVG.",
            "report-plotly",
        ) from None
    return get_plotlyjs().replace("</script", "<\\/script")


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], below: str = "") -> str:
    """Return a table, with a line of text below it if there is one."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        + f'<p class="caption">{escape(below)}</p>' * bool(below)
    )


def _footer(facts: ReportFacts) -> str:
    """Return the line about the sources of the numbers."""
    known = facts.source
    parts = [
        f"{name} {known[name]}"
        for name in ("backend", "target", "predictor", "jax", "jaxlib", "date")
        if known.get(name)
    ]
    verified = facts.plan.verification.source if facts.plan.verification else {}
    checked = [
        f"verified by {verified.get('backend', 'compile')} for "
        f"{verified.get('target', facts.plan.cluster.target)}"
    ] * facts.verified
    return (
        f"Sources: {', '.join([*parts, *checked]) or 'not said'}. Times are simulated, never "
        "measured."
    )
