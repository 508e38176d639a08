"""Draws a treemap: boxes in boxes, whose areas are numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from capture.quantities import format_bytes
from capture.report.palette import text_on

#: Left, top, width, height.
Box = tuple[float, float, float, float]
#: Pixels of a box's own title, and between it and its parts.
_HEAD, _GAP = 16.0, 1.5


class Area(NamedTuple):
    """A rectangle of a treemap, in another one or in none (``""``)."""

    parent: str
    name: str
    label: str
    nbytes: int
    color: str
    about: str

    @property
    def key(self) -> str:
        return f"{self.parent}/{self.name}"


def treemap(areas: Sequence[Area], width: float, height: float) -> Iterator[str]:
    """Yield the SVG of a treemap."""
    children: dict[str, list[Area]] = {}
    for each in areas:
        children.setdefault(each.parent, []).append(each)

    def boxes(parent: str, area: Box) -> Iterator[str]:
        members = children.get(parent, [])
        sizes = [float(each.nbytes) for each in members]
        for each, (x, y, w, h) in zip(members, squarified(sizes, area), strict=True):
            color, label = each.color, each.label
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w - 1, 0):.1f}" '
                f'height="{max(h - 1, 0):.1f}" fill="{color}">'
                f"<title>{escape(f'{each.about}: {format_bytes(each.nbytes)}')}</title></rect>"
            )
            letters = int((w - 6) / 6.5)
            if h > 14 and letters >= 3:
                shown = label if len(label) <= letters else f"{label[: letters - 1]}…"
                yield (
                    f'<text x="{x + 4:.1f}" y="{y + 12:.1f}" font-size="11" '
                    f'fill="{text_on(color)}">{escape(shown)}</text>'
                )
            if each.key in children and w > 8 and h > _HEAD + 4:
                inside = (x + _GAP, y + _HEAD, w - 1 - 2 * _GAP, h - 1 - _HEAD - _GAP)
                yield from boxes(each.key, inside)

    yield from boxes("", (2.0, 2.0, width - 4.0, height - 4.0))


def squarified(sizes: Sequence[float], area: Box) -> list[Box]:
    """Divide a rectangle in proportion to numbers, in boxes that are as square as rows allow.

    Args:
        sizes: Not negative; boxes come in their order.
        area: Rectangle that is divided.

    Source: Bruls, Huizing, van Wijk 2000 (squarified treemaps), without sorting.

    Example:
        >>> squarified([1, 1], (0, 0, 4, 2))
        [(0.0, 0.0, 2.0, 2.0), (2.0, 0.0, 2.0, 2.0)]
    """
    found: list[Box] = []
    x, y, width, height = map(float, area)
    left, rest = list(sizes), float(sum(sizes))
    while left:
        if rest <= 0 or width <= 0 or height <= 0:
            return found + [(x, y, 0.0, 0.0)] * len(left)
        short, scale = min(width, height), width * height / rest
        row: list[float] = []
        while left and (
            not row or _worst([*row, left[0]], short, scale) <= _worst(row, short, scale)
        ):
            row.append(left.pop(0))
        depth, along = sum(row) * scale / short, 0.0
        for size in row:
            length = size * scale / depth if depth else 0.0
            if width >= height:
                found.append((x, y + along, depth, length))
            else:
                found.append((x + along, y, length, depth))
            along += length
        rest -= sum(row)
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
    return found


def _worst(row: Sequence[float], short: float, scale: float) -> float:
    """Return the largest ratio of the sides of the boxes of a row."""
    depth = sum(row) * scale / short
    lengths = [size * scale / depth for size in row if size > 0 and depth > 0]
    return max((max(depth / n, n / depth) for n in lengths), default=0.0)
