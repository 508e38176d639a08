"""Small figures as SVG: panels of bars, histograms and points, side by side. Readable in a browser and in a code review alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

ALPA, OURS, PAPER, INK, FAINT = "#4477aa", "#228833", "#ccbb44", "#222222", "#dddddd"
_TEXT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass
class Panel:
    """One pair of axes.

    Attributes:
        title: Above it.
        x_label, y_label: Of the axes, with units.
        x_range, y_range: Of the axes.
        x_ticks: (value, text); None numbers the axis.
        marks: SVG of what is drawn, in order.
    """

    title: str
    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]] | None = None
    width: int = 330
    height: int = 230
    marks: list[str] = field(default_factory=list)

    LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 44

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.LEFT + (value - low) / (high - low) * (self.width - self.LEFT - self.RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - self.BOTTOM - (value - low) / (high - low) * (self.height - self.TOP - self.BOTTOM)

    def bar(self, left: float, right: float, top: float, color: str, about: str, opacity: float = 1.0) -> None:
        self.box((left, right), (self.y_range[0], top), color, about, opacity)

    def box(self, xs: tuple[float, float], ys: tuple[float, float], color: str, about: str, opacity: float = 0.25) -> None:
        left, right, bottom, top = *map(self.x, xs), *map(self.y, ys)
        self.marks.append(
            f"<rect x='{left:.1f}' y='{top:.1f}' width='{right - left:.1f}' height='{bottom - top:.1f}' fill='{color}' "
            f"fill-opacity='{opacity}'><title>{escape(about)}</title></rect>"
        )

    def level(self, value: float, color: str, text: str = "", dashes: str = "5 3") -> None:
        y = self.y(value)
        self.marks.append(
            f"<line x1='{self.LEFT}' x2='{self.width - self.RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='{color}' stroke-width='1.4' "
            f"stroke-dasharray='{dashes}'/>"
        )
        if text:
            self.marks.append(_text(self.width - self.RIGHT, y - 4, text, color=color, anchor="end"))

    def point(self, x: float, y: float, color: str, text: str, about: str, anchor: str = "start") -> None:
        side = 7 if anchor == "start" else -7
        self.marks.append(
            f"<circle cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='5' fill='{color}' fill-opacity='0.85'><title>{escape(about)}</title>"
            f"</circle>{_text(self.x(x) + side, self.y(y) + 4, text, anchor=anchor)}"
        )

    def note(self, x: float, y: float, text: str, color: str = INK, anchor: str = "middle") -> None:
        self.marks.append(_text(self.x(x), self.y(y), text, color=color, anchor=anchor))

    def svg(self) -> str:
        bottom, top = self.y(self.y_range[0]), self.y(self.y_range[1])
        parts = [_text(self.width / 2, 18, self.title, size=13, anchor="middle", weight="bold")]
        for value in _ticks(*self.y_range):
            y = self.y(value)
            parts.append(f"<line x1='{self.LEFT}' x2='{self.width - self.RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='{FAINT}'/>")
            parts.append(_text(self.LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        for value, text in self.x_ticks or [(value, f"{value:g}") for value in _ticks(*self.x_range)]:
            parts.append(_text(self.x(value), bottom + 15, text, anchor="middle"))
        parts += self.marks
        parts.append(f"<path d='M {self.LEFT} {top:.1f} V {bottom:.1f} H {self.width - self.RIGHT}' fill='none' stroke='{INK}'/>")
        parts.append(_text((self.LEFT + self.width - self.RIGHT) / 2, self.height - 10, self.x_label, anchor="middle"))
        middle = (top + bottom) / 2
        parts.append(f"<g transform='rotate(-90 14 {middle:.1f})'>{_text(14, middle + 4, self.y_label, anchor='middle')}</g>")
        return "".join(parts)


def draw(title: str, note: str, panels: Sequence[Panel], columns: int, legend: Sequence[tuple[str, str]] = ()) -> str:
    """A picture of panels in rows.

    Args:
        title: Above all.
        note: Below the title: what is simulated, and what it is compared with.
        panels: Of one size.
        columns: Panels in a row.
        legend: (colour, text).
    """
    first, head = panels[0], 78
    rows = -(-len(panels) // columns)
    width, height = columns * first.width + 20, head + rows * first.height + 10
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(12, 24, title, size=17, weight="bold"),
        _text(12, 44, note, size=12, color="#555555"),
    ]
    left = 12.0
    for color, text in legend:
        parts.append(f"<rect x='{left}' y='55' width='12' height='12' fill='{color}'/>{_text(left + 17, 65, text, size=12)}")
        left += 32 + 6.6 * len(text)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(f"<g transform='translate({10 + column * first.width} {head + row * first.height})'>{panel.svg()}</g>")
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: int = 11, color: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_TEXT} font-size='{size}' font-weight='{weight}' fill='{color}' text-anchor='{anchor}'>"
        f"{escape(text)}</text>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers of a range."""
    step = 10.0 ** len(str(int(high - low))) / 100
    while (high - low) / step > 8:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    first = -(-low // step)
    return [step * (first + i) for i in range(int((high - first * step) / step) + 1)]
