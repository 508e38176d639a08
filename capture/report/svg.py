"""Draws a figure as SVG: what a page shows without a script.

Of the language of ``capture.report.figure`` this module knows what the figures of this package use:
bars (stacked or not, upright or lying), lines and markers with error bars, heat maps of categories
and treemaps. What is said of a mark is its title.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from capture.report.figure import Figure
from capture.report.palette import INK, KINDS, LIMIT, OTHER, text_on
from capture.report.treemap import treemap

WIDTH = 1110
#: Pixels of a character of the axes' text, and of a line of it.
_CHARACTER, _LINE = 6.8, 16
_GRID = "#E4E7EB"


def draw(figure: Figure) -> str:
    """Return a figure as one SVG element."""
    height = int(figure.layout.get("height", 420))
    inner = _Chart(figure.traces, figure.layout, height).elements()
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(figure.title)}" '
        f'font-size="12" fill="{INK}">{"".join(inner)}</svg>'
    )


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: values between ``low`` and ``high`` lie between two pixels.

    Attributes:
        low, high: The values at its ends.
        begin, end: Their pixels.
        ticks: Values that are named, with their names.
        places: Position of each name, where the values of the axis are names.
        title: Title in words.
        has_grid: Whether a line is drawn at every tick.
    """

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    places: Mapping[Any, int]
    title: str = ""
    has_grid: bool = True

    def at(self, value: Any) -> float:
        """Return the pixel of a value or a name."""
        part = (float(self.places.get(value, value)) - self.low) / ((self.high - self.low) or 1.0)
        return self.begin + part * (self.end - self.begin)

    @property
    def pixels_per_unit(self) -> float:
        return abs(self.end - self.begin) / (abs(self.high - self.low) or 1.0)


