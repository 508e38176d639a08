"""Arrays between processes over sockets: ``jax.experimental.transfer``.

The sender offers arrays under a number, the receiver pulls them; nothing depends on the order in
which the two get there, and no third process takes part. The numbers are computed by both sides.
Nothing is encrypted, and whoever reaches the port can pull: it listens on the one address by which
the hosts know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from capture.runtime.hosts.transport import Buffer, Bundle, Silence, buffers, touch

#: Sockets to each peer over which pieces of an array travel side by side.
_SOCKETS = 2
#: In which pieces, and how many at once; by default JAX reserves 256 MiB for each.
_PIECE_BYTES, _PIECES = 2**22, 8
#: Of the number of an offer: an acknowledgement.
_ACKNOWLEDGED = 1 << 62


class Sockets:
    """The transfer server of this process, and its connections: a ``Transport``.

    Args:
        address: Of this host, where it listens.
        process: Number of this process.
        exchange: Gives every process's address for this one's.
        silence: Watches over what is pulled.
    """

    takes_all = False
    held: Sequence[jax.Array] = ()

    def __init__(
        self,
        address: str,
        process: int,
        exchange: Callable[[str], Sequence[str]],
        silence: Silence,
    ):
        client = jax.local_devices()[0].client
        own = [f"{address}:0"] * _SOCKETS
        self._server: Any = transfer.start_transfer_server(
            client, f"{address}:0", own, _PIECES, _PIECE_BYTES
        )
        self._addresses = exchange(self._server.address())
        self._connections: dict[int, Any] = {}
        self._process, self._silence = process, silence
        self.waiting: dict[tuple[int, int], dict[Buffer, int]] | None = None

    def carry(
        self, bundle: Bundle, number: int, arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        own = self._number(number, bundle.receiver)
        if bundle.sender == self._process:
            self._server.await_pull(own, list(arrays))
            if bundle.is_acknowledged and self.waiting is not None:
                self.waiting[number, bundle.receiver] = buffers(arrays)
            return ()
        got = self._pull(bundle.sender, own, bundle.structs, bundle.label)
        if bundle.is_acknowledged:
            arrived = [touch([got[n] for n in numbers]) for numbers in bundle.of_targets.values()]
            self._server.await_pull(_ACKNOWLEDGED | self._number(number, bundle.sender), arrived)
        return got

    def wait(self, bundle: Bundle, number: int) -> None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        structs = [
            jax.ShapeDtypeStruct((len(numbers),), jnp.float32, sharding=sharding)
            for numbers in bundle.of_targets.values()
        ]
        own = _ACKNOWLEDGED | self._number(number, bundle.sender)
        label = f"the acknowledgement of {bundle.label!r}"
        for array in self._pull(bundle.receiver, own, structs, label):
            array.block_until_ready()
        if self.waiting is not None:
            self.waiting.pop((number, bundle.receiver), None)

    def _number(self, number: int, host: int) -> int:
        """Of what this process offers to a host, and that one pulls."""
        return number * len(self._addresses) + host

    def _pull(
        self, host: int, number: int, structs: Sequence[jax.ShapeDtypeStruct], label: str
    ) -> list[jax.Array]:
        if host not in self._connections:
            self._connections[host] = self._server.connect(self._addresses[host])
        arrays = self._connections[host].pull(number, list(structs))
        self._silence.expect(arrays[-1], host, label)
        return arrays
