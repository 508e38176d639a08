"""One readable unit for all numbers of an axis."""

from __future__ import annotations

from dataclasses import dataclass

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3))


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
