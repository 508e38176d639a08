"""Several processes, one per node of a plan's cluster, each with its own part of the one step.

    hosts = multihost.initialize()
    step = capture.pipeshard(workload, plan, hosts=hosts)

Every process executes the same lines; what they must agree on is compared before the first step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from capture import documents, environment
from capture.errors import ExecutionError, Violation
from capture.measured.stage_cost import StageCost
from capture.plan.stages import Plan
from capture.runtime.dispatch import Layout, to_host
from capture.runtime.hosts.driver import check_nodes
from capture.runtime.hosts.part import Part, SharedStep
from capture.runtime.hosts.sockets import Sockets
from capture.runtime.reshard import reshard
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
    window: int = WINDOW,
    patience_seconds: float = PATIENCE,
    on_silence: Callable[[str], None] | None = None,
) -> Hosts:
    """Join the processes of a run; call it before anything asks JAX for devices.

    Args:
        coordinator: ``address:port`` at which host 0 listens, an address that all others reach;
            without it JAX asks the scheduler (Slurm, Open MPI).
        num_hosts, host: How many there are, and which this is.
        window: See ``capture.step.offers``.
        patience_seconds: After which a process gives up another one.
        on_silence: What then happens, given the sentence; by default it is printed and the process
            ends with code 3.

    Raises:
        ExecutionError: ``run-hosts-start`` if the others cannot be reached, ``run-hosts-differ`` if
            they have other versions or flags.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            host,
            coordinator_bind_address=coordinator if host == 0 else None,
            initialization_timeout=int(environment.patience(HEARTBEAT_SECONDS)),
            heartbeat_timeout_seconds=int(environment.patience(HEARTBEAT_SECONDS)),
            shutdown_timeout_seconds=5,
        )
    except Exception as error:  # of gRPC, as a RuntimeError or a class of its own
        where = coordinator or "the address that the scheduler gives"
        said = (str(error).splitlines() or [""])[0]
        raise ExecutionError.of(
            f"the processes of the run did not find each other at {where}: {said}; give an address "
            "and a free port of host 0 that every host reaches.",
            "run-hosts-start",
        ) from error
    from jax._src import distributed  # what it knows has no public name

    known = distributed.global_state
    hosts = Hosts(
        jax.process_index(),
        jax.process_count(),
        known.client,
        _own_address(coordinator or str(known.coordinator_address)),
        window=window,
        patience_seconds=patience_seconds,
        on_silence=on_silence or _end,
    )
    hosts.compare(
        {"versions": environment.versions(), "XLA_FLAGS": list(environment.active_flags())}
    )
    return hosts


