"""Arrays between processes over sockets: ``jax.experimental.transfer``.

The sender offers arrays under a number, the receiver pulls them; nothing depends on the order in
which the two get there, and no third process takes part. The numbers are computed by both sides.
Nothing is encrypted, and whoever reaches the port can pull: it listens on the one address by which
the hosts know each other.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.experimental import transfer

from capture import environment

#: Sockets to each peer over which pieces of an array travel side by side.
_SOCKETS = 2
#: In which pieces, and how many at once; by default JAX reserves 256 MiB for each.
_PIECE_BYTES, _PIECES = 2**22, 8


#: A device, the kind of its memories, and an address there.
Buffer = tuple[jax.Device, str, int]


class Transport(Protocol):
    """How arrays get from one process to another. None of the calls waits.

    Attributes:
        waiting: By number, the buffers that are offered and not acknowledged and their bytes, for a
            check of the ledger; None where nobody asks.
    """

    waiting: dict[int, dict[Buffer, int]] | None

    def offer(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Let the one receiver that knows the number pull the arrays, once. They are held until
        then; an array that is donated or deleted before is not protected."""

    def pull(
        self, sender: int, number: int, structs: Sequence[jax.ShapeDtypeStruct], label: str
    ) -> list[jax.Array]:
        """The arrays, which are not there yet; ``label`` says what they are."""


class Sockets:
    """The transfer server of this process, and its connections.

    Args:
        address: Of this host, where it listens.
        process: Number of this process.
        exchange: Gives every process's address for this one's.
        patience_seconds: For what is pulled.
        on_silence: Called with a sentence when it is over.
    """

    def __init__(
        self,
        address: str,
        process: int,
        exchange: Callable[[str], Sequence[str]],
        patience_seconds: float,
        on_silence: Callable[[str], None],
    ):
        client = jax.local_devices()[0].client
        own = [f"{address}:0"] * _SOCKETS
        self._server: Any = transfer.start_transfer_server(
            client, f"{address}:0", own, _PIECES, _PIECE_BYTES
        )
        self._addresses = exchange(self._server.address())
        self._connections: dict[int, Any] = {}
        self._pulled: dict[int, tuple[Any, float, str]] = {}
        self._count = 0
        self._patience_seconds, self._on_silence = patience_seconds, on_silence
        self.waiting: dict[int, dict[Buffer, int]] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def offer(self, number: int, arrays: Sequence[jax.Array]) -> None:
        self._server.await_pull(number, list(arrays))

    def pull(
        self, sender: int, number: int, structs: Sequence[jax.ShapeDtypeStruct], label: str
    ) -> list[jax.Array]:
        if sender not in self._connections:
            self._connections[sender] = self._server.connect(self._addresses[sender])
        arrays = self._connections[sender].pull(number, list(structs))
        what = f"host {sender} has not sent {label}"
        self._count += 1
        self._pulled[self._count] = weakref.ref(arrays[-1]), time.monotonic(), what
        return arrays

    def _watch(self) -> None:
        """A pull has no limit of its own that works (its ``timeout`` does not fire on a silent
        connection), and everything that a process waits for comes by one."""
        while True:
            time.sleep(1.0)
            now, found = time.monotonic(), list(self._pulled.items())
            for number, (reference, since, what) in found:
                if _has_come(reference()):
                    del self._pulled[number]
                elif now - since > environment.patience(self._patience_seconds):
                    late = f"within {now - since:.0f} s"
                    self._on_silence(f"{what} {late}; look why it is slow, frozen or cut off.")
                    return


def _has_come(array: Any) -> bool:
    try:
        return array is None or array.is_deleted() or array.is_ready()
    except RuntimeError:  # deleted in between
        return True
