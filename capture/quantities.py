"""Sizes, times and counts as people write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from typing import TypeVar

from capture.errors import PlanError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}

Number = TypeVar("Number")


def parse_bytes(text: str) -> int:
    """Read a number of bytes from ``"40GB"``, ``"39.5GiB"`` or a plain number.

    Raises:
        PlanError: ``memory-syntax``.

    Example:
        >>> parse_bytes("1.5KiB"), parse_bytes("40 GB"), parse_bytes("40g"), parse_bytes("12")
        (1536, 40000000000, 40000000000, 12)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if not match:
        near = re.match(
            r"\s*(\d+(?:[.,]\d+)?)\s*([kmgt])(i?)",
            re.sub(r",(?=\d{3}\b|\d{3}\D)", "", text),
            re.IGNORECASE,
        )
        meant = (
            f" Did you mean {near[1].replace(',', '.')}{near[2].upper()}{near[3].lower()}B?"
            if near
            else ""
        )
        raise PlanError.of(
            f"memory={text!r} is no size; write bytes, or a number with KB, MB, GB, TB, KiB, MiB, "
            f"GiB or TiB.{meant}",
            "memory-syntax",
        )
    return int(Decimal(match[1]) * _UNITS[(match[2] or "").lower()])


def bytes_of(size: str | Number) -> int | Number:
    """Return a number of bytes, also from a text such as ``"40GB"``; None stays None."""
    return parse_bytes(size) if isinstance(size, str) else size


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is spelled most alike, to end a sentence; empty if
    none is.

    Example:
        >>> nearest("gradens", ["seed", "gradient"]), nearest("x", ["seed"])
        (' Did you mean gradient?', '')
    """
    near = difflib.get_close_matches(name, tuple(known), 1)
    return f" Did you mean {near[0]}?" if near else ""


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with three significant digits and a decimal unit.

    Example:
        >>> format_bytes(13379844), format_bytes(999), format_bytes(999_999), format_bytes(-1500)
        ('13.4 MB', '999 B', '1 MB', '-1.5 kB')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        # 999.5 of the smaller unit would be written with four digits.
        if abs(nbytes) >= 0.9995 * scale:
            return (
                f"{nbytes / scale:.3g} {unit}"
                if abs(nbytes) < 999.5 * scale
                else f"{nbytes / scale:.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def format_flops(flops: float) -> str:
    """Write a number of floating-point operations with three significant digits.

    Example:
        >>> format_flops(1.26e15), format_flops(2_500_000), format_flops(12)
        ('1.26 PFLOP', '2.5 MFLOP', '12 FLOP')
    """
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(flops) >= 0.9995 * scale:
            return f"{flops / scale:.3g} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits, in s, ms or µs.

    Example:
        >>> format_seconds(1.2345), format_seconds(0.0456), format_seconds(7e-6)
        ('1.23 s', '45.6 ms', '7 µs')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((one for one in units if abs(seconds) >= one[1]), units[-1])
    number = seconds / scale
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:.0f} {unit}"


def format_rate(per_second: float) -> str:
    """Write a number per second with three significant digits, never as a power of ten.

    Example:
        >>> format_rate(4123.4), format_rate(12.345), format_rate(0.01234)
        ('4,120', '12.3', '0.0123')
    """
    if abs(per_second) < 999.5:
        return f"{per_second:.3g}" if abs(per_second) >= 1e-4 else f"{per_second:.2g}"
    digits = len(f"{abs(per_second):.0f}") - 3
    return f"{round(per_second, -digits):,.0f}"


def format_quantity(name: str, value: float) -> str:
    """Write a number in the unit that the name of its field ends in.

    Example:
        >>> format_quantity("swap_bytes_per_second", 2e10), format_quantity("num_devices", 4)
        ('20 GB/s', '4')
    """
    if name.endswith("_bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_seconds") else f"{value:g}"


def ids_text(ids: Sequence[int]) -> str:
    """Write ascending ids, runs of neighbours as ranges.

    Example:
        >>> ids_text([4]), ids_text(range(4, 8)), ids_text([0, 1, 2, 5])
        ('4', '4-7', '0-2,5')
    """
    runs = groupby(enumerate(ids), lambda pair: pair[1] - pair[0])
    ends = [[each for _, each in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Write a number of things; without ``many`` they are ``one`` with an s.

    Example:
        >>> counted(1, "stage"), counted(2000, "stage"), counted(0, "stage of it", "stages of it")
        ('1 stage', '2,000 stages', '0 stages of it')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
