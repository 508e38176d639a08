"""One server whose devices stream a model from the memory of their host: how much memory there is,
and how fast bytes move.

Servers are JSON files: those of ``capture/machine/servers`` by name, a user's own by path, each
number with its source, or made from a target (``Server.of``). Fields are those of the class, and
``schema_version`` 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from capture import documents
from capture.errors import ClusterError, Violation
from capture.machine.cluster import Cluster, Machine
from capture.machine.rates import ASSUMED, Sourced
from capture.quantities import format_quantity, nearest

SERVER = documents.Format(
    "server file",
    ClusterError,
    "server",
    "see capture/machine/server.py, which says what it holds",
    not_json="file",
    strict=True,
)
SERVERS_FOLDER = Path(__file__).parent / "servers"
#: Memory of a host with which plans are counted that need more than it has, and not refused.
ENDLESS_BYTES = 2**62


@dataclass(frozen=True)
class Server:
    """A host with equal devices behind it: its memories and bandwidths.

    Attributes:
        name: Name of a shipped server, the path of a file, or a target and how many.
        num_devices: GPUs.
        memory_bytes: Memory of one device.
        usable_bytes: Bytes of it that the layers of a pack may need.
        host_memory_bytes: Host memory for weights, optimizer state and what is kept for the
            backward pass.
        swap_bytes_per_second: Bandwidth between the host and one device while the others are idle;
            all that work share it.
        p2p_bytes_per_second: Bandwidth from one device to another.
        message_bytes_per_second: Bandwidth from one process of the host to another; shared
            likewise, and every byte is written and read.
        delete_seconds: Seconds to give the memory of a task back.
        description: A sentence for people.
    """

    name: str
    num_devices: Sourced
    memory_bytes: Sourced
    usable_bytes: Sourced
    host_memory_bytes: Sourced
    swap_bytes_per_second: Sourced
    p2p_bytes_per_second: Sourced
    message_bytes_per_second: Sourced
    delete_seconds: Sourced
    description: str = ""

    def __post_init__(self) -> None:
        ClusterError.check(self._violations())

    @classmethod
    def load(cls, name: str) -> Server:
        """Load a shipped server by name, or the file at a path that ends in ``.json``.

        Raises:
            ClusterError: ``server-unknown``, ``server-file``, ``server-schema``,
                ``server-corrupt``, and those of the numbers: ``server-devices``, ``server-memory``,
                ``server-rate`` and ``server-seconds``, all at once.
        """
        return _load(name)

    @classmethod
    def of(cls, cluster: Cluster) -> Server:
        """Return the server that one node of a target's devices makes.

        Raises:
            ClusterError: ``server-nodes`` for more than one node; TargetError: those of
                ``Machine.of``.
        """
        if len(cluster.nodes) > 1:
            raise ClusterError.of(
                f"cluster {cluster} has {len(cluster.nodes)} nodes; packs of layers are streamed "
                "from one host: give 1xG.",
                "server-nodes",
            )
        machine = Machine.of(cluster)
        rates, memory, count = machine.rates, machine.target.memory, cluster.num_devices
        assert memory is not None, "a machine has memory"
        host = machine.target.host
        return cls(
            f"{cluster.target}-x{count}",
            Sourced(count, "the cluster"),
            memory.capacity_bytes,
            Sourced(memory.usable_bytes, str(memory)),
            replace(host.memory_bytes, value=host.memory_bytes.value * count),
            rates.host.to_device.bytes_per_second,
            rates.intra_node.bytes_per_second,
            host.message_bytes_per_second,
            host.delete_seconds,
            machine.target.description,
        )

    def document(self) -> dict[str, Any]:
        """Return the server as its file has it."""
        return SERVER.write(documents.fields_of(self))

    @property
    def devices(self) -> int:
        return int(self.num_devices.value)

    @property
    def assumed(self) -> dict[str, str]:
        """Numbers that nobody measured, specified or gave, and where they are from."""
        return {
            name: f"{format_quantity(name, number.value)}: {number.source.removeprefix(ASSUMED)}"
            for name, number in vars(self).items()
            if isinstance(number, Sourced) and number.source.startswith(ASSUMED)
        }

    def with_(self, **sizes: int | None) -> Server:
        """Return the server with other sizes, by the names of their fields; None keeps one."""
        given = {name: Sourced(n, "given") for name, n in sizes.items() if n is not None}
        return replace(self, **given)  # type: ignore[arg-type]

    def _violations(self) -> Iterator[Violation]:
        devices = self.num_devices.value
        if not devices >= 1 or devices != int(devices):
            yield Violation(
                f"num_devices={devices} of server {self.name!r}; give a whole number from 1 on.",
                "server-devices",
            )
        for name in ("memory_bytes", "usable_bytes", "host_memory_bytes"):
            value = getattr(self, name).value
            if not 0 < value < float("inf"):
                yield Violation(
                    f"{name}={value} of server {self.name!r} is no memory; give bytes above 0.",
                    "server-memory",
                )
        for name in ("swap", "p2p", "message"):
            value = getattr(self, f"{name}_bytes_per_second").value
            if not 0 < value < float("inf"):
                yield Violation(
                    f"{name}_bytes_per_second={value} of server {self.name!r} is no bandwidth; "
                    "give bytes per second above 0.",
                    "server-rate",
                )
        if not 0 <= self.delete_seconds.value < float("inf"):
            yield Violation(
                f"delete_seconds={self.delete_seconds.value} of server {self.name!r}; give 0 or "
                "more.",
                "server-seconds",
            )


def server_names() -> tuple[str, ...]:
    """Return the names of the shipped servers, sorted."""
    return tuple(sorted(path.stem for path in SERVERS_FOLDER.glob("*.json")))


@cache
def _load(name: str) -> Server:
    is_file = name.endswith(".json")
    if not is_file and name not in server_names():
        near = nearest(name, server_names())
        raise ClusterError.of(
            f"machine={name!r} is unknown; choose one of {', '.join(server_names())}, give the "
            f"path of a server file (.json), or --cluster 1xG and --target.{near}",
            "server-unknown",
        )
    path = name if is_file else SERVERS_FOLDER / f"{name}.json"
    return replace(SERVER.load(path, _read), name=name)


def _read(data: object) -> Server:
    ClusterError.check(_without_rate(data))
    return SERVER.read(data, Server)


def _without_rate(data: object) -> list[Violation]:
    """Return a violation for each bandwidth that a server file does not say."""
    known = data if isinstance(data, dict) else {}
    return [
        Violation(
            f"server file has no {field.name}; give its bytes per second, and where that is from.",
            "server-rate",
        )
        for field in fields(Server)
        if field.name.endswith("_per_second") and field.name not in known
    ]
