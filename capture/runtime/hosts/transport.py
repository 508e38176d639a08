"""How arrays get from a process to another, whatever carries them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from capture import environment
from capture.tracing.keys import words

#: A device, the kind of its memories, and an address there.
Buffer = tuple[jax.Device, str, int]


@dataclass(frozen=True, eq=False)
class Shipment:
    """Arrays that go together from a process to another, each from one device to one.

    Attributes:
        sources: Of each array, its device in the sender.
        is_acknowledged: Whether the sender is told when all has arrived.
    """

    sender: int
    receiver: int
    sources: tuple[jax.Device, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    label: str
    is_acknowledged: bool = True

    @cached_property
    def targets(self) -> tuple[jax.Device, ...]:
        """The device of each array in the receiver."""
        return tuple(next(iter(struct.sharding.device_set)) for struct in self.structs)  # type: ignore[union-attr]

    @cached_property
    def of_targets(self) -> dict[jax.Device, tuple[int, ...]]:
        """The array numbers per device of the receiver, which acknowledges them together."""
        found: defaultdict[jax.Device, list[int]] = defaultdict(list)
        for number, device in enumerate(self.targets):
            found[device].append(number)
        return {device: tuple(numbers) for device, numbers in found.items()}


class Transport(Protocol):
    """A way in which arrays get from one process to another.

    Attributes:
        takes_all: Whether every process carries every shipment, in one order, also those of others;
            else only the two of a shipment do.
        waiting: By number and receiver, the buffers that are offered and not acknowledged and
            their bytes, for a check of the ledger; None where nobody asks.
        held: Arrays of its own, of 4 bytes an element, which no ledger books.
    """

    takes_all: bool
    waiting: dict[tuple[int, int], dict[Buffer, int]] | None

    @property
    def held(self) -> Sequence[jax.Array]: ...

    def carry(
        self, shipment: Shipment, number: int, arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Return the shipment's arrays in the receiver, none elsewhere. They may still be on their
        way: nothing is waited for.

        What is carried is held until the receiver has it, but an array that is donated or deleted
        before is not protected.

        Args:
            number: The same in all processes, and another every time.
            arrays: In the sender; of others nothing is read.
        """

    def wait(self, shipment: Shipment, number: int) -> None:
        """Block the sender until the receiver has all arrays of the shipment."""


class Silence:
    """A watch that ends the waiting for arrays that do not come: neither transport has a limit of
    its own that works (a pull's ``timeout`` does not fire on a silent connection).

    Args:
        on_silence: Called with a sentence when it is over.
    """

    def __init__(self, patience_seconds: float, on_silence: Callable[[str], None]):
        self._patience_seconds, self._on_silence = patience_seconds, on_silence
        self._count = 0
        self._awaited: dict[int, tuple[Any, float, int, str]] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, array: jax.Array, host: int, label: str) -> None:
        """Watch an array that is on its way from a host."""
        self._count += 1
        self._awaited[self._count] = weakref.ref(array), time.monotonic(), host, label

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            now, found = time.monotonic(), list(self._awaited.items())
            for number, (reference, since, host, label) in found:
                if _has_come(reference()):
                    del self._awaited[number]
                elif now - since > environment.patience(self._patience_seconds):
                    self._on_silence(
                        f"host {host} has not sent {label} within {now - since:.0f} s; look why it "
                        "is slow, frozen or cut off."
                    )
                    return


def _has_come(array: Any) -> bool:
    try:
        return array is None or array.is_deleted() or array.is_ready()
    except RuntimeError:  # deleted in between
        return True


def buffers(arrays: Iterable[jax.Array]) -> dict[Buffer, int]:
    """Return the bytes of the distinct buffers of some arrays.

    Looking at a shard makes an array of it, which is alive as well, so buffers are told apart by
    their address.
    """
    return {
        buffer: size
        for array in arrays
        if not array.is_deleted()
        for buffer, size in array_buffers(array)
    }


def array_buffers(array: jax.Array) -> list[tuple[Buffer, int]]:
    """Return the bytes of each buffer of an array in this process."""
    shards = [(shard.device, shard.data) for shard in words(array).addressable_shards]
    return [
        ((device, data.sharding.memory_kind, data.unsafe_buffer_pointer()), data.nbytes)
        for device, data in shards
        if data.nbytes
    ]


@jax.jit
def touch(arrays: list[jax.Array]) -> jax.Array:
    """Return a value that is there as soon as all arrays are."""
    return jnp.stack([jnp.real(array.ravel()[0]).astype(jnp.float32) for array in arrays])
