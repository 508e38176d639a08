"""Workers that are processes of this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from capture import environment
from capture.errors import CaptureError, ProfileError, users_traceback, violations_of
from capture.measured.claims import name_of_process
from profiling_runs.jobs import Job, Outcome, Setting
from profiling_runs.pools.pool import WORKER_BYTES, Ended, Pool, PoolWorker, Ready
from profiling_runs.pools.worker import Worker

#: Of a process that was killed, or whose end of the pipe is closed.
_SECONDS_TO_END = 60.0


class LocalPool(Pool):
    """A pool of processes of this machine, as many as asked for and its free memory has room for.

    Args:
        setting: What all jobs share.
        num_workers: At most.
        timeout_seconds: Most that a job may take on an idle machine.
    """

    def __init__(self, setting: Setting, num_workers: int, timeout_seconds: float):
        super().__init__(fresh_process=setting.fresh_process, timeout_seconds=timeout_seconds)
        self._setting, self._num_workers = setting, affordable_workers(num_workers)
        if self._num_workers < num_workers:
            warnings.warn(
                f"{num_workers} workers were asked for; the free memory has room for "
                f"{self._num_workers}",
                stacklevel=2,
            )

    def room(self) -> int:
        return self._num_workers

    def launch(self) -> PoolWorker:
        return _Process(self._setting)

    def news(self, workers: Sequence[_Process], timeout_seconds: float) -> Sequence[_Process]:
        # Also those whose other end is closed.
        ready = wait([worker.connection for worker in workers], timeout_seconds)
        return [worker for worker in workers if worker.connection in ready]


class _Process(PoolWorker):
    def __init__(self, setting: Setting):
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # For all that the worker writes, which may be killed at any time.
        self._folder = tempfile.TemporaryDirectory(
            prefix="capture-worker-", ignore_cleanup_errors=True
        )
        self._process = context.Process(
            target=_serve, args=(setting, theirs, os.getpid(), self._folder.name), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def send(self, job: Job) -> None:
        with suppress(OSError):  # it has just ended, which ``receive`` will say
            self.connection.send(job)

    def receive(self) -> Ready | Outcome | Ended:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(environment.patience(_SECONDS_TO_END))
            return Ended("lost", how_it_ended(self._process.exitcode))
        if isinstance(message, CaptureError):
            raise message
        return message

    def kill(self) -> None:
        self._process.kill()
        self._process.join(environment.patience(_SECONDS_TO_END))
        self.connection.close()
        self._folder.cleanup()


def how_it_ended(code: int | None) -> str:
    """Return how a worker process ended that reported nothing, in words, from its exit code.

    Example:
        >>> how_it_ended(-9)
        'its process ended by signal 9 (out of memory?)'
    """
    if code == 1:
        # What Python itself ends with: above all when the script that is imported starts workers.
        return (
            "its process ended with exit code 1 (in a script of your own, call this below "
            "if __name__ == '__main__':, since every worker imports the script)"
        )
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return f"its process ended {how} (out of memory?)"


def _serve(setting: Setting, connection: Connection, parent: int, folder: str) -> None:
    """Serve as a worker process: measure what arrives, with all temporary files in a folder."""
    faulthandler.enable()
    tempfile.tempdir = folder
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    try:
        worker = Worker(setting)
    except CaptureError as error:
        connection.send(error)
        return
    except Exception as error:  # of the user's model, which is imported here
        said = violations_of(error)[0].message
        connection.send(
            ProfileError.of(
                f"a worker could not be made: {said}\n{users_traceback(error).rstrip()}",
                "profile-worker",
            )
        )
        return
    connection.send(Ready(name_of_process()))
    worker.look_ahead(connection.poll)
    try:
        while True:
            connection.send(worker.measure(connection.recv()))
    except (EOFError, OSError):  # nobody is there any more
        return


def _end_with(parent: int, folder: str) -> None:
    """End this process when its parent was killed, and remove the folder in the parent's place."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def affordable_workers(num_workers: int, free_bytes: int | None = None) -> int:
    """Return how many workers, 1 or more, this machine's free memory has room for.

    Args:
        num_workers: Wanted.
        free_bytes: Free memory of the machine; read from it if None, and not limited where it does
            not say.

    Example:
        >>> affordable_workers(8, free_bytes=5_000_000_000)
        4
    """
    if free_bytes is None:
        found = re.search(r"^MemAvailable: +(\d+) kB", _text_of(Path("/proc/meminfo")), re.M)
        if found is None:
            return num_workers
        free_bytes = int(found[1]) * 1024
    return max(1, min(num_workers, free_bytes // WORKER_BYTES))


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
