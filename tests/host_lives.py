"""Lives of processes that a driver starts in tests: what a host does, without JAX."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from capture.errors import Violation
from capture.runtime.hosts.process import Alive, Done, Failed, HostJob, Said


def done(job: HostJob, connection: Connection, parent: int) -> None:
    connection.send(Said(f"host {job.host} trains"))
    connection.send(Done({"host": job.host}))
    time.sleep(600)


def killed(job: HostJob, connection: Connection, parent: int) -> None:
    """Host 1, upon which the other one sees its connection break."""
    connection.send(Alive())
    if job.host == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    connection.send(Failed((Violation("a connection is closed.", "exception"),)))
    time.sleep(600)


def raising(job: HostJob, connection: Connection, parent: int) -> None:
    if job.host == 1:
        lines = "Traceback: users_model.py, line 3"
        connection.send(Failed((Violation("ValueError: no data", "exception"),), lines))
    time.sleep(600)


def frozen(job: HostJob, connection: Connection, parent: int) -> None:
    connection.send(Alive())
    while job.host == 0:
        connection.send(Alive())
        time.sleep(0.1)
    time.sleep(600)
