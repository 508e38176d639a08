"""Lives of processes that a driver starts in tests: what a host does, without JAX."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from plan_examples import two_stages

from capture.errors import Violation
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.runtime.hosts.process import Alive, Done, Failed, HostJob, Said, serve
from capture.runtime.run_report import RunReport

PLAN = two_stages(cluster=Cluster((2, 2)))
JOB, SECOND = (
    HostJob(PLAN, WorkloadSpec.parse("a.py:b"), {}, "127.0.0.1:1", 2, host, ()) for host in (0, 1)
)
#: What one host says of its training, in short.
ALONE = RunReport(
    kind="stages",
    target="cpu",
    platform="cpu",
    is_target=True,
    num_devices=2,
    predicted_peak_bytes_per_device=[1000, 1000],
    replayed_peak_bytes_per_device=[1000, 1000],
    measured_peak_bytes_per_device=[1, 2],
    meter="live arrays",
    ledger_checks=3,
    losses=[],
    step_seconds=[],
).document()


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


def mortal(job: HostJob, connection: Connection, parent: int) -> None:
    """A real one. Host 0 is killed when it has written its part of the checkpoint of step 8, and
    then host 1 when it reads, each once."""
    crc32, folder = zlib.crc32, Path(job.training["save"])

    def fatal(*arguments: Any) -> int:
        names = {frame.name for frame in traceback.extract_stack(limit=6)}
        saved, restored = folder.with_name("killed in a save"), folder.with_name("and in a restore")
        if job.host == 0 and "files_of" in names and (folder / "8").exists():
            due = saved
        elif job.host == 1 and "damage" in names and saved.exists():
            due = restored
        else:
            return crc32(*arguments)
        if not due.exists():
            due.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return crc32(*arguments)

    zlib.crc32 = fatal  # type: ignore[assignment]
    serve(job, connection, parent)


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
