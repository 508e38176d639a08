"""Run a plan over actors of a Ray cluster, one per node of the plan: Ray places them and says when
they are gone. Loads no JAX."""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import capture
from capture import environment
from capture.errors import ExecutionError, Violation
from capture.machine.demand import Demand
from capture.machine.ray_cluster import (
    Actor,
    CallError,
    ClusterRoom,
    ProcessLostError,
    RayCluster,
    address_of_this_process,
    check_travels,
    kill_process,
    node_of_this_process,
)
from capture.model.workload import WorkloadSpec
from capture.plan.files import PlanFile
from capture.runtime.hosts.addresses import check_nodes, free_port
from capture.runtime.hosts.process import Alive, Failed, HostJob, Message, Voice, all_of, live
from capture.runtime.hosts.restarts import NONE, Restarts, train_over_hosts
from capture.runtime.hosts.watching import SILENT_SECONDS, lost

#: Most that is waited until the cluster has room for all processes.
PLACE_SECONDS = 60.0
#: Of a host, beside its arrays, which are where the devices are.
_PROCESS_BYTES = 1_000_000_000
#: After which a process that nobody hears ends by itself.
_UNHEARD_SECONDS = 60.0
#: Of a call that waits for news.
_TURN_SECONDS = 1.0
#: A process that has not answered for so long is stopped, and Ray's own end does not reach it.
_STOPPED_SECONDS = 3.0
_SECONDS_TO_GREET = 60.0


def run_on_ray(
    plan: PlanFile,
    workload: WorkloadSpec,
    training: Mapping[str, Any],
    address: str,
    accelerator_type: str | None = None,
    report: Callable[[str], None] = lambda text: None,
    restarts: Restarts = NONE,
    silent_seconds: float = SILENT_SECONDS,
) -> dict[str, Any]:
    """Train a plan in one Ray actor per node, and return the document of ``capture run --json`` of
    all processes together.

    Args:
        plan, workload, training, report, restarts, silent_seconds: As for ``train_over_hosts``.
        address: Of the cluster, as for ``RayCluster``.
        accelerator_type: Ray's name of the target's devices; None for the usual one.

    Raises:
        PlanError: ``run-hosts-span``.
        ExecutionError: The codes of ``RayCluster``, ``RayStarter`` and ``train_over_hosts``.
    """
    check_nodes(plan)
    workload = workload.admitted()
    save = training.get("save")
    left_out = [] if save is None else [os.path.relpath(save)]
    cluster = RayCluster(address, ExecutionError, len(plan.known_cluster.nodes), left_out)
    try:
        starter = RayStarter(cluster, workload, address == "local", accelerator_type)
        return train_over_hosts(starter, plan, training, restarts, report, silent_seconds)
    finally:
        cluster.close()


@dataclass(frozen=True)
class Greeting:
    """The first answer of an actor's process: where it runs, and its versions.

    Attributes:
        node, process: Ids, Ray's and the system's.
        address: By which others reach it, with a free port there.
        versions: What must be equal everywhere.
    """

    node: str
    process: int
    address: str
    versions: Mapping[str, str]


