"""Small figures: panels of bars, lines and points, side by side, drawn by matplotlib as SVG.

The same facts give the same bytes wherever they are drawn, and a mark says what it is where the
mouse is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

ALPA, OURS, PAPER, INK, FAINT = "#4477aa", "#228833", "#ccbb44", "#222222", "#dddddd"
#: Of series that have no colour of their own.
COLORS = (ALPA, "#66ccee", PAPER, "#aa3377", "#bbbbbb", OURS, "#ee6677", INK)
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],  # the first comes with matplotlib
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "text.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "capture",
}
#: Pixels beside and above the axes of a panel, and above all panels.
_LEFT, _RIGHT, _TOP, _HEAD = 52, 14, 34, 78
#: Of a line of the legend but the first.
_LEGEND_LINE = 20


@dataclass
class Panel:
    """One pair of axes.

    Attributes:
        title: Above it.
        x_label, y_label: Of the axes, with units.
        x_range, y_range: Of the axes.
        x_ticks: (value, text of one or more lines); None numbers the axis.
        width, height, bottom: In pixels; the last is what is below the axis.
        marks: What is drawn, in order, and what it says.
        y_ticks: Likewise of the other axis.
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
    marks: list[tuple[Callable[[Axes], Artist], str]] = field(default_factory=list)
    y_ticks: Sequence[tuple[float, str]] | None = None

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
        corner, size = (xs[0], ys[0]), (xs[1] - xs[0], ys[1] - ys[0])
        self._mark(
            lambda axes: axes.add_patch(
                Rectangle(corner, *size, facecolor=color, alpha=opacity, linewidth=0)
            ),
            about,
        )

    def level(self, value: float, color: str) -> None:
        self._mark(lambda axes: axes.axhline(value, color=color, linewidth=1.4, dashes=(5, 3)))

    def point(self, x: float, y: float, color: str, about: str) -> None:
        self._mark(
            lambda axes: axes.plot(x, y, "o", color=color, alpha=0.85, markersize=10, mew=0)[0],
            about,
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, about: str) -> None:
        xs, ys = zip(*points, strict=True)
        self._mark(lambda axes: axes.plot(xs, ys, color=color, linewidth=2)[0], about)

    def note(
        self,
        x: float,
        y: float,
        text: str,
        color: str = INK,
        anchor: str = "center",
        **style: float,
    ) -> None:
        self._mark(lambda axes: axes.text(x, y, text, color=color, ha=anchor, **style))

    def _mark(self, make: Callable[[Axes], Artist], about: str = "") -> None:
        self.marks.append((make, about))

    def draw(self, axes: Axes, name: str) -> dict[str, str]:
        """Draw it on axes that lie where they should; what marks say, by their ids."""
        axes.set_title(self.title, fontsize=13, fontweight="bold")
        axes.set(xlabel=self.x_label, ylabel=self.y_label, xlim=self.x_range, ylim=self.y_range)
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        if self.x_ticks is not None:
            axes.set_xticks(*zip(*self.x_ticks, strict=True))
        if self.y_ticks is not None:
            axes.set_yticks(*zip(*self.y_ticks, strict=True))
        said = {}
        for i, (make, about) in enumerate(self.marks):
            artist = make(axes)
            if about:
                artist.set_gid(f"{name}-{i}")
                said[f"{name}-{i}"] = about
        return said


def grouped_bars(
    title: str,
    y_label: str,
    groups: Sequence[tuple[str, Mapping[str, float | str]]],
    width: int,
    height: int,
    bottom: int = 72,
    colors: Mapping[str, str] | None = None,
) -> Panel:
    """Groups of bars.

    Args:
        groups: Name of each, and by series its height, or a text where there is none (OOM).
        colors: Of series, as several panels of a picture share them; None: ``COLORS``, in order.
    """
    heights = [value for _, bars in groups for value in bars.values() if not isinstance(value, str)]
    ticks = [(i + 0.5, name) for i, (name, _) in enumerate(groups)]
    top = 1.08 * (max(heights, default=1.0) or 1.0)
    panel = Panel(title, "", y_label, (0, len(groups)), (0, top), ticks, width, height, bottom)
    for i, (name, bars) in enumerate(groups):
        step = 0.88 / len(bars)
        own = colors or dict(zip(bars, COLORS, strict=False))
        for j, (series, value) in enumerate(bars.items()):
            left = i + 0.06 + j * step
            if isinstance(value, str):
                style = {"rotation": 90, "fontsize": 8, "rotation_mode": "anchor"}
                panel.note(left + 0.8 * step, 0.01 * top, value, "#888888", "left", **style)
            else:
                about = f"{series}, {' '.join(name.split())}: {value:.4g}"
                panel.bar(left, left + 0.92 * step, value, own[series], about)
    return panel


def _legend_columns(texts: Sequence[str], width: int) -> int:
    """How many texts of a legend fit beside each other, about: all, or as many of the longest."""
    widths = [34 + 7 * len(text) for text in texts]
    if sum(widths) <= width:
        return max(1, len(texts))
    return max(1, width // max(widths))


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
    first, rows = panels[0], -(-len(panels) // columns)
    width = columns * first.width + 20
    in_line = _legend_columns([text for _, text in legend], width)
    head = _HEAD + _LEGEND_LINE * max(0, -(-len(legend) // in_line) - 1)
    height = head + rows * first.height + 10
    said: dict[str, str] = {}
    with rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72))  # a pixel is a point of 1/72 inch
        figure.text(12 / width, 1 - 24 / height, title, fontsize=17, fontweight="bold")
        figure.text(12 / width, 1 - 44 / height, note, fontsize=12, color="#555555")
        if legend:
            figure.legend(
                handles=[Patch(facecolor=color, label=text) for color, text in legend],
                loc="upper left",
                bbox_to_anchor=(6 / width, 1 - 48 / height),
                ncols=in_line,
                frameon=False,
                fontsize=12,
                handlelength=1.0,
                handleheight=1.0,
                columnspacing=1.2,
            )
        for index, panel in enumerate(panels):
            row, column = divmod(index, columns)
            left = 10 + column * first.width + _LEFT
            below = height - head - (row + 1) * first.height + panel.bottom
            size = (panel.width - _LEFT - _RIGHT, panel.height - _TOP - panel.bottom)
            box = (left / width, below / height, size[0] / width, size[1] / height)
            said |= panel.draw(figure.add_axes(box), f"mark-{index}")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    picture = written.getvalue()
    for name, about in said.items():
        group = f'<g id="{name}">'
        picture = picture.replace(group, f"{group}<title>{escape(about)}</title>")
    return picture
