"""States of the results of JAX primitives, from those of their operands (``batch_states``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp

from capture.tracing.batch.equation import Step
from capture.tracing.batch.states import (
    Kind,
    State,
    broken,
    common_degree,
    function,
    linear,
    product,
    scaled,
    unknown,
)
from capture.tracing.split_rule import PRIMITIVE, split_rule

Rule = Callable[[Step, Sequence[State]], State | list[State]]
#: Where the batch dimension of an operand goes in the result; None if its examples are moved or
#: mixed.
Flow = Callable[[Step, int], int | None]


def _flows(step: Step, operands: Sequence[int], flow: Flow) -> bool:
    """Whether the examples stay in their order along the batch dimension of the (first) result."""
    return all(flow(step, i) == step.out_dim for i in operands if step.in_dim(i) is not None)


def _kept(step: Step, operand: int) -> int | None:
    return step.in_dim(operand)


def _mover(flow: Flow, is_linear: bool = True, operands: int | None = None) -> Rule:
    """A rule for operations that move elements, or combine those of one example, by ``flow``.

    Args:
        flow: Which dimension of the result each operand's dimensions become.
        is_linear: Whether the result is linear in the operands.
        operands: How many operands carry data; those after them are positions.
    """

    def rule(step: Step, states: Sequence[State]) -> State:
        data, positions = states[:operands], states[operands:] if operands is not None else ()
        if not _flows(step, range(len(data)), flow):
            if not is_linear and any(not s.is_data_free for s in data):
                return broken(f"{step.where} works along the examples of the micro-batch")
            return unknown(f"{step.where} rearranges the examples of the micro-batch")
        if any(s.is_aggregated for s in positions):
            return broken(
                f"{step.where} is not linear in a value computed from the whole micro-batch"
            )
        if not all(s.is_fixed for s in positions):
            return unknown(
                f"{step.where} reads positions that depend on the data or the batch size"
            )
        return linear(data, step.where) if is_linear else function(data, step.where)

    return rule


def _transposed(step: Step, operand: int) -> int:
    return list(step.params["permutation"]).index(step.in_dim(operand))


def _reshaped(step: Step, operand: int) -> int | None:
    """The examples stay in blocks of equal order if the dimensions before the batch dimension hold
    as many elements."""
    before, after = step.in_dim(operand), step.out_dim
    if after is None:
        return -1
    return (
        after
        if math.prod(step.in_shapes[operand][:before])
        == math.prod(step.one.outvars[0].aval.shape[:after])
        else -1
    )


def _except(*names: str) -> Flow:
    """The dimension stays, unless it is one of those that a parameter names; all in front of a
    removed one move up."""

    def flow(step: Step, operand: int) -> int | None:
        dim, ndim = step.in_dim(operand), len(step.in_shapes[operand])
        named = next((step.params[name] for name in names if name in step.params), ndim - 1)
        dims = {d % ndim for d in (named if isinstance(named, Sequence) else (named,))}
        if dim is None or dim in dims:
            return -1
        removed = dims if len(step.one.outvars[0].aval.shape) < ndim else set()
        return dim - sum(d < dim for d in removed)

    return flow


def _whole(step: Step, operand: int) -> int | None:
    """The dimension stays where all of it is taken."""
    dim = step.in_dim(operand)
    assert dim is not None, "a flow is asked for operands with a batch dimension"
    sizes = (
        (eqn.invars[operand].aval.shape, eqn.outvars[0].aval.shape) for eqn in (step.one, step.two)
    )
    strides = step.params.get("strides") or (1,) * (dim + 1)
    return dim if strides[dim] == 1 and all(a[dim] == b[dim] for a, b in sizes) else -1


def _padded(step: Step, operand: int) -> int | None:
    dim = step.in_dim(operand)
    return dim if dim is not None and tuple(step.params["padding_config"][dim]) == (0, 0, 0) else -1


def _windowed(step: Step, operand: int) -> int | None:
    dim, params = step.in_dim(operand), step.params
    assert dim is not None, "a flow is asked for operands with a batch dimension"
    single = all(
        params[name] is None or params[name][dim] in (1, (0, 0))
        for name in (
            "window_dimensions",
            "window_strides",
            "padding",
            "base_dilation",
            "window_dilation",
        )
        if name in params
    )
    return dim if single else -1


def _elementwise(factor: float | None) -> Rule:
    def rule(step: Step, states: Sequence[State]) -> State:
        return function(states, step.where, factor)

    return rule


def _power(step: Step, states: Sequence[State]) -> State:
    return function(states, step.where, step.params["y"])


def _linear(step: Step, states: Sequence[State]) -> list[State]:
    # Optimization_barrier and the like: each by itself.
    if len(states) > 1 and len(step.one.outvars) == len(states):
        return list(states)
    if len(states) == 1:
        return [states[0]]
    return [linear(states, step.where)]


def _converted(step: Step, states: Sequence[State]) -> State:
    source, target = step.one.invars[0].aval.dtype, step.one.outvars[0].aval.dtype
    if jnp.issubdtype(target, jnp.floating) or (
        jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer)
    ):
        return states[0]
    return function(states, step.where)


def _partitioned(step: Step, states: Sequence[State]) -> State:
    """An operation that says itself which dimensions may be split: the examples are independent if
    theirs may, in every result."""
    rule, batch = split_rule(step.one), set()
    if rule is not None:
        for factors, grown in (
            *zip(rule.operands, step.in_grown, strict=True),
            *zip(rule.results, step.out_grown, strict=True),
        ):
            batch |= {factors[dim] for dim in grown}
    reduces = any(step.in_grown) and not all(step.out_grown)
    if rule is None or None in batch or len(batch) > 1 or reduces:
        return unknown(f"{step.where} does not say that its examples may be split")
    return function(states, step.where)


def _mul(step: Step, states: Sequence[State]) -> State:
    return product(states[0], states[1], step.where)


def _div(step: Step, states: Sequence[State]) -> State:
    top, bottom = states
    if (
        bottom.is_data_free
        and bottom.degree is not None
        and top.kind in (Kind.SAME, Kind.EXAMPLES, Kind.AGGREGATE, Kind.MIXED)
    ):
        return scaled(top, -bottom.degree)
    if bottom.is_aggregated:
        return broken(f"{step.where} divides by a value computed from the whole micro-batch")
    if bottom.kind is not Kind.EXAMPLES:
        return function(states, step.where)
    return product(
        top, State(Kind.EXAMPLES, None if bottom.degree is None else -bottom.degree), step.where
    )


def _compared(step: Step, states: Sequence[State]) -> State:
    if (
        step.name == "lt"
        and states[0].kind is Kind.POSITION
        and states[1] == State(Kind.SAME, None)
    ):
        return State(Kind.NEVER)
    return function(states, step.where, 0.0)


def _select(step: Step, states: Sequence[State]) -> State:
    choice, *cases = states
    if choice.kind is Kind.NEVER:
        return cases[0]
    for kind in (Kind.BROKEN, Kind.UNKNOWN):
        if bad := next((s for s in states if s.kind is kind), None):
            return bad
    if choice.is_data_free:
        return linear(cases, step.where)
    degree = common_degree(cases)
    if any(s.is_aggregated for s in states):
        return function(states, step.where)
    if degree is not None and math.isnan(degree):
        return unknown(f"{step.where} reads the number of examples")
    return scaled(function([choice, *(State(s.kind) for s in cases)], step.where), degree or 0.0)


def _iota(step: Step, states: Sequence[State]) -> State:
    return State(Kind.POSITION) if step.out_dim == step.params["dimension"] else State(Kind.SAME)


def _spread(step: Step, states: Sequence[State]) -> State:
    dim = step.in_dim(0)
    if dim is not None and step.params["broadcast_dimensions"][dim] != step.out_dim:
        return unknown(f"{step.where} rearranges the examples of the micro-batch")
    return states[0]


def _reshape(step: Step, states: Sequence[State]) -> State:
    if not _flows(step, [0], _reshaped):
        return unknown(f"{step.where} rearranges the examples of the micro-batch")
    if (
        states[0].kind is Kind.POSITION
        and step.in_shapes[0][step.in_dim(0) or 0]
        != step.one.outvars[0].aval.shape[step.out_dim or 0]
    ):
        return unknown(f"{step.where} reads the positions of the examples in the micro-batch")
    return states[0]


def _concatenate(step: Step, states: Sequence[State]) -> State:
    dim = step.params["dimension"]
    if (
        any(s.kind is Kind.POSITION for s in states)
        and dim == len(step.in_shapes[0]) - 1 != step.out_dim
    ):
        if any(s.kind not in (Kind.POSITION, Kind.SAME, Kind.EXAMPLES) for s in states):
            return unknown(f"{step.where} makes indices from what is not known")
        starts = [sum(shape[dim] for shape in step.in_shapes[:i]) for i in range(len(states))]
        widths = zip(starts, step.in_shapes, states, strict=True)
        own = frozenset(
            start + c
            for start, shape, s in widths
            if s.kind is Kind.POSITION
            for c in range(shape[dim])
        )
        return State(Kind.ADDRESS, columns=own)
    return (
        linear(states, step.where)
        if dim != step.out_dim or len(states) == 1
        else unknown(f"{step.where} joins several micro-batches")
    )


def _sum(step: Step, states: Sequence[State]) -> State:
    (state,) = states
    if step.in_dim(0) in step.params["axes"]:
        if state.kind in (Kind.EXAMPLES, Kind.MIXED):
            return State(Kind.AGGREGATE, None if state.degree is None else state.degree + 1)
        return (
            scaled(state, 1)
            if state.kind in (Kind.SAME, Kind.AGGREGATE)
            else unknown(f"{step.where} sums positions")
        )
    return linear(states, step.where)


def _reduce(step: Step, states: Sequence[State]) -> State:
    if step.in_dim(0) in step.params["axes"]:
        if states[0].is_data_free:
            return unknown(f"{step.where} reduces over the batch dimension")
        return broken(
            f"{step.where} reduces over the examples of the micro-batch, and not by a sum or a mean"
        )
    return function(states, step.where, 1.0 if step.name in ("reduce_max", "reduce_min") else None)


def _dot(step: Step, states: Sequence[State]) -> State:
    (contracted, batched) = step.params["dimension_numbers"]
    result = product(states[0], states[1], step.where)
    if result.kind in (Kind.BROKEN, Kind.UNKNOWN):
        return result
    dims = [step.in_dim(0), step.in_dim(1)]
    for side in (0, 1):
        dim = dims[side]
        if dim is None:
            continue
        if dim in contracted[side]:
            if dims[1 - side] != contracted[1 - side][list(contracted[side]).index(dim)]:
                return unknown(f"{step.where} multiplies the batch dimension by another")
            kind = Kind.AGGREGATE if result.kind in (Kind.EXAMPLES, Kind.MIXED) else result.kind
            return scaled(State(kind, result.degree), 1)
        taken = {*contracted[side], *batched[side]}
        free = [d for d in range(len(step.in_shapes[side])) if d not in taken]
        lead = len(batched[0]) + (
            len(step.in_shapes[0]) - len(contracted[0]) - len(batched[0]) if side else 0
        )
        place = list(batched[side]).index(dim) if dim in batched[side] else lead + free.index(dim)
        if place != step.out_dim:
            return unknown(f"{step.where} rearranges the examples of the micro-batch")
    return result


def _conv(step: Step, states: Sequence[State]) -> State:
    numbers = step.params["dimension_numbers"]
    plain = (
        step.params["batch_group_count"] == 1
        and step.in_dim(0) in (None, numbers.lhs_spec[0])
        and step.in_dim(1) is None
    )
    if not plain or step.out_dim not in (None, numbers.out_spec[0]):
        return unknown(f"{step.where} has the examples in another dimension than that of the batch")
    return product(states[0], states[1], step.where)


def _gather(step: Step, states: Sequence[State]) -> State:
    """A lookup is per example in four ways: a table without examples is read by indices of each;
    the examples' dimension is batched on both sides, or taken whole; or each example reads its own
    row, which its indices say (``POSITION`` alone, or as a column of an ``ADDRESS``). Any other
    index into the examples' dimension would be of another example in a smaller micro-batch.
    """
    operand, indices = states
    numbers, sizes = step.params["dimension_numbers"], step.params["slice_sizes"]
    dim, index_dim, ndim = step.in_dim(0), step.in_dim(1), len(step.one.outvars[0].aval.shape)
    outer = [d for d in range(ndim) if d not in numbers.offset_dims]
    elsewhere = unknown(f"{step.where} reads examples by their position in the micro-batch")
    if indices.is_aggregated:
        return function(states, step.where)
    if index_dim is not None and (index_dim >= len(outer) or outer[index_dim] != step.out_dim):
        return elsewhere
    if dim is not None:
        if dim in numbers.operand_batching_dims:
            if (
                numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
                != index_dim
            ):
                return elsewhere
        elif dim in numbers.collapsed_slice_dims:
            # x[arange(batch_size), ...]: each example reads itself.
            own = (
                indices.columns
                if indices.kind is Kind.ADDRESS
                else {0}
                if indices.kind is Kind.POSITION
                else set()
            )
            if dim not in numbers.start_index_map or numbers.start_index_map.index(dim) not in own:
                return elsewhere
        else:
            windows = [
                d
                for d in range(len(sizes))
                if d not in {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            ]
            if (
                _shape_and_slice_differ(step, dim)
                or numbers.offset_dims[windows.index(dim)] != step.out_dim
            ):
                return elsewhere
        indices = State(Kind.EXAMPLES) if indices.kind in (Kind.ADDRESS, Kind.POSITION) else indices
    elif indices.kind in (Kind.ADDRESS, Kind.POSITION):
        return elsewhere
    if indices.is_fixed and index_dim is None:
        return operand
    if operand.is_aggregated:
        return (
            linear([operand, State(Kind.SAME)], step.where)
            if indices.is_data_free
            else function(states, step.where)
        )
    result = function([indices, State(operand.kind)], step.where)
    return result if operand.degree is None else scaled(result, operand.degree)


def _shape_and_slice_differ(step: Step, dim: int) -> bool:
    return any(
        eqn.params["slice_sizes"][dim] != eqn.invars[0].aval.shape[dim]
        for eqn in (step.one, step.two)
    )


def _random(step: Step, states: Sequence[State]) -> State:
    """Operations on arrays of random keys keep the dimensions of the keys in front."""
    if step.out_dim is None:
        return function(states, step.where)
    if all(not dims for dims in step.in_grown):
        return (
            State(Kind.EXAMPLES)
            if all(s.is_data_free for s in states)
            else function(states, step.where)
        )
    return (
        function(states, step.where)
        if _flows(step, range(len(states)), _kept)
        else unknown(f"{step.where} rearranges random keys")
    )


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}

    def add(rule: Rule, names: str) -> None:
        rules.update(dict.fromkeys(names.split(), rule))

    add(
        _elementwise(None),
        "acos acosh and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil cos cosh "
        "digamma erf erf_inv erfc exp exp2 expm1 "
        "floor is_finite lgamma log log1p logistic nextafter not or polygamma population_count "
        "pow igamma igammac rem round "
        "shift_left shift_right_arithmetic shift_right_logical sin sinh tan tanh xor",
    )
    add(_elementwise(1.0), "abs clamp max min")
    add(_elementwise(0.0), "sign")
    add(_elementwise(2.0), "square")
    add(_elementwise(0.5), "sqrt")
    add(_elementwise(-0.5), "rsqrt")
    add(_power, "integer_pow")
    add(_compared, "eq ne lt le gt ge")
    add(
        _linear,
        "add add_any sub neg copy copy_p name real imag conj reduce_precision stop_gradient "
        "optimization_barrier sharding_constraint "
        "device_put pvary",
    )
    add(_converted, "convert_element_type")
    add(_mul, "mul")
    add(_div, "div")
    add(_select, "select_n")
    add(_iota, "iota")
    add(_spread, "broadcast_in_dim")
    add(_reshape, "reshape squeeze expand_dims")
    add(_concatenate, "concatenate")
    add(_mover(_transposed), "transpose")
    add(_mover(_padded), "pad")
    add(_mover(_whole), "slice")
    add(_mover(_whole, operands=1), "dynamic_slice")
    add(_mover(_whole, operands=2), "dynamic_update_slice")
    add(_mover(_except("dimensions")), "rev")
    add(_mover(_except("axis")), "split")
    add(_mover(_except("axis"), is_linear=False), "cumsum cumprod cummax cummin cumlogsumexp")
    add(_mover(_except("axes"), is_linear=False), "argmax argmin")
    add(_mover(_except("dimension", "axis"), is_linear=False), "sort top_k")
    add(_mover(_windowed), "reduce_window_sum")
    add(_mover(_windowed, is_linear=False), "reduce_window_max reduce_window_min reduce_window")
    add(_sum, "reduce_sum")
    add(_reduce, "reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor")
    add(_dot, "dot_general")
    add(_conv, "conv_general_dilated")
    add(_gather, "gather")
    add(_partitioned, PRIMITIVE)
    add(
        _random,
        "random_bits random_fold_in random_split random_unwrap random_wrap random_clone "
        "random_seed",
    )
    return rules


#: By the name of the primitive.
RULES: Mapping[str, Rule] = MappingProxyType(_table())
