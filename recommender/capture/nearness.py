"""How near a plan is to what nothing can be below."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Of sums of the same numbers in another order.
ROUNDING = 1e-9
#: What counts of the bytes and seconds of a plan, or of the least ones of several.
Corner = tuple[float, float]


def far(corner: Corner, values: Iterable[Corner]) -> float:
    """Return the part by which the nearest plan is larger or slower than a corner, or infinity."""
    return min((max(map(above, value, corner)) for value in values), default=math.inf)


def above(value: float, least: float) -> float:
    """Return the part of ``least`` by which a value is above it; 0 within ``ROUNDING``, and
    infinite above nothing."""
    if value <= least * (1 + ROUNDING):
        return 0.0
    return value / least - 1 if least > 0 else math.inf
