"""What a traced program has to lay out anew between two products of a library.

A library's matrix product reads a matrix whose rows are at one distance from each other, and so are
its columns, one of them side by side; and the matrices of a batch at one distance. It writes its
results so, those of a batch one after the other. Heads of attention are made beside each other and
read apart: they are moved. So are arguments of the program, which lie in the order of their
dimensions.

Examples of replicas have to be one of the dimensions of each batch. Those of experts are not: what
they read may be sent between devices, and lie as they read it on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from capture.partition.tensor_parallel import DATA_AXIS
from capture.runtime.residuals import ValueSplit
from capture.runtime.traced_program import TracedProgram
from capture.runtime.views import Run, in_order
from capture.tracing.jaxprs import is_variable

#: Dimensions of a value, the outermost first.
Order = Sequence[int]


class Moves:
    """The operands of products that do not lie as a library reads them.

    Args:
        ends: Per value that is the end of products, these.
    """

    def __init__(self, program: TracedProgram, split: ValueSplit, ends: Mapping[object, object]):
        self._program, self._split, self._ends = program, split, ends

    def operands(self, products: Iterable[int]) -> Mapping[Any, Any]:
        """Return operands that are moved, one of each value in memory, with that value."""
        found: dict[Any, Any] = {}
        for at in products:
            equation = self._program.equations[at]
            if equation.primitive.name != "dot_general":
                continue
            parts = zip(equation.invars, *equation.params["dimension_numbers"], strict=True)
            for value, summed, batch in parts:
                if not is_variable(value) or (made := self._made_of(value)) is None:
                    continue
                base, runs = made
                if not self._is_by_example(value, batch, base):
                    continue
                orders = self._orders(value, base, runs)
                if orders and not any(self._is_read(value, o, summed, batch) for o in orders):
                    found.setdefault(base, value)
        return {value: base for base, value in found.items()}

    def _made_of(self, value: Any) -> tuple[Any, Sequence[Run]] | None:
        """Return the argument or result of a product that a value is, and where its elements are in
        it, in row-major order; None where it is computed, or that is not known."""
        program, runs = self._program, in_order(value)
        while True:
            view = program.views.of(value)
            if view.base is not value:
                if runs == in_order(value):
                    runs = view.runs
                elif view.runs != in_order(value):
                    return None
                value = view.base
            if value in program.given:
                return value, runs
            maker = program.flow.maker(value)
            if maker is None or value not in self._ends:
                return None
            if maker.primitive.name == "dot_general":
                return value, runs
            reads = {v for v in maker.invars if is_variable(v) and v in self._ends}
            if len(reads) != 1 or maker.primitive.name == "transpose":
                return None
            [read] = reads
            if read.aval.shape != value.aval.shape:
                return None
            value = read

    def _is_by_example(self, value: object, batch: Sequence[int], base: object) -> bool:
        """Return whether the products that make and read a value have examples in their batches, if
        they have any, where these are split over replicas.

        Args:
            batch: Its dimensions of the batch.
            base: What it is of, an argument or the result of a product.
        """
        axis = next((axis for axis in self._split.axes if axis.name == DATA_AXIS), None)
        if axis is None:
            return True
        maker = self._program.flow.maker(base)
        made = () if maker is None else range(len(maker.params["dimension_numbers"][1][0]))
        pairs = ((value, batch), (base, made))
        return all(not dims or axis.dims.get(one) in dims for one, dims in pairs)

    def _orders(self, value: Any, base: Any, runs: Sequence[Run]) -> Sequence[Order]:
        """Return the orders in which a value's dimensions may lie; none where that is not known."""
        sizes, whole = value.aval.shape, 1
        order = sorted(range(len(sizes)), key=lambda dim: -runs[dim][0])
        for dim in reversed(order):  # all elements, each once
            if sizes[dim] > 1 and runs[dim][0] != whole:
                return []
            whole *= sizes[dim]
        if whole != math.prod(base.aval.shape):
            return []
        maker = self._program.flow.maker(base)
        if maker is None:
            return [order]
        parts: list[list[int]] = [[], [], []]
        for dim in order:
            own = {_part(maker, d) for d in _dims_of(base, runs[dim])}
            if len(own) > 1:
                return []
            for part in own:
                parts[part].append(dim)
        batches, rows, columns = parts
        return [[*batches, *rows, *columns], [*batches, *columns, *rows]]

    def _is_read(
        self, value: object, order: Order, summed: Sequence[int], batch: Sequence[int]
    ) -> bool:
        """Return whether a library can read a value that lies in an order.

        Args:
            order: Of its dimensions.
            summed, batch: Those that are summed over, and those of the batch.
        """
        local = self._local(value)
        kinds = [(dim in batch, dim in summed) for dim in order if local[dim] > 1]
        runs = [kind for kind, _ in groupby(kinds)]
        return len(runs) == len({*runs}) and not (runs and runs[-1][0])

    def _local(self, value: Any) -> Sequence[int]:
        """Return the sizes of a value on one device; all 1 where it may be split in another way."""
        sizes = [*value.aval.shape]
        for axis in self._split.axes:
            dim = axis.dims.get(value)
            if dim is not None:
                sizes[dim] //= axis.degree
            elif value in axis.reached:
                return [1] * len(sizes)
        return sizes


def _dims_of(base: Any, run: Run) -> Sequence[int]:
    """Return the dimensions of a value that a run of elements goes along; none of a single one."""
    (distance, size), below, found = run, 1, []
    for dim in reversed(range(base.aval.ndim)):
        above = below * base.aval.shape[dim]
        if distance < above and below < distance * size:
            found.append(dim)
        below = above
    return found


def _part(product: Any, dim: int) -> int:
    """Return 0, 1 or 2 for a dimension of a product's result: of its batches, rows or columns."""
    [[summed, _], [batch, _]] = product.params["dimension_numbers"]
    rows = product.invars[0].aval.ndim - len(summed)
    return 0 if dim < len(batch) else 1 if dim < rows else 2
