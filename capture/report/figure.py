"""One drawing of a report, as plotly.js takes it, and the line of a limit in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capture.quantities import format_bytes
from capture.report.palette import LIMIT

#: A limit that lies so many times above everything else is said and not drawn.
FAR_LIMIT = 5


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
