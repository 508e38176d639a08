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

from capture.runtime.fast_paths import of_shards, plan_copies
from capture.runtime.fetches import Fetches, plan_fetches
from capture.runtime.hosts.transport import Shipment, Transport
from capture.runtime.reshard import cutter, joiner
from capture.step.offers import Crossing
from capture.tracing.keys import is_key, words


@dataclass(frozen=True)
class ArrayMove:
    """The move of an array from its sharding to another; typed random keys travel as data."""

    shape: tuple[int, ...]
    dtype: Any
    target: Sharding
    fetches: Fetches
    key_impl: Any = None

    @classmethod
    def of(cls, source: jax.ShapeDtypeStruct, target: Sharding) -> ArrayMove:
        impl, struct = None, source
        if is_key(source):
            impl = source.dtype._impl  # type: ignore[attr-defined]  # it has no public name
            struct = jax.eval_shape(jax.random.key_data, source)
        assert source.sharding is not None
        shape = tuple(struct.shape)
        return cls(shape, struct.dtype, target, plan_fetches(shape, source.sharding, target), impl)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


class CopyAcross:
    """A copy some of whose pieces go from one process to another."""

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
        """The (sender, receiver) pairs, and the bytes of cuts per ``jax.Device.id``."""
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
        """Return the (move, fetch) pairs of the pieces that go from a process to another, in the
        order in which they are offered."""
        return [
            (m, f)
            for m, move in enumerate(self.moves)
            for f, fetch in enumerate(move.fetches.fetches)
            if (fetch.source.process_index, fetch.target.process_index) == (sender, receiver)
        ]


class BoundCopy:
    """A copy between processes, as one of them takes part in it.

    Args:
        is_acknowledged: Whether senders are told what has arrived.
    """

    def __init__(
        self,
        across: CopyAcross,
        process: int,
        transport: Transport,
        *,
        is_acknowledged: bool = True,
    ):
        self._across, self._process, self._transport = across, process, transport
        self._moves, pairs = across.moves, sorted(across.crossing.pairs)
        self._shipments = [
            (self._shipment(*pair, is_acknowledged), across.between(*pair))
            for pair in pairs
            if transport.takes_all or process in pair
        ]
        self._local = across.between(process, process)
        self._copy = plan_copies([self._struct(m, f).sharding for m, f in self._local])  # type: ignore[misc]
        self._joins = [
            [
                (target, len(starts), joiner(starts) if len(starts) > 1 else None)
                for target, starts in move.fetches.joins
            ]
            for move in self._moves
        ]
        self._wholes = [
            of_shards(jax.ShapeDtypeStruct(move.shape, move.dtype, sharding=move.target))
            for move in self._moves
        ]

    @property
    def sends(self) -> bool:
        return any(shipment.sender == self._process for shipment, _ in self._shipments)

    @property
    def receives(self) -> bool:
        return any(
            target.process_index == self._process
            for move in self._moves
            for target, _ in move.fetches.joins
        )

    @property
    def takes_part(self) -> bool:
        return bool(self._shipments or self._local)

    def cutters(self, device: jax.Device) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Return a function that cuts a device's shards into all its pieces, array by array."""
        cuts = [
            (m, cutter(move.fetches.cuts[device]))
            for m, move in enumerate(self._moves)
            if device in move.fetches.cuts
        ]

        def cut(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [piece for m, program in cuts for piece in program(_shards(arrays[m])[device])]

        return cut

    def __call__(
        self,
        arrays: Sequence[jax.Array],
        pieces: dict[jax.Device, list[jax.Array]],
        number: int,
    ) -> list[jax.Array]:
        """Return the copied arrays, whose pieces from other processes may still be on their way. A
        process that has no part of the target gets none.

        Args:
            arrays: The source's; none in a process that has no part of them.
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

        found: dict[tuple[int, int], jax.Array] = {}
        for shipment, carried in self._shipments:
            is_sent = shipment.sender == self._process
            sent = [part(m, f) for m, f in carried] if is_sent else ()
            found |= zip(carried, self._transport.carry(shipment, number, sent), strict=False)
        if self._local:
            here = self._copy([part(m, f) for m, f in self._local])
            found |= zip(self._local, here, strict=True)
        return [self._joined(m, found) for m in range(len(self._moves))] if self.receives else []

    def wait(self, number: int) -> None:
        """Block until all that this process has sent has arrived."""
        for shipment, _ in self._shipments:
            if shipment.sender == self._process:
                self._transport.wait(shipment, number)

    def _shipment(self, sender: int, receiver: int, is_acknowledged: bool) -> Shipment:
        carried = self._across.between(sender, receiver)
        return Shipment(
            sender,
            receiver,
            tuple(self._moves[m].fetches.fetches[f].source for m, f in carried),
            tuple(self._struct(m, f) for m, f in carried),
            self._across.label,
            is_acknowledged,
        )

    def _struct(self, m: int, f: int) -> jax.ShapeDtypeStruct:
        move = self._moves[m]
        fetch = move.fetches.fetches[f]
        sharding = SingleDeviceSharding(fetch.target)
        return jax.ShapeDtypeStruct(fetch.shape, move.dtype, sharding=sharding)

    def _first_pieces(self, device: jax.Device) -> dict[int, int]:
        """Return, per array, how many pieces the device cuts of the arrays before it."""
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
        whole = self._wholes[m](arrays)
        if move.key_impl is None:
            return whole
        return jax.random.wrap_key_data(whole, impl=move.key_impl)


def _shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in words(array).addressable_shards}
