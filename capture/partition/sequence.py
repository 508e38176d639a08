"""Where the activations of a layer are split over the devices of a tensor-parallel group that would
otherwise each hold them whole: sequence parallelism, for any layer function.

Between products that are split over the mesh axis ``model``, activations are whole on every device.
Each layer is walked once more (``capture.partition.walk``), now with one dimension of what it is
given cut, as the positions of a sequence: whatever is whole and still has that dimension is split
along it. An operation that treats the dimension's elements alike, one by one, runs on the part; a
split product, or one that mixes them, is given the whole again. So of every all-reduce the
reduce-scatter comes after the product, and the all-gather before the next. A value that its maker
leaves split as all its readers want it stays so between stages.

A dimension is worth it if it saves more bytes than operations beside split products would gather or
sum; of several the one that saves most.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section
4.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.partition.dim_flow import dim_flow
from capture.partition.tensor_parallel import MODEL_AXIS, cut_dim
from capture.partition.walk import followed_dims, product_dim
from capture.tracing import TracedModel
from capture.tracing.jaxprs import BODIES, in_groups, is_body, is_variable, opened
from capture.tracing.program import Op, is_value
from capture.tracing.recompute import aval_bytes
from capture.tracing.slices import LayerCall, run_op, struct_of

#: What an operation beside split products reads whole, or sums over devices, counts against a
#: dimension: forwards and backwards.
_PASSES = 2


@dataclass(frozen=True)
class SequenceSplit:
    """The dimensions along which the values of one layer are split; None: as they come.

    Attributes:
        inputs: Dimension of each value that the layer is given.
        results: Dimension of each result of each operation.
        whole: Operands that each operation reads whole although they are split.
        parallel: Whether tensor parallelism splits each operation.
    """

    inputs: tuple[int | None, ...]
    results: tuple[tuple[int | None, ...], ...]
    whole: tuple[frozenset[int], ...]
    parallel: tuple[bool, ...]


class SequenceSplits:
    """The sequence splits of all layers, per tensor-parallel degree; equal layers are walked once.

    Args:
        traced: The model.
    """

    def __init__(self, traced: TracedModel):
        self._traced = traced
        self._known: dict[tuple[Any, ...], SequenceSplit | None] = {}

    def of_layers(
        self, specs: Sequence[PartitionSpec], degree: int
    ) -> list[tuple[LayerCall, SequenceSplit | None]]:
        """Return every layer with its sequence split; None where nothing is split.

        Args:
            specs: Spec of every parameter of the graph.
            degree: Devices of the group.
        """
        found = []
        for layer in self._traced.graph.layers:
            [call] = self._traced.slice(layer.layer_id, layer.layer_id + 1).calls
            cuts = tuple(cut_dim(specs[p]) for p in call.params)
            key = layer.key, degree, cuts
            if key not in self._known:
                self._known[key] = self._walk(call, cuts, degree)
            found.append((call, self._known[key]))
        return found

    def value_dims(self, specs: Sequence[PartitionSpec], degree: int) -> tuple[int | None, ...]:
        """Return, per value of the graph, the dimension along which its maker leaves it split and
        all layers that read it want it. None where they differ. Arguments as for ``of_layers``."""
        values = self._traced.graph.values
        made: dict[int, int | None] = {}
        wanted: dict[int, set[int | None]] = {}
        for call, split in self.of_layers(specs, degree):
            if split is not None:
                dims = _dims(call, split)
                made |= {
                    v: dims.get(o) for v, o in zip(call.outputs, call.function.outputs, strict=True)
                }
            inputs = [None] * len(call.inputs) if split is None else split.inputs
            for v, dim in zip(call.inputs, inputs, strict=True):
                wanted.setdefault(v, set()).add(dim)
        return tuple(
            dim
            if (dim := made.get(v)) is not None
            and wanted.get(v) == {dim}
            and dim != tensor.batch_dim
            and tensor.shape[dim] % degree == 0
            else None
            for v, tensor in enumerate(values)
        )

    def _walk(
        self, call: LayerCall, cuts: Sequence[int | None], degree: int
    ) -> SequenceSplit | None:
        if not any(cut is not None for cut in cuts):
            return None
        graph = self._traced.graph
        data = [graph.values[v] for v in call.inputs] + [graph.batch[b] for b in call.batch]
        groups = (
            [struct_of(graph.params[p]) for p in call.params],
            [struct_of(t) for t in data[: len(call.inputs)]],
            [struct_of(t) for t in data[len(call.inputs) :]],
        )
        layer = _Layer(call, groups, cuts, degree)
        best, most = None, 0.0
        for dims in _candidates(data, degree):
            split, saved = layer.along(dims, len(call.inputs))
            if saved > most:
                best, most = split, saved
        return best


def _dims(call: LayerCall, split: SequenceSplit) -> dict[Any, int | None]:
    """Return, by number of a layer's value, the dimension along which the value is split."""
    function = call.function
    found = dict(zip(function.inputs, split.inputs, strict=True))
    for op, dims in zip(function.ops, split.results, strict=True):
        found.update(zip(op.outputs, dims, strict=False))
    return found


