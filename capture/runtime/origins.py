"""Which operation of the model makes a value that a stage keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from capture.runtime.layout import shard_bytes
from capture.step.attribution import Buffer
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import variables
from capture.tracing.source import layer_of_scope, line_of, operation_name


def buffers_of(
    flow: DataFlow, values: Sequence[object], structs: Sequence[object]
) -> tuple[Buffer, ...]:
    """Return what is kept of a pass as buffers, given structures with shardings."""
    pairs = zip(values, structs, strict=True)
    return tuple(buffer_of(flow, value, shard_bytes(struct)) for value, struct in pairs)


def buffer_of(flow: DataFlow, value: object, nbytes: int) -> Buffer:
    """Return a residual as a buffer, with the operation that makes it."""
    equation = flow.maker(value)
    if equation is None:
        return Buffer(nbytes, "activations", None, "residual")
    scope = _scope(equation)
    layer, name = layer_of_scope(scope), operation_name(scope)
    return Buffer(nbytes, "activations", layer, name, _line_of(flow, equation))


def layer_of(flow: DataFlow, value: object) -> int | None:
    """Return the layer whose operation makes a residual."""
    equation = flow.maker(value)
    return None if equation is None else layer_of_scope(_scope(equation))


def _scope(equation: JaxprEqn) -> str:
    return f"{equation.source_info.name_stack}/{equation.primitive.name}"


def _line_of(flow: DataFlow, equation: JaxprEqn) -> str:
    """Return the line of an operation in the model; where JAX kept none (a rule of
    differentiation), that of the nearest operand that has one. A model inside this package has none
    at all, so no value is visited twice."""
    ring, seen = [equation], set[Any]()
    while ring:
        lines = [line for one in ring if (line := line_of(one.source_info.traceback))]
        if lines:
            return lines[0]
        read = [v for one in ring for v in variables(one.invars)]
        new = [v for v in dict.fromkeys(read) if v not in seen]
        seen.update(new)
        ring = [maker for v in new if (maker := flow.maker(v)) is not None]
    return ""
