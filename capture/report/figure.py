"""One drawing of a report, as plotly.js takes it, and the parts that several drawings have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from capture.quantities import format_bytes
from capture.report.palette import LIMIT

#: A limit that lies so many times above everything else is said and not drawn.
FAR_LIMIT = 5
#: Of a trace: what stands under the pointer is its ``customdata`` alone.
SAID = "%{customdata}<extra></extra>"
#: The words of a bar stand in its middle.
IN_BARS = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
#: Of a figure of bars in lanes.
OVERLAID = {"barmode": "overlay", "bargap": 0, "hovermode": "closest"}

#: Of a figure, in the language of plotly.js.
Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        name: Identifier of its element in the page, stable.
        title, caption: Title and caption in words; the caption says what is simulated.
        traces, layout: Traces and layout as plotly.js takes them.
    """

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def bars(name: str, x: Sequence[object], y: Sequence[object], **more: object) -> Trace:
    """Return a trace of upright bars, one at every ``x``."""
    return {"type": "bar", "name": name, "x": x, "y": y, **more}


def spans(
    rows: Sequence[float], begins: Sequence[float], lengths: Sequence[float], **more: object
) -> Trace:
    """Return a trace of lying bars, each in its row, from where it begins."""
    where = {"y": rows, "base": begins, "x": lengths}
    return {"type": "bar", "orientation": "h", **where, **more}


def scatter(
    mode: str, name: str, x: Sequence[object], y: Sequence[object], **more: object
) -> Trace:
    """Return a trace of points: lines, markers or both, as ``mode`` says."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def lanes(names: Sequence[str]) -> dict[str, Any]:
    """Return an upright axis of named rows, the first on top."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def edged(color: str, width: float = 0.5) -> dict[str, Any]:
    """Return the marker of bars with a white edge."""
    return {"color": color, "line": {"color": "white", "width": width}}


def limit_line(axis: str, limit: int | None, scale: float, largest: float) -> dict[str, Any]:
    """Return a dashed line at the limit, if it is near enough not to squeeze the rest."""
    if limit is None or limit > FAR_LIMIT * largest:
        return {}
    along, other = ("y", "x") if axis == "y" else ("x", "y")
    line = {
        "type": "line",
        f"{along}0": limit / scale,
        f"{along}1": limit / scale,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": LIMIT, "width": 2, "dash": "dash"},
    }
    words = {
        "text": f"limit {format_bytes(limit)}",
        "showarrow": False,
        "font": {"color": LIMIT},
        "bgcolor": "rgba(255,255,255,0.8)",
    }
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": limit / scale, "yanchor": "bottom"}
    if axis == "x":
        place = {"x": limit / scale, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "top"}
    return {"shapes": [line], "annotations": [{**words, **place}]}
