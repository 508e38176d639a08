"""What a stage keeps of its forward pass, and how its backward pass gets the rest of what it reads.

``jax.vjp`` says what the backward pass reads. What follows from parameters and constants alone
(casts of weights, masks) is made again in any case, so that it is not kept once per micro-batch. Of
the others, remat ``cheap`` keeps a minimum cut; the other modes keep all, and say to ``jax.vjp``
what it may save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from capture.partition.dim_flow import dim_flow
from capture.partition.spread import Spread
from capture.plan.choices import Remat, is_cut
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import Atom, is_variable, several
from capture.tracing.mincut import least_kept
from capture.tracing.recompute import recompute_bytes


class SavedPass:
    """A forward pass with everything that ``jax.vjp`` saves behind its outputs.

    Args:
        run: The pass: of arguments; to outputs, and the function that goes backwards.
    """

    def __init__(self, run: Callable[..., tuple[Sequence[object], object]], args: Sequence[object]):
        self._constants: dict[int, Any] = {}
        self._tree: Any = None

        def saving_all(*args):
            outputs, vjp = run(*args)
            saved, self._tree = jax.tree.flatten(vjp)
            self._constants = {
                i: array for i, array in enumerate(saved) if not isinstance(array, jax.core.Tracer)
            }
            return outputs, [array for i, array in enumerate(saved) if i not in self._constants]

        self.traced = jax.make_jaxpr(saving_all)(*args)
        self.flow = DataFlow(self.traced)

    @cached_property
    def spread(self) -> Spread:
        """The way in which splits spread through ``flow``."""
        return Spread(self.flow.jaxpr)

    def vjp(self, saved: Iterable[object]) -> Any:
        """Return the function that goes backwards, made from all that was saved."""
        read = iter(saved)
        return jax.tree.unflatten(
            self._tree,
            [
                self._constants[i] if i in self._constants else next(read)
                for i in range(self._tree.num_leaves)
            ],
        )


class Residuals:
    """The values that one micro-batch keeps for the backward pass.

    Args:
        flow: The forward pass: of parameters, inputs and batch leaves; to outputs, and what
            ``jax.vjp`` saves.
        num_params, num_inputs: Of its inputs; the others are of the batch.
        returns_outputs: Whether outputs may be kept as they are.

    Attributes:
        inputs, batch, outputs: Positions among those of the stage of what is kept as it is.
        stored: Variables of the flow that are kept beside them.
    """

    def __init__(
        self,
        flow: DataFlow,
        num_params: int,
        num_inputs: int,
        num_outputs: int,
        *,
        returns_outputs: bool,
        remat: Remat,
        split: ValueSplit,
    ):
        self._flow, self._split, self._read = flow, split, flow.outputs[num_outputs:]
        self._params = flow.inputs[:num_params]
        data = flow.inputs[num_params:]
        reached = flow.propagate({v: frozenset([0]) for v in data})
        from_data = {v for v, origins in reached.items() if origins}
        read = map(split.before_gather, filter(is_variable, self._read))
        kept = [v for v in dict.fromkeys(read) if v in from_data]
        if is_cut(remat):
            kept = least_kept(flow, kept, from_data, split.nbytes, split.recompute_bytes)
        made = flow.outputs[:num_outputs] if returns_outputs else []
        self.inputs = _places(kept, data[:num_inputs])
        self.batch = _places(kept, data[num_inputs:])
        self.outputs = _places(set(kept).difference(data), made)
        groups = (data, self.inputs), (data[num_inputs:], self.batch), (made, self.outputs)
        self._whole = [[values[i] for i in at] for values, at in groups]
        whole = {v for values in self._whole for v in values}
        self.stored = [v for v in kept if v not in whole]

    def spec(self, kept: object) -> PartitionSpec:
        """Return how one of the kept values is expected to lie on the stage's mesh."""
        return self._split.spec(kept)

    def read_again(self, *kept: Sequence[Any]) -> list[Any]:
        """Return all that the backward pass reads, made from parameters and what was kept: inputs,
        leaves of the batch, outputs and what is stored beside them."""
        given = [self._params, *self._whole, self.stored]
        return self._flow.part(given, [self._read])(*kept)[0]


def _places(kept: Collection[object], group: Sequence[object]) -> tuple[int, ...]:
    """Return positions of what is kept of a group; of a value that is in it twice, the first."""
    first = {v: k for k, v in reversed(list(enumerate(group))) if is_variable(v)}
    return tuple(sorted(k for v, k in first.items() if v in kept))


@dataclass(frozen=True, eq=False)
class SplitAxis:
    """An axis of a mesh that splits values of a program.

    Args:
        inputs: The dimension along which the axis splits each input.
        asked: How results are to lie, where that is asked for.
    """

    name: str
    degree: int
    _flow: DataFlow
    _spread: Spread
    _inputs: Sequence[int | None]
    _asked: Sequence[tuple[object, PartitionSpec]]

    @cached_property
    def dims(self) -> Mapping[Any, int | None]:
        """The dimension along which each value is expected to be split; None where it is not."""
        return self._spread.dims(self._inputs, self.degree, self.name)

    @cached_property
    def asked(self) -> Mapping[Any, bool]:
        """Whether each result for which that is asked is to be split."""
        return {v: bool(_dims_of(spec, self.name)) for v, spec in self._asked}

    @cached_property
    def reached(self) -> Collection[Any]:
        """The values that a compiler may split: by inputs, constraints or what is asked for."""
        constraints = [
            (equation.outvars[0], spec)
            for equation in self._flow.jaxpr.eqns
            if equation.primitive.name == "sharding_constraint"
            and (spec := getattr(equation.params["sharding"], "spec", None)) is not None
        ]
        given = zip(self._flow.inputs, self._inputs, strict=True)
        return self._spread.reached(
            [(v, dim) for v, dim in given if dim is not None]
            + [
                (v, dim)
                for v, spec in (*constraints, *self._asked)
                for dim in _dims_of(spec, self.name)
            ]
        )


