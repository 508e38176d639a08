"""What of a program's live memory does not depend on how its values are split: which operations
depend on which, and what stands in memory from when to when."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import JaxprEqn

from capture.memo import memo
from capture.partition.spread import Spread
from capture.runtime.opaque import OpaqueProducts
from capture.runtime.views import Views, products_before
from capture.tracing.dataflow import DataFlow
from capture.tracing.jaxprs import variables
from capture.tracing.recompute import ELEMENTWISE, REDUCTIONS

#: Computed inside of what reads the result.
_FUSED = ELEMENTWISE | {"pad", "rev", "slice", "transpose"}
#: More elements than any value has.
_ALL = sys.maxsize
T = TypeVar("T")


class TracedOperation(NamedTuple):
    """The values with memory of their own that an operation reads and makes.

    Attributes:
        sizes: Elements of each that it makes.
        new: Of these, how many begin here; no other bytes come out than went in.
    """

    reads: Sequence[Any]
    makes: Sequence[Any]
    sizes: Sequence[int]
    new: int

    @classmethod
    def of(cls, reads: Sequence[Any], makes: Sequence[Any], new: int) -> TracedOperation:
        return cls(reads, makes, [math.prod(v.aval.shape) for v in makes], new)


class Needed(NamedTuple):
    """The values that have to be there while a product runs, whatever the order of the operations:
    see ``capture.runtime.bounds.Memory``.

    Attributes:
        results: Results of the program that products before it made, as they are.
        steps: The operations, in order, through which all that it and those behind it read, and
            the other results, follow from products that it depends on, with which bytes begin.
        groups: Values that are read with it or behind it, or results, and do not depend on it,
            those that are computed from each other together; and which of them it reads itself.
        arguments: Arguments of the program that are read with it or behind it.
    """

    results: Sequence[Any]
    steps: Callable[[], Sequence[TracedOperation]]
    groups: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    arguments: Collection[Any]


class TracedProgram:
    """A program, traced once for all the ways in which its arguments are split.

    Args:
        shapes: Of its results, in its own tree.
        spread: How splits spread through a flat program of the same equations, if that is known.

    Attributes:
        flow: Everything opened.
        results: Variables that are results and no arguments.
        elsewhere: Those that have memory of the caller: arguments and results.
    """

    def __init__(self, closed: Any, shapes: object, spread: Spread | None = None):
        self.shapes, self.flow = shapes, DataFlow(closed, open_remats=True)
        is_known = spread is not None and self.flow.jaxpr is closed.jaxpr
        self.spread = spread if is_known else Spread(self.flow.jaxpr)
        self.equations: Sequence[Any] = self.flow.jaxpr.eqns
        self.given = frozenset(self.flow.inputs)
        self.results = frozenset(variables(self.flow.outputs)) - self.given
        self.elsewhere = {*self.flow.inputs, *self.results}

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any]) -> TracedProgram:
        """Return the program of a function; the shardings of its arguments have no part."""
        return cls(*jax.make_jaxpr(function, return_shape=True)(*args))

    @memo
    def once(self, of: Callable[..., T], *given: Hashable) -> T:
        """Return what a function says of the program, and of what else is given; asked once."""
        return of(self, *given)

    def opaque(self, num_devices: int) -> Opaque:
        """Return the program as what its opaque products on so many devices leave of it."""
        return self.once(Opaque, self.products.at(num_devices))

    @cached_property
    def products(self) -> OpaqueProducts:
        """The products that may be opaque."""
        return OpaqueProducts(self.equations, self.flow.inputs, self.useful)

    @cached_property
    def views(self) -> Views:
        """The values that are others under another name."""
        return Views(self.equations)

    @cached_property
    def readers(self) -> Mapping[Any, Sequence[Any]]:
        """The operations that read each value and that results depend on."""
        found: dict[Any, list[Any]] = {}
        for equation, reads in self.useful_reads:
            for value in {*reads}:
                found.setdefault(value, []).append(equation)
        return found

    @cached_property
    def reads(self) -> Sequence[Sequence[Any]]:
        """The variables that each operation reads."""
        return [variables(equation.invars) for equation in self.equations]

    @cached_property
    def useful_reads(self) -> Sequence[tuple[Any, Sequence[Any]]]:
        """The operations that results depend on, in order, each with what it reads."""
        return [(self.equations[at], self.reads[at]) for at in self.useful_at]

    @cached_property
    def useful_at(self) -> Sequence[int]:
        """The positions of the operations that results depend on, in order."""
        return self.flow.needed_at(self.flow.outputs)

    @cached_property
    def useful(self) -> Collection[int]:
        """The same positions, in no order."""
        return frozenset(self.useful_at)

    @cached_property
    def given_readers(self) -> Mapping[Any, Sequence[Any]]:
        """The results of the operations that read each argument."""
        found: dict[Any, list[Any]] = {v: [] for v in self.flow.inputs}
        for equation, reads in zip(self.equations, self.given_reads, strict=True):
            for v in {*reads}:
                found[v] += equation.outvars
        return found

    @cached_property
    def inner_reads(self) -> Sequence[Sequence[Any]]:
        """The variables that each operation reads and that are no arguments."""
        return [[v for v in reads if v not in self.given] for reads in self.reads]

    @cached_property
    def given_reads(self) -> Sequence[Sequence[Any]]:
        """The arguments that each operation reads."""
        return [[v for v in reads if v in self.given] for reads in self.reads]

    @cached_property
    def narrowest_dtype(self) -> str:
        """The narrowest floating-point type of any value; products may be computed in it."""
        atoms = [*self.flow.inputs, *(v for e in self.equations for v in e.outvars)]
        dtypes = {getattr(v.aval, "dtype", None) for v in atoms}
        floats = [d for d in dtypes if d and jax.numpy.issubdtype(d, jax.numpy.floating)]
        return min(floats, key=lambda d: (d.itemsize, d.name)).name if floats else "float32"

    def lives(self, stores_reduced: bool) -> tuple[Mapping[Any, int], Mapping[Any, int]]:
        """Return the operations, by position, at which each value that stands in memory is first
        and last needed; what is summed up among them, or computed while it is."""
        return self.once(TracedProgram._found_lives, stores_reduced)

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

        def need(value: object, at: int) -> None:
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


class Opaque:
    """The part of a program's facts that depends on which of its products are opaque."""

    def __init__(self, program: TracedProgram, products: frozenset[int]):
        self._program, self.products = program, products
        self._made = {v for at in products for v in program.equations[at].outvars}

    @cached_property
    def computing(self) -> Sequence[TracedOperation]:
        """The operations that are no opaque products, with what cannot be read as anything else."""
        return _reached(
            TracedOperation.of(reads, e.outvars, self._program.products.new_elements(e))
            for at, (e, reads) in enumerate(
                zip(self._program.equations, self._program.inner_reads, strict=True)
            )
            if at not in self.products
        )

    @cached_property
    def leaving(self) -> Sequence[tuple[Any, Sequence[tuple[Any, bool]]]]:
        """The values that operations make, last ones first, with the operations that read each, and
        whether these are opaque products."""
        readers: dict[Any, list[tuple[Any, bool]]] = {}
        for at, equation in enumerate(self._program.equations):
            if at in self._program.useful:
                for v in {*self._program.inner_reads[at]}:
                    readers.setdefault(v, []).append((equation, at in self.products))
        made = [v for e in self._program.equations for v in e.outvars]
        return [(v, readers.get(v, ())) for v in reversed(made)]

    @memo
    def needed(self, product: int) -> Needed:
        """Return what has to be there while the product at a position runs."""
        program, equations = self._program, self._program.equations
        before, groups = self._before[product], _Groups(self._joined_before[product])
        later = set(equations[product].outvars)
        wanted = set(program.inner_reads[product])
        behind = [product]
        others = [at for at in range(product) if at not in self.products or at in before]
        for at, reads in enumerate(program.inner_reads[product + 1 :], start=product + 1):
            if not later.isdisjoint(reads):
                later.update(equations[at].outvars)
                if at in program.useful:
                    wanted.update(reads)
                    behind.append(at)
            elif at not in self.products:
                groups.join(*self._joins(at))
                others.append(at)
        wanted = (wanted | program.results) - later
        results = {v for at in before for v in equations[at].outvars} & program.results
        read: dict[Any, list[Any]] = {}
        for v in wanted - results:
            read.setdefault(groups.of(v), []).append(v)
        operands: dict[Any, list[Any]] = {}
        for v in program.inner_reads[product]:
            operands.setdefault(groups.of(v), []).append(v)

        @cache
        def steps() -> Sequence[TracedOperation]:
            return self._steps(reversed(others), {*wanted}, results)

        return Needed(
            [*results],
            steps,
            [(values, operands.get(group, ())) for group, values in read.items()],
            {v for at in behind for v in program.given_reads[at]},
        )

    def _steps(
        self, backwards: Iterable[int], wanted: set[object], results: Collection[object]
    ) -> Sequence[TracedOperation]:
        """Return, of operations given last ones first, those that what is wanted follows from."""
        found = []
        for at in backwards:
            begins = at in self.products
            # What is computed of a result that is there need not be.
            there = results if begins else ()
            makes = [
                v for v in self._program.equations[at].outvars if v in wanted and v not in there
            ]
            if makes:
                reads = () if begins else self._program.inner_reads[at]
                found.append(TracedOperation.of(reads, makes, begins * _ALL))
                wanted.update(reads)
        return _reached(reversed(found))

    def _joins(self, at: int) -> Sequence[Any]:
        """Return what an operation reads and makes, but for results that are products' as they are:
        what is computed of these need not stand for them."""
        values = (*self._program.inner_reads[at], *self._program.equations[at].outvars)
        return [v for v in values if v not in self._made or v not in self._program.results]

    @cached_property
    def _joined_before(self) -> Mapping[int, Mapping[Any, Any]]:
        """The values that operations before each product join, by product; products join none."""
        groups, found = _Groups({}), {}
        for at in range(len(self._program.equations)):
            if at in self.products:
                found[at] = groups.joined
            else:
                groups.join(*self._joins(at))
        return found

    @cached_property
    def _before(self) -> Mapping[int, Collection[int]]:
        """The positions of the products that each product depends on."""
        return products_before(self._program.equations, self.products)


class _Groups:
    """Values that are joined, directly or through others.

    Args:
        joined: Those of other groups, which stay as they are.
    """

    def __init__(self, joined: Mapping[object, object]) -> None:
        self._next = dict(joined)

    @property
    def joined(self) -> Mapping[Any, Any]:
        """A copy of the links between the values that are joined so far."""
        return dict(self._next)

    def of(self, value: Any) -> int:
        """Return a number of the value's group."""
        return id(self._last(value))

    def join(self, *values: Any) -> None:
        for value in values[1:]:
            self._next[self._last(value)] = self._last(values[0])

    def _last(self, value: object) -> Any:
        while (joined := self._next.get(value, value)) is not value:
            self._next[value] = value = self._next.get(joined, joined)
        return value


def _reached(steps: Iterable[TracedOperation]) -> Sequence[TracedOperation]:
    """Return the steps at which bytes begin, and those that follow from them."""
    found, made = list[TracedOperation](), set[Any]()
    for step in steps:
        reads = [v for v in step.reads if v in made]
        if reads or step.new:
            found.append(step._replace(reads=reads))
            made.update(step.makes)
    return found


def _is_fused(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _FUSED and not equation.effects
