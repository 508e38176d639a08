"""Arrays between processes over sockets: ``jax.experimental.transfer``.

The sender offers arrays under a number, the receiver pulls them; nothing depends on the order in
which the two get there, and no third process takes part. The numbers are computed by both sides.

JAX's server ends its process when a stranger sends it 8 bytes (jax 0.10.2), and whoever reaches it
can pull. So it listens on 127.0.0.1, between machines behind the gates of the hosts, and no longer
than until all hosts have connected to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from capture.runtime.hosts.addresses import check_reached, parted
from capture.runtime.hosts.gate import Gate, listening, shut
from capture.runtime.hosts.transport import Buffer, Shipment, Silence, buffers, touch

#: Sockets to each peer over which pieces of an array travel side by side.
_SOCKETS = 2
#: In which pieces, and how many at once; by default JAX reserves 256 MiB for each.
_PIECE_BYTES, _PIECES = 2**22, 8
#: Of the number of an offer: an acknowledgement.
_ACKNOWLEDGED = 1 << 62
#: Of the number of the first offer to a host.
_FIRST = 1 << 61


class Sockets:
    """A ``Transport`` by JAX's transfer server: the one of this process, and its connections.

    Args:
        exchange: Gives what every process says for what this one does.
        gate: Of this host; None if all are on this machine.
    """

    takes_all = False
    held: Sequence[jax.Array] = ()

    def __init__(
        self,
        process: int,
        exchange: Callable[[str, Any], list[Any]],
        silence: Silence,
        gate: Gate | None,
    ):
        self._process, self._silence = process, silence
        self.waiting: dict[tuple[int, int], dict[Buffer, int]] | None = None
        client, before = jax.local_devices()[0].client, listening()
        own = ["127.0.0.1:0"] * _SOCKETS
        self._server: Any = transfer.start_transfer_server(
            client, "127.0.0.1:0", own, _PIECES, _PIECE_BYTES
        )
        doors = {number: port for number, port in listening().items() if number not in before}
        control = parted(self._server.address())[1]
        ports = [control, *(port for port in doors.values() if port != control)]
        if gate is not None:
            gate.allow({port: port for port in ports})
        reached = self._server.address() if gate is None else gate.address
        places = exchange("addresses", [reached, *ports])
        check_reached([each[0] for each in places], process, lambda mine: exchange("reached", mine))
        self._connections = {
            host: self._server.connect(reached if gate is None else _through(gate, reached, ports))
            for host, (reached, *ports) in enumerate(places)
            if host != process
        }
        self._num_hosts = len(places)
        self._greet()
        exchange("connected", None)
        shut(doors)

    def _greet(self) -> None:
        """Pull an array from each host: its server has accepted this one then."""
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        struct = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=sharding)
        for host in self._connections:
            offered = [jnp.zeros(1, jnp.float32, device=sharding)]
            self._server.await_pull(_FIRST | self._number(0, host), offered)
        own = _FIRST | self._number(0, self._process)
        for host in self._connections:
            (array,) = self._pull(host, own, [struct], "its greeting")
            array.block_until_ready()

    def carry(
        self, shipment: Shipment, number: int, arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        own = self._number(number, shipment.receiver)
        if shipment.sender == self._process:
            self._server.await_pull(own, list(arrays))
            if shipment.is_acknowledged and self.waiting is not None:
                self.waiting[number, shipment.receiver] = buffers(arrays)
            return ()
        got = self._pull(shipment.sender, own, shipment.structs, shipment.label)
        if shipment.is_acknowledged:
            arrived = [touch([got[n] for n in numbers]) for numbers in shipment.of_targets.values()]
            self._server.await_pull(_ACKNOWLEDGED | self._number(number, shipment.sender), arrived)
        return got

    def wait(self, shipment: Shipment, number: int) -> None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        structs = [
            jax.ShapeDtypeStruct((len(numbers),), jnp.float32, sharding=sharding)
            for numbers in shipment.of_targets.values()
        ]
        own = _ACKNOWLEDGED | self._number(number, shipment.sender)
        label = f"the acknowledgement of {shipment.label!r}"
        for array in self._pull(shipment.receiver, own, structs, label):
            array.block_until_ready()
        if self.waiting is not None:
            self.waiting.pop((number, shipment.receiver), None)

    def _number(self, number: int, host: int) -> int:
        """Return the number under which a copy's arrays are offered to a host, and pulled by it."""
        return number * self._num_hosts + host

    def _pull(
        self, host: int, number: int, structs: Sequence[jax.ShapeDtypeStruct], label: str
    ) -> list[jax.Array]:
        arrays = self._connections[host].pull(number, list(structs))
        self._silence.expect(arrays[-1], host, label)
        return arrays


def _through(gate: Gate, other: str, ports: Sequence[int]) -> str:
    """Return the address of this machine that leads to another host's server, and have its server
    name such addresses, too.

    Args:
        other: The address of the other one's gate.
        ports: Of 127.0.0.1 there: of the server, and where it listens for arrays.
    """
    control, *others = ports
    renamed = {
        f"127.0.0.1:{port}": gate.dial(other, port, num_digits=len(str(port))) for port in others
    }
    return gate.dial(other, control, num_digits=len(str(control)), renamed=renamed)
