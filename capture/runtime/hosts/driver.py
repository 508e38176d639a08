"""Run a plan over processes of this machine, one per node of its cluster: starts them, hears what
they say, and ends them all, whatever happens. Loads no JAX."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from capture import environment
from capture.model.workload import WorkloadSpec
from capture.plan.files import PlanFile
from capture.runtime.hosts.addresses import check_nodes, free_port
from capture.runtime.hosts.process import Failed, HostJob, Message, all_of, serve
from capture.runtime.hosts.restarts import NONE, Restarts, train_over_hosts
from capture.runtime.hosts.watching import SILENT_SECONDS, lost

_SECONDS_TO_END = 10.0
#: Signals of a process's own doing: nobody else sends them.
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


def run_on_this_machine(
    plan: PlanFile,
    workload: WorkloadSpec,
    training: Mapping[str, object],
    report: Callable[[str], None] = lambda text: None,
    restarts: Restarts = NONE,
    silent_seconds: float = SILENT_SECONDS,
) -> dict[str, Any]:
    """Train a plan in one process of this machine per node, and return the document of ``capture
    run --json`` of all processes together.

    Args:
        plan: Of stages that are within nodes, or on whole ones.
        workload: By name: every process loads it.
        training: Fields of ``capture.runtime.training.Training``.
        silent_seconds: After which a process counts as frozen.

    Raises:
        PlanError: ``run-hosts-span``.
        ExecutionError: ``run-host-lost`` if a process ends or freezes; what broke in one, with the
            codes that it has, in front of it the host.
    """
    check_nodes(plan)
    starter = LocalStarter(workload.admitted())
    return train_over_hosts(starter, plan, training, restarts, report, silent_seconds)


@dataclass(frozen=True)
class LocalStarter:
    """A ``Starter`` on this machine, which stands for all nodes of a plan: none is ever missing."""

    workload: WorkloadSpec

    def start(self, plan: PlanFile, training: Mapping[str, object]) -> LocalProcesses:
        nodes, flags = len(plan.known_cluster.nodes), environment.active_flags()
        coordinator = f"127.0.0.1:{free_port()}"
        return LocalProcesses(
            [
                HostJob(plan, self.workload, dict(training), coordinator, nodes, host, flags)
                for host in range(nodes)
            ]
        )

    def missing(self, plan: PlanFile) -> frozenset[int]:
        return frozenset()


class LocalProcesses:
    """The processes of one attempt at a training, all on this machine.

    Args:
        life: Of a process, given its job, the connection to this one and this one's id.
    """

    def __init__(
        self, jobs: Sequence[HostJob], life: Callable[[HostJob, Connection, int], None] = serve
    ):
        self._said: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._hosts: list[_Host] = []
        try:
            for job in jobs:
                self._hosts.append(_Host(job, life, self._said))
        except BaseException:
            self.end()
            raise

    def hear(self, seconds: float) -> list[tuple[int, Message]]:
        return all_of(self._said, seconds)

    def end(self) -> None:
        for host in self._hosts:
            host.end()
        self._hosts.clear()


def ended(code: int | None) -> Failed:
    """Return the failure of a process that is gone, given its exit code: less than 0 is a signal,
    None is unknown."""
    if code is None or code >= 0:
        return lost(f"its process ended with code {code}", crashed=True)
    if -code in _CRASHES:
        return lost(f"its process crashed by signal {-code}; it may have said why", crashed=True)
    return lost(f"its process ended by signal {-code} (killed, or out of memory?)")


class _Host:
    """A process that is started here, and a thread that hears it: one that is stopped in the middle
    of a message keeps nobody else waiting."""

    def __init__(
        self,
        job: HostJob,
        life: Callable[[HostJob, Connection, int], None],
        said: queue.SimpleQueue[tuple[int, Message]],
    ):
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._number, self._said, self._reaping = job.host, said, threading.Lock()
        self._process: SpawnProcess = context.Process(
            target=life, args=(job, theirs, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except Exception:  # it has ended, perhaps within a message
                self._said.put((self._number, ended(self._reaped())))
                return
            self._said.put((self._number, message))

    def end(self) -> None:
        with self._reaping:
            self._process.kill()
        self._reaped()
        self._ear.join(environment.patience(_SECONDS_TO_END))
        self._connection.close()

    def _reaped(self) -> int | None:
        """Return the exit code, or None if the process does not end in time. One thread at a time
        asks the system, which tells it once."""
        end = time.monotonic() + environment.patience(_SECONDS_TO_END)
        while True:
            with self._reaping:
                code = self._process.exitcode
            if code is not None or time.monotonic() > end:
                return code
            time.sleep(0.01)
