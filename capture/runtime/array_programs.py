"""The compiled programs of sub-arrays: equal ones once, by content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import HOST_MEMORY, AnyCompiler, Executable
from capture.memo import memo
from capture.runtime.fused import FusedArray
from capture.step.program import Place
from capture.step.sub_array import Call, ProgramFacts
from capture.tracing.hashing import digest
from capture.tracing.layers import LayerOps
from capture.tracing.slices import LayerFunction


class ArrayPrograms:
    """The compiler of the programs that sub-arrays run (``Programs``).

    Args:
        device: That all of it runs on, or one that stands for it.
    """

    def __init__(self, device: jax.Device, compiler: AnyCompiler):
        self.device, self._mesh = device, Mesh(np.asarray([device]), ("device",))
        self._compiler = compiler
        self.executables: dict[str, Executable] = {}

    def sharding(self, place: Place) -> NamedSharding:
        """Return a place's sharding: whole on the device, or in the memory of its host."""
        kind = None if place.host is None else HOST_MEMORY
        return NamedSharding(self._mesh, PartitionSpec(), memory_kind=kind)

    def structs(
        self, array: FusedArray, bundle: int, sharding: NamedSharding
    ) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of a bundle's arrays, with a sharding."""
        avals = [array.struct(value) for value in array.values[bundle]]
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]

    @memo
    def facts(self, sub_array: Any, call: Call) -> ProgramFacts:
        """Return name and temporaries of the program of a call, compiled if no equal one was."""
        name = program_name(sub_array, call)
        return ProgramFacts(name, self.executable(sub_array, call, name).transient_bytes)

    def executable(self, array: FusedArray, call: Call, name: str) -> Executable:
        """Return the program with this name, compiled for the call if it is not there."""
        if name not in self.executables:
            self.executables[name] = self._compiled(array, call, _operations(array, call))
        return self.executables[name]

    def _compiled(self, array: FusedArray, call: Call, ops: LayerOps) -> Executable:
        function = LayerFunction(ops, array.program.consts)
        values = [array.values[number] for number in call.inputs]
        results = [_results(array, number) for number in call.outputs]

        def run(*groups: Sequence[Any]) -> list[list[Any]]:
            found: dict[int, Any] = {}
            for own, group in zip(values, groups, strict=True):
                found |= zip(own, group, strict=True)
            function.add_to(found)
            return [[found[value] for value in own] for own in results]

        sharding = NamedSharding(self._mesh, PartitionSpec())
        args = [self.structs(array, number, sharding) for number in call.inputs]
        donated = [n for n, number in enumerate(call.inputs) if number in call.donated]
        out = [[sharding] * len(own) for own in results]
        return self._compiler(run, args, donate=donated, out_shardings=out)


def program_name(array: FusedArray, call: Call) -> str:
    """Return a name that is equal for equal programs: the same operations on bundles that are put
    together in the same way. Nothing is compiled."""
    ops = _operations(array, call)
    position = {v: n for n, v in enumerate((*ops.params, *ops.batch, *ops.inputs))}

    def named(value: int) -> Any:
        aval = array.struct(value)
        return position.get(value, f"{aval.dtype}{aval.shape}")

    made = {value: n for n, value in enumerate(ops.outputs)}
    inputs = [
        ([named(value) for value in array.values[number]], number in call.donated)
        for number in call.inputs
    ]
    outputs = [[made[value] for value in _results(array, number)] for number in call.outputs]
    return f"{call.kind} {digest(repr((array.hasher.layer_key(ops), inputs, outputs)))}"


def _operations(array: FusedArray, call: Call) -> LayerOps:
    if call.kind == "recompute":
        return array.slice(call.outputs, frozenset(call.inputs))
    return array.layers[call.segment]


def _results(array: FusedArray, bundle: int) -> tuple[int, ...]:
    """Return the values that a program makes for a bundle: of state, the new ones."""
    return array.renewed[bundle] or array.values[bundle]
