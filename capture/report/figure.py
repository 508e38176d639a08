"""One drawing of a report as plain data, which ``capture.report.svg`` draws, and the parts that
several drawings have: traces, axes, a limit, and one readable unit for all numbers of an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capture.quantities import format_bytes
from capture.report.palette import category_color, in_order

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3))
#: A limit that lies so many times above everything else is said and not drawn.
FAR_LIMIT = 5

#: Of a figure; ``said`` is what stands under the pointer, by mark.
Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        name: Identifier of its element in the page, stable.
        title, caption: Title and caption in words; the caption says what is simulated.
        traces, layout: Traces and layout of the drawing.
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
    ends = (len(names) - 0.5, -0.5)
    return {"names": list(enumerate(names)), "range": ends, "showgrid": False}


def stacked(names: Sequence[str], parts: Sequence[Mapping[str, int]], unit: Unit) -> list[Trace]:
    """Return a bar of bytes per name, divided by category."""
    return [
        bars(
            category,
            names,
            [of.get(category, 0) / unit.scale for of in parts],
            said=[f"{category}: {format_bytes(of.get(category, 0))}" for of in parts],
            marker=edged(category_color(category)),
        )
        for category in in_order([category for of in parts for category in of])
    ]


def at_peak(
    title: str,
    caption: str,
    names: Sequence[str],
    parts: Sequence[Mapping[str, int]],
    **axes: object,
) -> Figure:
    """Return the figure of who holds a peak, by name and category."""
    unit = bytes_unit(max(1, *(sum(of.values()) for of in parts)))
    layout = {"stacked": True, "yaxis": {"title": unit.name}, **axes}
    return Figure("at_peak", title, caption, stacked(names, parts, unit), layout)


def edged(color: str, width: float = 0.5) -> dict[str, Any]:
    """Return the marker of bars with a white edge."""
    return {"color": color, "line": {"color": "white", "width": width}}


def limit_line(axis: str, limit: int | None, scale: float, largest: float) -> dict[str, Any]:
    """Return a dashed line at the limit, if it is near enough not to squeeze the rest."""
    if limit is None or limit > FAR_LIMIT * largest:
        return {}
    return {"limit": (axis, limit / scale, f"limit {format_bytes(limit)}")}


@dataclass(frozen=True)
class Unit:
    """The unit of an axis: its name, and the number that values are divided by."""

    name: str
    scale: float


def bytes_unit(largest: float) -> Unit:
    """Return the decimal unit in which the largest number of an axis is at least 1.

    Example:
        >>> bytes_unit(31_200_000_000), bytes_unit(12)
        (Unit(name='GB', scale=1000000000.0), Unit(name='B', scale=1.0))
    """
    return next((Unit(name, scale) for name, scale in _BYTES if largest >= scale), Unit("B", 1.0))


def seconds_unit(largest: float) -> Unit:
    """Return the unit of time in which the largest number of an axis is at least 1, microseconds
    for less.

    Example:
        >>> seconds_unit(0.25)
        Unit(name='ms', scale=0.001)
    """
    return next(
        (Unit(name, scale) for name, scale in _SECONDS if largest >= scale), Unit("µs", 1e-6)
    )
