"""One equation of a loss, traced for n and for 2 n examples: what grows with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


def grown_dims(shape: Sequence[int], doubled: Sequence[int]) -> tuple[int, ...]:
    """Dimensions whose size changes with the number of examples."""
    if len(shape) != len(doubled):
        return tuple(range(len(shape)))
    return tuple(dim for dim, (a, b) in enumerate(zip(shape, doubled, strict=True)) if a != b)


@dataclass(frozen=True)
class Step:
    """The same equation for n and for 2 n examples, and the name scopes around it."""

    one: Any
    two: Any
    scope: str

    @property
    def name(self) -> str:
        return self.one.primitive.name

    @property
    def where(self) -> str:
        return (
            f"{self.name} in {self.scope}"
            if self.scope
            else f"{self.name} at the top level of the loss"
        )

    @property
    def params(self) -> Mapping[str, Any]:
        return self.one.params

    @cached_property
    def in_shapes(self) -> list[tuple[int, ...]]:
        return [v.aval.shape for v in self.one.invars]

    @cached_property
    def in_grown(self) -> list[tuple[int, ...]]:
        return [
            grown_dims(a.aval.shape, b.aval.shape)
            for a, b in zip(self.one.invars, self.two.invars, strict=True)
        ]

    @cached_property
    def out_grown(self) -> list[tuple[int, ...]]:
        return [
            grown_dims(a.aval.shape, b.aval.shape)
            for a, b in zip(self.one.outvars, self.two.outvars, strict=True)
        ]

    @cached_property
    def out_dims(self) -> list[tuple[int, ...] | None]:
        """Batch dimension of each result (empty if it has none); None where it did not exactly
        double."""
        outputs = zip(self.one.outvars, self.two.outvars, self.out_grown, strict=True)
        return [
            dims if all(b.aval.shape[d] == 2 * a.aval.shape[d] for d in dims) else None
            for a, b, dims in outputs
        ]

    def in_dim(self, operand: int) -> int | None:
        return next(iter(self.in_grown[operand]), None)

    @property
    def out_dim(self) -> int | None:
        return next(iter(self.out_grown[0]), None)
