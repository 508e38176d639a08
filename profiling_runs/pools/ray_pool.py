"""Workers that are actors of a Ray cluster.

Nodes may come and go: workers of a node that is lost are started elsewhere and its jobs done again,
and a node that joins gets workers within seconds. The working directory travels, so the workload
and a target file must be in it, or the workload a package that is installed everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capture.errors import CaptureError, ProfileError, WorkloadError
from capture.machine.demand import Demand
from capture.machine.ray_cluster import (
    Actor,
    CallError,
    ProcessLostError,
    RayCluster,
    check_travels,
    node_of_this_process,
)
from capture.measured.claims import name_of_process
from profiling_runs.jobs import Job, Outcome, Setting
from profiling_runs.pools.pool import WORKER_BYTES, Ended, Pool, PoolWorker, Ready
from profiling_runs.pools.worker import Worker

_SECONDS_BETWEEN_LOOKS = 2.0


def demand_of(setting: Setting, accelerator_type: str | None) -> Demand:
    """Return the resources that each worker of a setting asks Ray for: processors and memory, and
    for runs on accelerators so many devices of one kind.

    Raises:
        ProfileError: ``ray-accelerator``.
    """
    demand = Demand(WORKER_BYTES)
    if not setting.executes:
        return demand
    return demand.on(setting.target, setting.num_devices, accelerator_type, ProfileError)


class RayPool(Pool):
    """A pool of actors on a Ray cluster, as many as its nodes have room for.

    Args:
        setting: What all jobs share.
        address: As for ``RayCluster``.
        num_workers: At most.
        timeout_seconds: Most that a job may take on an idle machine.
        accelerator_type: Ray's name of the target's devices; None for the usual one.

    Raises:
        ProfileError: The codes of ``RayCluster``; ``ray-resources`` if no node has what a worker
            needs, ``ray-workload`` if the workload's file would not travel; ``worker-versions``.
    """

    def __init__(
        self,
        setting: Setting,
        address: str,
        num_workers: int,
        timeout_seconds: float,
        accelerator_type: str | None,
    ):
        super().__init__(fresh_process=setting.fresh_process, timeout_seconds=timeout_seconds)
        self._demand, self._setting = demand_of(setting, accelerator_type), travelling(setting)
        self._num_workers, self._room, self._looked = num_workers, 0, float("-inf")
        self._cluster = RayCluster(address, ProfileError)
        with _closed_if_refused(self):
            self._demand = self._cluster.check(self._demand)

    def room(self) -> int:
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            if self._cluster.hears_head():  # asking for nodes would wait for it
                nodes = self._cluster.nodes()
                self._room = sum(self._demand.room(node["Resources"]) for node in nodes)
            self._looked = time.monotonic()
        return min(self._num_workers, self._room)

    def launch(self) -> PoolWorker:
        return _Actor(self._cluster, self._setting, self._demand)

    def news(self, workers: Sequence[_Actor], timeout_seconds: float) -> Sequence[_Actor]:
        busy = {worker.reference: worker for worker in workers if worker.reference is not None}
        if not busy:  # every node is gone; one may come
            time.sleep(timeout_seconds)
            return []
        return [busy[done] for done in self._cluster.ready(list(busy), timeout_seconds)]

    def close(self) -> None:
        super().close()
        self._cluster.close()


class _Actor(PoolWorker):
    def __init__(self, cluster: RayCluster, setting: Setting, demand: Demand):
        super().__init__()
        self._cluster, self._nodes = cluster, cluster.alive()  # where it may be, until it says
        self._actor = Actor(RemoteWorker, demand.options())
        self.reference: Any = self._actor.call("begin", setting)

    def send(self, job: Job) -> None:
        self.reference = self._actor.call("measure", job)

    def receive(self) -> Ready | Outcome | Ended:
        reference, self.reference = self.reference, None
        try:
            message = self._cluster.result(reference)
        except WorkloadError as error:
            # The workload was imported here. A node that is lost may take the files that travelled
            # from others of its machine: try again.
            return _not_made(error)
        except CallError as error:
            return _not_made(error)
        except ProcessLostError as error:
            lost = error.node or bool(self._nodes - self._cluster.alive())
            return Ended(
                "node lost" if lost else "lost",
                f"its {'node' if lost else 'process'} was lost: {error}",
            )
        if isinstance(message, RemoteReady):
            self._nodes = {message.node}
            return Ready(message.name)
        return message

    def kill(self) -> None:
        self._actor.kill()


def _not_made(error: Exception) -> Ended:
    said = (str(error).strip().splitlines() or ["no message"])[-1]
    return Ended("lost", f"it could not be made: {said}")


@dataclass(frozen=True)
class RemoteReady:
    """The message that a worker can take its first job, on this node."""

    name: str
    node: str


class RemoteWorker:
    """The object that measures jobs in a Ray actor's process."""

    def begin(self, setting: Setting) -> RemoteReady:
        self._worker = Worker(setting)
        return RemoteReady(name_of_process(), node_of_this_process())

    def measure(self, job: Job) -> Outcome:
        return self._worker.measure(job)


def travelling(setting: Setting) -> Setting:
    """Return a setting as other machines see it: paths within the working directory, which travels.

    Raises:
        ProfileError: ``ray-workload`` for the file of a workload or a target outside of it.
    """
    here = Path.cwd()
    workload, target = setting.workload.relative_to(here), setting.target
    if target.endswith(".json"):
        target = (
            str(Path(target).resolve().relative_to(here))
            if Path(target).resolve().is_relative_to(here)
            else f"../{target}"
        )
    check_travels([workload.location if workload.is_file else "", target], ProfileError)
    return replace(setting, workload=workload, target=target)


@contextmanager
def _closed_if_refused(pool: RayPool) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        pool.close()
        raise
