"""Processes on the nodes of a Ray cluster: the one file that imports Ray.

They are placed by what they need: processors and memory everywhere, and accelerators of one kind,
which nodes offer as Ray's resource ``accelerator_type:KIND``. The working directory travels to
them. Ray's usage reports and its dashboard are off, and nothing is fetched.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from capture import environment
from capture.errors import CaptureError
from capture.extras import install_command
from capture.machine.demand import Demand, resources_text

#: Ray's least; what is sent is a few kilobytes.
_OBJECT_STORE_BYTES = 80_000_000
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_CONNECT, _SECONDS_TO_END = 2.0, 5.0, 10.0
#: That the head may be silent. A minute after it was lost Ray ends the driver's process, without a
#: word of ours.
_SECONDS_WITHOUT_HEAD = 20.0


class ProcessLostError(Exception):
    """A process of the cluster, or its node, is gone.

    Args:
        said: By Ray.
        node: Whether the node is, as far as is known.
    """

    def __init__(self, said: str, node: bool):
        super().__init__(said)
        self.node = node


class CallError(Exception):
    """A call in a process raised something that is no error of ours."""


class RayCluster:
    """A Ray cluster that this process has joined.

    Args:
        address: ``"auto"`` for the cluster that this machine is a part of, ``"local"`` for one of
            this machine alone, or an address.
        error: The class of what is raised.
        num_processes: That a cluster of this machine alone has at least room for.
        left_out: Folders of the working directory that do not travel.

    Raises:
        CaptureError: ``ray-missing`` without Ray, ``ray-address`` if there is no cluster,
            ``ray-lost`` from all its methods if it is gone.
    """

    def __init__(
        self,
        address: str,
        error: type[CaptureError],
        num_processes: int = 1,
        left_out: Sequence[str] = (),
    ):
        self._error, self._heard = error, time.monotonic()
        self._looked = float("-inf")
        self._joined = _join(address, error, num_processes, left_out)

    def close(self) -> None:
        """Leave the cluster, if it was joined here; one of this machine alone ends."""
        if self._joined:
            import ray

            ray.shutdown()

    def hears_head(self) -> bool:
        """Return whether the cluster's head answers; it is asked again two seconds after an answer.

        Raises:
            CaptureError: ``ray-lost`` if it has not for long.
        """
        import ray

        if time.monotonic() - self._looked < _SECONDS_BETWEEN_LOOKS:
            return True
        address = ray.get_runtime_context().gcs_address
        if error := _refusal(address, _SECONDS_BETWEEN_LOOKS):
            if time.monotonic() - self._heard > _SECONDS_WITHOUT_HEAD:
                with self.may_be_lost():
                    raise ConnectionError(f"its head at {address} does not answer ({error})")
            return False
        self._looked = self._heard = time.monotonic()
        return True

    @contextmanager
    def may_be_lost(self) -> Iterator[None]:
        """Raise ``ray-lost`` in place of Ray's own errors if the cluster is gone."""
        import ray

        try:
            yield
        except (ray.exceptions.RaySystemError, ConnectionError, TimeoutError) as error:
            raise self._error.of(
                f"the Ray cluster is gone: {error}. What was finished is kept: run the same "
                "command again when it is back.",
                "ray-lost",
            ) from error

    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's records of the nodes that are alive: ``NodeID``, ``Resources`` and more."""
        import ray

        with self.may_be_lost():
            return [node for node in ray.nodes() if node["Alive"]]

    def alive(self) -> set[str]:
        """Return the ids of the nodes that are alive."""
        return {node["NodeID"] for node in self.nodes()}

    def check(self, demand: Demand) -> Demand:
        """Return the demand with no more devices than the best node has.

        Raises:
            CaptureError: ``ray-resources`` if no node has room for one.
        """
        found = [node["Resources"] for node in self.nodes()]
        offering = [resources for resources in found if demand.offered(resources)]
        if demand.devices is not None and offering:
            most = int(max(resources[demand.devices] for resources in offering))
            demand = replace(demand, num_devices=min(demand.num_devices, most))
        if not any(demand.room(resources) for resources in offering):
            raise self._error.of(
                f"no node has what a worker needs: {demand}. The nodes have "
                f"{resources_text(found)}. Add a node, or profile with --backend compile, which "
                "needs no such device.",
                "ray-resources",
            )
        return demand

    def ready(self, references: Sequence[object], timeout_seconds: float) -> list[Any]:
        """Return the calls whose results are there; wait for a first one, at most the timeout."""
        import ray

        with self.may_be_lost():
            first, _ = ray.wait(list(references), num_returns=1, timeout=timeout_seconds)
            if not first:
                return []
            return ray.wait(list(references), num_returns=len(references), timeout=0)[0]

    def result(self, reference: Any) -> Any:
        """Wait for a call and return its result.

        Raises:
            CaptureError: that it raised, of any kind.
            CallError: with what it raised else.
            ProcessLostError: if its process is gone.
        """
        import ray

        try:
            with self.may_be_lost():
                return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CaptureError):
                raise error.cause from None
            raise CallError((str(error).strip().splitlines() or ["no message"])[-1]) from None
        except ray.exceptions.RayError as error:
            # Of a process that ended Ray knows that it did; of a node that was lost, at first, only
            # that nothing answers.
            silent = isinstance(error, ray.exceptions.ActorUnavailableError)
            said = (str(error).strip().splitlines() or ["no message"])[0]
            raise ProcessLostError(said, silent) from None

    def reserve(self, demands: Sequence[Demand], apart: bool, seconds: float) -> ClusterRoom:
        """Reserve room for processes that run together.

        Args:
            demands: Of the processes.
            apart: Whether each is on a node of its own.
            seconds: Most that is waited for the room.

        Raises:
            CaptureError: ``ray-resources`` if there is none.
        """
        from ray.util.placement_group import placement_group

        start = time.monotonic()
        with self.may_be_lost():
            group = placement_group(
                [demand.resources for demand in demands],
                strategy="STRICT_SPREAD" if apart else "PACK",
            )
            room = ClusterRoom(group, demands)
            try:
                while not group.wait(_SECONDS_BETWEEN_LOOKS):
                    waited = time.monotonic() - start
                    if self.hears_head() and waited > seconds:
                        raise self._error.of(self._missing(demands, apart, waited), "ray-resources")
            except BaseException:
                room.release()
                raise
        return room

    def _missing(self, demands: Sequence[Demand], apart: bool, seconds: float) -> str:
        """Return a message that says what the cluster lacks for processes that found no room."""
        found = [node["Resources"] for node in self.nodes()]
        lacking = [
            f"process {number} needs {demand}, which no node has"
            for number, demand in enumerate(demands)
            if not any(demand.room(resources) for resources in found)
        ]
        if not lacking:
            where = ", each on a node of its own" if apart else ""
            lacking = [
                f"{len(demands)} processes need {'; '.join(dict.fromkeys(map(str, demands)))} each"
                f"{where}, and that is not free at once"
            ]
        return (
            f"{'; '.join(lacking)}. The nodes have {resources_text(found)} in all; waited "
            f"{seconds:.0f} s. Add nodes, or wait until others have ended."
        )


