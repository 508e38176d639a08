"""Run a plan over processes of this machine, one per node of its cluster: starts them, hears what
they say, and ends them all, whatever happens. Loads no JAX.

A process that dies, an exception in one and a process that freezes are one error, that of the host
in which it began; what others then say follows from it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from capture import environment
from capture.errors import ExecutionError, PlanError, Violation, plain
from capture.model.workload import WorkloadSpec
from capture.plan.stages import Plan
from capture.runtime.hosts.documents import joined
from capture.runtime.hosts.process import Alive, Done, Failed, HostJob, Said, serve

#: Most that a process of an idle machine may give no sign of life.
SILENT_SECONDS = 10.0
#: What else is heard after the first failure, to find the one that led to it.
_GRACE_SECONDS = 0.5
_SECONDS_TO_END = 10.0


def run_on_this_machine(
    plan: Plan,
    workload: WorkloadSpec,
    training: dict[str, Any],
    report: Callable[[str], None] = lambda text: None,
    silent_seconds: float = SILENT_SECONDS,
) -> dict[str, Any]:
    """The document of ``capture run --json``, of all processes together.

    Args:
        plan: Of stages that are within nodes, or on whole ones.
        workload: By name: every process loads it.
        training: Fields of ``capture.runtime.training.Training``.
        report: Takes the lines of progress of host 0.
        silent_seconds: After which a process counts as frozen.

    Raises:
        PlanError: ``run-hosts-span``.
        ExecutionError: ``run-host-lost`` if a process ends or freezes; what broke in one, with the
            codes that it has, in front of it the host.
    """
    check_nodes(plan)
    nodes = len(plan.cluster.nodes)
    coordinator, flags = f"127.0.0.1:{_free_port()}", environment.active_flags()
    jobs = [
        HostJob(plan, workload, training, coordinator, nodes, host, flags) for host in range(nodes)
    ]
    return joined(run_processes(jobs, serve, report, silent_seconds))


def run_processes(
    jobs: Sequence[HostJob],
    life: Callable[[HostJob, Connection, int], None],
    report: Callable[[str], None] = lambda text: None,
    silent_seconds: float = SILENT_SECONDS,
) -> list[dict[str, Any]]:
    """What each process has done, by host. None is left.

    Args:
        jobs: One per host.
        life: Of a process, given its job, the connection to this one and this one's id.
        report, silent_seconds: As for ``run_on_this_machine``.

    Raises:
        ExecutionError: As there.
    """
    processes: list[_Host] = []
    try:
        for job in jobs:
            processes.append(_Host(job, life))
        return _hear(processes, report, silent_seconds)
    finally:
        for process in processes:
            process.end()


def check_nodes(plan: Plan) -> None:
    """Refuse stages on parts of several nodes.

    Raises:
        PlanError: ``run-hosts-span``.
    """
    node_of, sizes = plan.cluster.node_of_device, plan.cluster.nodes
    nodes_of = [{node_of[device] for device in stage.devices} for stage in plan.stages]
    PlanError.check(
        Violation(
            f"stage {number} has {stage.num_devices} devices of nodes "
            f"{', '.join(map(str, sorted(nodes)))}, which have {sum(sizes[n] for n in nodes)}; "
            "over several hosts a stage runs within a node or on whole nodes: plan with "
            "--whole-nodes.",
            "run-hosts-span",
        )
        for number, (stage, nodes) in enumerate(zip(plan.stages, nodes_of, strict=True))
        if len(nodes) > 1 and stage.num_devices < sum(sizes[n] for n in nodes)
    )


class _Host:
    """A process that is started here."""

    def __init__(self, job: HostJob, life: Callable[[HostJob, Connection, int], None]):
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.number, self.heard = job.host, time.monotonic()
        self.process: SpawnProcess = context.Process(
            target=life, args=(job, theirs, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def hear(self) -> Alive | Said | Done | Failed:
        self.heard = time.monotonic()
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(environment.patience(_SECONDS_TO_END))
            code = self.process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
            return _lost(f"its process ended {how} (killed, or out of memory?)")

    def end(self) -> None:
        self.process.kill()
        self.process.join(environment.patience(_SECONDS_TO_END))
        self.connection.close()


@dataclass(frozen=True)
class _Failure:
    host: int
    said: Failed

    @property
    def is_lost(self) -> bool:
        return any(violation.code == "run-host-lost" for violation in self.said.violations)


def _hear(
    hosts: list[_Host], report: Callable[[str], None], silent_seconds: float
) -> list[dict[str, Any]]:
    """Until all are done.

    Raises:
        ExecutionError: what broke first.
    """
    documents: dict[int, dict[str, Any]] = {}
    failures: list[_Failure] = []
    until = float("inf")
    while len(documents) < len(hosts) and time.monotonic() < until:
        failed = {failure.host for failure in failures}
        listened = [host for host in hosts if host.number not in failed]
        ready = wait([host.connection for host in listened], 0.1)
        for host in listened:
            if host.connection in ready:
                match host.hear():
                    case Said(text) if host.number == 0:
                        report(text)
                    case Done(document):
                        documents[host.number] = document
                    case Failed() as said:
                        failures.append(_Failure(host.number, said))
                    case _:
                        pass
            elif time.monotonic() - host.heard > environment.patience(silent_seconds):
                quiet = time.monotonic() - host.heard
                said = _lost(f"its process gives no sign of life for {quiet:.0f} s (frozen?)")
                failures.append(_Failure(host.number, said))
        if failures and until == float("inf"):
            until = time.monotonic() + _GRACE_SECONDS
        if len(failures) == len(hosts):
            break
    if failures:
        raise _error_of(failures)
    return [documents[number] for number in sorted(documents)]


def _lost(sentence: str) -> Failed:
    return Failed((Violation(sentence, "run-host-lost"),))


def _error_of(failures: list[_Failure]) -> ExecutionError:
    """That of the host where it began: what others say of a process that is gone follows."""
    first = min(failures, key=lambda failure: not failure.is_lost)
    others = [failure for failure in failures if failure.host != first.host]
    same = {failure.host for failure in others if failure.said.violations == first.said.violations}
    name = "every host" if len(same) + 1 == len(failures) > 1 else f"host {first.host}"
    traceback = f"\n{first.said.traceback.rstrip()}" if first.said.traceback else ""
    return ExecutionError(
        Violation(f"{name}: {plain(violation.message)}{traceback}", violation.code)
        for violation in first.said.violations
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
