"""Run ``custom_partitioning`` operations on the local parts of their arguments.

A partitioner would ask the operation, through a callback, how to run on its part. A program that is
exported for another process to compile cannot carry a callback, and a stage knows its mesh: so each
operation is run by ``shard_map``, split as its rule allows. The dimension in front of its first
operand is taken for the examples, and goes over the mesh axis ``data``; the next that the rule may
split and the degree divides goes over ``model``. What arrives otherwise is resharded on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.work import LocalFlops
from capture.tracing.dataflow import bind
from capture.tracing.flops import KERNEL, equation_flops, holds
from capture.tracing.jaxprs import REMATS, evaluate, is_body, opened, sub_jaxprs
from capture.tracing.split_rule import PRIMITIVE, Factors, split_rule


def localize(
    function: Callable[..., object], args: Sequence[object], mesh: Mesh
) -> tuple[Callable[..., Any], LocalFlops]:
    """Bind the ``custom_partitioning`` operations of a function to a mesh with the axes ``data``
    and ``model``.

    Args:
        function: Traced here, once.
        args: ``ShapeDtypeStruct`` pytrees.
        mesh: The stage's devices, with the axes ``data`` and ``model``.

    Returns:
        The function on arguments of these shapes, and the FLOPs of those operations on one device.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)

    @wraps(function)
    def localized(*arrays: Any) -> Any:
        return jax.tree.unflatten(
            jax.tree.structure(shape), _evaluate(closed, jax.tree.leaves(arrays), mesh)
        )

    return localized, LocalFlops(
        _call_flops(closed.jaxpr, mesh, kernels=False),
        _call_flops(closed.jaxpr, mesh, kernels=True),
    )


def _call_flops(jaxpr: Any, mesh: Mesh, kernels: bool) -> int:
    """Count the FLOPs per device of the operations that hold a Pallas kernel for some platform, or
    of the others."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == PRIMITIVE:
            if holds(equation, KERNEL) == kernels:
                total += equation_flops(equation) // math.prod(
                    mesh.shape[axis] for axis in _axes(equation, mesh).values()
                )
        elif equation.primitive.name == KERNEL:
            total += equation_flops(equation) if kernels else 0
        else:
            bodies = [_call_flops(body, mesh, kernels) for body in sub_jaxprs(equation.params)]
            if equation.primitive.name == "cond":
                bodies = [max(bodies, default=0)]
            total += equation.params.get("length", 1) * sum(bodies)
    return total


def _axes(equation: Any, mesh: Mesh) -> dict[str, str]:
    """Return the mesh axis over which each factor of an operation is split."""
    axes: dict[str, str] = {}
    rule = split_rule(equation)
    for factor, operand, dim in rule.factors if rule else ():
        axis = "data" if (operand, dim) == (0, 0) else "model"
        if (
            axis not in axes.values()
            and equation.invars[operand].aval.shape[dim] % mesh.shape[axis] == 0
        ):
            axes[factor] = axis
    return axes


def _evaluate(body: object, args: Sequence[object], mesh: Mesh) -> list[Any]:
    def run(
        equation: jex_core.JaxprEqn, operands: list[object], values: dict[object, object]
    ) -> None:
        params, is_open = {}, equation.primitive.name in REMATS
        for key, value in equation.params.items():
            # Of an open body (jax.checkpoint), the constants are operands.
            params[key], hoisted = _localized(value, mesh, is_open)
            operands = [*hoisted, *operands]
        call = _local_call(equation, mesh) if equation.primitive.name == PRIMITIVE else None
        bind(equation.replace(params=params), operands, values, call=call)

    return evaluate(body, args, run)


def _localized(value: object, mesh: Mesh, is_open: bool) -> tuple[Any, Sequence[Any]]:
    """Return a parameter of an equation with the operations in its bodies replaced, and the
    operands that an open body takes before its own."""
    if isinstance(value, (tuple, list)):
        return (
            type(value)(_localized(item, mesh, is_open)[0] for item in value)
            if any(map(_holds_call, value))
            else value
        ), ()
    if not _holds_call(value):
        return value, ()
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in opened(value).invars]
    closed = jax.make_jaxpr(lambda *args: _evaluate(value, args, mesh))(*avals)
    if not is_open and isinstance(value, jex_core.ClosedJaxpr):
        return closed, ()
    if not closed.consts:
        return closed.jaxpr, ()
    shapes = [jax.ShapeDtypeStruct(jnp.shape(c), jnp.result_type(c)) for c in closed.consts]
    hoisted = jax.make_jaxpr(lambda consts, args: jax.core.eval_jaxpr(closed.jaxpr, consts, *args))(
        shapes, avals
    )
    assert not hoisted.consts, "constants are arguments now"
    return hoisted.jaxpr, closed.consts


def _holds_call(value: object) -> bool:
    return is_body(value) and any(holds(e, PRIMITIVE) for e in opened(value).eqns)


def _local_call(equation: Any, mesh: Mesh) -> Callable[..., Any] | None:
    """Return the function that runs one operation on its local parts; None leaves it to JAX."""
    rule = split_rule(equation)
    if rule is None:
        return None
    params, axes = equation.params, _axes(equation, mesh)

    def sharded(factors: Factors, atom: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*(axes.get(factor) if factor else None for factor in factors))
        return jax.ShapeDtypeStruct(
            atom.aval.shape, atom.aval.dtype, sharding=NamedSharding(mesh, spec)
        )

    arguments = params["in_tree"].unflatten(list(map(sharded, rule.operands, equation.invars)))
    results = params["out_tree"].unflatten(list(map(sharded, rule.results, equation.outvars)))
    # The operation's author has the last word on shardings, and says what runs on a part.
    _, local, result_shardings, argument_shardings = params["partition"](
        *params["static_args"], mesh, arguments, results
    )

    def specs(shardings: object) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, shardings)

    call = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs(tuple(argument_shardings)),
        out_specs=specs(result_shardings),
        check_vma=False,
    )
    return lambda *args: jax.tree.leaves(call(*params["in_tree"].unflatten(args)))
