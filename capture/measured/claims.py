"""Which process has taken a job of the store, and whether that process still exists."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

#: After which a claim of another machine, whose processes nobody here sees, counts as given up.
_LEASE_SECONDS = 24 * 3600.0


def name_of_process() -> str:
    """Return the host and the id of this process, such as ``node-3:4711``."""
    return f"{socket.gethostname()}:{os.getpid()}"


def is_gone(worker: str, since: str) -> bool:
    """Tell whether the process that took a job no longer exists.

    Args:
        worker: ``name_of_process`` of it.
        since: When it took the job, in UTC, such as ``2026-01-31T12:00:00Z``.
    """
    taken = datetime.fromisoformat(since)
    host, _, process = worker.rpartition(":")
    if host == socket.gethostname() and process.isdecimal():
        began = _began(int(process))
        return began is None or began > taken.timestamp() + 1.0  # another one, of the same number
    return (datetime.now(UTC) - taken).total_seconds() > _LEASE_SECONDS


def _began(process: int) -> float | None:
    """Return when a process of this machine was started, in seconds since 1970; 0 where the system
    does not say, and None if there is no such process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # of another user
        pass
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, StopIteration):
        return 0.0
    return boot + ticks / os.sysconf("SC_CLK_TCK")