def _candidates(data: Sequence[Any], degree: int) -> Iterator[list[int | None]]:
    """Yield, per input, a dimension to cut: all inputs' dimensions of one length, but for the
    examples of a batch."""
    sizes = [
        [0 if dim == tensor.batch_dim else size for dim, size in enumerate(tensor.shape)]
        for tensor in data
    ]
    for length in dict.fromkeys(chain(*sizes)):
        if length and length % degree == 0:
            yield [own.index(length) if length in own else None for own in sizes]


class _Layer:
    """The program of a layer, and how its tensor parallelism splits it."""

    def __init__(
        self, call: LayerCall, groups: Sequence[Any], cuts: Sequence[int | None], degree: int
    ):
        made: dict[Op, Sequence[Any]] = {}

        def run(op: Op, arguments: Sequence[object], env: object) -> Sequence[Any]:
            made[op] = run_op(op, arguments)
            return made[op]

        def results(params: Any, inputs: Any, batch: Any) -> list[Sequence[Any]]:
            call.function.without_remat(params, inputs, batch, run)
            return list(made.values())

        self._jaxpr = jaxpr = jax.make_jaxpr(results)(*groups).jaxpr
        self._degree, self._num_params = degree, len(cuts)
        # Operations on literals leave no equation.
        makers = {out: e for e in jaxpr.eqns for out in e.outvars}
        self._of_ops = [
            makers.get(group[0]) if group and is_variable(group[0]) else None
            for group in in_groups(jaxpr.outvars, map(len, made.values()))
        ]
        self._own = followed_dims(jaxpr, cuts, degree)
        self._from_data: set[Any] = set(jaxpr.invars[len(cuts) :])
        for equation in jaxpr.eqns:
            if any(is_variable(v) and v in self._from_data for v in equation.invars):
                self._from_data.update(equation.outvars)

    def along(self, dims: Sequence[int | None], num_inputs: int) -> tuple[SequenceSplit, float]:
        """Return the split that begins with these dimensions of the data, and the bytes that it
        saves."""
        jaxpr = self._jaxpr
        found = followed_dims(jaxpr, [*[None] * self._num_params, *dims], self._degree)
        for equation in reversed(jaxpr.eqns):
            self._back(equation, found)
        given = jaxpr.invars[self._num_params :][:num_inputs]
        of_batch = set(jaxpr.invars).difference(given)  # lies as the stage is given it
        split = {
            v: dim
            for v in found
            if v not in of_batch and (dim := self._split_dim(v, found)) is not None
        }
        saved = float(sum(map(aval_bytes, split)))
        whole: dict[int, frozenset[int]] = {}
        for equation in jaxpr.eqns:
            parallel = self._is_split(equation)
            reads = frozenset(
                i
                for i, v in enumerate(equation.invars)
                if is_variable(v)
                and v in split
                and (parallel or not _keeps(equation, i, split, self._degree))
            )
            if not parallel:
                saved -= _PASSES * sum(aval_bytes(equation.invars[i]) for i in reads)
            # A sum over the dimension is one over the devices.
            is_sum = not parallel and equation.primitive.name.startswith("reduce_")
            whole[id(equation)] = frozenset() if is_sum else reads
        ops = self._of_ops
        return (
            SequenceSplit(
                tuple(split.get(v) for v in given),
                tuple(tuple(split.get(v) for v in e.outvars) if e else () for e in ops),
                tuple(whole[id(e)] if e else frozenset() for e in ops),
                tuple(e is not None and self._is_split(e) for e in ops),
            ),
            saved,
        )

    def _is_split(self, equation: JaxprEqn) -> bool:
        """Tell whether tensor parallelism splits an operand: a part of the result is made of the
        whole of the others."""
        return any(is_variable(v) and self._own.get(v) is not None for v in equation.invars)

    def _back(self, equation: Any, found: dict[Any, int | None]) -> None:
        """Split the operands that meet a split result element by element: masks, and sums of what
        came another way."""
        dim = found.get(equation.outvars[0])
        if dim is None or equation.primitive.name in ("dot_general", "conv_general_dilated"):
            return
        result = equation.outvars[0].aval
        for v in equation.invars:
            if is_variable(v) and found.get(v) is None and v.aval.shape == result.shape:
                # Other operations of results as large keep no dimension for certain.
                flow = dim_flow(equation, equation.invars.index(v), self._degree)
                if flow == tuple(range(len(flow))):
                    found[v] = dim

    def _split_dim(self, value: Any, found: Mapping[Any, int | None]) -> int | None:
        dim, aval = found[value], value.aval
        fits = (
            dim is not None
            and value in self._from_data
            and self._own.get(value) is None
            and (jnp.issubdtype(aval.dtype, jnp.inexact) or aval.dtype == jnp.bool_)
            and aval.shape[dim] % self._degree == 0
        )
        return dim if fits else None