class RemoteHost:
    """The object in an actor's process: one call trains, others return what was said meanwhile."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._heard = time.monotonic()

    def greet(self) -> Greeting:
        address = address_of_this_process()
        reached = f"{address}:{free_port(address)}"
        return Greeting(node_of_this_process(), os.getpid(), reached, versions_here())

    def live(self, job: HostJob) -> None:
        live(job, Voice(self._said.put, self._is_heard))

    def hear(self, seconds: float) -> list[Message]:
        """Return the messages since the last call, or wait so many seconds for the first."""
        self._heard = time.monotonic()
        return all_of(self._said, seconds)

    def _is_heard(self) -> bool:
        return time.monotonic() - self._heard < environment.patience(_UNHEARD_SECONDS)


def versions_here() -> dict[str, str]:
    return {"capture": capture.__version__, **environment.versions()}


@dataclass(frozen=True)
class RayStarter:
    """A ``Starter`` of Ray actors, one per node of a plan, on the nodes of a Ray cluster.

    Attributes:
        workload: By name, in the working directory or installed everywhere.
        alone: Whether the cluster is of this machine alone: all processes are on it then, on
            virtual CPU devices.
        accelerator_type: Ray's name of the target's devices; None for the usual one.
        place_seconds: Most that is waited for room on an idle cluster.

    Raises:
        ExecutionError: ``ray-workload`` for a workload that does not travel.
    """

    cluster: RayCluster
    workload: WorkloadSpec
    alone: bool = False
    accelerator_type: str | None = None
    place_seconds: float = PLACE_SECONDS

    def __post_init__(self) -> None:
        here = self.workload.relative_to(Path.cwd())
        check_travels([here.location if here.is_file else ""], ExecutionError)

    def start(self, plan: PlanFile, training: Mapping[str, object]) -> RayProcesses:
        """Place one actor per node of the plan on the cluster, and give each its job.

        Raises:
            ExecutionError: ``ray-resources`` if there is no room, ``run-hosts-differ`` for other
                versions than here.
        """
        seconds = environment.patience(self.place_seconds)
        room = self.cluster.reserve(self.demands(plan), not self.alone, seconds)
        processes = RayProcesses(self.cluster, room)
        try:
            greetings = processes.greetings()
            check_versions(greetings)
            secret = secrets.token_hex(32)
            # Paths are this machine's; the working directory there is a copy.
            paths = {
                name: value.resolve() for name, value in training.items() if isinstance(value, Path)
            }
            processes.begin(
                [
                    HostJob(
                        plan,
                        self.workload.relative_to(Path.cwd()),
                        {**training, **paths},
                        greetings[0].address,
                        len(greetings),
                        host,
                        environment.active_flags("tpu"),  # other machines have none of ours
                        self._virtual(plan),
                        secret,
                    )
                    for host in range(len(greetings))
                ]
            )
        except BaseException:
            processes.end()
            raise
        return processes

    def demands(self, plan: PlanFile) -> list[Demand]:
        """Return each process's demand: the target's devices of its node of the plan."""
        demand, target = Demand(_PROCESS_BYTES), plan.known_cluster.target
        if self.alone:
            return [demand] * len(plan.known_cluster.nodes)
        return [
            demand.on(target, size, self.accelerator_type, ExecutionError)
            for size in plan.known_cluster.nodes
        ]

    def _virtual(self, plan: PlanFile) -> bool:
        return self.demands(plan)[0].devices is None

    def missing(self, plan: PlanFile) -> frozenset[int]:
        """Return the nodes of the plan for which the cluster has none; each takes one that has
        room, those with most devices first."""
        if self.alone:
            return frozenset()
        demands = self.demands(plan)
        end = time.monotonic() + environment.patience(self.place_seconds)
        while True:
            found = unplaced(demands, [node["Resources"] for node in self.cluster.nodes()])
            if not found or time.monotonic() > end:
                return found
            time.sleep(_TURN_SECONDS)


class RayProcesses:
    """The actors of one attempt at a training.

    Args:
        room: For them; given back at their end.
    """

    def __init__(self, cluster: RayCluster, room: ClusterRoom):
        self._cluster, self._room = cluster, room
        self._greetings: list[Greeting] = []
        self._heard: dict[int, float] = {}
        self._waiting: dict[Any, int] = {}
        # One call trains, one is asked for news.
        self._actors = [Actor(RemoteHost, each, num_threads=2) for each in room.options]

    def greetings(self) -> list[Greeting]:
        """Wait for the greetings of all processes, and return them by host.

        Raises:
            ExecutionError: ``run-host-lost`` if one does not come.
        """
        asked = {actor.call("greet"): host for host, actor in enumerate(self._actors)}
        found: dict[int, Greeting] = {}
        end = time.monotonic() + environment.patience(_SECONDS_TO_GREET)
        while len(found) < len(asked):
            left = [reference for reference, host in asked.items() if host not in found]
            ready = self._cluster.ready(left, _TURN_SECONDS)
            self._cluster.hears_head()
            for reference in ready:
                found[asked[reference]] = self._greeting(asked[reference], reference)
            if time.monotonic() > end:
                missing = [host for host in range(len(asked)) if host not in found]
                raise ExecutionError.of(
                    f"host {missing[0]}: its process has not begun within {_SECONDS_TO_GREET:.0f} "
                    "s; look at the logs of Ray on its node.",
                    "run-host-lost",
                )
        self._greetings = [found[host] for host in range(len(asked))]
        return self._greetings

    def _greeting(self, host: int, reference: object) -> Greeting:
        try:
            return self._cluster.result(reference)
        except (ProcessLostError, CallError) as error:
            raise ExecutionError.of(
                f"host {host}: its process could not be made: {error}.", "run-host-lost"
            ) from error

    def begin(self, jobs: Sequence[HostJob]) -> None:
        """Give each actor its job, and ask for its first messages."""
        for job, actor in zip(jobs, self._actors, strict=True):
            actor.call("live", job)
            self._ask(job.host)

    def _ask(self, host: int) -> None:
        self._waiting[self._actors[host].call("hear", _TURN_SECONDS)] = host
        self._heard[host] = time.monotonic()

    def hear(self, seconds: float) -> list[tuple[int, Message]]:
        self._cluster.hears_head()
        if not self._waiting:
            time.sleep(seconds)
            return []
        found: list[tuple[int, Message]] = []
        for reference in self._cluster.ready(list(self._waiting), seconds):
            host = self._waiting.pop(reference)
            try:
                said = self._cluster.result(reference)
            except ProcessLostError as error:
                # How a process has ended Ray does not say.
                what = "node was lost" if error.node else "process ended"
                how = f"its {what} (killed, or out of memory?): {error}"
                found.append((host, lost(how, crashed=not error.node)))
            except CallError as error:
                found.append((host, Failed((Violation(str(error), "exception"),))))
            else:
                # Its clock is another machine's; it lived when it was asked.
                found.append((host, Alive(self._heard[host])))
                found += [(host, each) for each in said if not isinstance(each, Alive)]
                self._ask(host)
        return found

    def end(self) -> None:
        for actor in self._actors:
            actor.kill()
        for host in self._waiting.values():
            if time.monotonic() - self._heard[host] > _STOPPED_SECONDS:
                kill_process(self._greetings[host].node, self._greetings[host].process)
        if self._actors:
            self._room.release()
        self._actors.clear()
        self._waiting.clear()


def check_versions(greetings: Sequence[Greeting]) -> None:
    """Refuse hosts whose versions are not those of this process.

    Raises:
        ExecutionError: ``run-hosts-differ``.
    """
    own = versions_here()
    ExecutionError.check(
        Violation(
            f"host {host} has {name} {there.versions.get(name, 'missing')} and the driver "
            f"{version}; start the command where the versions are those of the cluster.",
            "run-hosts-differ",
        )
        for host, there in enumerate(greetings)
        for name, version in own.items()
        if there.versions.get(name) != version
    )


def unplaced(demands: Sequence[Demand], nodes: Sequence[Mapping[str, float]]) -> frozenset[int]:
    """Return the processes for which there is no node of their own.

    Example:
        >>> node = {"CPU": 8, "memory": 64e9}
        >>> sorted(unplaced([Demand(10**9)] * 3, [node, node]))
        [2]
    """
    left, found = list(nodes), set()
    for number in sorted(range(len(demands)), key=lambda n: -demands[n].num_devices):
        # The smallest that has room, so that larger ones are left to others.
        fitting = [node for node in left if demands[number].room(node)]
        if not fitting:
            found.add(number)
            continue
        left.remove(min(fitting, key=lambda node: node.get(demands[number].devices or "CPU", 0)))
    return frozenset(found)
