"""Workers that are actors of a Ray cluster: the one file that imports Ray.

Workers are placed by what they need: processors and memory everywhere, and for runs on accelerators
so many devices of one kind, which their nodes offer as Ray's resource ``accelerator_type:KIND``.
Nodes may come and go: workers of a node that is lost are started elsewhere and its jobs done again,
and a node that joins gets workers within seconds.

The working directory travels, so the workload and a target file must be in it, or the workload a
package that is installed everywhere. Ray's usage reports and its dashboard are off, and nothing is
fetched.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capture import environment
from capture.errors import CaptureError, ProfileError, WorkloadError
from capture.extras import install_command
from capture.machine.target import Target, same_target
from profiling_runs.jobs import Job, Outcome, Setting
from profiling_runs.pools.pool import WORKER_BYTES, Ended, Pool, PoolWorker, Ready
from profiling_runs.pools.worker import Worker, name_of_process

#: Kinds as Ray detects them, by target; those of the same letters share a kind, whatever memory
#: they have.
ACCELERATOR_TYPES = {
    "v100-32g": "V100",
    "a100-40g": "A100",
    "a100-80g": "A100",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gh200": "GH200",
    "gb300": "GB300",
    "v4": "TPU-V4",
    "v5e": "TPU-V5LITEPOD",
    "v5p": "TPU-V5P",
    "v6e": "TPU-V6E",
    "tpu7x": "TPU-V7X",
}
#: Ray's least; what is sent is a few kilobytes.
_OBJECT_STORE_BYTES = 80_000_000
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_CONNECT = 2.0, 5.0
#: That the head may be silent. A minute after it was lost Ray ends the driver's process, without a
#: word of ours.
_SECONDS_WITHOUT_HEAD = 20.0


@dataclass(frozen=True)
class Demand:
    """What a worker needs of its node.

    Attributes:
        devices: ``"GPU"`` or ``"TPU"``; None if it only compiles.
        num_devices: How many of them.
        accelerator_type: Kind of the devices.
        memory_bytes: Memory on the host.
    """

    devices: str | None = None
    num_devices: int = 0
    accelerator_type: str | None = None
    memory_bytes: int = WORKER_BYTES

    @classmethod
    def of(cls, setting: Setting, accelerator_type: str | None) -> Demand:
        """What the workers of a setting need.

        Raises:
            ProfileError: ``ray-accelerator`` if it is not known how Ray calls the devices of the
                target.
        """
        target = Target.load(setting.target)
        if setting.backend == "compile" or target.platform == "cpu":
            return cls()
        kind = accelerator_type or next(
            (ray for name, ray in ACCELERATOR_TYPES.items() if same_target(name, setting.target)),
            None,
        )
        if kind is None:
            raise ProfileError.of(
                f"target={setting.target!r} has no accelerator type of Ray's that is known here; "
                "name one with --accelerator.",
                "ray-accelerator",
            )
        return cls("GPU" if target.platform == "cuda" else "TPU", setting.num_devices, kind)

    def offered(self, resources: Mapping[str, float]) -> bool:
        """Whether a node has such devices at all."""
        return self.devices is None or (
            f"accelerator_type:{self.accelerator_type}" in resources
            and resources.get(self.devices, 0) >= 1
        )

    def room(self, resources: Mapping[str, float]) -> int:
        """How many workers a node has room for.

        Example:
            >>> node = {"CPU": 8, "GPU": 5, "memory": 64e9}
            >>> Demand("GPU", 2, "A100").room({**node, "accelerator_type:A100": 1})
            2
            >>> Demand("GPU", 2, "A100").room({**node, "accelerator_type:H100": 1})
            0
        """
        if not self.offered(resources):
            return 0
        bounds = [resources.get("CPU", 0), resources.get("memory", 0) // self.memory_bytes]
        if self.devices is not None:
            bounds.append(resources[self.devices] // self.num_devices)
        return int(min(bounds))

    def options(self) -> dict[str, Any]:
        """What Ray is asked for, for an actor."""
        # A node offers a whole one of its kind, to be shared by all that need it: an actor takes
        # next to nothing.
        kind = {f"accelerator_type:{self.accelerator_type}": 0.001} if self.accelerator_type else {}
        tpus = {"TPU": self.num_devices} if self.devices == "TPU" else {}
        num_gpus = self.num_devices if self.devices == "GPU" else 0
        return {
            "num_cpus": 1,
            "num_gpus": num_gpus,
            "memory": self.memory_bytes,
            "resources": {**kind, **tpus},
            "max_restarts": 0,
        }


class RayPool(Pool):
    """Actors of a Ray cluster, as many as its nodes have room for.

    Args:
        setting: What all jobs share.
        address: ``"auto"`` for the cluster that this machine is a part of, ``"local"`` for one of
            this machine alone, or an address.
        num_workers: At most.
        timeout_seconds: Most that a job may take on an idle machine.
        accelerator_type: Ray's name of the target's devices; None for the usual one.

    Raises:
        ProfileError: ``ray-missing`` without Ray, ``ray-address`` if there is no cluster,
            ``ray-resources`` if no node has what a worker needs, ``ray-workload`` if the workload's
            file would not travel, ``ray-lost`` if the cluster is gone; ``worker-versions``.
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
        self._demand, self._setting = Demand.of(setting, accelerator_type), travelling(setting)
        self._num_workers, self._room, self._looked = num_workers, 0, float("-inf")
        self._heard = time.monotonic()
        self._connected = _connect(address)
        with _lost_cluster(), _closed_if_refused(self):
            self._demand = _check_nodes(self._demand, _nodes())

    def room(self) -> int:
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            with _lost_cluster():
                if self._hears_head():  # asking for nodes would wait for it
                    self._room = sum(self._demand.room(node["Resources"]) for node in _nodes())
            self._looked = time.monotonic()
        return min(self._num_workers, self._room)

    def _hears_head(self) -> bool:
        import ray

        address = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=_SECONDS_BETWEEN_LOOKS
            ).close()
        except OSError as error:
            if time.monotonic() - self._heard > _SECONDS_WITHOUT_HEAD:
                raise ConnectionError(f"its head at {address} does not answer ({error})") from None
            return False
        self._heard = time.monotonic()
        return True

    def launch(self) -> PoolWorker:
        return _Actor(self._setting, self._demand)

    def news(self, workers: Sequence[_Actor], timeout_seconds: float) -> Sequence[_Actor]:
        import ray

        busy = {worker.reference: worker for worker in workers if worker.reference is not None}
        if not busy:  # every node is gone; one may come
            time.sleep(timeout_seconds)
            return []
        with _lost_cluster():
            first, _ = ray.wait(list(busy), num_returns=1, timeout=timeout_seconds)
            done, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0) if first else ([], [])
        return [busy[reference] for reference in done]

    def close(self) -> None:
        import ray

        super().close()
        if self._connected:
            ray.shutdown()


