"""One HTML file with everything in it: it opens without a network, and its own policy forbids one.
Figures are SVG, and the page needs no script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

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
"""

#: Said below every page.
_HOW_TO_LOOK = " Rest the pointer on a mark to read its numbers. Made with capture report."


@dataclass(frozen=True)
class Page:
    """A plan as it is shown: as one HTML file, or as a table and lines of text.

    Attributes:
        title: The question that the plan answers, in words.
        header, rows: The table.
        lines: What is said of the plan, in lines for people; those that are tables are left out of
            the file.
        footer: Where the numbers are from.
        below: What is said below the table.
        figures: Makes the figures, for the file alone.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str]
    footer: str
    below: str = ""
    figures: Callable[[], Sequence[Figure]] = tuple

    def html(self, room: Headroom | None) -> str:
        """Return the HTML of the title, whether the plan fits, the lines as a paragraph, the table
        and the figures."""
        said = (line.rstrip(".") for line in self.lines if "\n" not in line)
        lead = " ".join(f"{line[0].upper()}{line[1:]}." for line in said)
        sections = "".join(
            (
                f'<h2>{escape(figure.title)}</h2><p class="caption">{escape(figure.caption)}</p>'
                f'<div class="figure" id="{figure.name}">{draw(figure)}</div>\n'
            )
            for figure in self.figures()
        )
        verdict = ""
        if room is not None:
            color = {"fits": "#CDE7D8", "does not fit": "#F8C9C9"}.get(room.verdict, "#FCE8B2")
            words = escape(room.verdict)
            verdict = f'<span class="verdict" style="background: {color}">{words}</span>\n'
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(self.title)}</title><link rel="icon" '
            f'href="data:,"><style>{_STYLE}</style></head>\n<body>'
            f'<h1>{escape(self.title)}</h1>\n{verdict}<p class="lead">{escape(lead)}</p>\n<div '
            f'class="wide">{self._table}</div>\n{sections}'
            f"<footer><p>{escape(self.footer + _HOW_TO_LOOK)}</p></footer>\n</body></html>\n"
        )

    @property
    def _table(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            + f'<p class="caption">{escape(self.below)}</p>' * bool(self.below)
        )


def page(facts: ReportFacts, costs: Sequence[str] = ()) -> Page:
    """Return what is shown of a plan of stages, with what it costs in words."""
    said = [paragraph(facts), *costs]
    make = partial(figures, facts)
    return Page(title(facts), HEADER, rows(facts), said, _footer(facts), figures=make)


def _footer(facts: ReportFacts) -> str:
    """Return the line about the sources of the numbers."""
    known = facts.prediction.source
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
