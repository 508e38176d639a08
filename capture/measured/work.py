"""What a compiled program computes, reads and sends: framework-free facts of the compiler, from
which times are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from capture import documents


@dataclass(frozen=True, order=True)
class Collective:
    """A group of equal collective operations of a program.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute``.
        nbytes: Bytes per device of the larger of what goes in and what comes out.
        group_size: Devices that take part.
        stride: Distance of neighbours in the stage's device order: 1 for tensor-parallel groups,
            the tensor-parallel degree for replicas.
        count: How many there are.
        is_part: Whether a compiler may put it into another one, so that its latency does not count;
            of lower bounds.
    """

    kind: str
    nbytes: int
    group_size: int
    stride: int
    count: int = 1
    is_part: bool = False

    def to_json(self) -> dict[str, Any]:
        found = documents.fields_of(self, "kind", "nbytes", "group_size", "stride", "count")
        return found | ({"is_part": True} if self.is_part else {})


@dataclass(frozen=True, order=True)
class Kernel:
    """A group of equal kernels of a program; most have no products, and their documents no such
    fields.

    Attributes:
        nbytes: Bytes that each reads and writes.
        flops: FLOPs of its matrix products or convolutions.
        dtype, precision: What these products compute in, as in ``ProgramWork``.
        count: How many there are.
        shape: (batches, rows, columns) of the results of a product in a library, which its tiles
            cover; a convolution counts as the product that it is. Empty for what has none.
    """

    nbytes: int
    flops: int = 0
    dtype: str = ""
    precision: str = ""
    count: int = 1
    shape: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"nbytes": self.nbytes, "count": self.count}
        if self.dtype:
            fields |= {"flops": self.flops, "dtype": self.dtype, "precision": self.precision}
        return fields | ({"shape": list(self.shape)} if self.shape else {})


@dataclass(frozen=True)
class ProgramWork:
    """The work of a compiled program: what it computes, reads and sends, per device and execution.

    Attributes:
        flops: FLOPs by XLA's cost analysis of the optimised program.
        dtype: Data type in which most of its matrix products take their operands.
        product_bytes: Bytes that kernels with matrix products or convolutions read and write.
        other_bytes: Bytes that all other kernels read and write.
        collectives: Different ones.
        precision: Precision that most of its products ask for: ``default``, ``high`` or ``highest``
            (``jax.lax.Precision``).
        kernels: Different ones, collectives aside; None in measurements from before they were
            counted, of which only the totals are known.
    """

    flops: int
    dtype: str
    product_bytes: int
    other_bytes: int
    collectives: tuple[Collective, ...] = ()
    precision: str = "default"
    kernels: tuple[Kernel, ...] | None = None

    def writing(self, sizes: Mapping[int, int]) -> ProgramWork:
        """Return the work with further kernels that only write: ``sizes`` gives their number by
        bytes."""
        written = [Kernel(nbytes, count=count) for nbytes, count in sizes.items()]
        return replace(
            self,
            other_bytes=self.other_bytes + sum(n * count for n, count in sizes.items()),
            kernels=None if self.kernels is None else (*self.kernels, *written),
        )

    def to_json(self) -> dict[str, Any]:
        return {k: value for k, value in documents.fields_of(self).items() if value is not None}