class _Actor(PoolWorker):
    def __init__(self, setting: Setting, demand: Demand):
        import ray

        super().__init__()
        self._nodes = _alive()  # where it may be, until it says
        remote_class: Any = ray.remote(RemoteWorker)
        self._actor = remote_class.options(**demand.options()).remote()
        self.reference: Any = self._actor.begin.remote(setting)

    def send(self, job: Job) -> None:
        self.reference = self._actor.measure.remote(job)

    def receive(self) -> Ready | Outcome | Ended:
        import ray

        reference, self.reference = self.reference, None
        try:
            with _lost_cluster():
                message = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            # The workload was imported here. A node that is lost may take the files that travelled
            # from others of its machine: try again.
            if isinstance(error.cause, CaptureError) and not isinstance(error.cause, WorkloadError):
                raise error.cause from None
            return Ended(
                "lost",
                f"it could not be made: {(str(error).strip().splitlines() or ['no message'])[-1]}",
            )
        except ray.exceptions.RayError as error:
            # Of a process that ended Ray knows that it did; of a node that was lost, at first, only
            # that nothing answers.
            silent = isinstance(error, ray.exceptions.ActorUnavailableError)
            lost = silent or bool(self._nodes - _alive())
            said = (str(error).strip().splitlines() or ["no message"])[0]
            return Ended(
                "node lost" if lost else "lost",
                f"its {'node' if lost else 'process'} was lost: {said}",
            )
        if isinstance(message, RemoteReady):
            self._nodes = {message.node}
            return Ready(message.name)
        return message

    def kill(self) -> None:
        import ray

        if ray.is_initialized():
            # The cluster is gone, and the actor with it.
            with suppress(ray.exceptions.RayError, ConnectionError):
                ray.kill(self._actor)


