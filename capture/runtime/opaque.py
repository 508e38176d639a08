"""Which products of a traced program keep what they read and make in memory, whatever a compiler
does with the rest.

XLA hands large products of floating-point numbers to a library, which reads operands from memory
and writes its result there. Others it computes inside of what reads them: those with a dimension of
size 1 are multiplications and sums, integers have no library, operands that are constant are
folded, and of products of equal operands one is left. Read in XLA's sources (``HandleDot`` of the
algebraic simplifier, ``IsMatrixMultiplicationTooSmallForRewriting`` of the GPU backend) and
confirmed by programs compiled for h100 (jaxlib 0.10.2, Triton's products switched off).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.extend.core import JaxprEqn

from capture.tracing.jaxprs import is_variable, sub_jaxprs
from capture.tracing.recompute import (
    FUNCTIONS,
    LONG_FUNCTIONS,
    REDUCTIONS,
    RENAMED,
)

#: Data types for which libraries have products; of complex numbers and of 8 bits, XLA takes factors
#: and parts out.
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
#: Elements of both operands, without batch dimensions, below which XLA calls no library (100).
_FEWEST_ELEMENTS = 128
#: Rows, columns and terms from which on a product is large.
LARGE = 32
#: These undo another function, or do nothing for some exponent: an argument may be left of both.
_UNDONE = {"log", "pow", "div"}
_MAKE_NEW = (FUNCTIONS | LONG_FUNCTIONS | {"square", "integer_pow"}) - _UNDONE
_COMBINE = {"add", "add_any", "sub", "mul", "mul_any", "div", "max", "min", "select_n", "pow"}
#: Through which the operands of equal products may differ.
_SAME = RENAMED | {"neg", "transpose"}


class OpaqueProducts:
    """The matrix products and convolutions of a program, and how much of a value is its own.

    Args:
        equations: In order, flat.
        given: Its inputs, without constants.
        useful: Positions of the equations that results depend on.
    """

    def __init__(
        self, equations: Sequence[JaxprEqn], given: Sequence[object], useful: Collection[int]
    ):
        self._equations, self._useful = equations, useful
        self._distinct = {v: _size(v) for v in given}
        self._root: dict[Any, Any] = {}
        self._computed: dict[Any, Sequence[Any]] = {}
        for equation in equations:
            self._follow(equation)

    def _follow(self, equation: JaxprEqn) -> None:
        read = {v: self.distinct(v) for v in equation.invars if is_variable(v)}
        all_of_it = self._is_product(equation)
        for v in equation.outvars:
            self._distinct[v] = _size(v) if all_of_it else min(_size(v), sum(read.values()))
        sources = [v for v, elements in read.items() if elements > 1]
        name = equation.primitive.name
        scales = name in ("mul", "div") and len(sources) == 1
        if len(sources) == 1 and (name in _SAME or scales) and len(equation.outvars) == 1:
            self._root[equation.outvars[0]] = self._rooted(sources[0])
        elif not any(sub_jaxprs(equation.params)) and not equation.effects:
            operands = [self._rooted(v) if is_variable(v) else str(v) for v in equation.invars]
            key = name, str(equation.params), *operands
            roots = self._computed.setdefault(key, equation.outvars)
            self._root.update(zip(equation.outvars, roots, strict=True))

    def _rooted(self, value: object) -> Any:
        """Return one of the values that are equal to a value, but for scale, type and order."""
        return self._root.get(value, value)

    def distinct(self, value: object) -> int:
        """Return how many elements a value is made of: 0 of a constant; broadcast, those before."""
        return self._distinct.get(value, 0) if is_variable(value) else 0

    @cached_property
    def candidates(self) -> Mapping[int, tuple[int, int, int]]:
        """The rows, columns and terms of the products that may be opaque, by position: of those
        whose operands are equal but for scale and order, which may be one, none."""
        count = Counter(self._operands.values())
        return {
            at: product_sizes(self._equations[at])
            for at, read in self._operands.items()
            if count[read] == 1
        }

    @cached_property
    def distinct_products(self) -> Mapping[int, tuple[int, int, int]]:
        """The rows, columns and terms of all products, by position: of those whose operands are
        equal but for scale and order, which may be one, the first."""
        first = {read: at for at, read in reversed([*self._operands.items()])}
        return {at: product_sizes(self._equations[at]) for at in sorted(first.values())}

    @cached_property
    def _operands(self) -> Mapping[int, frozenset[Any]]:
        return {
            at: frozenset(map(self._rooted, equation.invars))
            for at, equation in enumerate(self._equations)
            if at in self._useful and self._is_product(equation)
        }

    def is_large(self, at: int, num_devices: int) -> bool:
        """Return whether a product is one of matrices and large on so many devices: all of these
        are given scratch, and what they compute is known."""
        is_matrix = self._equations[at].primitive.name == "dot_general"
        return is_matrix and min(self.candidates[at]) >= LARGE * num_devices

    def at(self, num_devices: int) -> frozenset[int]:
        """Return the positions of the opaque products on so many devices, which may split any of
        their dimensions."""
        return frozenset(
            at
            for at, (rows, columns, terms) in self.candidates.items()
            if min(rows, columns, terms) >= 2 * num_devices
            and terms * (rows + columns) >= _FEWEST_ELEMENTS * num_devices
        )

    def _is_product(self, equation: JaxprEqn) -> bool:
        return min(product_sizes(equation)) > 0 and all(map(self.distinct, equation.invars))

    def new_elements(self, equation: JaxprEqn) -> int:
        """Return how many elements of the result are in none of the operands, even if a compiler
        leaves out, folds or moves all that it may; 0 where that is not certain."""
        name, [result, *_] = equation.primitive.name, equation.outvars
        read = [v for v in equation.invars if is_variable(v)]
        elements = self.distinct(result)
        if name in _MAKE_NEW:
            return elements if name != "integer_pow" or equation.params["y"] not in (0, 1) else 0
        if name in _COMBINE:
            varied = {self._rooted(v) for v in read if self.distinct(v) > 1}
            return elements if len(varied) > 1 else 0
        if name in REDUCTIONS:
            return elements if any(self.distinct(v) > _size(result) for v in read) else 0
        return 0


def product_sizes(equation: Any) -> tuple[int, int, int]:
    """Return rows, columns and what is summed over of a product of floating-point numbers, without
    what it does alike for groups; zeros for anything else."""
    name = equation.primitive.name
    if name not in ("dot_general", "conv_general_dilated"):
        return 0, 0, 0
    if any(v.aval.dtype.name not in _FLOATS for v in (*equation.invars, *equation.outvars)):
        return 0, 0, 0
    if name == "dot_general":
        (contract, others), batch = equation.params["dimension_numbers"]
        shapes = [operand.aval.shape for operand in equation.invars]
        rows, columns = (
            math.prod(
                size for dim, size in enumerate(shape) if dim not in summed and dim not in apart
            )
            for shape, summed, apart in zip(shapes, (contract, others), batch, strict=True)
        )
        return rows, columns, math.prod(shapes[0][dim] for dim in contract)
    params, kernel = equation.params, equation.invars[1].aval.shape
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return 0, 0, 0
    columns = kernel[params["dimension_numbers"].rhs_spec[0]]
    if not columns:
        return 0, 0, 0
    return _size(equation.outvars[0]) // columns, columns, math.prod(kernel) // columns


def _size(value: Any) -> int:
    return math.prod(value.aval.shape)
