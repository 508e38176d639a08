"""How the weights of a pack are updated: the optimizer's slice on slots of weights, state and
gradients of every device and pack, and the sum of the gradients of all devices where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import AnyCompiler, Executable
from capture.runtime.dispatch import Call
from capture.runtime.fast_paths import FlatCall
from capture.runtime.optimizer import StageUpdate, TracedOptimizer

Arrays = Sequence[Any]


@dataclass(frozen=True)
class PackUpdate:
    """A pack's slice of the optimizer as functions of slots: of weights, state, gradients, and of
    what other packs summarized.

    Attributes:
        stage: The slice.
        weights: Arrays of each slot of weights.
        params: Per slot of gradients, the parameter whose it is; None for those of all that the
            pack owns.
        groups: Slots of each argument.
    """

    stage: StageUpdate
    weights: Sequence[int]
    params: Sequence[int | None]
    groups: Sequence[int]

    def key(self, traced: TracedOptimizer) -> Any:
        """What tells it from updates of the same arguments."""
        stage = self.stage
        at = {param: i for i, param in enumerate(stage.params)}
        # Which of the other packs' values is which, the keys of parameters do not say.
        number = stage.stage_id if any(each.summary for each in stage.siblings) else None
        return (
            tuple(traced.param_keys[p] for p in stage.params),
            tuple(at.get(stage.param_of_state.get(k, -1), -1) for k in stage.state),
            tuple(None if param is None else at[param] for param in self.params),
            number,
        )

    def update(self, *slots: Arrays) -> list[Any]:
        """New weights and state."""
        params, state, gradients, summaries = self._arguments(slots)
        if summaries:  # what the loss does not read, has none
            summaries += [[]] * (len(self.stage.siblings) - 1 - len(summaries))
        params, state = self.stage.update(params, state, gradients, summaries)
        return [*cut(params, self.weights), state]

    def summarize(self, *slots: Arrays) -> list[Any]:
        """What the updates of other packs need of this one's gradients."""
        return [self.stage.summarize(*self._arguments(slots)[:3])]

    def _arguments(self, slots: Sequence[Arrays]) -> tuple[list[Any], ...]:
        weights, (state,), gradients, *rest = cut(slots, self.groups)
        at = {param: i for i, param in enumerate(self.stage.params)}
        whole = [
            given for given, param in zip(gradients, self.params, strict=True) if param is None
        ]
        total = [_sum(parts) for parts in zip(*whole, strict=True)]
        for given, param in zip(gradients, self.params, strict=True):
            if param is not None:
                total[at[param]] = total[at[param]] + given[0]
        params = [array for arrays in weights for array in arrays]
        return params, list(state), total, [summary for group in rest for summary in group]


@dataclass(frozen=True)
class Reduction:
    """The sum of the gradients of all devices, which all of them have afterwards: each gives its
    part of an array and gets the whole.

    Attributes:
        structs: The gradients of one device.
        shardings: Of all devices in their order, how it lies on each.
    """

    structs: Sequence[jax.ShapeDtypeStruct]
    shardings: Sequence[NamedSharding]

    @property
    def key(self) -> Any:
        """What tells it from others."""
        return "reduce", tuple((struct.shape, str(struct.dtype)) for struct in self.structs)

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh([each.mesh.devices.item() for each in self.shardings], ("device",))

    @cached_property
    def _joined(self) -> list[jax.ShapeDtypeStruct]:
        sharding = NamedSharding(self._mesh, PartitionSpec("device"))
        return [
            jax.ShapeDtypeStruct(
                (len(self.shardings) * rows, *rest), struct.dtype, sharding=sharding
            )
            for struct in self.structs
            for rows, *rest in [struct.shape or (1,)]
        ]

    def compiled(self, compiler: AnyCompiler) -> Executable:
        """The program, on joined arrays."""

        def add(*arrays: Any) -> list[Any]:
            return [
                jnp.sum(array.reshape(len(self.shardings), *struct.shape), 0, dtype=struct.dtype)
                for array, struct in zip(arrays, self.structs, strict=True)
            ]

        whole = NamedSharding(self._mesh, PartitionSpec())
        every = tuple(range(len(self.structs)))
        return compiler(add, self._joined, donate=every, out_shardings=[whole] * len(every))

    def call(self, program: FlatCall) -> Call:
        """That program on the arrays of slots, device by device."""
        count = len(self.structs)

        def reduce(flat: list[jax.Array]) -> list[list[jax.Array]]:
            joined: list[jax.Array] = [
                jax.make_array_from_single_device_arrays(
                    struct.shape,
                    struct.sharding,
                    [array if array.ndim else array.reshape(1) for array in flat[i::count]],
                )
                for i, struct in enumerate(self._joined)
            ]
            parts = [
                {shard.device: shard.data for shard in result.addressable_shards}
                for result in program(joined)
            ]
            return [
                [
                    jax.make_array_from_single_device_arrays(struct.shape, sharding, [part[device]])
                    for struct, part in zip(self.structs, parts, strict=True)
                ]
                for device, sharding in zip(self._mesh.devices, self.shardings, strict=True)
            ]

        return reduce


def cut(items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Consecutive groups."""
    found, start = [], 0
    for size in sizes:
        found.append(list(items[start : start + size]))
        start += size
    return found


def _sum(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
