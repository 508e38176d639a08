"""What the large products of a traced program compute, read and make, per device: at least, and as
expected.

    least      FLOPs shared out over all devices that may share them; operands and results once, in
               their narrowest type, each of them only as large as what it is made of; products that
               a compiler may make one (of query, key and value) as one
    expected   as the partition walk splits them, by tiles

Products that a compiler may leave out, fold, or compute inside of what reads them are none of these
(``capture.runtime.opaque``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from capture.measured.work import Kernel
from capture.runtime.opaque import LARGE
from capture.runtime.residuals import SplitAxis, ValueSplit
from capture.runtime.traced_program import TracedProgram
from capture.runtime.views import item_bytes
from capture.tracing.flops import equation_flops
from capture.tracing.jaxprs import is_variable

#: Of a result, these need a part, or a sum, which compilers may compute of the operands instead.
_PARTS = frozenset({"slice", "dynamic_slice", "gather", "reduce_sum", "split"})


@dataclass(frozen=True)
class Product:
    """A product of a program.

    Attributes:
        sizes: Batches, rows, columns and terms on one device, as expected.
        summed: The axes over which its results are parts of a sum.
    """

    at: int
    equation: Any
    sizes: tuple[int, int, int, int]
    summed: tuple[str, ...]

    @property
    def result(self) -> Any:
        return self.equation.outvars[0]


class LargeProducts:
    """The large products of a program on a mesh.

    Args:
        reads_memory: Whether operands and results are in memory; else what else than products
            computes them may be computed inside, so that only arguments are read for certain.
    """

    def __init__(self, program: TracedProgram, split: ValueSplit, reads_memory: bool):
        self._program, self._split, self._reads_memory = program, split, reads_memory

    @cached_property
    def large(self) -> Mapping[int, Product]:
        """The large products by position, in order."""
        found = {}
        for at, (rows, columns, terms) in self._program.once(_read_whole).items():
            equation = self._program.equations[at]
            batches = math.prod(equation.outvars[0].aval.shape) // (rows * columns)
            sizes = {"batches": batches, "rows": rows, "columns": columns, "terms": terms}
            summed = []
            for axis in self._split.axes:
                part = part_of(equation, axis)
                if part is not None:
                    sizes[part] = max(1, sizes[part] // axis.degree)
                if part == "terms":
                    summed.append(axis.name)
            if min(sizes["rows"], sizes["columns"], sizes["terms"]) >= LARGE:
                found[at] = Product(at, equation, tuple(sizes.values()), tuple(summed))
        return found

    def least(self) -> list[Kernel]:
        """Return one kernel per product, or per products that may be one, in program order."""
        first = self._program.once(_alike)
        groups: dict[int, list[Product]] = {}
        for at, product in self.large.items():
            groups.setdefault(first[at], []).append(product)
        return [self._together(products) for products in groups.values()]

    def _together(self, products: Sequence[Product]) -> Kernel:
        flops, read, made = 0, dict[Any, int](), 0
        types = []
        for product in products:
            flops += self._least_flops(product)
            made += self._least_made(product)
            for value in filter(is_variable, product.equation.invars):
                base = self._program.views.of(value).base
                read[base] = max(read.get(base, 0), self._least_read(value))
            types.append(self._program.once(_computed, product.at))
        dtype, precision = min(types, key=_slowness)
        return Kernel(made + sum(read.values()), flops, dtype, precision)

    def _least_flops(self, product: Product) -> int:
        atoms = [v for v in (*product.equation.invars, product.result) if is_variable(v)]
        shared = math.prod(
            axis.degree for axis in self._split.axes if any(v in axis.reached for v in atoms)
        )
        return least_flops(product.equation) // shared

    def _least_read(self, value: Any) -> int:
        view = self._program.views.of(value)
        if not self._reads_memory and view.base not in self._program.given:
            return 0
        size = math.prod(value.aval.shape)
        made_of = min(size, self._program.products.distinct(value))
        nbytes = self._split.least_bytes(value) * made_of // size
        return nbytes * view.itemsize // item_bytes(value)

    def _least_made(self, product: Product) -> int:
        if not self._reads_memory:
            return 0
        itemsize = self._program.views.written_itemsize.get(product.result)
        nbytes = self._split.least_bytes(product.result)
        return nbytes if itemsize is None else nbytes * itemsize // item_bytes(product.result)

    def expected(self) -> list[Kernel]:
        """Return one kernel per product, with its shape."""
        return [self._expected(product) for product in self.large.values()]

    def _expected(self, product: Product) -> Kernel:
        batches, rows, columns, terms = product.sizes
        flops = 2 * batches * rows * columns * terms
        operands = [v for v in product.equation.invars if is_variable(v)]
        itemsizes = [self._program.views.of(v).itemsize for v in operands]
        sizes = [batches * rows * terms, batches * columns * terms]
        if product.equation.primitive.name != "dot_general":
            sizes = [self._split.nbytes(v) // item_bytes(v) for v in operands]
        read = sum(a * b for a, b in zip(sizes, itemsizes, strict=False))
        made = (
            batches
            * rows
            * columns
            * self._program.views.written_itemsize.get(product.result, item_bytes(product.result))
        )
        dtype, precision = self._program.once(_computed, product.at)
        return Kernel(read + made, flops, dtype, precision, shape=(batches, rows, columns))


def _computed(program: TracedProgram, at: int) -> tuple[str, str]:
    """Return the fastest data type of an operand on its way to a product, and the precision."""
    equation = program.equations[at]
    views = [program.views.of(v) for v in equation.invars if is_variable(v)]
    narrow = min(view.itemsize for view in views)
    dtypes = {v.aval.dtype.name for v in equation.invars}
    dtype = min(dtypes, key=lambda name: np.dtype(name).itemsize if "b" not in name else 2)
    asked = str(equation.params.get("precision")).lower()
    if narrow < 4 and dtype not in ("bfloat16", "float16"):
        dtype = "bfloat16"
    if "bf16" in asked or "tf32" in asked:
        return ("bfloat16" if "bf16" in asked else "tf32"), "highest"
    return dtype, next((p for p in ("highest", "high") if p in asked), "default")


def _alike(program: TracedProgram) -> Mapping[int, int]:
    """Return ``Views.alike`` of all products."""
    return program.views.alike(program.products.distinct_products)


def _read_whole(program: TracedProgram) -> Mapping[int, tuple[int, int, int]]:
    """Return the distinct products of whose results more than parts or sums are needed."""
    found = program.products.distinct_products
    return {at: sizes for at, sizes in found.items() if not _is_read_in_parts(program, at)}


def _is_read_in_parts(program: TracedProgram, at: int) -> bool:
    """Return whether only parts or sums of a result are needed."""
    [result], views = program.equations[at].outvars, program.views
    waiting, readers = [result], program.readers
    while waiting:
        value = waiting.pop()
        if value in program.results:
            return False
        for equation in readers.get(value, ()):
            if len(equation.outvars) == 1 and views.of(equation.outvars[0]).base is result:
                waiting.append(equation.outvars[0])
            elif equation.primitive.name == "split" or equation.primitive.name not in _PARTS:
                return False
    return True


def part_of(equation: Any, axis: SplitAxis) -> str | None:
    """Return what of a product an axis splits, as the partition walk says: its batches, rows,
    columns, or the terms of its sums."""
    dims = [axis.dims.get(v) if is_variable(v) else None for v in equation.invars]
    out = axis.dims.get(equation.outvars[0])
    if equation.primitive.name == "dot_general":
        contract, batch = equation.params["dimension_numbers"]
        if out is not None:
            rows = equation.invars[0].aval.ndim - len(contract[0])
            return "batches" if out < len(batch[0]) else "rows" if out < rows else "columns"
        if dims[0] in contract[0] and dims[1] in contract[1]:
            places = contract[0].index(dims[0]), contract[1].index(dims[1])
            return "terms" if places[0] == places[1] else None
        return None
    numbers = equation.params["dimension_numbers"]
    if out is not None:
        return "columns" if out == numbers.out_spec[1] else "rows"
    both = dims[0] == numbers.lhs_spec[1] and dims[1] == numbers.rhs_spec[1]
    return "terms" if both else None


def least_flops(equation: Any) -> int:
    """Return the FLOPs of a product; of a convolution, of the elements that are there: not of
    padding, or of what lies between them."""
    if equation.primitive.name == "dot_general":
        return equation_flops(equation)
    params: Any = equation.params
    numbers, (image, kernel) = params["dimension_numbers"], [v.aval for v in equation.invars]
    result = equation.outvars[0].aval
    pairs = 1
    for i in range(len(params["window_strides"])):
        pairs *= _valid_pairs(
            image.shape[numbers.lhs_spec[2 + i]],
            kernel.shape[numbers.rhs_spec[2 + i]],
            result.shape[numbers.out_spec[2 + i]],
            params["window_strides"][i],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
            params["padding"][i][0],
        )
    others = result.shape[numbers.out_spec[0]] * result.shape[numbers.out_spec[1]]
    return 2 * others * kernel.shape[numbers.rhs_spec[1]] * pairs


def _valid_pairs(
    size: int, window: int, results: int, stride: int, spread: int, apart: int, low: int
) -> int:
    """Count, in one dimension, pairs of result and window positions that meet an element."""
    at = np.arange(results)[:, None] * stride + np.arange(window)[None] * apart - low
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


def _slowness(computed: tuple[str, str]) -> tuple[int, int]:
    dtype, precision = computed
    width = {"bfloat16": 2, "float16": 2, "tf32": 3, "float32": 4}.get(dtype, 8)
    return width, ("default", "high", "highest").index(precision)
