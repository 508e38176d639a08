"""Copies between processes: which pieces of which arrays, from whom to whom. Every process works
out the same from shapes and shardings alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from capture.runtime.array_copy import plan_copies
from capture.runtime.fetches import Fetches, plan_fetches
from capture.runtime.hosts.sockets import Buffer, Transport
from capture.runtime.reshard import cutter, joiner
from capture.step.offers import Crossing

#: Of the number of an offer: an acknowledgement.
_ACKNOWLEDGED = 1 << 62


@dataclass(frozen=True)
class ArrayMove:
    """How one array of a copy gets from its sharding to another. Typed random keys travel as their
    data.

    Attributes:
        shape, dtype: Of what travels.
        target: Sharding of the result.
        fetches: The pieces.
        key_impl: Of random keys.
    """

    shape: tuple[int, ...]
    dtype: Any
    target: Sharding
    fetches: Fetches
    key_impl: Any = None

    @classmethod
    def of(cls, source: jax.ShapeDtypeStruct, target: Sharding) -> ArrayMove:
        impl, struct = None, source
        if jnp.issubdtype(source.dtype, jax.dtypes.prng_key):
            impl = source.dtype._impl  # type: ignore[attr-defined]  # it has no public name
            struct = jax.eval_shape(jax.random.key_data, source)
        assert source.sharding is not None
        shape = tuple(struct.shape)
        return cls(shape, struct.dtype, target, plan_fetches(shape, source.sharding, target), impl)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


class CopyAcross:
    """A copy of which pieces cross from a process to others.

    Args:
        sources: Of the arrays that are copied, with their shardings.
        targets: Shardings of the results.
        label: What people call it.
    """

    def __init__(
        self, sources: Sequence[jax.ShapeDtypeStruct], targets: Sequence[Sharding], label: str
    ):
        self.moves = [
            ArrayMove.of(struct, sharding)
            for struct, sharding in zip(sources, targets, strict=True)
        ]
        self.label = label

    @cached_property
    def crossing(self) -> Crossing:
        """What it offers. Devices by ``jax.Device.id``."""
        pairs = {
            (fetch.source.process_index, fetch.target.process_index)
            for move in self.moves
            for fetch in move.fetches.fetches
        }
        pairs = {(sender, receiver) for sender, receiver in pairs if sender != receiver}
        nbytes: defaultdict[int, int] = defaultdict(int)
        for move in self.moves:
            for device, cuts in move.fetches.cuts.items():
                elements = sum(math.prod(b - a for a, b in cut) for cut in cuts)
                nbytes[device.id] += elements * move.itemsize
        return Crossing(frozenset(pairs), dict(nbytes))

    def between(self, sender: int, receiver: int) -> list[tuple[int, int]]:
        """(move, fetch) of the pieces that go from a process to another, in the order in which they
        are offered."""
        return [
            (m, f)
            for m, move in enumerate(self.moves)
            for f, fetch in enumerate(move.fetches.fetches)
            if (fetch.source.process_index, fetch.target.process_index) == (sender, receiver)
        ]


class BoundCopy:
    """A copy across, as one process takes part in it.

    Args:
        across: The copy.
        process, num_processes: This one, of how many.
        transport: Between them.
        acknowledged: Whether the sender is told what has arrived.
    """

    def __init__(
        self,
        across: CopyAcross,
        process: int,
        num_processes: int,
        transport: Transport,
        *,
        acknowledged: bool = True,
    ):
        self._acknowledged = acknowledged
        self._across, self._process, self._num_processes = across, process, num_processes
        self._transport, self._moves = transport, across.moves
        pairs = sorted(across.crossing.pairs)
        self._offers = {
            receiver: across.between(process, receiver)
            for sender, receiver in pairs
            if sender == process
        }
        self._pulls = {
            sender: across.between(sender, process)
            for sender, receiver in pairs
            if receiver == process
        }
        self._structs = {
            sender: [self._struct(m, f) for m, f in pieces]
            for sender, pieces in self._pulls.items()
        }
        self._local = across.between(process, process)
        self._copy = plan_copies([self._struct(m, f).sharding for m, f in self._local])  # type: ignore[misc]
        self._joins = [
            [
                (target, len(starts), joiner(starts) if len(starts) > 1 else None)
                for target, starts in move.fetches.joins
            ]
            for move in self._moves
        ]

    @property
    def sends(self) -> bool:
        return bool(self._offers)

    @property
    def receives(self) -> bool:
        return any(
            target.process_index == self._process
            for move in self._moves
            for target, _ in move.fetches.joins
        )

    def cutters(self, device: jax.Device) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Cuts a device's shards of the arrays into all its pieces, array by array."""
        cuts = [
            (m, cutter(move.fetches.cuts[device]))
            for m, move in enumerate(self._moves)
            if device in move.fetches.cuts
        ]

        def cut(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [piece for m, program in cuts for piece in program(_shards(arrays[m])[device])]

        return cut

    def send(
        self,
        arrays: Sequence[jax.Array],
        pieces: dict[jax.Device, list[jax.Array]],
        number: int,
    ) -> dict[tuple[int, int], jax.Array]:
        """Offer what goes to other processes; what stays in this one.

        Args:
            arrays: The source's.
            pieces: Of every device that cuts some, as ``cutters`` returns them.
            number: Of this copy in all that the processes ever make.
        """
        shards = [_shards(array) for array in arrays]
        first = {device: self._first_pieces(device) for device in pieces}

        def part(m: int, f: int) -> jax.Array:
            fetch = self._moves[m].fetches.fetches[f]
            if fetch.piece is None:
                return shards[m][fetch.source]
            return pieces[fetch.source][first[fetch.source][m] + fetch.piece]

        for receiver, wanted in self._offers.items():
            offered, own = [part(m, f) for m, f in wanted], self._number(number, receiver)
            self._transport.offer(own, offered)
            if self._acknowledged and self._transport.waiting is not None:
                self._transport.waiting[own] = _buffers(offered)
        here = self._copy([part(m, f) for m, f in self._local]) if self._local else []
        return dict(zip(self._local, here, strict=True))

    def receive(self, here: dict[tuple[int, int], jax.Array], number: int) -> list[jax.Array]:
        """The arrays of the target, of which other processes' pieces need not be there yet; their
        senders are told when they are.

        Args:
            here: What ``send`` of this process kept for it.
            number: As there.
        """
        found = dict(here)
        for sender, wanted in self._pulls.items():
            own = self._number(number, self._process)
            got = self._transport.pull(sender, own, self._structs[sender], self._across.label)
            found |= zip(wanted, got, strict=True)
            by_device: defaultdict[jax.Device, list[jax.Array]] = defaultdict(list)
            for struct, array in zip(self._structs[sender], got, strict=True):
                by_device[next(iter(struct.sharding.device_set))].append(array)  # type: ignore[union-attr]
            if self._acknowledged:
                touched = [_touch(arrays) for arrays in by_device.values()]
                self._transport.offer(self._number(number, sender, own=False), touched)
        return [self._joined(m, found) for m in range(len(self._moves))]

    def wait(self, number: int) -> None:
        """Until all that was offered has been pulled."""
        device = jax.local_devices()[0]
        for receiver, wanted in self._offers.items():
            counts: defaultdict[jax.Device, int] = defaultdict(int)
            for m, f in wanted:
                counts[self._moves[m].fetches.fetches[f].target] += 1
            structs = [
                jax.ShapeDtypeStruct((count,), jnp.float32, sharding=SingleDeviceSharding(device))
                for count in counts.values()
            ]
            label = f"the acknowledgement of {self._across.label!r}"
            own = self._number(number, self._process, own=False)
            for array in self._transport.pull(receiver, own, structs, label):
                array.block_until_ready()
            if self._transport.waiting is not None:
                self._transport.waiting.pop(self._number(number, receiver), None)

    def _struct(self, m: int, f: int) -> jax.ShapeDtypeStruct:
        move = self._moves[m]
        fetch = move.fetches.fetches[f]
        sharding = SingleDeviceSharding(fetch.target)
        return jax.ShapeDtypeStruct(fetch.shape, move.dtype, sharding=sharding)

    def _number(self, number: int, receiver: int, own: bool = True) -> int:
        """Of an offer to a process, and of an acknowledgement to it."""
        return (number * self._num_processes + receiver) | (0 if own else _ACKNOWLEDGED)

    def _first_pieces(self, device: jax.Device) -> dict[int, int]:
        """Per array, how many pieces of others come before its own."""
        found, count = {}, 0
        for m, move in enumerate(self._moves):
            found[m] = count
            count += len(move.fetches.cuts.get(device, ()))
        return found

    def _joined(self, m: int, found: dict[tuple[int, int], jax.Array]) -> jax.Array:
        move, arrays, position = self._moves[m], [], 0
        for target, count, join in self._joins[m]:
            if target.process_index == self._process:
                parts = [found[m, f] for f in range(position, position + count)]
                arrays.append(parts[0] if join is None else join(*parts))
            position += count
        whole = jax.make_array_from_single_device_arrays(move.shape, move.target, arrays)
        if move.key_impl is None:
            return whole
        return jax.random.wrap_key_data(whole, impl=move.key_impl)


def _shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return {shard.device: shard.data for shard in array.addressable_shards}


def _buffers(arrays: Sequence[jax.Array]) -> dict[Buffer, int]:
    """Bytes of arrays that are each on one device."""
    return {
        (array.device, str(array.sharding.memory_kind), array.unsafe_buffer_pointer()): array.nbytes
        for array in arrays
        if array.nbytes
    }


@jax.jit
def _touch(arrays: list[jax.Array]) -> jax.Array:
    """A value that is there as soon as all of them are."""
    return jnp.stack([jnp.real(array.ravel()[0]).astype(jnp.float32) for array in arrays])
