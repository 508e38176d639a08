"""What the whole process holds on its host, by counters that know neither ledger nor compiler:
bytes that malloc has given out, and the resident set."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path


class HeapMeter:
    """High-water mark of what malloc has given out in this process, from ``start`` to ``stop``;
    XLA's CPU devices allocate there.

    Read whenever it is called, and by a thread in between. So it may miss what lives shorter, and
    is never above what was allocated.
    """

    meter = (
        "malloc of the whole process (glibc mallinfo2), read before every instruction and by a "
        "thread every millisecond"
    )

    def __init__(self) -> None:
        self._read = _malloc_reader()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._most = 0
        self.before_bytes: int | None = None

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._read is None:
            return
        gc.collect()
        self.before_bytes = self._most = self._read()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read the counter once more, and end the thread that reads it."""
        self()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def __call__(self) -> None:
        if self._read is not None:
            self._most = max(self._most, self._read())

    def _watch(self) -> None:
        while not self._stopped.wait(1e-3):
            self()

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes seen; None where the C library has no such counter (macOS, musl)."""
        return None if self.before_bytes is None else self._most


def _malloc_reader() -> Callable[[], int] | None:
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo2.restype = _MallInfo2

    def read() -> int:
        info = mallinfo2()
        return int(info.uordblks + info.hblkhd)

    return read


class _MallInfo2(ctypes.Structure):
    """Ten counters of all arenas, among them ``hblkhd``, bytes in regions of their own, and
    ``uordblks``, bytes in use (glibc 2.33 and newer)."""

    _fields_ = [
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("behind", ctypes.c_size_t * 2),
    ]


class ResidentSetMeter:
    """Peak resident set of this process from ``start`` on; on CPU it holds the arrays of all
    virtual devices and everything else."""

    def __init__(self) -> None:
        self.before_bytes: int | None = None

    def start(self) -> None:
        """Forget earlier peaks."""
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current size
        except OSError:
            return
        self.before_bytes = _peak_resident_bytes()

    @property
    def peak_bytes(self) -> int | None:
        """The peak; None if the system has no such counter, or does not let it be reset."""
        return None if self.before_bytes is None else _peak_resident_bytes()


def _peak_resident_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
