"""Small figures as SVG: panels of bars, lines and points, side by side. Readable in a browser and
in a code review alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

ALPA, OURS, PAPER, INK, FAINT = "#4477aa", "#228833", "#ccbb44", "#222222", "#dddddd"
#: Of series that have no colour of their own.
COLORS = (ALPA, "#66ccee", PAPER, "#aa3377", "#bbbbbb", OURS, "#ee6677", INK)
_TEXT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass
class Panel:
    """One pair of axes.

    Attributes:
        title: Above it.
        x_label, y_label: Of the axes, with units.
        x_range, y_range: Of the axes.
        x_ticks: (value, text of one or more lines); None numbers the axis.
        width, height, bottom: In pixels; the last is what is below the axis.
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
    bottom: int = 44
    marks: list[str] = field(default_factory=list)

    LEFT, RIGHT, TOP = 52, 14, 34

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.LEFT + (value - low) / (high - low) * (self.width - self.LEFT - self.RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return (
            self.height
            - self.bottom
            - (value - low) / (high - low) * (self.height - self.TOP - self.bottom)
        )

    def bar(
        self, left: float, right: float, top: float, color: str, about: str, opacity: float = 1.0
    ) -> None:
        self.box((left, right), (self.y_range[0], top), color, about, opacity)

    def box(
        self,
        xs: tuple[float, float],
        ys: tuple[float, float],
        color: str,
        about: str,
        opacity: float = 0.25,
    ) -> None:
        left, right, bottom, top = *map(self.x, xs), *map(self.y, ys)
        self.marks.append(
            f"<rect x='{left:.1f}' y='{top:.1f}' width='{right - left:.1f}' "
            f"height='{bottom - top:.1f}' fill='{color}' "
            f"fill-opacity='{opacity}'><title>{escape(about)}</title></rect>"
        )

    def level(self, value: float, color: str) -> None:
        y = self.y(value)
        self.marks.append(
            f"<line x1='{self.LEFT}' x2='{self.width - self.RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
            f"stroke='{color}' stroke-width='1.4' "
            f"stroke-dasharray='5 3'/>"
        )

    def point(self, x: float, y: float, color: str, about: str) -> None:
        at = f"cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='5'"
        self.marks.append(
            f"<circle {at} fill='{color}' "
            f"fill-opacity='0.85'><title>{escape(about)}</title></circle>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, about: str) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        style = f"fill='none' stroke='{color}' stroke-width='2'"
        self.marks.append(
            f"<polyline points='{path}' {style}><title>{escape(about)}</title></polyline>"
        )

    def note(self, x: float, y: float, text: str, color: str = INK, anchor: str = "middle") -> None:
        self.marks.append(_text(self.x(x), self.y(y), text, color=color, anchor=anchor))

    def svg(self) -> str:
        bottom, top = self.y(self.y_range[0]), self.y(self.y_range[1])
        parts = [_text(self.width / 2, 18, self.title, size=13, anchor="middle", weight="bold")]
        for value in _ticks(*self.y_range):
            y = self.y(value)
            parts.append(
                f"<line x1='{self.LEFT}' x2='{self.width - self.RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
                f"stroke='{FAINT}'/>"
            )
            parts.append(_text(self.LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        for value, text in self.x_ticks or [
            (value, f"{value:g}") for value in _ticks(*self.x_range)
        ]:
            parts += [
                _text(self.x(value), bottom + 15 + 12 * n, line, anchor="middle")
                for n, line in enumerate(text.split("\n"))
            ]
        parts += self.marks
        parts.append(
            f"<path d='M {self.LEFT} {top:.1f} V {bottom:.1f} H {self.width - self.RIGHT}' "
            f"fill='none' stroke='{INK}'/>"
        )
        parts.append(
            _text(
                (self.LEFT + self.width - self.RIGHT) / 2,
                self.height - 10,
                self.x_label,
                anchor="middle",
            )
        )
        middle = (top + bottom) / 2
        parts.append(
            "<g transform='rotate(-90 14 "
            f"{middle:.1f})'>{_text(14, middle + 4, self.y_label, anchor='middle')}</g>"
        )
        return "".join(parts)


def grouped_bars(
    title: str,
    y_label: str,
    groups: Sequence[tuple[str, Mapping[str, float | str]]],
    width: int,
    height: int,
    bottom: int = 72,
) -> Panel:
    """Groups of bars, a series in each of ``COLORS``.

    Args:
        groups: Name of each, and by series its height, or a text where there is none (OOM).
    """
    heights = [value for _, bars in groups for value in bars.values() if not isinstance(value, str)]
    ticks = [(i + 0.5, name) for i, (name, _) in enumerate(groups)]
    top = 1.08 * max(heights, default=1.0)
    panel = Panel(title, "", y_label, (0, len(groups)), (0, top), ticks, width, height, bottom)
    for i, (name, bars) in enumerate(groups):
        step = 0.88 / len(bars)
        for j, ((series, value), color) in enumerate(zip(bars.items(), COLORS, strict=False)):
            left = i + 0.06 + j * step
            if isinstance(value, str):
                x, y = panel.x(left + 0.8 * step), panel.y(0) - 3
                panel.marks.append(
                    f"<g transform='rotate(-90 {x:.1f} "
                    f"{y:.1f})'>{_text(x, y, value, 8, '#888888')}</g>"
                )
            else:
                about = f"{series}, {' '.join(name.split())}: {value:.4g}"
                panel.bar(left, left + 0.92 * step, value, color, about)
    return panel


def draw(
    title: str,
    note: str,
    panels: Sequence[Panel],
    columns: int,
    legend: Sequence[tuple[str, str]] = (),
) -> str:
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
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 "
        f"{width} {height}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(12, 24, title, size=17, weight="bold"),
        _text(12, 44, note, size=12, color="#555555"),
    ]
    left = 12.0
    for color, text in legend:
        parts.append(
            f"<rect x='{left}' y='55' width='12' height='12' "
            f"fill='{color}'/>{_text(left + 17, 65, text, size=12)}"
        )
        left += 32 + 6.6 * len(text)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(
            f"<g transform='translate({10 + column * first.width} "
            f"{head + row * first.height})'>{panel.svg()}</g>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 11,
    color: str = INK,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_TEXT} font-size='{size}' font-weight='{weight}' "
        f"fill='{color}' text-anchor='{anchor}'>"
        f"{escape(text)}</text>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers of a range."""
    step = 10.0 ** len(str(int(high - low))) / 100
    while (high - low) / step > 8:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    first = -(-low // step)
    return [step * (first + i) for i in range(int((high - first * step) / step) + 1)]
