"""What a compiled program computes, reads and sends: framework-free facts of the compiler, from
which times are estimated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Collective:
    """Equal collective operations of a program.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute``.
        nbytes: Per device, of the larger of what goes in and what comes out.
        group_size: Devices that take part.
        stride: Distance of neighbours in the stage's device order: 1 for tensor-parallel groups,
            the tensor-parallel degree for replicas.
        count: How many there are.
    """

    kind: str
    nbytes: int
    group_size: int
    stride: int
    count: int = 1


@dataclass(frozen=True)
class ProgramWork:
    """Per device and execution.

    Attributes:
        flops: By XLA's cost analysis of the optimised program.
        dtype: In which its matrix products take their operands, mostly.
        product_bytes: That kernels with matrix products or convolutions read and write.
        other_bytes: That all other kernels do.
        collectives: Different ones.
        precision: That most of its products ask for: ``default``, ``high`` or ``highest``
            (``jax.lax.Precision``).
    """

    flops: int
    dtype: str
    product_bytes: int
    other_bytes: int
    collectives: tuple[Collective, ...] = ()
    precision: str = "default"