@dataclass(frozen=True)
class RemoteReady:
    """A worker can take its first job, on this node."""

    name: str
    node: str


class RemoteWorker:
    """What runs in an actor's process."""

    def begin(self, setting: Setting) -> RemoteReady:
        import ray

        self._worker = Worker(setting)
        return RemoteReady(name_of_process(), ray.get_runtime_context().get_node_id())

    def measure(self, job: Job) -> Outcome:
        return self._worker.measure(job)


def travelling(setting: Setting) -> Setting:
    """A setting as the other machines see it: paths within the working directory, which travels.

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
    outside = [
        name
        for name in (workload.location if workload.is_file else "", target)
        if name.startswith("..")
    ]
    if outside:
        raise ProfileError.of(
            f"{' and '.join(outside)} is outside of the working directory {str(here)!r}, which "
            "travels to the workers; run the command "
            "in a folder that holds it, or name an installed package.",
            "ray-workload",
        )
    return replace(setting, workload=workload, target=target)


def _connect(address: str) -> bool:
    """Join the cluster; False if this process has done so before."""
    try:
        environment.prepare_ray(local=address == "local")
        import ray
    except ImportError:
        raise ProfileError.of(
            f"--ray needs Ray, which is not installed: {install_command('ray')}.", "ray-missing"
        ) from None
    if ray.is_initialized():
        return False
    host, _, port = address.rpartition(":")
    if host and "://" not in address and port.isdecimal():  # Ray itself would try for minutes
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=environment.patience(_SECONDS_TO_CONNECT)
            ).close()
        except OSError as error:
            raise ProfileError.of(
                f"--ray {address}: nothing answers there ({error}); name the address of a running "
                "cluster.",
                "ray-address",
            ) from None
    own: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        if address == "local"
        else {}
    )
    try:
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"working_dir": str(Path.cwd())},
            **own,
        )
    except (
        Exception
    ) as error:  # Ray raises nothing more special where a node does not start in time
        raise ProfileError.of(
            f"--ray {address}: no cluster could be joined: {error} Start one (ray start --head), "
            "name its address, or use --ray local; "
            "where the machine was only too busy, run the same command again.",
            "ray-address",
        ) from error
    return True


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _alive() -> set[str]:
    return {node["NodeID"] for node in _nodes()}


def _check_nodes(demand: Demand, nodes: Sequence[Mapping[str, Any]]) -> Demand:
    """What a worker will ask for: not more devices than a node has.

    Raises:
        ProfileError: ``ray-resources`` if no node has room for a worker.
    """
    offering = [node["Resources"] for node in nodes if demand.offered(node["Resources"])]
    if demand.devices is not None and offering:
        demand = replace(
            demand,
            num_devices=min(
                demand.num_devices, int(max(resources[demand.devices] for resources in offering))
            ),
        )
    if not any(demand.room(resources) for resources in offering):
        needs = (
            f"{demand.num_devices} {demand.devices} of type {demand.accelerator_type}, "
            if demand.devices
            else ""
        )
        there = "; ".join(
            ", ".join(
                f"{k} {v:g}"
                for k, v in sorted(n["Resources"].items())
                if ":" not in k or "type:" in k
            )
            for n in nodes
        )
        raise ProfileError.of(
            f"no node has what a worker needs: {needs}1 CPU, {demand.memory_bytes} bytes of "
            f"memory. The nodes have {there}. Add a node, or "
            "profile with --backend compile, which needs no such device.",
            "ray-resources",
        )
    return demand


@contextmanager
def _lost_cluster() -> Iterator[None]:
    """Say it in our words when the cluster is gone."""
    import ray

    try:
        yield
    except (ray.exceptions.RaySystemError, ConnectionError, TimeoutError) as error:
        raise ProfileError.of(
            f"the Ray cluster is gone: {error}. Finished measurements are kept: run the same "
            "command again when it is back.",
            "ray-lost",
        ) from error


@contextmanager
def _closed_if_refused(pool: RayPool) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        pool.close()
        raise
