"""What becomes of a value when a batch is cut into micro-batches: the states of ``batch_flow`` and
their arithmetic.

With v the value in the whole batch of 2 n examples, and v1, v2 those in its halves, a state says,
for a degree d,

    same        v = 2^d v1 = 2^d v2    no data; repeated along the batch dimension if it has one
    examples    v = 2^d [v1; v2]       along the batch dimension
    aggregate   v = 2^(d-1) (v1 + v2)  d = 0: a mean over the examples, d = 1: a sum; repeated along
                                       the batch dimension if it has one
    mixed       examples + aggregate

The loss splits over micro-batches if it is ``same`` or ``aggregate`` of degree 0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Kind(enum.Enum):
    """See the module; the last five are bookkeeping.

    ``POSITION`` is each example's own index along the batch dimension (``jnp.arange(batch_size)``),
    ``NEVER`` a mask that is all false, ``ADDRESS`` indices of which some columns are positions,
    ``BROKEN`` a value that breaks the split and ``UNKNOWN`` one not understood.
    """

    SAME = "same"
    EXAMPLES = "examples"
    AGGREGATE = "aggregate"
    MIXED = "mixed"
    POSITION = "position"
    NEVER = "never"
    ADDRESS = "address"
    BROKEN = "broken"
    UNKNOWN = "unknown"


_AGGREGATED = (Kind.AGGREGATE, Kind.MIXED)


@dataclass(frozen=True)
class State:
    """State of one value.

    Attributes:
        kind: Its relation to the values of the halves.
        degree: d; None for zeros, which have every degree.
        reason: Which operation made it ``BROKEN`` or ``UNKNOWN``, and where.
        columns: Where it is an ``ADDRESS``, the columns of the last dimension that are positions.
    """

    kind: Kind
    degree: float | None = 0.0
    reason: str = ""
    columns: frozenset[int] = frozenset()

    @property
    def is_data_free(self) -> bool:
        return self.kind is Kind.SAME

    @property
    def is_fixed(self) -> bool:
        """Neither data nor the number of examples are in it."""
        return self.kind is Kind.SAME and self.degree in (0, None)

    @property
    def is_aggregated(self) -> bool:
        return self.kind in _AGGREGATED


SAME = State(Kind.SAME)


def broken(reason: str) -> State:
    return State(Kind.BROKEN, reason=reason)


def unknown(reason: str) -> State:
    return State(Kind.UNKNOWN, reason=reason)


def constant_state(value: Any, doubled: Any, where: str) -> State:
    """State of a constant of the program, from its values at n and at 2 n examples."""
    if value is doubled or (
        np.shape(value) == np.shape(doubled) and np.array_equal(value, doubled)
    ):
        return State(Kind.SAME, None if _is_zero(value) else 0.0)
    if (
        np.shape(value) == np.shape(doubled) == ()
        and float(value)
        and (ratio := float(doubled) / float(value)) > 0
    ):
        return State(Kind.SAME, math.log2(ratio))
    if np.ndim(value) == np.ndim(doubled) == 1 and len(doubled) == 2 * len(value):
        if np.array_equal(doubled, np.arange(len(doubled))):
            return State(Kind.POSITION)
        if np.array_equal(doubled, np.concatenate([value, value])):
            return SAME
    return unknown(f"{where} holds a constant that depends on the batch size")


def _is_zero(value: Any) -> bool:
    return (
        np.ndim(value) == 0
        and isinstance(value, (bool, int, float, np.generic, np.ndarray))
        and value == 0
    )


def scaled(state: State, degree: float) -> State:
    """The value times a number that grows as 2^degree."""
    return State(state.kind, None if state.degree is None else state.degree + degree)


def common_degree(states: Sequence[State]) -> float | None:
    """The degree that all have; None if all are zeros, NaN if they differ."""
    degrees = [s.degree for s in states if s.degree is not None]
    if not degrees:
        return None
    return (
        degrees[0] if all(math.isclose(d, degrees[0], abs_tol=1e-6) for d in degrees) else math.nan
    )


def linear(states: Sequence[State], where: str) -> State:
    """A sum, concatenation or selection by position of values."""
    kinds = {s.kind for s in states} - {Kind.SAME}
    if kinds <= {Kind.EXAMPLES, Kind.AGGREGATE, Kind.MIXED}:
        degree = common_degree(states)
        if degree is not None and math.isnan(degree):
            if kinds & set(_AGGREGATED):
                return broken(
                    f"{where} adds values that grow differently with the number of examples, such "
                    "as a sum and a mean over them"
                )
            return unknown(f"{where} reads the number of examples")
        return State(kinds.pop() if len(kinds) == 1 else Kind.MIXED if kinds else Kind.SAME, degree)
    return _special(where)


def product(left: State, right: State, where: str) -> State:
    """An element-wise product, or another function linear in each."""
    for factor, other in ((left, right), (right, left)):
        if factor.is_data_free:
            degree = (
                None
                if factor.degree is None or other.degree is None
                else factor.degree + other.degree
            )
            return State(other.kind, degree) if other.kind in _ORDINARY else _special(where)
    if left.is_aggregated or right.is_aggregated:
        return broken(
            f"{where} multiplies a value computed from the whole micro-batch by other data"
        )
    if left.kind is right.kind is Kind.EXAMPLES:
        return State(
            Kind.EXAMPLES,
            None if left.degree is None or right.degree is None else left.degree + right.degree,
        )
    return _special(where)


def function(states: Sequence[State], where: str, factor: float | None = None) -> State:
    """A function that is not linear, of values of one example each.

    Args:
        states: States of its arguments.
        where: Names the operation.
        factor: f(2^d x) = 2^(d * factor) f(x); None if f is no such function.
    """
    if any(s.is_aggregated for s in states):
        return broken(f"{where} is not linear in a value computed from the whole micro-batch")
    kinds = {s.kind for s in states} - {Kind.SAME}
    if not kinds <= {Kind.EXAMPLES}:
        return _special(where)
    degree = common_degree(states)
    if degree is None or math.isclose(degree, 0, abs_tol=1e-6):
        return State(kinds.pop() if kinds else Kind.SAME)
    if factor is None or math.isnan(degree):
        return unknown(f"{where} reads the number of examples")
    return State(kinds.pop() if kinds else Kind.SAME, degree * factor)


_ORDINARY = (Kind.SAME, Kind.EXAMPLES, Kind.AGGREGATE, Kind.MIXED)


def _special(where: str) -> State:
    return unknown(f"{where} reads the positions of the examples in the micro-batch")