class Hosts:
    """The processes of a run, seen by one of them. Made by ``initialize``.

    Args:
        process, count: This one, of how many.
        store: Keys and values that all see: the client of ``jax.distributed``.
        address: Of this host, for the others.
        window, patience_seconds, on_silence: As for ``initialize``.
    """

    def __init__(
        self,
        process: int,
        count: int,
        store: Any,
        address: str,
        *,
        window: int = WINDOW,
        patience_seconds: float = PATIENCE,
        on_silence: Callable[[str], None],
    ):
        self.process, self.count, self.window = process, count, window
        self._store, self._address = store, address
        self._patience_seconds, self._on_silence = patience_seconds, on_silence
        self._exchanges = self._numbers = 0

    @cached_property
    def transport(self) -> Sockets:
        """How arrays travel; made when first used, in all processes together."""
        return Sockets(
            self._address,
            self.process,
            lambda own: self.exchange("addresses", own),
            environment.patience(self._patience_seconds),
            self._on_silence,
        )

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """Small documents, one per process; every process makes the same calls in the same order.

        Raises:
            ExecutionError: ``run-hosts-silent`` if one does not come in time.
        """
        self._exchanges += 1
        key = f"capture/{what}/{self._exchanges}"
        self._store.key_value_set(f"{key}/{self.process}", json.dumps(mine))
        found = []
        for process in range(self.count):
            try:
                milliseconds = int(1000 * environment.patience(self._patience_seconds))
                text = self._store.blocking_key_value_get(f"{key}/{process}", milliseconds)
            except Exception as error:
                raise ExecutionError.of(
                    f"host {process} has not said its {what} within "
                    f"{milliseconds // 1000} s; look why it is late, or ended.",
                    "run-hosts-silent",
                ) from error
            found.append(json.loads(text))
        return found

    def compare(self, facts: Mapping[str, Any]) -> None:
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

    def first_does(self, what: str, call: Callable[[], None]) -> None:
        """Host 0 does something, and the others wait for it.

        Raises:
            ExecutionError: what it raises there, in every process.
        """
        failed: list[tuple[str, str]] = []
        if self.process == 0:
            try:
                call()
            except ExecutionError as error:
                failed = [(violation.message, violation.code) for violation in error.violations]
        failed, *_ = self.exchange(what, failed)
        ExecutionError.check(Violation(message, code) for message, code in failed)

    def has(self, mesh: Mesh) -> bool:
        """Whether a stage's devices are this process's."""
        return mesh.devices.flat[0].process_index == self.process

    def part(self, step: Step, layout: Layout, devices: Sequence[jax.Device]) -> Part:
        """What this process executes of a step.

        Args:
            step: As in one process.
            layout: Of its slots.
            devices: By device id.

        Raises:
            ExecutionError: ``run-hosts-differ`` if the others have another list.
        """
        shared = SharedStep.of(step, layout, devices, self.window)
        self.compare({"list of instructions": shared.digest})
        return Part(shared, self, devices)

    def costs(self, own: Mapping[int, StageCost]) -> dict[int, StageCost]:
        """Those of all stages: each process compiles its own, all at once.

        Args:
            own: By stage.
        """
        mine = {str(s): cost.to_json() for s, cost in own.items()}
        return {
            int(s): documents.read(cost, StageCost)
            for found in self.exchange("costs of stages", mine)
            for s, cost in found.items()
        }

    def gather(
        self,
        own: Mapping[tuple[int, int], jax.Array],
        structs: Mapping[tuple[int, int], jax.ShapeDtypeStruct],
    ) -> dict[tuple[int, int], Any]:
        """Whole arrays of all processes, on the host of each; all ask together.

        Args:
            own: Those of this process.
            structs: Of all, with the shardings that they have.
        """
        first, found = self.reserve(len(structs)), {}
        for number, key in enumerate(sorted(structs), first):
            struct = structs[key]
            if key in own:
                found[key] = to_host(own[key])
                self._offer_all(number, [own[key]])
            else:
                (array,) = self._pull(number, [struct])
                found[key] = to_host(array)
            if number % _GATHERED == 0 or len(found) == len(structs):
                self.exchange("progress", number)
        return found

    def broadcast(
        self, own: Sequence[jax.Array], structs: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Small arrays of one process in every process; they need not be there yet.

        Args:
            own: In their owner; empty elsewhere.
            structs: With the shardings that they have there.
        """
        number = self.reserve(1)
        if own:
            self._offer_all(number, own)
            return list(own)
        return self._pull(number, structs)

    def _offer_all(self, number: int, arrays: Sequence[jax.Array]) -> None:
        device = jax.local_devices()[0]
        whole = [_data(reshard(array, SingleDeviceSharding(device))) for array in arrays]
        for receiver in range(self.count):
            if receiver != self.process:
                self.transport.offer(number * self.count + receiver, whole)

    def _pull(self, number: int, structs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        here, sharding = [], SingleDeviceSharding(jax.local_devices()[0])
        for struct in structs:
            data = jax.eval_shape(_data, struct)
            here.append(jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding))
        assert structs[0].sharding is not None
        owner = min(device.process_index for device in structs[0].sharding.device_set)
        own = number * self.count + self.process
        arrays = self.transport.pull(owner, own, here, "what all hosts asked for")
        return [
            jax.random.wrap_key_data(array, impl=struct.dtype._impl)  # it has no public name
            if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key)
            else array
            for array, struct in zip(arrays, structs, strict=True)
        ]

    def devices(self, plan: Plan) -> list[Any]:
        """Those of the plan: node n's are the first of process n.

        Raises:
            ExecutionError: ``run-hosts`` if there is not one process per node, or one has too few
                devices.
            PlanError: ``run-hosts-span`` if a stage has devices of several nodes.
        """
        nodes, found = plan.cluster.nodes, []
        if len(nodes) != self.count:
            raise ExecutionError.of(
                f"the plan's cluster {plan.cluster} has {len(nodes)} nodes and the run "
                f"{self.count} processes; start one process per node.",
                "run-hosts",
            )
        violations = []
        for process, size in enumerate(nodes):
            own = [device for device in jax.devices() if device.process_index == process]
            found += own[:size]
            if len(own) < size:
                violations.append(
                    Violation(
                        f"node {process} of the plan has {size} devices and host {process} "
                        f"{len(own)}; plan for what the hosts have.",
                        "run-hosts",
                    )
                )
        ExecutionError.check(violations)
        check_nodes(plan)
        return found

    def reserve(self, count: int) -> int:
        """The first of so many numbers, the same in every process."""
        first, self._numbers = self._numbers, self._numbers + count
        return first


def _data(array: jax.Array) -> jax.Array:
    """What travels of an array: of random keys, their data."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _own_address(coordinator: str) -> str:
    """The address of this host from which the coordinator is reached; nothing is sent."""
    address, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.strip("[]"), int(port)))
        return probe.getsockname()[0]


def _end(sentence: str) -> None:
    print(f"error: {sentence} [run-hosts-silent]", file=sys.stderr, flush=True)
    os._exit(3)
