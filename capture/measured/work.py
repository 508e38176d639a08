"""What a compiled program computes, reads and sends: framework-free facts of the compiler, from
which times are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Collective:
    """One collective operation of a program.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or
            ``collective-permute``.
        nbytes: Per device, of the larger of what goes in and what comes out.
        group_size: Devices that take part.
        stride: Distance of neighbours in the stage's device order: 1 for tensor-parallel groups,
            the tensor-parallel degree for replicas.
    """

    kind: str
    nbytes: int
    group_size: int
    stride: int


@dataclass(frozen=True)
class ProgramWork:
    """Per device and execution.

    Attributes:
        flops: By XLA's cost analysis of the optimised program.
        dtype: In which its matrix products take their operands, mostly.
        product_bytes: That kernels with matrix products or convolutions read and write.
        other_bytes: That all other kernels do.
        collectives: With their numbers.
        precision: That most of its products ask for: ``default``, ``high`` or ``highest``
            (``jax.lax.Precision``).
    """

    flops: int
    dtype: str
    product_bytes: int
    other_bytes: int
    collectives: tuple[tuple[Collective, int], ...] = ()
    precision: str = "default"

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "collectives": [
                {**asdict(collective), "count": count} for collective, count in self.collectives
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProgramWork:
        collectives = tuple(
            (Collective(row["kind"], row["nbytes"], row["group_size"], row["stride"]), row["count"])
            for row in data["collectives"]
        )
        sizes = (data["product_bytes"], data["other_bytes"])
        return cls(
            data["flops"], data["dtype"], *sizes, collectives, data.get("precision", "default")
        )