class _Chart:
    """The drawing of one figure, in pixels."""

    def __init__(self, traces: Sequence[dict[str, Any]], layout: dict[str, Any], height: int):
        self._traces, self._layout, self._height = traces, layout, height
        self._legend = _legend(traces, layout)

    def elements(self) -> Iterator[str]:
        if self._traces and self._traces[0]["type"] == "treemap":
            yield from treemap(self._traces[0]["areas"], WIDTH, self._height)
            return
        top = 8 + _LINE * (1 + max((row for row, *_ in self._legend), default=-1))
        self._x, self._y = self._axes(top)
        yield from self._frame()
        stacked: dict[Any, float] = {}
        for trace in self._traces:
            yield from {"bar": self._bars, "scatter": self._scatter, "heatmap": self._heatmap}[
                trace["type"]
            ](trace, stacked)
        yield from self._limit_line()
        for row, x, trace in self._legend:
            y = 11 + _LINE * row
            yield _swatch(trace, x, y)
            yield _text(x + 16, y + 4, trace["name"], anchor="start")

    # ---- axes ------------------------------------------------------------------------------------

    def _axes(self, top: float) -> tuple[Axis, Axis]:
        lying = any(trace.get("orientation") == "h" for trace in self._traces)
        x_values, y_values = self._values("x", lying), self._values("y", not lying)
        x, y = self._layout.get("xaxis", {}), self._layout.get("yaxis", {})
        y_axis = _axis(y, y_values, self._height - 44.0, top + 4.0, 7)
        left = 20 + _CHARACTER * max((len(name) for _, name in y_axis.ticks), default=0)
        x_axis = _axis(x, x_values, left + 18 * bool(y_axis.title), WIDTH - 16.0, 10)
        if x.get("tickangle"):
            below = 24 + 0.7 * _CHARACTER * max((len(name) for _, name in x_axis.ticks), default=0)
            y_axis = _axis(y, y_values, self._height - below, top + 4.0, 7)
        return x_axis, y_axis

    def _values(self, axis: str, is_length: bool) -> list[Any]:
        """Return everything that an axis has to show."""
        found: list[Any] = []
        sums: dict[Any, float] = {}
        for trace in self._traces:
            values = [v for v in trace.get(axis, ()) if v is not None]
            if trace["type"] == "heatmap" and axis == "x":
                values = [0.0, len(trace["kinds"][0]) * trace["dx"]]
            if trace["type"] == "bar" and is_length:
                bases = trace.get("base")
                across = trace["y" if axis == "x" else "x"]
                if bases is None and self._layout.get("stacked"):
                    for at, value in zip(across, values, strict=True):
                        sums[at] = sums.get(at, 0.0) + value
                    values = [0.0, *sums.values()]
                else:
                    bases = bases or [0.0] * len(values)
                    ends = [base + v for base, v in zip(bases, values, strict=True)]
                    values = [*bases, *ends]
            if axis == "y":
                values += [end for interval in trace.get("intervals", ()) for end in interval]
            found += values
        limited, limit, _ = self._layout.get("limit", ("", 0, ""))
        return [*found, limit] if limited == axis else found

    def _frame(self) -> Iterator[str]:
        x, y = self._x, self._y
        for value, name in y.ticks:
            at = y.at(value)
            if y.has_grid:
                yield _line(x.begin, at, x.end, at, _GRID)
            yield _text(x.begin - 6, at + 4, name, anchor="end")
        angle = self._layout.get("xaxis", {}).get("tickangle")
        for value, name in x.ticks:
            at = x.at(value)
            if x.has_grid and not x.places:
                yield _line(at, y.begin, at, y.end, _GRID)
            turned = {"anchor": "end", "turn": angle} if angle else {}
            yield _text(at, y.begin + (14 if angle else 16), name, **turned)
        yield _line(x.begin, y.begin, x.end, y.begin, "#9AA5B1")
        if x.title:
            yield _text((x.begin + x.end) / 2, y.begin + 36, x.title)
        if y.title:
            yield _text(12, (y.begin + y.end) / 2, y.title, turn=-90)

    # ---- marks -----------------------------------------------------------------------------------

    def _bars(self, trace: dict[str, Any], stacked: dict[Any, float]) -> Iterator[str]:
        lying = trace.get("orientation") == "h"
        along, across = (self._x, self._y) if lying else (self._y, self._x)
        at, sizes = (trace["y"], trace["x"]) if lying else (trace["x"], trace["y"])
        default = 1 - self._layout.get("bargap", 0.2)
        thick = trace.get("width", default) * across.pixels_per_unit
        marker, texts = trace.get("marker", {}), trace.get("text")
        colors = marker.get("color", OTHER)
        for i, (where, size) in enumerate(zip(at, sizes, strict=True)):
            if not size:
                continue
            base = trace["base"][i] if "base" in trace else stacked.get(where, 0.0)
            if "base" not in trace and self._layout.get("stacked"):
                stacked[where] = base + size
            low, high = sorted((along.at(base), along.at(base + size)))
            middle, color = across.at(where), _color_of(colors, i)
            box = (low, middle - thick / 2, high - low, thick)
            x, y, width, height = box if lying else (box[1], box[0], box[3], box[2])
            edge = marker.get("line", {})
            stroke = f' stroke="{edge["color"]}" stroke-width="{edge["width"]}"' if edge else ""
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" '
                f'height="{max(height, 0.3):.1f}" fill="{color}"{stroke}>'
                f"{_title(trace, i)}</rect>"
            )
            if texts:
                lines = [line for line in texts[i].split("\n") if line]
                if lines and width > _CHARACTER * max(map(len, lines)) and height > 14 * len(lines):
                    begin = y + height / 2 + 4 - 7.5 * (len(lines) - 1)
                    for n, line in enumerate(lines):
                        yield _text(x + width / 2, begin + 15 * n, line, fill=text_on(color))

    def _scatter(self, trace: dict[str, Any], stacked: dict[Any, float]) -> Iterator[str]:
        points = [
            (self._x.at(x), self._y.at(y), i)
            for i, (x, y) in enumerate(zip(trace["x"], trace["y"], strict=True))
            if x is not None and y is not None
        ]
        line = trace.get("line", {})
        if "lines" in trace["mode"] and points:
            steps = line.get("shape") == "hv"
            path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
            path += "".join(
                (f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}") for x, y, _ in points[1:]
            )
            if "fill" in trace:
                bottom = self._y.at(0)
                closed = f"{path}V{bottom:.1f}H{points[0][0]:.1f}Z"
                yield f'<path d="{closed}" fill="{trace["fill"]}" stroke="none"/>'
            dash = ' stroke-dasharray="6 4"' if line.get("dash") else ""
            name = escape(trace.get("name", ""))
            yield (
                f'<path d="{path}" fill="none" stroke="{line.get("color", INK)}" '
                f'stroke-width="{line.get("width", 1.5)}"{dash}><title>{name}</title></path>'
            )
        if "markers" not in trace["mode"]:
            return
        marker = trace.get("marker", {})
        for x, y, i in points:
            if "intervals" in trace:
                bottom, top = map(self._y.at, trace["intervals"][i])
                yield _line(x, top, x, bottom, INK)
                yield _line(x - 5, top, x + 5, top, INK) + _line(x - 5, bottom, x + 5, bottom, INK)
            yield _symbol(marker, x, y, _title(trace, i))
            if "text" in trace["mode"] and trace["text"][i]:
                yield _text(x + 8, y - 8, trace["text"][i], anchor="start", halo=True)

    def _heatmap(self, trace: dict[str, Any], stacked: dict[Any, float]) -> Iterator[str]:
        """Yield a heat map with runs of equal values as one bar each."""
        half = self._y.pixels_per_unit / 2 - 2
        for y, (row, labels) in enumerate(zip(trace["kinds"], trace["text"], strict=True)):
            for kind, run in groupby(range(len(row)), row.__getitem__):
                first, *others = run
                if kind is None:
                    continue
                begin = self._x.at(first * trace["dx"])
                end = self._x.at((first + 1 + len(others)) * trace["dx"])
                yield (
                    f'<rect x="{begin:.1f}" y="{self._y.at(y) - half:.1f}" '
                    f'width="{end - begin:.1f}" height="{2 * half:.1f}" fill="{KINDS[kind]}">'
                    f"<title>{escape(labels[first])}</title></rect>"
                )

    def _limit_line(self) -> Iterator[str]:
        x, y = self._x, self._y
        match self._layout.get("limit"):
            case "y", value, words:
                at = y.at(value)
                yield _line(x.begin, at, x.end, at, LIMIT, dash="8 5", width=2)
                yield _text(x.begin + 4, at - 5, words, anchor="start", fill=LIMIT, halo=True)
            case "x", value, words:
                at = x.at(value)
                yield _line(at, y.begin, at, y.end, LIMIT, dash="8 5", width=2)
                yield _text(at - 4, y.end + 12, words, anchor="end", fill=LIMIT, halo=True)