def _keeps(equation: JaxprEqn, operand: int, split: Mapping[object, int], degree: int) -> bool:
    """Tell whether an operation makes its split results of the split operand as it lies."""
    name, dim = equation.primitive.name, split[equation.invars[operand]]
    if any(out not in split for out in equation.outvars):
        return False
    results = [split[out] for out in equation.outvars]
    if name in BODIES:
        return _body_keeps(opened(equation.params[BODIES[name]]), equation, split, degree)
    if name == "dot_general":
        contract, _ = equation.params["dimension_numbers"]
        return dim not in contract[operand] and results == [product_dim(equation, operand, dim)]
    if len(results) > 1 or any(map(is_body, equation.params.values())):
        return False
    return name != "conv_general_dilated" and dim_flow(equation, operand, degree)[dim] == results[0]


def _body_keeps(body: Any, equation: JaxprEqn, split: Mapping[Any, int], degree: int) -> bool:
    """Tell whether all operations of a call keep their split operands, and its results are split as
    outside."""
    given = [split.get(v) if is_variable(v) else None for v in equation.invars]
    dims = followed_dims(body, given, degree)
    inside = {v: dim for v, dim in dims.items() if dim is not None}
    alike = all(
        inside.get(inner) == split.get(outer)
        for inner, outer in zip(body.outvars, equation.outvars, strict=True)
        if is_variable(inner)
    )
    return alike and all(
        _keeps(e, i, inside, degree)
        for e in body.eqns
        for i, v in enumerate(e.invars)
        if is_variable(v) and v in inside
    )


def _lying(array: Any, dim: int, mesh: Mesh, axis: str | None) -> NamedSharding:
    """Return a sharding with one dimension split over an axis, or whole; the others as they
    come."""
    spec = [PartitionSpec.UNCONSTRAINED] * array.ndim
    return NamedSharding(mesh, PartitionSpec(*spec[:dim], axis, *spec[dim + 1 :]))


