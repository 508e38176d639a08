"""XLA's memory report, read from its dump: complete seconds before a TPU program is, and all that a
planner asks for.

With ``xla_dump_to`` and ``xla_dump_hlo_as_text`` the compiler writes, when buffers are assigned and
before machine code is made,

    *-memory-usage-report.txt     per memory space its ``Total bytes``; space 0 is the device's
                                  main memory
    *-buffer-assignment.txt       every allocation: parameter, maybe-live-out (a result),
                                  preallocated-temp, ...
    *after_optimizations.txt      the optimised program

The format is no stable interface; ``tests/golden`` has a dump of every supported version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from capture.compiler.text import ALLOCATION

_TOTAL = re.compile(
    r"^Memory Space: default \(color=0\)\s*\nTotal bytes: (\d+)|^Total bytes: (\d+)", re.M
)


@dataclass(frozen=True)
class MemoryReport:
    """The bytes of a program per device in main memory.

    Attributes:
        total_bytes: Arguments, results, temporaries and constants; a donated argument that holds a
            result counts once.
        argument_bytes: Bytes of arguments as allocated: on TPU padded to whole tiles.
        output_bytes: Results that have no donated argument to live in, likewise.
    """

    total_bytes: int
    argument_bytes: int
    output_bytes: int

    @property
    def transient_bytes(self) -> int:
        """The bytes that the program needs beside its arguments while it runs."""
        return self.total_bytes - self.argument_bytes


def read_report(folder: Path) -> MemoryReport | None:
    """Read the memory report of the one program that is dumped in a folder; None as long as it is
    not complete.

    Args:
        folder: Given to the compiler as ``xla_dump_to``.
    """
    names = ("memory-usage-report", "buffer-assignment", "live-range")
    report, assignment, live = (_one(folder.glob(f"*-{name}.txt")) for name in names)
    program = read_program(folder)
    if report is None or assignment is None or live is None or program is None:
        return None
    # Of these files the live ranges or the program are written last; they end with this tree and
    # with this brace.
    if "Stack trace breakdown" not in live or not program.rstrip().endswith("}"):
        return None
    return parse_report(report, assignment)


def parse_report(report: str, assignment: str) -> MemoryReport | None:
    """Return the memory report from the texts of both files; None if they hold no total."""
    total = _TOTAL.search(report)
    if total is None:
        return None
    arguments = outputs = 0
    for size, color, kind in ALLOCATION.findall(assignment):
        if color not in ("", "0"):  # vector memory, scalar memory, host, ...
            continue
        if kind.startswith("parameter"):
            arguments += int(size)
        elif "maybe-live-out" in kind:
            outputs += int(size)
    return MemoryReport(int(total[1] or total[2]), arguments, outputs)


def read_program(folder: Path) -> str | None:
    """Read the optimised program of the dump as text; None if it is not there."""
    return _one(folder.glob("*after_optimizations.txt"))


def _one(paths: Iterable[Path]) -> str | None:
    for path in paths:
        return path.read_text(errors="replace")
    return None
