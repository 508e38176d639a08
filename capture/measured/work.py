"""What a compiled program computes, reads and sends: framework-free facts of the compiler, from
which times are estimated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        over_replicas: Whether it is of parameters or gradients, between replicas, so that little
            else waits for it; of what is expected before anything is compiled.
    """

    kind: str
    nbytes: int
    group_size: int
    stride: int
    count: int = 1
    is_part: bool = False
    over_replicas: bool = False

    def to_json(self) -> dict[str, Any]:
        found = documents.fields_of(self, "kind", "nbytes", "group_size", "stride", "count")
        return found | {name: True for name in ("is_part", "over_replicas") if getattr(self, name)}


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
        order: In which order a device is given them, words with spaces between: ``5`` runs the
            kernel at this place of ``kernels``; ``=2`` a collective that the next word waits for;
            ``+2`` begins one, and ``-0`` waits for the end of that which began at first (``+`` are
            counted from 0, in the order of the words); ``32(`` and ``)`` enclose a loop. None where
            it is not known.
    """

    flops: int
    dtype: str
    product_bytes: int
    other_bytes: int
    collectives: tuple[Collective, ...] = ()
    precision: str = "default"
    kernels: tuple[Kernel, ...] | None = None
    order: str | None = None

    def writing(self, sizes: Mapping[int, int]) -> ProgramWork:
        """Return the work with further kernels that only write: ``sizes`` gives their number by
        bytes."""
        written = [Kernel(nbytes, count=count) for nbytes, count in sizes.items()]
        order = self.order
        if order is not None and self.kernels is not None:
            first = len(self.kernels)
            loops = (f"{one.count}( {first + i} )" for i, one in enumerate(written))
            order = " ".join((order, *loops)).strip()
        return replace(
            self,
            other_bytes=self.other_bytes + sum(n * count for n, count in sizes.items()),
            kernels=None if self.kernels is None else (*self.kernels, *written),
            order=order,
        )

    def sending(self, collectives: Iterable[Collective]) -> ProgramWork:
        """Return the work of a program that sends other things, whose order is not known."""
        return replace(self, collectives=tuple(collectives), order=None)

    def to_json(self) -> dict[str, Any]:
        return documents.but_none(self)
