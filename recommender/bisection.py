"""The largest number for which a condition holds, found with few questions."""

from __future__ import annotations

from collections.abc import Callable


def last_that_holds(holds: Callable[[int], bool], start: int, most: float) -> int:
    """Return the last of the numbers 1 to ``most`` that a condition holds of; 0 if it holds of
    none. Behind the first number that it fails for, it must fail for all.

    Args:
        holds: Asked about ``start`` first, then ever farther from it until the end is passed, then
            in between.
        start: From 1 to ``most``.
        most: Where to end; infinite if it fails of some.
    """
    low, high, here, stride = 0, most + 1, start, 1
    found = failed = False
    while high - low > 1:
        if holds(here):
            low, found = here, True
        else:
            high, failed = here, True
        if found and failed:
            here = int(low + high) // 2
        else:
            here = int(min(low + stride, most)) if found else int(max(high - stride, 1))
        stride *= 2
    return low
