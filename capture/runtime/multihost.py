"""Several processes, one per node of a plan's cluster, each with its own part of the one step.

    hosts = multihost.initialize()
    step = capture.pipeshard(workload, plan, hosts=hosts)

Every process executes the same lines; what they must agree on is compared before the first step.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture import documents, environment
from capture.errors import ExecutionError, Violation
from capture.measured.stage_cost import StageCost
from capture.plan.files import PlanFile
from capture.runtime.dispatch import to_host
from capture.runtime.frame import Layout
from capture.runtime.hosts import device_puts
from capture.runtime.hosts.across import BoundCopy, CopyAcross
from capture.runtime.hosts.addresses import check_coordinator, check_nodes, free_port, own_address
from capture.runtime.hosts.device_puts import DevicePuts
from capture.runtime.hosts.gate import COORDINATOR, Gate, check_secret, is_of_this_machine
from capture.runtime.hosts.part import SharedStep, StepPart
from capture.runtime.hosts.sockets import Sockets
from capture.runtime.hosts.transport import Silence, Transport
from capture.step.program import Step

#: Offers of a process to another that may wait to be pulled.
WINDOW = 2
#: Most that an idle machine waits for another process, in seconds.
PATIENCE = 600.0
HEARTBEAT_SECONDS = 60
#: So many arrays of a state may wait to be pulled.
_GATHERED = 8


def initialize(
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host: int | None = None,
    *,
    plan: PlanFile | None = None,
    transport: str | None = None,
    secret: str | None = None,
    patience_seconds: float = PATIENCE,
    on_silence: Callable[[str], None] | None = None,
) -> Hosts:
    """Join the processes of a run; call it before anything asks JAX for devices.

    Args:
        coordinator: ``address:port`` at which host 0 listens, an address that all others reach;
            without it JAX asks the scheduler (Slurm, Open MPI).
        num_hosts, host: How many there are, and which this is.
        plan: That they will run. Where none of its stages spans hosts, collectives of CPU devices
            go through the memory of their process, 15 times faster than between processes.
        transport: How arrays get from process to process, a name of ``TRANSPORTS``; None: "sockets"
            between CPU devices, else "device_put".
        secret: The same text on all hosts, known to nobody else; None: ``CAPTURE_SECRET`` of the
            environment. Where the coordinator's address is not of this machine alone, there must be
            one: the hosts then meet through gates (``capture.runtime.hosts.gate``).
        patience_seconds: After which a process gives up another one.
        on_silence: What then happens, given the sentence; by default it is printed and the process
            ends with code 3.

    Raises:
        ExecutionError: ``run-hosts-start`` if the others cannot be reached, ``run-hosts-secret`` if
            there is no secret or not one, ``run-hosts-differ`` if they have other versions, flags
            or transports, ``run-transport`` for another name.
    """
    if transport is not None and transport not in TRANSPORTS:
        raise ExecutionError.of(
            f"transport={transport!r} is not known; choose one of {', '.join(TRANSPORTS)}.",
            "run-transport",
        )
    where, num_hosts, host, local_ids = _parties(coordinator, num_hosts, host)
    secret = secret or environment.secret_of_run()
    if transport != "device_put":
        check_secret(where, secret)
    check_coordinator(where, host)
    address = "127.0.0.1" if is_of_this_machine(where) else own_address(where)
    gate = None if secret is None else Gate(secret, f"{address}:0" if host else where, host)
    service = where if gate is None else _service(gate, where, host)
    _join(service, num_hosts, host, local_ids, gate, where)
    from jax._src import distributed  # what it knows has no public name

    joined = plan is None or _spans_hosts(plan)
    if not joined:
        # Gloo, the default of several processes, uses sockets within a process, too.
        jax.config.update("jax_cpu_collectives_implementation", None)
    transport = _prepared(transport, address, patience_seconds)
    _warn_of_strangers(where, transport, joined)
    hosts = Hosts(
        jax.process_index(),
        jax.process_count(),
        distributed.global_state.client,
        gate,
        transport=transport,
        patience_seconds=patience_seconds,
        on_silence=on_silence or _end,
    )
    hosts.compare(
        {
            "versions": environment.versions(),
            "XLA_FLAGS": list(environment.active_flags()),
            "transport": transport,
            "stages that span hosts": joined,
        }
    )
    hosts.are_joined = joined
    return hosts


def _prepared(transport: str | None, address: str, patience_seconds: float) -> str:
    """Return the transport that is asked for, prepared, or the one for the devices here."""
    if transport == "device_put":
        device_puts.prepare(address, environment.patience(patience_seconds))
    if transport is not None:
        return transport
    return "sockets" if jax.local_devices()[0].platform == "cpu" else "device_put"


class Hosts:
    """The processes of a run, seen by one of them. Made by ``initialize``.

    Args:
        process, count: This one, of how many.
        store: Keys and values that all see: the client of ``jax.distributed``.
        gate: Of this host; None if all are on this machine.
        transport: A name of ``TRANSPORTS``.

    Attributes:
        are_joined: Whether they have collectives.
        window: See ``capture.step.offers``.
    """

    def __init__(
        self,
        process: int,
        count: int,
        store: Any,
        gate: Gate | None = None,
        *,
        transport: str = "sockets",
        patience_seconds: float = PATIENCE,
        on_silence: Callable[[str], None],
    ):
        self.process, self.count = process, count
        self.transport_name, self.window = transport, WINDOW
        self._store, self._gate = store, gate
        self._patience_seconds, self._on_silence = patience_seconds, on_silence
        self._exchanges = self._numbers = 0
        self.are_joined = True
        self._copies: dict[Any, BoundCopy] = {}
        self._transports: dict[str, Transport] = {}

    @property
    def transport(self) -> Transport:
        """The way in which arrays travel; made when first used, in all processes together."""
        if self.transport_name not in self._transports:
            self._transports[self.transport_name] = TRANSPORTS[self.transport_name](self)
        return self._transports[self.transport_name]

    @cached_property
    def silence(self) -> Silence:
        """The watch over what is on its way."""
        return Silence(self._patience_seconds, self._on_silence)

    def sockets(self) -> Sockets:
        return Sockets(self.process, self.exchange, self.silence, self._gate)

    @property
    def limit_seconds(self) -> float:
        """The most seconds that are waited for another process."""
        return environment.patience(self._patience_seconds)

    def exchange(self, what: str, mine: object) -> list[Any]:
        """Exchange small documents, one per process, in calls that all processes make in one order.

        Raises:
            ExecutionError: ``run-hosts-silent`` if one does not come in time, ``run-hosts-cut`` if
                host 0 cannot be asked.
        """
        self._exchanges += 1
        return self.meet(f"{what}/{self._exchanges}", mine)

    def meet(self, what: str, mine: Any) -> list[Any]:
        """Exchange as ``exchange`` does, in any thread and order: no two meetings have one name.

        Raises:
            ExecutionError: ``run-hosts-silent``, ``run-hosts-cut``.
        """
        key, own, found = f"capture/{what}", json.dumps(mine), []
        milliseconds = int(1000 * self.limit_seconds)
        process = self.process
        try:
            self._store.key_value_set(f"{key}/{process}", own)
            for process in range(self.count):
                text = self._store.blocking_key_value_get(f"{key}/{process}", milliseconds)
                found.append(json.loads(text))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in (said := str(error).partition("\n")[0]):
                raise ExecutionError.of(
                    f"the service of the run in host 0 does not answer host {self.process}: "
                    f"{said}; look at that host and the network.",
                    "run-hosts-cut",
                ) from error
            raise ExecutionError.of(
                f"host {process} has not said its {what.partition('/')[0]} within "
                f"{milliseconds // 1000} s; look why it is late, or ended.",
                "run-hosts-silent",
            ) from error
        return found

    def compare(self, facts: Mapping[str, object]) -> None:
        """Refuse processes that would not do the same.

        Raises:
            ExecutionError: ``run-hosts-differ`` with every host and fact that differs from host
                0's.
        """
        first, *others = self.exchange("facts", dict(facts))
        ExecutionError.check(
            Violation(
                f"host {number} has {name}={other.get(name)!r} and host 0 {first[name]!r}; start "
                "all hosts with the same files, packages and environment.",
                "run-hosts-differ",
            )
            for number, other in enumerate(others, 1)
            for name in first
            if other.get(name) != first[name]
        )

    def check_alike(self, what: str, mine: object) -> None:
        """Refuse processes that do not see the same files.

        Raises:
            ExecutionError: ``checkpoint-not-shared`` with every host that sees others than host 0.
        """
        first, *others = self.exchange("files", mine)
        ExecutionError.check(
            Violation(
                f"host {number} sees {other!r} as {what}, and host 0 {first!r}; give a directory "
                "that all hosts share, by one path.",
                "checkpoint-not-shared",
            )
            for number, other in enumerate(others, 1)
            if other != first
        )

    def has(self, mesh: Mesh) -> bool:
        """Return whether a stage has devices of this process."""
        return any(device.process_index == self.process for device in mesh.devices.flat)

    def part(self, step: Step, layout: Layout, devices: Sequence[jax.Device]) -> StepPart:
        """Return the part of a step that this process executes.

        Raises:
            ExecutionError: ``run-hosts-differ`` if the others have another list.
        """
        shared = SharedStep.of(step, layout, devices, self.window)
        self.compare({"list of instructions": shared.digest})
        return StepPart(shared, self, devices)

    def costs(self, own: Mapping[int, StageCost]) -> dict[int, StageCost]:
        """Return the costs of all stages: each process compiles its own, all at once."""
        mine = {str(s): cost.to_json() for s, cost in own.items()}
        return {
            int(s): documents.read(cost, StageCost)
            for found in self.exchange("costs of stages", mine)
            for s, cost in found.items()
        }

    def gather(
        self,
        own: Sequence[Sequence[jax.Array]],
        structs: Sequence[Sequence[jax.ShapeDtypeStruct]],
    ) -> list[list[Any]]:
        """Return whole arrays of all processes, on the host of each; all ask together.

        Args:
            own: In groups; none of a group that others have.
            structs: Of all, with the shardings that they have.
        """
        numbers, found = count(self.reserve(sum(map(len, structs)))), list[list[Any]]()
        sent: deque[tuple[BoundCopy, int]] = deque()
        for arrays, group in zip(own, structs, strict=True):
            found.append([])
            for i, (struct, number) in enumerate(zip(group, numbers, strict=False)):
                copy = self._to_all((struct,))
                (array,) = copy(arrays[i : i + 1], {}, number)
                found[-1].append(to_host(array.addressable_shards[0].data))
                sent.append((copy, number))
                if len(sent) > _GATHERED:
                    copy, number = sent.popleft()
                    copy.wait(number)
        for copy, number in sent:
            copy.wait(number)
        return found

    def broadcast(
        self, own: Sequence[jax.Array], structs: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Return small arrays of one process in every process; they need not be there yet.

        Args:
            own: In their owner; empty elsewhere.
            structs: With the shardings that they have there.
        """
        copy = self._to_all(tuple(structs), is_acknowledged=False)
        arrays = copy(own, {}, self.reserve(1))
        return list(own) or [array.addressable_shards[0].data for array in arrays]

    def _to_all(
        self, structs: tuple[jax.ShapeDtypeStruct, ...], *, is_acknowledged: bool = True
    ) -> BoundCopy:
        """Return the copy of whole arrays to the first device of every process."""
        key = (structs, is_acknowledged, self.transport_name)
        if key not in self._copies:
            first: dict[int, jax.Device] = {}
            for device in jax.devices():
                first.setdefault(device.process_index, device)
            mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("host",))
            everywhere = [NamedSharding(mesh, PartitionSpec())] * len(structs)
            across = CopyAcross(structs, everywhere, "what all hosts asked for")
            self._copies[key] = BoundCopy(
                across, self.process, self.transport, is_acknowledged=is_acknowledged
            )
        return self._copies[key]

    def devices(self, plan: PlanFile) -> list[Any]:
        """Return the devices of the plan: node n's are the first of process n.

        Raises:
            ExecutionError: ``run-hosts`` if there is not one process per node, one has too few
                devices, or a stage spans hosts and they were told of another plan.
            PlanError: ``run-hosts-span``, see ``check_nodes``.
        """
        nodes = plan.known_cluster.nodes
        if len(nodes) != self.count:
            raise ExecutionError.of(
                f"the plan's cluster {plan.cluster} has {len(nodes)} nodes and the run "
                f"{self.count} processes; start one process per node.",
                "run-hosts",
            )
        of_host = [
            [device for device in jax.devices() if device.process_index == process]
            for process in range(self.count)
        ]
        violations = [
            Violation(
                f"node {process} of the plan has {size} devices and host {process} {len(own)}; "
                "plan for what the hosts have.",
                "run-hosts",
            )
            for process, (size, own) in enumerate(zip(nodes, of_host, strict=True))
            if len(own) < size
        ]
        if not self.are_joined and _spans_hosts(plan):
            violations.append(
                Violation(
                    "a stage of the plan spans hosts, and multihost.initialize(plan=) was given a "
                    "plan without such stages; give it the one that is run.",
                    "run-hosts",
                )
            )
        ExecutionError.check(violations)
        check_nodes(plan)
        return [each for size, own in zip(nodes, of_host, strict=True) for each in own[:size]]

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers, the same in every process."""
        first, self._numbers = self._numbers, self._numbers + count
        return first


def _spans_hosts(plan: PlanFile) -> bool:
    node_of = plan.known_cluster.node_of_device
    return any(len({node_of[device] for device in group}) > 1 for group in plan.device_groups)


def _parties(
    coordinator: str | None, num_hosts: int | None, host: int | None
) -> tuple[str, int, int, Any]:
    """Return where host 0 listens, how many hosts there are, which this is, and its devices, as
    given and else as the scheduler says.

    Raises:
        ExecutionError: ``run-hosts-start`` if that is not known.
    """
    local_ids = None
    if coordinator is None or num_hosts is None or host is None:
        from jax._src.clusters import ClusterEnv  # what it knows has no public name

        coordinator, num_hosts, host, local_ids = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_hosts, host, None, None, int(environment.patience(HEARTBEAT_SECONDS))
        )
    if coordinator is None or num_hosts is None or host is None:
        raise ExecutionError.of(
            "no scheduler says which host this is, where host 0 listens and how many there are; "
            "start the command with srun or mpirun, or set CAPTURE_COORDINATOR, CAPTURE_NUM_HOSTS "
            "and CAPTURE_HOST.",
            "run-hosts-start",
        )
    return coordinator, num_hosts, host, local_ids


def _join(
    service: str, num_hosts: int, host: int, local_ids: Any, gate: Gate | None, coordinator: str
) -> None:
    """Have JAX meet the others."""
    try:
        jax.distributed.initialize(
            service,
            num_hosts,
            host,
            local_ids,
            coordinator_bind_address=service if host == 0 else None,
            initialization_timeout=int(environment.patience(HEARTBEAT_SECONDS)),
            heartbeat_timeout_seconds=int(environment.patience(HEARTBEAT_SECONDS)),
            shutdown_timeout_seconds=5,
        )
    except Exception as error:  # of gRPC, as a RuntimeError or a class of its own
        said = (str(error).splitlines() or [""])[0]
        if gate is not None and (count := gate.num_refused):
            said += f" ({count} connections did not know the secret of the run)"
        raise ExecutionError.of(
            f"the processes of the run did not find each other at {coordinator}: {said}; give an "
            "address and a free port of host 0 that every host reaches.",
            "run-hosts-start",
        ) from error


def _service(gate: Gate, coordinator: str, host: int) -> str:
    """Return where this process reaches the service of the run, behind the gate of host 0."""
    if host == 0:
        port = free_port()
        gate.allow({COORDINATOR: port})
        return f"127.0.0.1:{port}"
    gate.meet(coordinator, environment.patience(HEARTBEAT_SECONDS))
    return gate.dial(coordinator, COORDINATOR)


def _warn_of_strangers(coordinator: str, transport: str, joined: bool) -> None:
    """Warn of what the library cannot protect between machines."""
    if is_of_this_machine(coordinator):
        return
    exposed = ["--transport device_put"] if transport == "device_put" else []
    exposed += ["collectives of stages that span hosts"] if joined else []
    if exposed:
        warnings.warn(
            f"{' and '.join(exposed)}: the library that moves these arrays listens for everybody "
            "and asks nobody who they are. Use a network without strangers (docs/security.md).",
            stacklevel=3,
        )


def _end(sentence: str) -> None:
    print(f"error: {sentence} [run-hosts-silent]", file=sys.stderr, flush=True)
    os._exit(3)


#: How arrays get from process to process, by name.
TRANSPORTS: Mapping[str, Callable[[Hosts], Transport]] = {
    "sockets": Hosts.sockets,
    "device_put": lambda hosts: DevicePuts(hosts.process, hosts.silence),
}
