"""An item of a checkpoint: arrays, such as those of a stage, written by Orbax in the processes that
hold them, each its shards; and read, in part, by any process alone."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from capture.tracing.keys import words

#: Read at once to sum a file up.
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class _Shard:
    index: tuple[slice, ...]
    replica_id: int
    host: np.ndarray | None
    shape: tuple[int, ...]
    dtype: Any

    @cached_property
    def data(self) -> Any:
        """The array that Orbax takes to be on a device; a mere structure if others write it."""
        if self.host is None:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.device_put(self.host, _host_device())


class Shards:
    """This process's shards of an array, copied to the host: meanwhile the array may be donated.

    To Orbax's array handler they are a ``jax.Array``, and to its checks they are not: it refuses
    arrays that live in one of several processes, and its handler of NumPy arrays writes in process
    0 alone. Of what several devices hold alike, one writes.

    Args:
        array: Its copy is awaited.
    """

    def __init__(self, array: jax.Array):
        array = words(array)
        self.shape, self.dtype, self.sharding = array.shape, array.dtype, array.sharding
        self.addressable_shards = [
            _Shard(
                shard.index,
                shard.replica_id,
                None if shard.replica_id else np.array(shard.data),
                shard.data.shape,
                array.dtype,
            )
            for shard in array.addressable_shards
        ]

    @classmethod
    def of_host(cls, leaf: np.ndarray, sharding: jax.sharding.Sharding, *, writes: bool) -> Shards:
        """Make ``Shards`` of what all processes of an item have on the host, and one writes; it may
        not change until then."""
        shards = object.__new__(cls)
        shards.shape, shards.dtype, shards.sharding = leaf.shape, leaf.dtype, sharding
        index = tuple(slice(None) for _ in leaf.shape)
        own = leaf if writes else None
        shards.addressable_shards = [_Shard(index, int(not writes), own, leaf.shape, leaf.dtype)]
        return shards

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


def write_item(path: Path, item: Mapping[str, Mapping[str, Shards]], writers: Collection[int]):
    """Write the arrays of an item; each of its processes calls it.

    Args:
        path: Where; every save has another.
        writers: The processes; the first of them makes the folder, and renames it at the end.
    """
    first = min(writers)
    together = _together(first, writers, f"{path.parent.name}.{path.name}")
    handler = ocp.type_handlers.ArrayHandler(
        primary_host=first, use_replica_parallel=False, enable_write_sharding_file=False
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (Shards, handler), (jax.Array, handler)
    )
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            multiprocessing_options=together, type_handler_registry=registry
        ),
        multiprocessing_options=together,
    ) as checkpointer:
        checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(item))


def read_item(path: Path, wanted: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """Return arrays of an item, by part and path, whole, on this host."""
    own = jax.process_index()
    alone = _together(own, {own}, f"{path.parent.name}.{path.name}.read")
    asked = {part: dict.fromkeys(paths, 0) for part, paths in wanted.items() if paths}
    if not asked:
        return {part: {} for part in wanted}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), asked)
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    ) as checkpointer:
        read = checkpointer.restore(
            path.resolve(),
            args=ocp.args.PyTreeRestore(asked, restore_args=as_numpy, partial_restore=True),
        )
    return {part: read.get(part, {}) for part in wanted}


def files_of(path: Path) -> dict[str, list[int]]:
    """Return the size and CRC-32 of every file of an item, by its path in the checkpoint."""
    return {
        str(file.relative_to(path.parent)): list(_sum(file))
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def damage(checkpoint: Path, files: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield, for each file that is not what was written, what is wrong with it."""
    for name, (size, total) in files.items():
        file = checkpoint / name
        if not file.is_file():
            yield f"{name} is missing"
        elif (there := file.stat().st_size) != size:
            yield f"{name} has {there} bytes and was written with {size}"
        elif _sum(file) != (size, total):
            yield f"{name} has other content than was written"


def _sum(file: Path) -> tuple[int, int]:
    size = total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
    return size, total


def _together(
    first: int, processes: Collection[int], name: str
) -> ocp.options.MultiprocessingOptions:
    return ocp.options.MultiprocessingOptions(
        primary_host=first, active_processes=set(processes), barrier_sync_key_prefix=name
    )


def _host_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return jax.local_devices()[0]
