"""A backward pass layer by layer: the gradients of a layer's parameters are complete before layers
further back begin.

Nothing else in a program says so. XLA's scheduler for GPUs leaves products of weight gradients for
later, and with them what they read: of every layer its activations, kept or computed again, and the
gradients of its results. What a program needs while it runs then grows with its layers.

Where replicas split parameters, a forward pass goes by turns as well: the scheduler else gathers
the parameters of many layers before the first of them is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from capture.tracing.dataflow import DataFlow, bind
from capture.tracing.jaxprs import in_groups, value_of, variables
from capture.tracing.source import goes_backwards, layer_of_scope


def layer_by_layer(
    function: Callable[..., Sequence[object]],
    groups: Sequence[Sequence[object]],
    *,
    given: Collection[int],
    awaited: int,
    lag: int = 0,
    lying: Sequence[NamedSharding] = (),
) -> Any:
    """Return what a backward pass returns, computed layer by layer.

    Args:
        function: The pass, its operations in the scopes of their layers.
        groups: Its arguments, lists of arrays.
        given: Which of them are there all the time, parameters and accumulators: nothing waits to
            read them.
        awaited: Which of its results are gradients of parameters.
        lag: How many layers further back may begin before a layer's gradients are complete.
        lying: The shardings of these gradients, where each device holds a part of them; what is
            returned then is what others have waited for. Parts may be computed in another order of
            memory than that of the parameter, and only a copy in that order is waited for, which
            XLA's algebraic simplifier takes out where nobody reads it.
    """
    flow, leaves, shapes = _opened(function, groups)
    inputs = in_groups(flow.inputs, map(len, groups))
    sizes = [len(jax.tree.leaves(part)) for part in shapes]
    gradients = in_groups(flow.outputs, sizes)[awaited]
    results = _evaluate(
        flow,
        dict(zip(flow.inputs, leaves, strict=True)),
        given={*flow.jaxpr.constvars, *(v for at in given for v in inputs[at])},
        gradients=gradients,
        lag=lag,
        lying=dict(zip(gradients, lying, strict=True)) if lying else {},
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def parameters_in_turn(
    function: Callable[..., Sequence[object]], groups: Sequence[Sequence[object]]
) -> Any:
    """Run a forward pass that reads no parameter before the layer in front of its own begins.

    Args:
        function: The pass, its operations in the scopes of their layers.
        groups: Its arguments, lists of arrays, parameters first.
    """
    flow, leaves, shapes = _opened(function, groups)
    params = flow.inputs[: len(groups[0])]
    given = {*flow.jaxpr.constvars, *flow.inputs}
    values = flow.constants | dict(zip(flow.inputs, leaves, strict=True))
    by_layer, first_read = _by_layer(flow.jaxpr.eqns)
    for layer, together in by_layer.items():
        begins = _held_back(together, values, given)
        coming = [p for p in params if first_read.get(p) == layer + 1]
        if begins and coming:
            tied = [*begins, *coming]
            after = jax.lax.optimization_barrier([values[v] for v in tied])
            values |= zip(tied, after, strict=True)
        for equation in together:
            bind(equation, [value_of(v, values) for v in equation.invars], values)
    results = [value_of(v, values) for v in flow.outputs]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _by_layer(equations: Sequence[JaxprEqn]) -> tuple[dict[int, list[Any]], dict[Any, int]]:
    """Return the operations of a forward pass by layer, in their order, each no sooner than those
    that stand before it; and the layer that first reads each value."""
    by_layer: dict[int, list[Any]] = {}
    first_read: dict[Any, int] = {}
    layer = -1  # in front of all
    for equation in equations:
        own = layer_of_scope(str(equation.source_info.name_stack))
        layer = layer if own is None else max(layer, own)
        by_layer.setdefault(layer, []).append(equation)
        for v in variables(equation.invars):
            first_read.setdefault(v, layer)
    return by_layer, first_read


def _opened(
    function: Callable[..., object], groups: Sequence[Sequence[object]]
) -> tuple[DataFlow, list[Any], Any]:
    """Return the traced function, the leaves of its arguments and the structure of its results."""
    leaves, tree = jax.tree.flatten(tuple(groups))
    closed, shapes = jax.make_jaxpr(
        lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*leaves)
    return DataFlow(closed), leaves, shapes


def _evaluate(
    flow: DataFlow,
    args: Mapping[object, object],
    given: Collection[object],
    gradients: Sequence[Any],
    lag: int,
    lying: Mapping[object, NamedSharding],
) -> list[Any]:
    values = flow.constants | dict(args)
    shown = [v for e in flow.jaxpr.eqns if e.effects for v in e.invars]
    needed = {id(equation) for equation in flow.needed([*flow.outputs, *shown])}
    equations = [e for e in flow.jaxpr.eqns if id(e) in needed or e.effects]
    turns = _turns(equations)
    by_turn: dict[int, list[Any]] = {}
    for equation in equations:
        by_turn.setdefault(turns[id(equation)], []).append(equation)
    made_at = {v: turn for turn, each in by_turn.items() for e in each for v in e.outvars}
    waiting = [v for v in dict.fromkeys(variables(gradients)) if v in made_at]
    for turn, together in sorted(by_turn.items()):
        done = [v for v in waiting if made_at[v] < turn - lag]
        tied = _held_back(together, values, given)
        if done and tied:
            waiting = [v for v in waiting if v not in done]
            ready = [_by_rows(values[v], lying[v]) if v in lying else values[v] for v in done]
            after, waited = jax.lax.optimization_barrier(([values[v] for v in tied], ready))
            values |= zip(tied, after, strict=True)
            if lying:
                values |= zip(done, waited, strict=True)
        for equation in together:
            bind(equation, [value_of(v, values) for v in equation.invars], values)
    return [value_of(v, values) for v in flow.outputs]


def _by_rows(array: jax.Array, sharding: NamedSharding) -> Any:
    """Return a gradient in the order of memory in which results are returned, so that it is put
    into that order when it is complete, and not at the end, all layers' at once.

    Every device does so with its own part: left to the partitioner, it would gather the whole.
    """
    if array.ndim < 2:
        return array
    rows = Layout(major_to_minor=tuple(range(array.ndim)))
    return jax.shard_map(
        lambda part: with_layout_constraint(part, rows),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
    )(array)


def _turns(equations: Sequence[JaxprEqn]) -> dict[int, int]:
    """Return each operation's turn, by its identity: gradients at the turn of their layer, counted
    from the last one; what is computed again of the forward pass when it is first read."""
    layers: dict[Any, int] = {}
    of_gradients: dict[int, int] = {}
    for equation in equations:
        scope = str(equation.source_info.name_stack)
        known = [layers[v] for v in variables(equation.invars) if v in layers]
        if known or goes_backwards(scope):
            own = layer_of_scope(scope)
            known += [] if own is None else [own]
            if known:
                of_gradients[id(equation)] = min(known)
                layers.update(dict.fromkeys(equation.outvars, min(known)))
    last, first = max(of_gradients.values(), default=0), min(of_gradients.values(), default=0)
    turns: dict[int, int] = {}
    first_read: dict[Any, int] = {}
    for equation in reversed(equations):
        if id(equation) in of_gradients:
            turn = last - of_gradients[id(equation)]
        else:  # what nobody reads is there for its effects
            readers = (first_read[v] for v in equation.outvars if v in first_read)
            turn = min(readers, default=last - first)
        turns[id(equation)] = turn
        for v in variables(equation.invars):
            first_read[v] = min(first_read.get(v, turn), turn)
    return turns


def _held_back(
    equations: Sequence[JaxprEqn], values: Mapping[Any, Any], given: Collection[Any]
) -> list[Any]:
    """Return what operations read, and is not there all the time, that a barrier can hold back."""
    reads = dict.fromkeys(v for equation in equations for v in variables(equation.invars))
    return [v for v in reads if v in values and v not in given and may_wait(values[v])]


def may_wait(array: jax.Array) -> bool:
    """Return whether a barrier takes an array: no random keys, and no gradients of integers."""
    return jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_