#: What makes values whose split is that of what they are read with.
_LIE_AS_READ = ("scatter", "broadcast_in_dim", "iota")


class ValueSplit:
    """The split of a program's values that is expected on a stage's mesh: as the partition walk
    follows the shardings of its inputs. The compiler decides.

    Args:
        inputs: By name and degree of a mesh axis, the dimension along which it splits each input.
        asked: How each output is to lie, where that is asked for.
        spread: That of the program, where it is asked about several splits.
    """

    def __init__(
        self,
        flow: DataFlow,
        inputs: Sequence[tuple[str, int, Sequence[int | None]]],
        asked: Sequence[PartitionSpec | None] = (),
        spread: Spread | None = None,
    ):
        self._flow, spread = flow, Spread(flow.jaxpr) if spread is None else spread
        wanted = [
            (v, spec)
            for v, spec in zip(flow.outputs, asked, strict=False)
            if spec is not None and is_variable(v)
        ]
        #: The axes of the mesh that split anything, in their order.
        self.axes = [
            SplitAxis(axis, degree, flow, spread, dims, wanted)
            for axis, degree, dims in inputs
            if degree > 1
        ]
        self._least: dict[Any, int] = {}
        self._expected: dict[Any, int] = {}

    def before_gather(self, value: Any) -> Any:
        """Return the split value that one is the whole of, made by a constraint; else the value.
        Only the part is kept, and gathered again: Korthikanti et al., section 4.2.2."""
        equation = self._flow.maker(value)
        if equation is None or equation.primitive.name != "sharding_constraint":
            return value
        [part] = equation.invars
        return part if self._parts(part) > self._parts(value) else value

    def _parts(self, atom: Atom) -> int:
        """Return the number of different parts into which a value is split over the mesh."""
        return math.prod(axis.degree for axis in self.axes if _dim(axis.dims, atom) is not None)

    def spec(self, value: Any) -> PartitionSpec:
        """Return how a value lies on the mesh; no axis splits a dimension twice, or unevenly."""
        entries: list[str | None] = [None] * len(value.aval.shape)
        for axis in self.axes:
            dim = _dim(axis.dims, value)
            if dim is None or entries[dim] is not None or value.aval.shape[dim] % axis.degree:
                continue
            entries[dim] = axis.name
        return PartitionSpec(*entries)

    def nbytes(self, value: Any) -> int:
        """Return the bytes of a value per device."""
        return -(-self._flow.nbytes(value) // self._parts(value))

    def expected_bytes(self, value: object) -> int:
        """Return the bytes of a value per device, once it is compiled: what is scattered goes to
        zeros, which lie as it does."""
        if value not in self._expected:
            maker = self._flow.maker(value)
            is_given = maker is None or not maker.primitive.name.startswith(_LIE_AS_READ)
            self._expected[value] = (self.nbytes if is_given else self.least_bytes)(value)
        return self._expected[value]

    def least_bytes(self, value: object) -> int:
        """Return a value's bytes per device, if the compiler splits it along all axes it can."""
        found = self._least.get(value)
        if found is None:
            parts = math.prod(axis.degree for axis in self.axes if value in axis.reached)
            found = self._least[value] = -(-self._flow.nbytes(value) // parts)
        return found

    def recompute_bytes(self, equation: JaxprEqn) -> float | None:
        """Return the bytes that a device moves to recompute an equation; None if that is not cheap,
        or devices would exchange data."""
        cost = recompute_bytes(equation)
        if equation.primitive.name == "sharding_constraint":
            return cost
        if cost is None or any(_exchanges(equation, axis) for axis in self.axes):
            return None
        return cost / max(map(self._parts, (*equation.invars, *equation.outvars)))


def _dims_of(spec: PartitionSpec, axis: str) -> list[int]:
    """Return the dimensions that a mesh axis is asked to split, beside others or alone."""
    return [dim for dim, names in enumerate(spec) if axis in several(names)]


def _dim(dims: Mapping[Any, int | None], atom: Atom) -> int | None:
    return dims.get(atom) if is_variable(atom) else None


def _exchanges(equation: JaxprEqn, axis: SplitAxis) -> bool:
    """Return whether an operand is not split as the result is: a sum over what is split."""
    dims, degree = axis.dims, axis.degree
    result = _dim(dims, equation.outvars[0])
    for operand, atom in enumerate(equation.invars):
        dim = _dim(dims, atom)
        if dim is not None and (
            result is None or dim_flow(equation, operand, degree)[dim] != result
        ):
            return True
    return False
