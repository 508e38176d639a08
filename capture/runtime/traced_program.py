"""What of a program's live memory does not depend on how its values are split: which operations
depend on which, and what stands in memory from when to when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax

from capture.partition.spread import Spread
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import is_variable
from capture.tracing.recompute import (
    ARITHMETIC,
    FUNCTIONS,
    LONG_FUNCTIONS,
    REDUCTIONS,
    RENAMED,
)

#: Computed inside of what reads the result.
_FUSED = RENAMED | ARITHMETIC | FUNCTIONS | LONG_FUNCTIONS | {"pad", "rev", "slice", "transpose"}
#: An argument of which nothing else is made may be read by a product as it is.
_READ_AS_IT_IS = RENAMED | {"transpose"}
#: Of which every compiler puts results into memory, and takes operands from there.
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})


class Step(NamedTuple):
    """What an operation reads and makes that is neither argument nor result.

    Attributes:
        begins: Whether bytes begin with what it makes; else no more come out of it than went in.
    """

    reads: Sequence[Any]
    makes: Sequence[Any]
    begins: bool


class Needed(NamedTuple):
    """What has to be there while a product runs, whatever the order of the operations: see
    ``capture.runtime.bounds.Memory``.

    Attributes:
        made: Its results that products behind it depend on.
        steps: The operations, in order, through which all that it and those behind it read follows
            from products that it depends on, with which bytes begin.
        groups: Values that are read with it or behind it and do not depend on it, those that are
            computed from each other together; and which of them it reads itself.
    """

    made: Sequence[Any]
    steps: Sequence[Step]
    groups: Sequence[tuple[Sequence[Any], Sequence[Any]]]


class TracedProgram:
    """A program, traced once for all the ways in which its arguments are split.

    Args:
        function: Traceable.
        args: Its arguments; their shardings have no part.

    Attributes:
        shapes: Of its results, in its own tree.
        flow: Everything opened.
        elsewhere: Variables that have memory of the caller: arguments and results.
        products: Positions of the products among the operations.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]):
        closed, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self.flow = DataFlow(closed, open_remats=True)
        self.spread = Spread(self.flow.jaxpr)
        self.equations: Sequence[Any] = self.flow.jaxpr.eqns
        self.elsewhere = {*self.flow.inputs, *variables(self.flow.outputs)}
        self.products = [at for at, e in enumerate(self.equations) if _is_product(e)]
        self._is_product = frozenset(self.products)
        self._needed: dict[int, Needed] = {}
        self._lives: dict[bool, tuple[Mapping[Any, int], Mapping[Any, int]]] = {}

    @cached_property
    def inner_reads(self) -> Sequence[Sequence[Any]]:
        """Per operation, what it reads that is neither argument nor result."""
        return [self._inner(equation.invars) for equation in self.equations]

    @cached_property
    def _inner_makes(self) -> Sequence[Sequence[Any]]:
        """Per operation, what it makes that is no result."""
        return [self._inner(equation.outvars) for equation in self.equations]

    @cached_property
    def inner_values(self) -> Sequence[Any]:
        """All that operations make that is no result."""
        return [v for makes in self._inner_makes for v in makes]

    @cached_property
    def distinct_products(self) -> Sequence[Any]:
        """The products that results depend on; of equal ones, which a compiler runs once, the
        first."""
        found: dict[Any, Any] = {}
        for at in self.products:
            equation = self.equations[at]
            operands = (v if is_variable(v) else id(v) for v in equation.invars)
            if at in self._useful:
                found.setdefault((equation.primitive, str(equation.params), *operands), equation)
        return list(found.values())

    @cached_property
    def narrowest_dtype(self) -> str:
        """Of floating-point values; products may be computed in it."""
        atoms = [*self.flow.inputs, *(v for e in self.equations for v in e.outvars)]
        dtypes = {getattr(v.aval, "dtype", None) for v in atoms}
        floats = [d for d in dtypes if d and jax.numpy.issubdtype(d, jax.numpy.floating)]
        return min(floats, key=lambda d: (d.itemsize, d.name)).name if floats else "float32"

    def _inner(self, atoms: Iterable[Any]) -> list[Any]:
        return [v for v in variables(atoms) if v not in self.elsewhere]

    @cached_property
    def computing(self) -> Sequence[Step]:
        """All but products, by which bytes begin where they do not only rename, cast or
        transpose."""
        return [
            Step(reads, makes, e.primitive.name not in _READ_AS_IT_IS)
            for e, reads, makes in zip(
                self.equations, self.inner_reads, self._inner_makes, strict=True
            )
            if not _is_product(e)
        ]

    def needed(self, product: int) -> Needed:
        """While a product runs, by position."""
        if product not in self._needed:
            self._needed[product] = self._found_needed(product)
        return self._needed[product]

    def _found_needed(self, product: int) -> Needed:
        before, groups = self._before[product], _Groups(self._joined_before[product])
        made = self.equations[product].outvars
        later = set(made)
        wanted = set(self.inner_reads[product])
        others = [at for at in range(product) if at not in self._is_product or at in before]
        for at, reads in enumerate(self.inner_reads[product + 1 :], start=product + 1):
            if not later.isdisjoint(reads):
                later.update(self.equations[at].outvars)
                if at in self._useful:
                    wanted.update(reads)
            elif at not in self._is_product:
                groups.join(*reads, *self._inner_makes[at])
                others.append(at)
        wanted -= later
        read: dict[Any, list[Any]] = {}
        for v in wanted:
            read.setdefault(groups.of(v), []).append(v)
        operands: dict[Any, list[Any]] = {}
        for v in self.inner_reads[product]:
            operands.setdefault(groups.of(v), []).append(v)
        steps = []
        for at in reversed(others):
            makes = [v for v in self.equations[at].outvars if v in wanted]
            if makes:
                begins = at in self._is_product
                steps.append(Step(() if begins else self.inner_reads[at], makes, begins))
                wanted.update(steps[-1].reads)
        return Needed(
            [v for v in made if v in self._read_by_products and v not in self.elsewhere],
            steps[::-1],
            [(values, operands.get(group, ())) for group, values in read.items()],
        )

    @cached_property
    def _joined_before(self) -> Mapping[int, Mapping[Any, Any]]:
        """Per product, how the operations before it that are no products join values."""
        groups, found = _Groups({}), {}
        for at, reads in enumerate(self.inner_reads):
            if at in self._is_product:
                found[at] = groups.joined
            else:
                groups.join(*reads, *self._inner_makes[at])
        return found

    @cached_property
    def _useful(self) -> Collection[int]:
        """Positions of the operations that results depend on."""
        wanted, found = set(variables(self.flow.outputs)), set[int]()
        for at in reversed(range(len(self.equations))):
            equation = self.equations[at]
            if not wanted.isdisjoint(equation.outvars):
                found.add(at)
                wanted.update(variables(equation.invars))
        return found

    @cached_property
    def _read_by_products(self) -> Collection[Any]:
        """Values that products depend on."""
        found: set[Any] = set()
        for equation in reversed(self.equations):
            if _is_product(equation) or not found.isdisjoint(equation.outvars):
                found.update(variables(equation.invars))
        return found

    @cached_property
    def _before(self) -> Mapping[int, Collection[int]]:
        """Per product, the products that it depends on, by position."""
        found: dict[int, frozenset[int]] = {}
        origins: dict[Any, frozenset[int]] = {}
        for at, equation in enumerate(self.equations):
            reads = variables(equation.invars)
            earlier = frozenset[int]().union(*(origins.get(v, ()) for v in reads))
            if _is_product(equation):
                found[at] = earlier
                earlier = earlier | {at}
            origins.update(dict.fromkeys(equation.outvars, earlier))
        return found

    @cached_property
    def results_before(self) -> Mapping[int, Collection[Any]]:
        """Per product, the results that it depends on."""
        found: dict[int, frozenset[Any]] = {}
        made_of: dict[Any, frozenset[Any]] = {}
        outputs = set(variables(self.flow.outputs))
        for at, equation in enumerate(self.equations):
            reads = variables(equation.invars)
            results = frozenset(v for v in reads if v in outputs).union(
                *(made_of.get(v, frozenset()) for v in reads)
            )
            made_of.update(dict.fromkeys(equation.outvars, results))
            if _is_product(equation):
                found[at] = results
        return found

    def lives(self, stores_reduced: bool) -> tuple[Mapping[Any, int], Mapping[Any, int]]:
        """The operations, by position, at which each value that stands in memory is first and last
        needed; what is summed up among them, or computed while it is."""
        if stores_reduced not in self._lives:
            self._lives[stores_reduced] = self._found_lives(stores_reduced)
        return self._lives[stores_reduced]

    def _found_lives(self, stores_reduced: bool) -> tuple[dict[Any, int], dict[Any, int]]:
        equations = self.equations
        opaque = [equation for equation in equations if not _is_fused(equation)]
        reading = [e for e in opaque if stores_reduced or e.primitive.name not in REDUCTIONS]
        stored = {v for e in reading for v in variables(e.invars)}
        stored.update(v for e in opaque for v in e.outvars)
        stored.update(variables(self.flow.outputs))
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        # What a value that was computed element by element is computed from, of what is stored.
        sources: dict[Any, frozenset[Any]] = {}

        def need(value: Any, at: int) -> None:
            if value not in first:
                first[value] = at
                for source in sources.get(value, ()):
                    need(source, at)
            last[value] = at

        for at, equation in enumerate(equations):
            reads = frozenset[Any]().union(
                *(
                    sources[v] if v in sources and v not in stored else [v]
                    for v in variables(equation.invars)
                )
            )
            if _is_fused(equation):
                sources.update(dict.fromkeys(equation.outvars, reads))
                continue
            for value in (*reads, *equation.outvars):
                need(value, at)
        for value in variables(self.flow.outputs):
            need(value, len(equations))
        return first, last


class _Groups:
    """Values that are joined, directly or through others.

    Args:
        joined: Those of other groups, which stay as they are.
    """

    def __init__(self, joined: Mapping[Any, Any]) -> None:
        self._next = dict(joined)

    @property
    def joined(self) -> Mapping[Any, Any]:
        """As of now."""
        return dict(self._next)

    def of(self, value: Any) -> int:
        """A number of the value's group."""
        return id(self._last(value))

    def join(self, *values: Any) -> None:
        for value in values[1:]:
            self._next[self._last(value)] = self._last(values[0])

    def _last(self, value: Any) -> Any:
        while (joined := self._next.get(value, value)) is not value:
            self._next[value] = value = self._next.get(joined, joined)
        return value


def _is_fused(equation: Any) -> bool:
    return equation.primitive.name in _FUSED and not equation.effects


def _is_product(equation: Any) -> bool:
    return equation.primitive.name in _PRODUCTS


def variables(atoms: Iterable[Any]) -> Collection[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if is_variable(atom)]
