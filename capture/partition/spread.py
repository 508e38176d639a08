"""How splits of its inputs spread through one program, remembered by what is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.extend.core import Jaxpr

from capture.partition.split_reach import Dim, SplitReach
from capture.partition.walk import followed_dims
from capture.tracing.jaxprs import sub_jaxprs


class Spread:
    """The splits of all values of a program, remembered per split of its inputs.

    Args:
        jaxpr: Flat.
    """

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        self._dims: dict[Any, Mapping[Any, int | None]] = {}
        self._reached: dict[Any, Collection[Any]] = {}

    def dims(
        self, inputs: Sequence[int | None], degree: int, axis: str
    ) -> Mapping[Any, int | None]:
        """Return the dimension along which every value of the program is split (see
        ``followed_dims``)."""
        # The walk asks of a degree only which sizes it divides.
        key = (tuple(inputs), axis, frozenset(s for s in self._sizes if s % degree))
        if key not in self._dims:
            self._dims[key] = followed_dims(self._jaxpr, inputs, degree, axis)
        return self._dims[key]

    @cached_property
    def _sizes(self) -> Collection[int]:
        return _divided(self._jaxpr)

    def reached(self, split: Sequence[Dim]) -> Collection[Any]:
        """Return the values that may be split where these dimensions are."""
        key = frozenset(split)
        if key not in self._reached:
            self._reached[key] = self._reach.of(split)
        return self._reached[key]

    @cached_property
    def _reach(self) -> SplitReach:
        return SplitReach(self._jaxpr)


def _divided(jaxpr: Any) -> set[int]:
    """Return all sizes that a walk may divide, in bodies too: dimensions, and groups of
    convolutions."""
    values = {*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)}
    found = {size for v in values for size in getattr(v.aval, "shape", ())}
    for equation in jaxpr.eqns:
        found.add(equation.params.get("feature_group_count", 1))
        found.update(*map(_divided, sub_jaxprs(equation.params)))
    return found
