"""Move an array between shardings on different, overlapping or equal device sets, without the host
and without blocking.

``jax.device_put`` of a sharded array to another layout goes through host memory and holds up the
thread that dispatches the pipeline. Here every destination shard is cut out of the source shards on
their own devices, the pieces are copied device to device, and joined on the destination; all of it
is only enqueued. The same move is made thousands of times in a step, so what to cut, copy and join
is worked out once (``plan_reshard``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from capture.errors import ExecutionError
from capture.runtime.fast_paths import plan_copies
from capture.runtime.fetches import Box, Fetches, boxes, plan_fetches
from capture.tracing.keys import is_key


def reshard(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the values under another sharding, in buffers of their own, maybe not yet there.

    Args:
        x: Any array of any rank, typed random keys included; its shards must be addressable by this
            process.
        sharding: The result's, usually a ``NamedSharding``.

    Raises:
        ExecutionError: ``reshard-addressable``, see ``plan_reshard``.
    """
    return plan_reshard(x.shape, x.dtype, x.sharding, sharding)(x)


@lru_cache(maxsize=4096)
def plan_reshard(
    shape: tuple[int, ...], dtype: object, src: Sharding, dst: Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Work out a move once, to be made many times.

    Each piece that ``plan_fetches`` names is cut on its source, copied, and the grid is joined
    dimension by dimension.

    Args:
        dtype: Data type of the elements; typed random keys move as their key data.
        src: Sharding of the arrays that will be given; an equivalent one serves as well.

    Returns:
        A function of one array.

    Raises:
        ExecutionError: ``reshard-addressable`` if a device of either sharding belongs to another
            process.
    """
    for role, sharding in (("source", src), ("destination", dst)):
        if not sharding.is_fully_addressable:
            raise ExecutionError.of(
                f"the {role} sharding {sharding} has devices of another process; reshard moves "
                "arrays within one process.",
                "reshard-addressable",
            )
    if is_key(struct := jax.ShapeDtypeStruct(shape, dtype)):
        return _plan_keys(struct, src, dst)
    if goes_whole(shape, src, dst):
        copy = plan_copies([dst])
        return lambda x: copy([x])[0]
    return _plan_pieces(shape, plan_fetches(tuple(shape), src, dst), dst)


def plan_moves(
    sources: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding]
) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """Work out several moves at once; where all are copies of whole shards, one call enqueues them.

    Args:
        sources: Shapes, dtypes and shardings of the arrays that will be given.
        shardings: Those of the results, in the same order.
    """
    pairs = list(zip(sources, shardings, strict=True))
    if all(
        source.sharding is not None
        and source.sharding.is_fully_addressable
        and sharding.is_fully_addressable
        and not is_key(source)
        and goes_whole(tuple(source.shape), source.sharding, sharding)
        for source, sharding in pairs
    ):
        return plan_copies(shardings)
    moves = [
        plan_reshard(tuple(source.shape), source.dtype, source.sharding, sharding)
        for source, sharding in pairs
    ]
    return lambda arrays: [move(array) for move, array in zip(moves, arrays, strict=True)]


@lru_cache(maxsize=4096)
def goes_whole(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> bool:
    """Return whether every shard is copied as it is to another device, or another memory."""
    src_boxes, dst_boxes = boxes(src, shape), boxes(dst, shape)
    # One device to one, or shard for shard onto other devices: XLA does these without the host. On
    # devices in common it would alias, whatever JAX is told, if the source is a replica (seen in
    # jax 0.10.2 and 0.12); another memory of theirs is no alias.
    return list(src_boxes.values()) == list(dst_boxes.values()) and (
        not src.device_set & dst.device_set or src.memory_kind != dst.memory_kind
    )


def _plan_keys(
    struct: jax.ShapeDtypeStruct, src: Sharding, dst: Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Return the move of random keys by their data, which has the shape of the keys and one more
    dimension, which a ``NamedSharding`` of the keys leaves whole."""
    data = jax.eval_shape(jax.random.key_data, struct)
    move = plan_reshard(data.shape, data.dtype, src, dst)

    def move_keys(x: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(move(jax.random.key_data(x)), impl=jax.random.key_impl(x))

    return move_keys


def _plan_pieces(
    shape: tuple[int, ...], found: Fetches, dst: Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Return the general move: cut, copy, join."""
    fetches = found.fetches
    cutters = {device: cutter(cuts) for device, cuts in found.cuts.items()}
    joins = [
        (len(starts), joiner(starts) if len(starts) > 1 else None) for _, starts in found.joins
    ]
    # What is already in place needs no copy: a cut is a new buffer, and so is what a join makes of
    # whole shards.
    joined = [join is not None for count, join in joins for _ in range(count)]
    copies = [
        number
        for number, fetch in enumerate(fetches)
        if fetch.source != fetch.target or (fetch.piece is None and not joined[number])
    ]
    copy = plan_copies(
        [
            SingleDeviceSharding(fetches[number].target, memory_kind=dst.memory_kind)
            for number in copies
        ]
    )

    def move(x: jax.Array) -> jax.Array:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        pieces = {device: cut(shards[device]) for device, cut in cutters.items()}
        parts = [
            shards[fetch.source] if fetch.piece is None else pieces[fetch.source][fetch.piece]
            for fetch in fetches
        ]
        moved = copy([parts[number] for number in copies]) if copies else []
        for number, part in zip(copies, moved, strict=True):
            parts[number] = part
        arrays, position = [], 0
        for count, join in joins:
            arrays.append(
                parts[position] if join is None else join(*parts[position : position + count])
            )
            position += count
        return jax.make_array_from_single_device_arrays(shape, dst, arrays)

    return move


@lru_cache(maxsize=4096)
def cutter(cuts: tuple[Box, ...]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Return one program that cuts all pieces wanted of a shard."""

    @jax.jit
    def cut(shard: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(shard[tuple(slice(start, stop) for start, stop in box)] for box in cuts)

    return cut


@lru_cache(maxsize=4096)
def joiner(starts: tuple[tuple[int, ...], ...]) -> Callable[..., jax.Array]:
    """Return one program that joins a grid of pieces, given their first indexes, ascending."""

    def nest(pieces: Sequence[tuple[tuple[int, ...], jax.Array]], dim: int) -> jax.Array:
        if len(pieces) == 1:
            return pieces[0][1]
        rows = sorted({start[dim] for start, _ in pieces})
        parts = [nest([piece for piece in pieces if piece[0][dim] == row], dim + 1) for row in rows]
        return jnp.concatenate(parts, dim) if len(parts) > 1 else parts[0]

    @jax.jit
    def join(*pieces: jax.Array) -> jax.Array:
        return nest(list(zip(starts, pieces, strict=True)), 0)

    return join
