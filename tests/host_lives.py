"""Lives of processes that a driver starts in tests: what a host does, without JAX."""

from __future__ import annotations

import os
import resource
import signal
import time
from multiprocessing.connection import Connection

from plan_examples import two_stages

from capture.errors import Violation
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.runtime.hosts.process import Alive, Done, Failed, HostJob, Said

PLAN = two_stages(cluster=Cluster((2, 2)))
JOB, SECOND = (
    HostJob(PLAN, WorkloadSpec.parse("a.py:b"), {}, "127.0.0.1:1", 2, host, ()) for host in (0, 1)
)
#: What one host says of its training, in short.
ALONE = {
    "measured_peak_bytes_per_device": [1, 2],
    "ledger_checks": 3,
    "step_seconds": [],
    "loss": [],
    **dict.fromkeys(
        (
            "allocator",
            "resident_set_peak_bytes",
            "resident_set_before_bytes",
            "dispatch_seconds",
        )
    ),
}


def done(job: HostJob, connection: Connection, parent: int) -> None:
    connection.send(Said(f"host {job.host} trains"))
    connection.send(Done({"host": job.host}))
    time.sleep(600)


def killed(job: HostJob, connection: Connection, parent: int) -> None:
    """Host 1, upon which the other one sees its connection break."""
    if job.host == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    connection.send(Failed((Violation("a connection is closed.", "exception"),)))
    breathe(connection)


def breathe(connection: Connection) -> None:
    while True:
        connection.send(Alive(time.monotonic()))
        time.sleep(0.1)


def crashed(job: HostJob, connection: Connection, parent: int) -> None:
    """Host 1, by itself; the other one lives on."""
    if job.host == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    breathe(connection)


def crashed_with_host_0(job: HostJob, connection: Connection, parent: int) -> None:
    """The end of host 0 is heard after that of the other one, which follows from it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job.host == 1:
        os.abort()
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def late(job: HostJob, connection: Connection, parent: int) -> None:
    """Done after a while, of which host 1 may be stopped for a part."""
    connection.send(Alive(time.monotonic()))
    connection.send(Said("host 0 trains"))
    time.sleep(0.5)
    connection.send(Done({"host": job.host}))
    time.sleep(600)


def raising(job: HostJob, connection: Connection, parent: int) -> None:
    if job.host == 1:
        lines = "Traceback: users_model.py, line 3"
        connection.send(Failed((Violation("ValueError: no data", "exception"),), lines))
    breathe(connection)


def frozen(job: HostJob, connection: Connection, parent: int) -> None:
    """Host 1, of which the other one says before that its connection is closed."""
    connection.send(Alive(time.monotonic()))
    if job.host == 0:
        connection.send(Failed((Violation("a connection is closed.", "run-hosts-cut"),)))
        breathe(connection)
    time.sleep(600)
