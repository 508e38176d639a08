"""Which dimensions of values grow with the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from capture.tracing.program import LossProgram

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Growth:
    """The dimensions along which the values between the layers of a loss grow with the micro-batch.

    Attributes:
        operations: Operations with the values that they make, in the order of the program.
        dims: Dimension of each value that doubles with the micro-batch; None for none.
    """

    microbatch_size: int
    operations: Sequence[Any]
    values: Sequence[int]
    shapes: Shapes
    dims: Sequence[int | None]

    def at(
        self,
        microbatch_size: int,
        operations: Sequence[object],
        values: Sequence[int],
        shapes: Shapes,
    ) -> Sequence[int | None] | None:
        """Return the dimensions of a trace at another size, if they follow without tracing at twice
        that size: it is the same program and all values grow in proportion; else None."""
        one, other = self.microbatch_size, microbatch_size
        if other == 2 * one:
            return None  # the proportion is of this size and its double, and wants a third
        if (operations, values) != (self.operations, self.values):
            return None
        if any(dim is None for shape, dim in zip(self.shapes, self.dims, strict=True) if shape):
            return None  # it may grow elsewhere, as what is padded does
        expected = [
            [size * (other if d == dim else one) for d, size in enumerate(shape)]
            for shape, dim in zip(self.shapes, self.dims, strict=True)
        ]
        same = expected == [[size * one for size in shape] for shape in shapes]
        return self.dims if same else None


def operations_of(program: LossProgram) -> Sequence[Any]:
    """Return, per operation, its primitive and the values that it makes."""
    return [(op.primitive, op.outputs) for op in program.ops]


def grown_dim(shape: Sequence[int], doubled: Sequence[int]) -> int | None:
    """Return the dimension that doubled with the micro-batch; None if none did."""
    if len(shape) != len(doubled):
        return None
    return next(
        (d for d, (a, b) in enumerate(zip(shape, doubled, strict=True)) if b == 2 * a > 0), None
    )
