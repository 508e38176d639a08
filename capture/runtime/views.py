"""Which values of a program are others under another name, shape, order or type, and which products
read the same one the same way, so that a compiler may make one product of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from capture.partition.dim_flow import reshape_groups
from capture.tracing.jaxprs import is_variable, variables
from capture.tracing.recompute import RENAMED

#: The same elements under another name, shape, type or order.
_MOVED = (RENAMED | {"transpose"}) - {"broadcast_in_dim", "broadcast_to", "split", "unstack"}
_MOVED -= {"empty", "empty2", "full", "iota", "zeros_like"}
#: A run of elements: the distance between two of them, and how many.
Run = tuple[int, int]


class View(NamedTuple):
    """A value as another one, whose elements it has in some order.

    Attributes:
        base: The other value; itself, if it is computed.
        runs: Per dimension, which of the other's elements in row-major order.
        itemsize: Bytes of an element where they are fewest on the way.
    """

    base: Any
    runs: tuple[Run, ...]
    itemsize: int


class Views:
    """The views of a program.

    Args:
        equations: In order, flat.
    """

    def __init__(self, equations: Sequence[Any]):
        self._equations = equations
        self._known: dict[Any, View] = {}
        self._own: dict[Any, View] = {}  # of values that are no views
        for equation in equations:
            name, [out, *more] = equation.primitive.name, equation.outvars or [None]
            if name in _MOVED and not more and is_variable(equation.invars[0]):
                self._known[out] = self._moved(equation, self.of(equation.invars[0]))

    def of(self, value: Any) -> View:
        """Return what a value is a view of."""
        known = self._known.get(value) or self._own.get(value)
        if known is None:
            known = self._own[value] = _own(value)
        return known

    def _moved(self, equation: Any, view: View) -> View:
        [out], name, runs = equation.outvars, equation.primitive.name, view.runs
        moved: Sequence[Run] | None = runs
        if name == "transpose":
            moved = [runs[dim] for dim in equation.params["permutation"]]
        elif equation.invars[0].aval.shape != out.aval.shape:
            moved = _reshaped(runs, equation.invars[0].aval.shape, out.aval.shape)
        if moved is None:  # moved in memory
            return _own(out)
        return View(view.base, tuple(moved), min(view.itemsize, item_bytes(out)))

    @cached_property
    def written_itemsize(self) -> Mapping[Any, int]:
        """The bytes per element of what is computed, where it may be cast before it is stored."""
        found: dict[Any, int] = {}
        for value, view in self._known.items():
            found[view.base] = min(found.get(view.base, item_bytes(view.base)), item_bytes(value))
        return found

    def alike(self, products: Collection[int]) -> Mapping[int, int]:
        """Return, per product, the first of those that a compiler may make one product with it:
        they read the same elements the same way, and do not depend on each other."""
        first = {at: at for at in products}
        readers: dict[Any, list[int]] = {}
        before = products_before(self._equations, products)

        def last(at: int) -> int:
            while first[at] != at:
                at = first[at]
            return at

        for at in sorted(products):
            for key in self._reads(self._equations[at]):
                for other in readers.setdefault(key, []):
                    if other not in before[at]:
                        one, two = sorted((last(at), last(other)))
                        first[two] = one
                readers[key].append(at)
        return {at: last(at) for at in products}

    def _reads(self, equation: JaxprEqn) -> list[Any]:
        """Return how a product reads its operands; a convolution reads each in its own way."""
        if equation.primitive.name != "dot_general":
            return []
        found = []
        for value, *dims in zip(
            equation.invars, *equation.params["dimension_numbers"], strict=True
        ):
            if is_variable(value):
                view = self.of(value)
                runs = (_joined(view.runs[dim] for dim in part) for part in dims)
                found.append((view.base, *runs))
        return found


def products_before(
    equations: Iterable[JaxprEqn], products: Collection[int]
) -> Mapping[int, frozenset[int]]:
    """Return the positions of the products that each product depends on."""
    origins: dict[Any, frozenset[int]] = {}
    found = {}
    for at, equation in enumerate(equations):
        reads = (origins[v] for v in variables(equation.invars) if v in origins)
        earlier = frozenset[int]().union(*reads)
        if at in products:
            found[at] = earlier
            earlier |= {at}
        if earlier:
            origins.update(dict.fromkeys(equation.outvars, earlier))
    return found


def item_bytes(value: Any) -> int:
    """Return the bytes of one element; a random key has two words."""
    dtype = getattr(value.aval, "dtype", None)
    return 8 if dtype is None or not hasattr(dtype, "kind") else int(dtype.itemsize)


def in_order(value: Any) -> tuple[Run, ...]:
    """Return the runs of a value as it is."""
    shape = getattr(value.aval, "shape", ())
    return tuple((math.prod(shape[dim + 1 :]), size) for dim, size in enumerate(shape))


def _own(value: object) -> View:
    return View(value, in_order(value), item_bytes(value))


def _joined(runs: Iterable[Run]) -> frozenset[Run]:
    """Return the same elements as the fewest runs."""
    found: list[Run] = []
    for distance, size in sorted((run for run in runs if run[1] > 1), reverse=True):
        if found and found[-1][0] == distance * size:
            found[-1] = distance, found[-1][1] * size
        else:
            found.append((distance, size))
    return frozenset(found)


def _reshaped(runs: Sequence[Run], shape: Sequence[int], result: Sequence[int]) -> list[Run] | None:
    """Return the runs of a reshaped view; None where its elements have to be moved."""
    found: list[Run] = [(0, 1)] * len(result)
    for old, new in reshape_groups(shape, result):
        joined = [*_joined(runs[dim] for dim in old)]
        in_order = [runs[dim][0] for dim in old if shape[dim] > 1]
        if len(joined) > 1 or in_order != sorted(in_order, reverse=True):
            return None
        distance = joined[0][0] if joined else 1
        for dim in reversed(new):
            found[dim] = distance, result[dim]
            distance *= result[dim]
    return found
