"""What the devices of data parallelism give each other of a pack: they add gradients, and where
each has a share of the arrays on the host, they make weights whole and scatter sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import AnyCompiler, Executable
from capture.runtime.fast_paths import FlatCall
from capture.runtime.frame import Call

_DEVICE = "device"


def share_struct(struct: jax.ShapeDtypeStruct, num_shares: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a share of an array: its elements in a row, in equal parts, padded."""
    elements = int(np.prod(struct.shape, dtype=np.int64))
    return jax.ShapeDtypeStruct((-(-elements // num_shares),), struct.dtype)


def share_of(array: Any, which: int, num_shares: int, xp: Any = np) -> Any:
    """Return one share of an array of NumPy or, with ``xp=jax.numpy``, of JAX."""
    flat = array.reshape(-1)
    size = -(-flat.size // num_shares)
    part = flat[which * size : (which + 1) * size]
    return part if part.size == size else xp.pad(part, (0, size - part.size))


def joined(shares: Sequence[Any], shape: tuple[int, ...], xp: Any = np) -> Any:
    """Return the array of which these are all shares."""
    return xp.concatenate(shares)[: int(np.prod(shape, dtype=np.int64))].reshape(shape)


@dataclass(frozen=True)
class Exchange:
    """A program of all devices that reduces, scatters or gathers their arrays.

    Attributes:
        kind: ``reduce`` gives all the sum over all, ``scatter`` each its share of that, and
            ``gather`` makes of the shares of all the whole.
        given, made: Arrays of one device.
        shardings: Of all devices in their order, how an array lies on each.
    """

    kind: str
    given: Sequence[jax.ShapeDtypeStruct]
    made: Sequence[jax.ShapeDtypeStruct]
    shardings: Sequence[NamedSharding]

    @property
    def key(self) -> Any:
        """The kind, the number of devices and the shapes, which tell the program from others."""
        structs = (*self.given, *self.made)
        shapes = tuple((struct.shape, str(struct.dtype)) for struct in structs)
        return self.kind, len(self.shardings), shapes

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh([each.mesh.devices.item() for each in self.shardings], (_DEVICE,))

    @cached_property
    def _joined(self) -> list[jax.ShapeDtypeStruct]:
        sharding = NamedSharding(self._mesh, PartitionSpec(_DEVICE))
        return [
            jax.ShapeDtypeStruct(
                (len(self.shardings) * rows, *rest), struct.dtype, sharding=sharding
            )
            for struct in self.given
            for rows, *rest in [struct.shape or (1,)]
        ]

    def _of(self, struct: jax.ShapeDtypeStruct) -> Callable[[Any], Any]:
        """Return what a device computes, with the others, from one of its arrays."""

        def gather(share: object) -> Any:
            whole = jax.lax.all_gather(share, _DEVICE, tiled=True)
            return whole[: int(np.prod(struct.shape, dtype=np.int64))].reshape(struct.shape)

        def scatter(array: jax.Array) -> Any:
            (size,), count = struct.shape, len(self.shardings)
            flat = jnp.pad(array.reshape(-1), (0, count * size - array.size))
            return jax.lax.psum_scatter(flat, _DEVICE, tiled=True)

        def add(array: jax.Array) -> Any:
            return jax.lax.psum(array, _DEVICE).reshape(struct.shape)

        return {"gather": gather, "scatter": scatter, "reduce": add}[self.kind]

    def compiled(self, compiler: AnyCompiler) -> Executable:
        """Compile the program, on joined arrays."""
        spec = PartitionSpec(_DEVICE) if self.kind == "scatter" else PartitionSpec()
        functions = [self._of(struct) for struct in self.made]

        def exchange(*arrays: Any) -> list[Any]:
            return [function(array) for function, array in zip(functions, arrays, strict=True)]

        program = jax.shard_map(
            exchange,
            mesh=self._mesh,
            in_specs=PartitionSpec(_DEVICE),
            out_specs=spec,
            check_vma=False,
        )
        every = tuple(range(len(self.given)))
        shardings = [NamedSharding(self._mesh, spec)] * len(every)
        return compiler(program, self._joined, donate=every, out_shardings=shardings)

    def call(self, program: FlatCall, sizes: Sequence[int]) -> Call:
        """Return the program as a call on the arrays of slots, device by device; ``sizes`` says how
        many of a device's results are in each slot."""
        count = len(self.given)

        def exchange(flat: list[jax.Array]) -> list[list[jax.Array]]:
            together: list[jax.Array] = [
                jax.make_array_from_single_device_arrays(
                    struct.shape,
                    struct.sharding,
                    [array if array.ndim else array.reshape(1) for array in flat[i::count]],
                )
                for i, struct in enumerate(self._joined)
            ]
            parts = [
                {shard.device: shard.data for shard in result.addressable_shards}
                for result in program(together)
            ]
            found: list[list[jax.Array]] = []
            for device, sharding in zip(self._mesh.devices, self.shardings, strict=True):
                arrays: Iterator[jax.Array] = iter(
                    jax.make_array_from_single_device_arrays(struct.shape, sharding, [part[device]])
                    for struct, part in zip(self.made, parts, strict=True)
                )
                found += [[next(arrays) for _ in range(size)] for size in sizes]
            return found

        return exchange
