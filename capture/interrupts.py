"""Ctrl-C that is not lost, and what a scheduler sends when it needs the machine (SIGTERM), which is
the same.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. Inside a callback of the
garbage collector, as JAX has one, it is printed and ignored. So the signal is noted as well, and
loops that end with what they have look for the note.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_noted = threading.Event()


@contextmanager
def noted() -> Iterator[None]:
    """Note interrupts while the block runs, besides raising them; nothing changes outside the main
    thread, or for a signal that the process handles or ignores in another way, as shells have jobs
    in the background ignore Ctrl-C."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {
        number: handler
        for number, handler in own.items()
        if is_main and signal.getsignal(number) is handler
    }
    for number in before:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:  # else the note is of a block around this one
            _noted.clear()


def _note(number: int, frame: FrameType | None) -> None:
    _noted.set()
    raise KeyboardInterrupt


def raise_noted() -> None:
    """Raise an interrupt that was noted and has not ended anything yet.

    Raises:
        KeyboardInterrupt: once per note.
    """
    if _noted.is_set():
        _noted.clear()
        raise KeyboardInterrupt


def forget() -> None:
    """Forget the interrupt that was noted: it was raised, and has ended what it was to end."""
    _noted.clear()