def split_along(array: object, dim: int, mesh: Mesh) -> Any:
    return jax.lax.with_sharding_constraint(array, _lying(array, dim, mesh, MODEL_AXIS))


def gathered(array: object, dim: int, mesh: Mesh) -> Any:
    """Gather an array that is split along one dimension; its gradient is scattered where it
    arises."""
    return _constrained(array, _lying(array, dim, mesh, None), _lying(array, dim, mesh, MODEL_AXIS))


def scattered(array: object, dim: int, mesh: Mesh) -> Any:
    """Return the local part of a sum over the devices; its gradient is gathered where it is
    read."""
    return _constrained(array, _lying(array, dim, mesh, MODEL_AXIS), _lying(array, dim, mesh, None))


def _constrained(array: Any, sharding: NamedSharding, of_gradient: NamedSharding) -> Any:
    constrain = jax.lax.with_sharding_constraint
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return constrain(array, sharding)
    function = jax.custom_vjp(lambda x: constrain(x, sharding))
    function.defvjp(
        lambda x: (constrain(x, sharding), None), lambda _, g: (constrain(g, of_gradient),)
    )
    return function(array)


class SplitRun:
    """The runner of one layer's operations with its values split.

    Args:
        call: The layer.
        split: Dimensions along which its values are split.
        mesh: The stage's.
        arrives_split: Values of the graph that the stage is given as the layer wants them.
        runs_again: Whether the layer is run again before it goes backwards (remat ``full``).
    """

    def __init__(
        self,
        call: LayerCall,
        split: SequenceSplit,
        mesh: Mesh,
        arrives_split: Collection[int],
        runs_again: bool,
    ):
        function = call.function
        self._split, self._mesh, self._runs_again = split, mesh, runs_again
        self._entering = [
            None if v in arrives_split else dim
            for v, dim in zip(call.inputs, split.inputs, strict=True)
        ]
        self._index = {op: i for i, op in enumerate(function.ops)}
        self._dims = _dims(call, split)
        self.outputs = tuple(self._dims.get(v) for v in function.outputs)

    def enter(self, inputs: Sequence[object]) -> list[Any]:
        """Split the layer's inputs."""
        return [
            array if dim is None else split_along(array, dim, self._mesh)
            for array, dim in zip(inputs, self._entering, strict=True)
        ]

    def __call__(self, op: Op, arguments: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
        """Run one operation and return its results. Operands that it reads whole are kept in the
        environment beside the value, for later operations."""
        at, given, wholes = self._index[op], list(arguments), dict[int, int]()
        for i in self._split.whole[at]:
            value = op.inputs[i]
            dim = self._dims[value] if is_value(value) else None
            assert dim is not None, "what is read whole is split"
            wholes[i] = dim
        if self._runs_again and wholes:
            results = jax.checkpoint(lambda *parts: self._run_whole(op, parts, wholes))(*given)
        else:
            for i, dim in wholes.items():
                key = "whole", op.inputs[i]
                if key not in env:
                    env[key] = gathered(given[i], dim, self._mesh)
                given[i] = env[key]
            results = run_op(op, given)
        split = scattered if self._split.parallel[at] else split_along
        return [
            array if dim is None else split(array, dim, self._mesh)
            for array, dim in zip_longest(results, self._split.results[at])
        ]

    def _run_whole(
        self, op: Op, parts: Sequence[object], wholes: Mapping[int, int]
    ) -> Sequence[Any]:
        """Run an operation on gathered operands. Under ``jax.checkpoint`` the backward pass keeps
        the parts and gathers once more (section 4.2.2): else the gathered operands of all products
        would be in memory at once when a layer is run again."""
        given = [
            gathered(part, wholes[i], self._mesh) if i in wholes else part
            for i, part in enumerate(parts)
        ]
        return run_op(op, given)