class ClusterRoom:
    """The room reserved for processes on the nodes of a cluster: a placement group of Ray's.

    Args:
        group: Ray's.
        demands: Of the processes.
    """

    def __init__(self, group: Any, demands: Sequence[Demand]):
        self._group, self._demands = group, demands

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options with which Ray starts the actor of each process in its part of the room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

        return [
            {**demand.options(), "scheduling_strategy": Place(self._group, number)}
            for number, demand in enumerate(self._demands)
        ]

    def release(self) -> None:
        """Give the room back; processes in it end."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(ray.exceptions.RayError, ConnectionError, TimeoutError):
            remove_placement_group(self._group)


class Actor:
    """A process on a node of the cluster, which holds an object.

    Args:
        made_of: Class of the object, importable there.
        options: As ``Demand.options`` or ``ClusterRoom.options`` gives them.
        num_threads: Calls that it answers at the same time.
    """

    def __init__(self, made_of: type, options: Mapping[str, object], num_threads: int = 1):
        import ray

        remote_class: Any = ray.remote(made_of)
        self._actor = remote_class.options(max_concurrency=num_threads, **options).remote()

    def call(self, method: str, *arguments: Any) -> Any:
        """Begin a call of a method of the object and return a reference to its result."""
        return getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        """End the process at once."""
        import ray

        if ray.is_initialized():
            # The cluster is gone, and the actor with it.
            with suppress(ray.exceptions.RayError, ConnectionError):
                ray.kill(self._actor)


def kill_process(node: str, process: int) -> None:
    """End a process that is stopped, to which an actor's own ``kill`` does not get through.

    Args:
        node: Id of its node.
        process: Id there.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    end: Any = ray.remote(_kill).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    with suppress(ray.exceptions.RayError, ConnectionError, TimeoutError):
        ray.get(end.remote(process), timeout=environment.patience(_SECONDS_TO_END))


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def node_of_this_process() -> str:
    """Return Ray's id of the node of this process, which runs in a cluster."""
    import ray

    return ray.get_runtime_context().get_node_id()


def address_of_this_process() -> str:
    """Return the IP address by which other nodes reach the node of this process."""
    import ray

    return ray.util.get_node_ip_address()


def check_travels(paths: Sequence[str], error: type[CaptureError]) -> None:
    """Refuse files that other machines will not see.

    Args:
        paths: Relative to the working directory, which travels.
        error: What is raised.

    Raises:
        CaptureError: ``ray-workload``.
    """
    outside = [path for path in paths if path.startswith("..")]
    if outside:
        raise error.of(
            f"{' and '.join(outside)} is outside of the working directory {str(Path.cwd())!r}, "
            "which travels to the workers; run the command in a folder that holds it, or name an "
            "installed package.",
            "ray-workload",
        )


def _refusal(address: str, timeout_seconds: float) -> OSError | None:
    """Return why nothing answers at an address; None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
    except OSError as error:
        return error
    return None


def _join(
    address: str, error: type[CaptureError], num_processes: int, left_out: Sequence[str]
) -> bool:
    """Join a cluster; return False if this process has joined one before."""
    try:
        environment.prepare_ray(local=address == "local")
        import ray
    except ImportError:
        raise error.of(
            f"--ray needs Ray, which is not installed: {install_command('ray')}.", "ray-missing"
        ) from None
    if ray.is_initialized():
        return False
    host, _, port = address.rpartition(":")
    is_plain = host and "://" not in address and port.isdecimal()
    patience = environment.patience(_SECONDS_TO_CONNECT)
    if is_plain and (said := _refusal(address, patience)):  # Ray itself would try for minutes
        raise error.of(
            f"--ray {address}: nothing answers there ({said}); name the address of a running "
            "cluster.",
            "ray-address",
        )
    own: dict[str, Any] = {}
    if address == "local":
        own = {
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "num_cpus": max(num_processes, os.cpu_count() or 1),
        }
    try:
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"working_dir": str(Path.cwd()), "excludes": list(left_out)},
            **own,
        )
    except Exception as refused:  # Ray raises nothing more special where a node starts too late
        raise error.of(
            f"--ray {address}: no cluster could be joined: {refused} Start one (ray start --head), "
            "name its address, or use --ray local; "
            "where the machine was only too busy, run the same command again.",
            "ray-address",
        ) from refused
    return True
