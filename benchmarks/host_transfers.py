"""How long an array takes from a process to another: what two processes of ``multihost.py`` do."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from capture.runtime.hosts.transport import Shipment
from capture.runtime.multihost import Hosts

SIZES_BYTES = (2**10, 2**16, 2**18, 2**20, 2**24)


def transfers(hosts: Hosts, num_rounds: int) -> list[dict[str, Any]]:
    """Of every size; the answer of host 0 counts."""
    ways = [Transported(hosts), Plain(hosts)]
    found = []
    for nbytes in SIZES_BYTES:
        repeats = 20 if nbytes <= 2**20 else 5
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_rounds):
            for way in ways:
                ways[1].meet()
                seconds = [way.there_and_back(nbytes) / 2 for _ in range(repeats + 2)]
                times[way.name] += seconds[2:]
            times["copy"] += [_copy_seconds(nbytes) for _ in range(repeats)]
        row: dict[str, Any] = {"bytes": nbytes}
        for name, seconds in times.items():
            row |= {f"{name}_seconds": median(seconds), f"{name}_seconds_least": min(seconds)}
        for name in ("plain_socket", "copy"):
            row[f"ratio_to_{name}"] = row["transport_seconds"] / row[f"{name}_seconds"]
        row["least_ratio_to_plain_socket"] = (
            row["transport_seconds_least"] / row["plain_socket_seconds_least"]
        )
        row["transport_bytes_per_second"] = nbytes / row["transport_seconds"]
        found.append(row)
    return found


class Transported:
    """By the transport of ``hosts``."""

    name = "transport"

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._sharding = SingleDeviceSharding(jax.local_devices()[0])
        self._arrays: dict[int, Any] = {}

    def there_and_back(self, nbytes: int) -> float:
        hosts = self._hosts
        if nbytes not in self._arrays:
            zeros = jax.numpy.zeros(nbytes // 4, "float32", device=self._sharding)
            self._arrays[nbytes] = zeros.block_until_ready()
        there, back = self._shipment(nbytes, 0), self._shipment(nbytes, 1)
        first, transport, sent = hosts.reserve(2), hosts.transport, [self._arrays[nbytes]]
        start = time.perf_counter()
        for number, shipment in enumerate((there, back), first):
            got = transport.carry(shipment, number, sent)
            for array in got:
                array.block_until_ready()
            sent = list(got) or sent
        return time.perf_counter() - start

    def _shipment(self, nbytes: int, sender: int) -> Shipment:
        devices = [
            next(d for d in jax.devices() if d.process_index == host)
            for host in (sender, 1 - sender)
        ]
        struct = jax.ShapeDtypeStruct(
            (nbytes // 4,), "float32", sharding=SingleDeviceSharding(devices[1])
        )
        return Shipment(sender, 1 - sender, (devices[0],), (struct,), "a ball", False)


class Plain:
    """By a socket of the operating system."""

    name = "plain_socket"

    def __init__(self, hosts: Hosts):
        self._process = hosts.process
        self._device = jax.local_devices()[0]
        self._arrays: dict[int, Any] = {}
        if hosts.process == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                hosts.exchange("port", server.getsockname()[1])
                self._socket, _ = server.accept()
        else:
            port, _ = hosts.exchange("port", None)
            self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def meet(self) -> None:
        """Both get here."""
        self._socket.sendall(b"x")
        assert self._socket.recv(1) == b"x"

    def there_and_back(self, nbytes: int) -> float:
        if nbytes not in self._arrays:
            zeros = jax.device_put(np.zeros(nbytes // 4, np.float32), self._device)
            self._arrays[nbytes] = zeros.block_until_ready()
        start = time.perf_counter()
        if self._process == 0:
            self._send(self._arrays[nbytes])
            self._receive(nbytes)
        else:
            self._send(self._receive(nbytes))
        return time.perf_counter() - start

    def _send(self, array: Any) -> None:
        self._socket.sendall(memoryview(np.asarray(array)).cast("B"))

    def _receive(self, nbytes: int) -> Any:
        array = np.empty(nbytes // 4, np.float32)
        view, got = memoryview(array).cast("B"), 0
        while got < nbytes:
            got += self._socket.recv_into(view[got:])
        return jax.device_put(array, self._device).block_until_ready()


def _copy_seconds(nbytes: int) -> float:
    array = np.zeros(nbytes // 4, np.float32)
    start = time.perf_counter()
    array.copy()
    return time.perf_counter() - start
