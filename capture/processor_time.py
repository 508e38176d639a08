"""Processor time: what work costs, however busy the machine is with other work."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path


def processor_seconds() -> float:
    """Return the seconds that all threads of this process and of its workers here have computed so
    far; without running workers where the system does not say theirs."""
    seconds = sum(os.times()[:4])  # with processes that have ended
    for worker in multiprocessing.active_children():
        with suppress(OSError):
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds
