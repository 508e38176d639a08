"""From a jaxpr to a flat ``LossProgram``: calls and remat regions opened, chosen scans unrolled,
stacked parameters divided.

Source: the marks are ``jax.ad_checkpoint.checkpoint_name(x, "layer_boundary")``; the idea of
cutting a traced loss at markers is Alpa's (Zheng et al., OSDI 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from capture.errors import TracingError
from capture.tracing.flops import equation_flops
from capture.tracing.jaxprs import (
    CALLS,
    REMATS,
    consts_of,
    is_variable,
    opened,
    scan_arity,
    sub_jaxprs,
)
from capture.tracing.program import LossProgram, Mark, Op, RematRegion, is_value
from capture.tracing.source import traceback_of

LAYER_BOUNDARY = "layer_boundary"

#: Position of an equation: its index in the outermost jaxpr, in the body there, and so on.
EquationPath = tuple[int, ...]

#: What is opened. Custom derivatives and control flow stay closed.
_OPENED = CALLS | REMATS
#: Ops that may stand between a stacked parameter and the scan over it: applied to each layer's part
#: instead.
_PER_PART = ("convert_element_type", "transpose", "copy")


@dataclass
class _Stack:
    """A value that is known as its parts along one dimension, and stacked only if needed."""

    parts: list[int]
    dim: int
    whole: int | None = None


_Value = int | jex_core.Literal | _Stack


@dataclass(frozen=True)
class Flattening:
    """The flat program of a loss, and what was learned of its scans.

    Attributes:
        scan_flops: FLOPs of each scan over stacked parameters that was left closed.
        stacked: Dimension of each parameter leaf over which an unrolled scan ran.
        unrolled: The scans that were chosen to be unrolled; None: those with marks.
    """

    program: LossProgram
    scan_flops: dict[EquationPath, int]
    stacked: dict[int, int]
    unrolled: frozenset[EquationPath] | None


def is_mark(equation) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == LAYER_BOUNDARY


def flatten(
    closed, num_params: int, unroll: frozenset[EquationPath] | None, stacked: Mapping[int, int]
) -> Flattening:
    """Flatten the jaxpr of a loss.

    Args:
        closed: Closed jaxpr; its inputs are the parameter leaves, then the batch leaves, and the
            first of its outputs is the loss.
        unroll: Scans to unroll; None to honour layer marks: scans with a mark in the body are
            unrolled, and marks are recorded.
        stacked: Dimension along which to divide a parameter leaf into one per layer, by leaf.

    Raises:
        TracingError: ``trace-mark-position`` for a mark inside a custom derivative, ``cond``,
            ``while`` or another closed body.
    """
    flattener = _Flattener(unroll)
    params: list[int] = []
    arguments: list[_Value] = []
    for leaf, var in enumerate(closed.jaxpr.invars):
        dim = stacked.get(leaf) if leaf < num_params else None
        if dim is None:
            value = flattener.new_value(var.aval)
            arguments.append(value)
            if leaf < num_params:
                params.append(value)
                flattener.origin[value] = (leaf, tuple(range(var.aval.ndim)))
        else:
            shape = var.aval.shape[:dim] + var.aval.shape[dim + 1 :]
            part = jax.ShapeDtypeStruct(shape, var.aval.dtype)
            parts = [flattener.new_value(part) for _ in range(var.aval.shape[dim])]
            params += parts
            arguments.append(_Stack(parts, dim))
    batch = [v for v in arguments[num_params:] if is_value(v)]
    top = _Place()
    loss, *aux = [
        flattener.as_value(v, top)
        for v in flattener.open(closed.jaxpr, closed.consts, arguments, top)
    ]
    if all(loss not in op.outputs for op in flattener.ops):
        # A loss that is a leaf or a constant still needs a layer that makes it.
        loss = flattener.emit(("copy",), [loss], top)
    program = LossProgram(
        tuple(flattener.ops),
        tuple(flattener.avals),
        flattener.consts,
        tuple(params),
        tuple(batch),
        loss,
        tuple(aux),
        tuple(flattener.marks),
    )
    found = {leaf: dims.pop() for leaf, dims in flattener.scanned_dims.items() if len(dims) == 1}
    return Flattening(program.without_dead_ops().sunk(), flattener.scan_flops, found, unroll)


@dataclass(frozen=True)
class _Place:
    """The name scopes, remat regions and path of an equation, and where the model calls it."""

    scope: str = ""
    regions: tuple[RematRegion, ...] = ()
    path: EquationPath = ()
    traceback: Any = None

    def of(self, equation, index: int) -> _Place:
        scope = "/".join(filter(None, (self.scope, str(equation.source_info.name_stack))))
        traceback = traceback_of(equation, self.traceback)
        return _Place(scope, self.regions, (*self.path, index), traceback)


@dataclass
class _Flattener:
    unroll: frozenset[EquationPath] | None
    ops: list[Op] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    num_regions: int = 0
    # Value -> parameter leaf, order of the leaf's dims.
    origin: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    scanned_dims: dict[int, set[int]] = field(default_factory=dict)
    scan_flops: dict[EquationPath, int] = field(default_factory=dict)
    # By id of a jaxpr, which the traced loss keeps alive.
    known_marked: dict[int, bool] = field(default_factory=dict)

    def new_value(self, aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def new_const(self, array) -> int:
        value = self.new_value(jax.typeof(array))
        self.consts[value] = array
        return value

    def has_mark(self, jaxpr) -> bool:
        if self.unroll is not None:
            return False  # automatic cutting does not look at marks
        if id(jaxpr) not in self.known_marked:
            self.known_marked[id(jaxpr)] = any(
                is_mark(equation) or any(map(self.has_mark, sub_jaxprs(equation.params)))
                for equation in jaxpr.eqns
            )
        return self.known_marked[id(jaxpr)]

    def open(
        self, jaxpr, consts: Sequence[object], arguments: Sequence[_Value], place: _Place
    ) -> list[_Value]:
        """Append the equations of a body and return its outputs."""
        env: dict[Any, _Value] = dict(
            zip(jaxpr.constvars, map(self.new_const, consts), strict=True)
        )
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom) -> _Value:
            return env[atom] if is_variable(atom) else atom

        for index, equation in enumerate(jaxpr.eqns):
            outputs = self._equation(
                equation, [read(atom) for atom in equation.invars], place.of(equation, index)
            )
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, inputs: list[_Value], place: _Place) -> Sequence[_Value]:
        """Append one equation as an op, or open it; return the values of its results.

        Calls are opened so that cuts may fall inside them, but not those that say how they are to
        be sharded, unless they hold a mark; a scan is unrolled where it holds one, or where that is
        asked for. Any other operation with a mark inside cannot be cut there.
        """
        name, params = equation.primitive.name, equation.params
        if is_mark(equation):
            # An alias rather than an op: a skip connection may read the value by either name, and
            # must not cross twice.
            if self.unroll is None:
                self.marks.append(Mark(len(self.ops), inputs[0] if is_value(inputs[0]) else None))
            return inputs
        if name in _OPENED and (
            not _is_sharded(params) or self.has_mark(opened(params[_OPENED[name]]))
        ):
            if name in REMATS:
                region = RematRegion(self.num_regions, 0, params["policy"], params["prevent_cse"])
                place = replace(place, regions=(*place.regions, region))
                self.num_regions += 1
            body = params[_OPENED[name]]
            return self.open(opened(body), consts_of(body), inputs, place)
        if name == "scan" and self._unrolls(equation, inputs, place):
            return self._unrolled(equation, inputs, place)
        if any(map(self.has_mark, sub_jaxprs(params))):
            raise TracingError.of(
                f"a {LAYER_BOUNDARY!r} mark stands inside {name} (scope "
                f"{place.scope or 'top level'!r}), which cannot be cut; "
                f"move the mark out of the {name}.",
                "trace-mark-position",
            )
        if name in _PER_PART and isinstance(inputs[0], _Stack):
            return [self._per_part(equation, inputs[0], place)]
        return self._append(equation, [self.whole(v, place) for v in inputs], place)

    def _append(
        self, equation, inputs: Sequence[int | jex_core.Literal], place: _Place
    ) -> list[_Value]:
        outputs = [self.new_value(var.aval) for var in equation.outvars]
        regions = tuple(replace(region, segment=len(self.marks)) for region in place.regions)
        self.ops.append(
            Op(
                equation.primitive,
                equation.params,
                tuple(inputs),
                tuple(outputs),
                equation.ctx,
                bool(equation.effects),
                place.scope,
                place.traceback,
                regions,
                equation_flops(equation),
            )
        )
        if (
            equation.primitive.name in _PER_PART
            and is_value(inputs[0])
            and inputs[0] in self.origin
        ):
            leaf, dims = self.origin[inputs[0]]
            self.origin[outputs[0]] = (
                leaf,
                tuple(dims[d] for d in equation.params.get("permutation", range(len(dims)))),
            )
        return list(outputs)

    def emit(self, operation: tuple, inputs: Sequence[int], place: _Place) -> int:
        """Append one of the small array operations of ``_EMITTED``."""
        closed = _emitted_jaxpr(
            operation, tuple((self.avals[v].shape, self.avals[v].dtype) for v in inputs)
        )
        (output,) = self.open(closed.jaxpr, closed.consts, list(inputs), place)
        assert is_value(output), f"{operation} gave {output}"
        return output

    def whole(self, value: _Value, place: _Place) -> int | jex_core.Literal:
        """Return a value as one array; the parts of a stack are stacked by an added operation."""
        if not isinstance(value, _Stack):
            return value
        if value.whole is None:
            value.whole = self.emit(("stack", value.dim), value.parts, place)
        return value.whole

    def as_value(self, value: _Value, place: _Place) -> int:
        array = self.whole(value, place)
        return array if isinstance(array, int) else self.new_const(array.val)

    def _per_part(self, equation, stack: _Stack, place: _Place) -> _Stack:
        if equation.primitive.name == "transpose":
            order = equation.params["permutation"]
            inner = tuple(d - (d > stack.dim) for d in order if d != stack.dim)
            return _Stack(
                [self.emit(("transpose", inner), [part], place) for part in stack.parts],
                order.index(stack.dim),
            )
        if equation.primitive.name == "convert_element_type":
            dtype = equation.params["new_dtype"]
            return _Stack(
                [self.emit(("cast", dtype), [part], place) for part in stack.parts], stack.dim
            )
        return stack  # a copy

    def _unrolls(self, equation, inputs: list[_Value], place: _Place) -> bool:
        """Tell whether to unroll a scan, and note which parameter leaves it runs over."""
        num_consts, num_carry = scan_arity(equation)
        scanned = inputs[num_consts + num_carry :]
        leaves = [self.origin[v] for v in scanned if is_value(v) and v in self.origin]
        if (
            self.has_mark(opened(equation.params["jaxpr"]))
            if self.unroll is None
            else place.path in self.unroll
        ):
            for leaf, dims in leaves:
                self.scanned_dims.setdefault(leaf, set()).add(dims[0])
            return True
        if leaves or any(isinstance(v, _Stack) for v in scanned):
            self.scan_flops[place.path] = equation_flops(equation)
        return False

    def _unrolled(self, equation, inputs: list[_Value], place: _Place) -> list[_Value]:
        """Append the body of a scan once per iteration; what it collects stays a stack of parts."""
        body, length = equation.params["jaxpr"], equation.params["length"]
        num_consts, num_carry = scan_arity(equation)
        consts, carry, scanned = (
            inputs[:num_consts],
            inputs[num_consts : num_consts + num_carry],
            inputs[num_consts + num_carry :],
        )
        collected: list[list[_Value]] = [[] for _ in range(length)]
        for i in reversed(range(length)) if equation.params["reverse"] else range(length):
            rows = [self._row(value, i, place) for value in scanned]
            outputs = self.open(opened(body), consts_of(body), [*consts, *carry, *rows], place)
            carry, collected[i] = outputs[:num_carry], outputs[num_carry:]
        stacks = [
            _Stack([self.as_value(v, place) for v in column], 0)
            for column in zip(*collected, strict=True)
        ]
        return [*carry, *stacks]

    def _row(self, value: _Value, i: int, place: _Place) -> int:
        """Return entry ``i`` of a value along its leading dimension."""
        if isinstance(value, _Stack) and value.dim == 0:
            return value.parts[i]
        return self.emit(("index", i), [self.as_value(value, place)], place)


_EMITTED: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "copy": lambda: lambda x: jnp.copy(x),
    "stack": lambda dim: lambda *parts: jnp.stack(parts, dim),
    "transpose": lambda order: lambda x: jax.lax.transpose(x, order),
    "cast": lambda dtype: lambda x: jax.lax.convert_element_type(x, dtype),
    "index": lambda i: lambda x: jax.lax.index_in_dim(x, i, 0, keepdims=False),
}


@lru_cache(maxsize=4096)
def _emitted_jaxpr(operation: tuple, avals: tuple):
    kind, *arguments = operation
    return jax.make_jaxpr(_EMITTED[kind](*arguments))(
        *[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    )


def _is_sharded(params: Mapping[str, Any]) -> bool:
    """Tell whether a jit carries shardings of its own, which opening it would lose."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