# ---- parts ---------------------------------------------------------------------------------------


def _axis(
    asked: Mapping[str, Any], values: Sequence[Any], begin: float, end: float, most: int
) -> Axis:
    names = list(dict.fromkeys(v for v in values if isinstance(v, str)))
    places = {name: i for i, name in enumerate(names)}
    title, has_grid = asked.get("title", ""), asked.get("showgrid", True)
    if names:
        ticks = tuple((float(i), name) for name, i in places.items())
        return Axis(-0.5, len(names) - 0.5, begin, end, ticks, places, title, has_grid)
    low, high = min(values, default=0.0), max(values, default=0.0)
    pad = 0.04 * ((high - low) or abs(high) or 1.0)
    from_zero = low == 0 or (low > 0 and "from_zero" in asked)
    low, high = asked.get("range", (0.0 if from_zero else low - pad, high + pad))
    named = tuple(asked.get("names", ()) or _ticks(low, high, most, asked.get("dtick")))
    return Axis(low, high, begin, end, named, {}, title, has_grid)


def _ticks(low: float, high: float, most: int, step: float | None) -> Iterator[tuple[float, str]]:
    """Yield round numbers between two, at most ``most``, with their names.

    Example:
        >>> [name for _, name in _ticks(0, 9, 5, None)]
        ['0', '2', '4', '6', '8']
    """
    low, high = min(low, high), max(low, high)
    if step is None:
        rough = ((high - low) or 1.0) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield n * step, f"{n * step:.10g}"


def _legend(
    traces: Sequence[dict[str, Any]], layout: Mapping[str, object]
) -> list[tuple[int, float, dict[str, Any]]]:
    """Return (row, x, trace) of every named trace; nothing where one needs no legend."""
    named = [trace for trace in traces if trace.get("name")]
    if not layout.get("showlegend", len(named) > 1):
        return []
    found, row, x = [], 0, 60.0
    for trace in named:
        width = 16 + _CHARACTER * len(trace["name"]) + 18
        if x + width > WIDTH:
            row, x = row + 1, 60.0
        found.append((row, x, trace))
        x += width
    return found


def _color_of(colors: str | Sequence[str], i: int) -> str:
    """Return the colour of mark ``i``: the one of all marks, or its own."""
    return colors if isinstance(colors, str) else colors[i]


def _swatch(trace: Mapping[str, Any], x: float, y: float) -> str:
    """Return the mark that stands for a trace in the legend."""
    marker, line = trace.get("marker", {}), trace.get("line", {})
    if trace["type"] == "scatter" and "lines" in trace["mode"]:
        dash = "4 3" if line.get("dash") else ""
        return _line(x, y, x + 12, y, line.get("color", INK), dash=dash, width=2.5)
    if trace["type"] == "scatter" and marker.get("symbol") != "square":
        return _symbol({**marker, "size": min(marker.get("size", 8), 11)}, x + 6, y, "")
    color = _color_of(marker.get("color", OTHER), 0)
    return f'<rect x="{x:g}" y="{y - 5:g}" width="10" height="10" fill="{color}"/>'


def _symbol(marker: Mapping[str, Any], x: float, y: float, title: str) -> str:
    color, half = marker.get("color", INK), marker.get("size", 8) / 2
    symbol = marker.get("symbol", "circle")
    if symbol == "diamond-open":
        path = f"M{x:.1f} {y - half:.1f}l{half} {half}l{-half} {half}l{-half} {-half}z"
        return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2">{title}</path>'
    if symbol == "star":
        corners = [
            (half * (1 if n % 2 == 0 else 0.45), math.pi * n / 5 - math.pi / 2) for n in range(10)
        ]
        path = "L".join(f"{x + r * math.cos(a):.1f} {y + r * math.sin(a):.1f}" for r, a in corners)
        return f'<path d="M{path}z" fill="{color}">{title}</path>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" fill="{color}">{title}</circle>'


def _title(trace: Mapping[str, Any], i: int) -> str:
    """Return the element with the text that is shown under the pointer."""
    said = trace.get("said")
    return f"<title>{escape(said[i])}</title>" if said else ""


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "middle",
    fill: str = "",
    turn: float = 0,
    halo: bool = False,
) -> str:
    more = f' fill="{fill}"' if fill else ""
    more += ' paint-order="stroke" stroke="white" stroke-width="4"' * halo
    more += f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _line(
    x0: float, y0: float, x1: float, y1: float, color: str, *, dash: str = "", width: float = 1
) -> str:
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}" '
        f'stroke-width="{width:g}"{more}/>'
    )
