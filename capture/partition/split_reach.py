"""How far the split of some values can spread through a program, whatever a compiler prefers.

A compiler carries a sharding from value to value along dimensions that hold the same elements:
those of an element-wise operation, of both sides of a product. Dimensions that are joined so, in
any number of steps, are split together or not at all; a value with no dimension that is joined with
a split one is whole on every device. What is not known of an operation joins all that it touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from capture.partition.dim_flow import dim_flow, reshape_groups
from capture.tracing.jaxprs import is_variable
from capture.tracing.recompute import ARITHMETIC, FUNCTIONS, LONG_FUNCTIONS, REDUCTIONS

#: A dimension of a value.
Dim = tuple[Any, int]

#: Made of no operand's elements.
_MADE_OF_NOTHING = {name for name in LONG_FUNCTIONS if name.startswith("random")} | {"iota"}
#: Dimensions stay where they are.
_IN_PLACE = (
    (ARITHMETIC | FUNCTIONS | LONG_FUNCTIONS) - _MADE_OF_NOTHING
    | {"argsort", "clamp", "concatenate", "convert_element_type", "copy", "copy_p", "cumlogsumexp"}
    | {"cummax", "cummin", "cumprod", "cumsum", "dynamic_slice", "dynamic_update_slice", "name"}
    | {"pad", "reduce_precision", "reduce_window", "reduce_window_max", "reduce_window_min"}
    | {"reduce_window_sum", "rev", "select_and_gather_add", "select_and_scatter"}
    | {"select_and_scatter_add", "sharding_constraint", "slice", "sort", "stop_gradient", "top_k"}
)
#: What ``dim_flow`` says of them is all there is.
_FOLLOWED = REDUCTIONS | {"argmax", "argmin", "broadcast_in_dim", "squeeze", "transpose"}


class SplitReach:
    """The joined dimensions of a program's values: those that are split together or not at all.

    Args:
        jaxpr: Flat.
    """

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        self._next: dict[Dim, Dim] = {}
        for equation in jaxpr.eqns:
            for one, other in _joined(equation):
                # What is one element is broadcast, not split.
                if _size(one) > 1 and _size(other) > 1:
                    self._next[self._last(one)] = self._last(other)

    def of(self, split: Iterable[Dim]) -> set[Any]:
        """Return the values that may be split where these dimensions are."""
        groups = {self._last(dim) for dim in split}
        values = [*self._jaxpr.invars, *(v for e in self._jaxpr.eqns for v in e.outvars)]
        return {v for v in values if any(self._last(dim) in groups for dim in _dims(v))}

    def _last(self, dim: Dim) -> Dim:
        while (joined := self._next.get(dim, dim)) != dim:
            self._next[dim] = dim = self._next.get(joined, joined)
        return dim


def _size(dim: Dim) -> int:
    value, place = dim
    return int(value.aval.shape[place])


def _dims(value: Any) -> list[Dim]:
    return [(value, dim) for dim in range(value.aval.ndim)]


def _joined(equation: Any) -> Iterator[tuple[Dim, Dim]]:
    name, results = equation.primitive.name, list(equation.outvars)
    operands = [v for v in equation.invars if is_variable(v)]
    if name in _MADE_OF_NOTHING:
        return
    if name in _IN_PLACE:
        ranked = [v for v in (*operands, *results) if v.aval.ndim]
        if len({v.aval.ndim for v in ranked}) < 2:
            for v in ranked[:-1]:  # a result is as large as any of them
                yield from _between(_dims(v), _dims(ranked[-1]))
            return
    elif name == "optimization_barrier":
        for one, other in zip(equation.invars, results, strict=True):
            yield from _between(_dims(one), _dims(other))
        return
    elif name == "reshape":
        [result] = results
        for v in operands[:1]:
            for old, new in reshape_groups(v.aval.shape, result.aval.shape):
                yield from _together([(v, dim) for dim in old] + [(result, dim) for dim in new])
        return
    elif name in _FOLLOWED:
        for side, v in enumerate(equation.invars):
            if is_variable(v):
                flow = dim_flow(equation, side, 1)
                yield from (
                    ((v, dim), (result, target))
                    for result in results
                    for dim, target in enumerate(flow)
                    if target is not None
                )
        return
    elif name == "dot_general":
        yield from _of_product(equation)
        return
    elif name == "conv_general_dilated" and equation.params["feature_group_count"] == 1:
        if equation.params["batch_group_count"] == 1:
            yield from _of_convolution(equation)
            return
    elif name == "gather" or name.startswith("scatter"):
        yield from _of_lookup(equation)
        return
    yield from _together([dim for v in (*operands, *results) for dim in _dims(v)])


def _together(dims: Sequence[Dim]) -> Iterator[tuple[Dim, Dim]]:
    large = [dim for dim in dims if _size(dim) > 1]
    return ((large[0], dim) for dim in large[1:])


def _of_product(equation: Any) -> Iterator[tuple[Dim, Dim]]:
    contract, batch = equation.params["dimension_numbers"]
    sides, [result] = equation.invars, equation.outvars
    for i, j in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        yield (sides[0], i), (sides[1], j)
    place = len(batch[0])
    for side, v in enumerate(sides):
        yield from (((v, dim), (result, at)) for at, dim in enumerate(batch[side]))
        for dim in range(v.aval.ndim):
            if dim not in contract[side] and dim not in batch[side]:
                yield (v, dim), (result, place)
                place += 1


def _of_convolution(equation: JaxprEqn) -> Iterator[tuple[Dim, Dim]]:
    numbers, [result] = equation.params["dimension_numbers"], equation.outvars
    image, kernel = equation.invars
    images, kernels, results = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    yield (image, images[0]), (result, results[0])
    yield (image, images[1]), (kernel, kernels[1])
    yield (kernel, kernels[0]), (result, results[1])
    for i, j, k in zip(images[2:], kernels[2:], results[2:], strict=True):
        yield (image, i), (result, k)
        yield (image, i), (kernel, j)


def _of_lookup(equation: Any) -> Iterator[tuple[Dim, Dim]]:
    """Yield the joined dimensions of a gather or scatter: of the table and the windows that are
    taken from it or put into it, of the indices and which windows."""
    numbers, operands = equation.params["dimension_numbers"], equation.invars
    table, indices = operands[0], operands[1]
    if equation.primitive.name == "gather":
        taken, windows = equation.outvars[0], numbers.offset_dims
        gone, batch = numbers.collapsed_slice_dims, numbers.operand_batching_dims
        of_indices = numbers.start_indices_batching_dims
    else:
        taken, windows = operands[2], numbers.update_window_dims
        gone, batch = numbers.inserted_window_dims, numbers.operand_batching_dims
        of_indices = numbers.scatter_indices_batching_dims
        yield from _between(_dims(table), _dims(equation.outvars[0]))
    which = [dim for dim in range(taken.aval.ndim) if dim not in windows]
    whole = [dim for dim in range(table.aval.ndim) if dim not in gone and dim not in batch]
    yield from _between([(table, dim) for dim in whole], [(taken, dim) for dim in windows])
    yield from _between(_dims(indices), [(taken, dim) for dim in which])
    for dim, index_dim in zip(batch, of_indices, strict=True):
        yield from _between([(table, dim)], [(taken, which[index_dim])])
    # Indices that count up make a dimension of the table one of the result, if a compiler sees it.
    shape = taken.aval.shape
    for one, other in ((i, j) for i in gone for j in which if table.aval.shape[i] == shape[j]):
        yield from _between([(table, one)], [(taken, other)])


def _between(some: Sequence[Dim], others: Sequence[Dim]) -> Iterator[tuple[Dim, Dim]]:
    """Yield pairs of dimensions, except those of constants; a dimension without a partner is left
    out."""
    return (
        pair
        for pair in zip(some, others, strict=False)
        if all(is_variable(value) for value, _ in pair)
    )
