"""What compiled libraries say (XLA, its plugins, absl), in a file: C++ writes to file descriptor 2,
where it would break what people read.

Only the ``capture`` command does this, for its process; its workers inherit the descriptor.
Python's ``sys.stderr`` stays where it was, and so does the trace of a process that is ended by a
fatal signal. A file is removed when its command ends without a failure, so that those that are
there are of commands that failed, crashed or still run.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import FunctionType

from capture import environment

#: Of those that failed, so many are left.
KEPT_LOGS = 20
#: Said by every process that loads JAX, whatever it does.
_NOTHING = re.compile(
    r"^(WARNING: All log messages before absl::InitializeLog|.*Could not find cuda drivers|\s*$)"
)


@contextmanager
def output_is_ours() -> Iterator[None]:
    """Send what compiled libraries write to standard output (Gloo names its ranks) to standard
    error while this context is open."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


class LibraryLog:
    """The log of what compiled libraries say in this process.

    Args:
        path: None, or where no file can be made: everything goes where it went.
    """

    def __init__(self, path: Path | None):
        self.path = path

    @classmethod
    def begin(cls) -> LibraryLog:
        """Send descriptor 2 to a new file, and ``sys.stderr`` to where descriptor 2 led."""
        folder = environment.log_folder()
        path = folder / f"{environment.now().replace(':', '')}-{os.getpid()}.log"
        try:
            sys.stderr.flush()
            folder.mkdir(parents=True, exist_ok=True)
            for old in sorted(folder.glob("*.log"))[: 1 - KEPT_LOGS]:  # by date
                with suppress(OSError):
                    old.unlink()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            terminal = os.dup(sys.stderr.fileno())
        except (OSError, AttributeError, io.UnsupportedOperation):
            return cls(None)
        sys.stderr = os.fdopen(
            terminal, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace"
        )
        faulthandler.enable(sys.stderr)
        # What it writes of a fatal signal are the files of all threads: this one waits, and so
        # names the log.
        names_it = FunctionType(
            _wait.__code__.replace(co_filename=str(path), co_name="what_libraries_said"), globals()
        )
        Thread(target=names_it, daemon=True).start()
        os.dup2(file, 2)
        os.close(file)
        return cls(path)

    def said(self) -> bool:
        """Tell whether the log holds more than what is always said."""
        if self.path is None or not self.path.exists():
            return False
        with self.path.open(errors="replace") as lines:
            return any(not _NOTHING.match(line) for line in lines)

    def end(self, failed: bool) -> None:
        """Name the file after a failure, if it may tell more; else remove it."""
        if self.path is None:
            return
        if failed and self.said():
            print(f"what libraries and workers said is in {self.path}", file=sys.stderr)
        else:
            with suppress(OSError):
                self.path.unlink()


def _wait() -> None:
    Event().wait()
