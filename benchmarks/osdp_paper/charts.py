"""Grouped bars and lines as SVG, in panels side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#4477aa", "#66ccee", "#ccbb44", "#aa3377", "#bbbbbb", "#228833", "#ee6677", "#222222")
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 34, 46


@dataclass(frozen=True)
class Bars:
    """Groups of bars.

    Attributes:
        title, y_label: Above, and of the axis with its unit.
        groups: Name of each group and, by series, its height, or a text where there is none (OOM).
    """

    title: str
    y_label: str
    groups: Sequence[tuple[str, Mapping[str, float | str]]]

    def draw(self, width: int, height: int, colors: Mapping[str, str]) -> str:
        heights = [value for _, bars in self.groups for value in bars.values() if not isinstance(value, str)]
        axes = _Axes(width, height, (0.0, float(len(self.groups))), (0.0, 1.08 * max(heights, default=1.0)))
        parts = [axes.frame(self.title, self.y_label)]
        for i, (name, bars) in enumerate(self.groups):
            step = 0.88 / len(bars)
            for j, (series, value) in enumerate(bars.items()):
                left = axes.x(i + 0.06 + j * step)
                if isinstance(value, str):
                    x = left + axes.scale * step * 0.8
                    y = axes.y(0) - 3
                    parts.append(f"<g transform='rotate(-90 {x:.1f} {y:.1f})'>{_text(x, y, value, 7, '#888888')}</g>")
                    continue
                top, about = axes.y(value), escape(f"{series}, {name}: {value:.4g}")
                parts.append(
                    f"<rect x='{left:.1f}' y='{top:.1f}' width='{axes.scale * step * 0.92:.1f}' height='{axes.y(0) - top:.1f}' "
                    f"fill='{colors[series]}'><title>{about}</title></rect>"
                )
            for line, text in enumerate(name.split("\n")):
                parts.append(_text(axes.x(i + 0.5), height - _BOTTOM + 14 + 12 * line, text, 9, anchor="middle"))
        return "".join(parts)


@dataclass(frozen=True)
class Lines:
    """Lines through points.

    Attributes:
        title, x_label, y_label: With units.
        series: By name, (x, y) with x ascending.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]

    def draw(self, width: int, height: int, colors: Mapping[str, str]) -> str:
        points = [point for line in self.series.values() for point in line]
        xs = sorted({x for x, _ in points})
        axes = _Axes(width, height, (xs[0], xs[-1]), (0.0, 1.08 * max(y for _, y in points)))
        parts = [axes.frame(self.title, self.y_label)]
        parts += [_text(axes.x(x), height - _BOTTOM + 14, f"{x:g}", 9, anchor="middle") for x in xs]
        parts.append(_text(width / 2, height - 12, self.x_label, anchor="middle"))
        for name, line in self.series.items():
            path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line)
            parts.append(f"<polyline points='{path}' fill='none' stroke='{colors[name]}' stroke-width='2'><title>{name}</title></polyline>")
        return "".join(parts)


def figure(
    title: str, note: str, panels: Sequence[Bars | Lines], series: Sequence[str], columns: int = 1, size: tuple[int, int] = (900, 250)
) -> str:
    """A picture of panels in rows, with a legend of the series; the note says what is simulated."""
    width, height = size
    rows, head = -(-len(panels) // columns), 78
    colors = dict(zip(series, COLORS, strict=False))
    whole = (columns * width + 20, head + rows * height + 10)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{whole[0]}' height='{whole[1]}' viewBox='0 0 {whole[0]} {whole[1]}'>",
        f"<rect width='{whole[0]}' height='{whole[1]}' fill='white'/>",
        _text(12, 24, title, 17, weight="bold"),
        _text(12, 44, note, 12, "#555555"),
    ]
    left = 12.0
    for name, color in colors.items():
        parts.append(f"<rect x='{left:.1f}' y='55' width='12' height='12' fill='{color}'/>{_text(left + 17, 65, name, 12)}")
        left += 34 + 6.8 * len(name)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        parts.append(f"<g transform='translate({10 + column * width} {head + row * height})'>{panel.draw(width, height, colors)}</g>")
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axes:
    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @property
    def scale(self) -> float:
        """Pixels per unit of x."""
        return (self.width - _LEFT - _RIGHT) / (self.x_range[1] - self.x_range[0])

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_range[0]) * self.scale

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)

    def frame(self, title: str, y_label: str) -> str:
        parts = [_text(self.width / 2, 18, title, 13, anchor="middle", weight="bold")]
        for i in range(5):
            value = self.y_range[1] * i / 4
            y = self.y(value)
            parts.append(f"<line x1='{_LEFT}' x2='{self.width - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#dddddd'/>")
            parts.append(_text(_LEFT - 5, y + 4, f"{value:.3g}", 10, anchor="end"))
        middle = (_TOP + self.height - _BOTTOM) / 2
        parts.append(f"<g transform='rotate(-90 12 {middle:.1f})'>{_text(12, middle, y_label, anchor='middle')}</g>")
        return "".join(parts)


def _text(x: float, y: float, text: str, size: int = 11, color: str = "#222222", anchor: str = "start", weight: str = "normal") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' font-weight='{weight}' fill='{color}' text-anchor='{anchor}'>"
        f"{escape(text)}</text>"
    )
