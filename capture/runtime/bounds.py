"""What a program needs while it runs, between two bounds, from tracing: no compiler is asked.

A compiler fuses: what products, loops and other opaque operations make and read stands in memory;
what is computed element by element does only where one of them, or the caller, reads it. So

    least    the results that no donated argument holds; or, if that is more, what has to be there
             while some product runs, whatever the order: what products before it made for
             products behind it, and the results that it depends on. A result that is still to
             come may lend its memory
    most     those results, and the largest live set of what stands in memory, in the order of the
             program (what is computed element by element is there from its first reader on), with
             a margin; where the compiler puts speed before memory, all of it at once

Only the first is proven of every program: what a compiler adds of its own, such as scratch of
libraries, copies and another order, has no bound that is known.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from capture.compiler.executable import Executable, LayerOf
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops
from capture.runtime.programs import shard_bytes, split_dim
from capture.runtime.residuals import ValueSplit
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


#: What compilers were seen to need beside a live set, of programs of transformers, mixtures of
#: experts and convolutions for h100: copies and gradients that wait, and scratch of libraries.
_MARGIN, _SCRATCH_BYTES = 1.15, 8 * 2**20
_CPU_SCRATCH_BYTES = 2**16
#: Rows, columns and terms per device from which on every product is a library's: smaller ones, and
#: those with vectors, a compiler may compute otherwise.
_SMALLEST_PRODUCT = 32


@dataclass(frozen=True, eq=False)
class BoundedProgram(Executable):
    """A program that was traced and not compiled: it cannot be called, and ``transient_bytes`` is
    the upper bound.

    Attributes:
        least_bytes: The lower bound of the same.
        least_outputs: Those of its results, one by one.
    """

    least_bytes: int = 0
    least_outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bounder:
    """An ``AnyCompiler`` that compiles nothing.

    Attributes:
        is_cpu: XLA's CPU compiler orders operations so that they may run side by side, and gives
            every program its memory as a whole.
        product_scratch_bytes: What a compiler gives to every matrix product while it runs, at
            least.
    """

    is_cpu: bool = False
    product_scratch_bytes: int = 0

    def __call__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
        layer_of: LayerOf | None = None,
        local_flops: LocalFlops = NO_LOCAL_FLOPS,
    ) -> BoundedProgram:
        """See ``AnyCompiler``."""
        given = jax.tree.leaves(tuple(args))
        if not given:  # a layer without parameters has nothing to update
            return BoundedProgram(_not_compiled, jax.eval_shape(function, *args), 0)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        flow = DataFlow(closed, open_remats=True)
        mesh = given[0].sharding.mesh
        asked = _per_leaf(out_shardings, shapes)
        split = ValueSplit(
            flow,
            [
                (axis, degree, [split_dim(each.sharding.spec, axis) for each in given])
                for axis, degree in mesh.shape.items()
            ],
            [None if sharding is None else sharding.spec for sharding in asked],
        )
        results = [
            jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=sharding or _chosen(split, mesh, value)
            )
            for shape, sharding, value in zip(
                jax.tree.leaves(shapes), asked, flow.outputs, strict=True
            )
        ]
        least = [
            split.least_bytes(value)
            if sharding is None and is_variable(value)
            else shard_bytes(result)
            for result, sharding, value in zip(results, asked, flow.outputs, strict=True)
        ]
        donated = Counter(_kind(each) for i in donate for each in jax.tree.leaves(args[i]))
        fresh: dict[Any, int] = {}
        least_fresh: dict[Any, int] = {}
        for result, nbytes, value in zip(results, least, flow.outputs, strict=True):
            if donated[_kind(result)]:
                donated[_kind(result)] -= 1
                continue
            key = value if is_variable(value) else object()
            fresh[key], least_fresh[key] = shard_bytes(result), nbytes
        scratch = (self.product_scratch_bytes, mesh.size)
        memory = Memory(flow, split, fresh, least_fresh, scratch)
        return BoundedProgram(
            _not_compiled,
            jax.tree.unflatten(jax.tree.structure(shapes), results),
            memory.all() if self.is_cpu else memory.most(),
            least_bytes=memory.least(),
            least_outputs=tuple(least),
        )


class Memory:
    """What a program takes beside its arguments, see the module.

    Args:
        flow: The program, everything opened.
        split: How its values lie on the devices.
        fresh: Bytes per device of the results that no donated argument holds.
        least_fresh: The same, at least.
        scratch: Bytes of every matrix product that is large, split over so many devices at most.
    """

    def __init__(
        self,
        flow: DataFlow,
        split: ValueSplit,
        fresh: Mapping[Any, int],
        least_fresh: Mapping[Any, int],
        scratch: tuple[int, int] = (0, 1),
    ):
        self._flow, self._split, self._scratch = flow, split, scratch
        self._fresh, self._least_fresh = fresh, least_fresh
        self._elsewhere = {*flow.inputs, *_variables(flow.outputs)}
        self._equations: list[Any] = flow.jaxpr.eqns

    def least(self) -> int:
        """The lower bound: over the products, the most that has to be there while one runs, in any
        order of the operations."""
        before, fresh = self._before(), self._fresh_before()
        at_products = (
            fresh[at] + self._while_running(at, before[at]) + self._scratch_bytes(equation)
            for at, equation in enumerate(self._equations)
            if _is_product(equation)
        )
        return max(sum(self._least_fresh.values()), max(at_products, default=0))

    def _scratch_bytes(self, equation: Any) -> int:
        nbytes, num_devices = self._scratch
        smallest = _SMALLEST_PRODUCT * num_devices
        return nbytes if min(_product_sizes(equation)) >= smallest else 0

    def _while_running(self, product: int, before: Collection[int]) -> int:
        """What it makes, and what is read with it or after it: of products before it, or what is
        computed from their results, at its narrowest on the widest way; and operands, where they
        are computed from arguments.

        Nothing that depends on the product is there yet. Values that are computed from each other
        may stand for each other, so of those the largest counts.
        """
        groups = _Groups()
        made, later = set(self._equations[product].outvars), set[Any]()
        width: dict[Any, int] = {}
        needed: set[Any] = set(self._inner(self._equations[product].invars))
        for at, equation in enumerate(self._equations):
            reads = self._inner(equation.invars)
            if at == product:
                later |= made
            elif not later.isdisjoint(reads):
                later.update(equation.outvars)
                if at in self._useful:
                    needed.update(reads)
            elif not _is_product(equation):
                reach = max((width.get(v, 0) for v in reads), default=0)
                width.update((v, min(reach, self._nbytes(v))) for v in equation.outvars)
                groups.join(*reads, *self._inner(equation.outvars))
            elif at in before:
                width.update((v, self._nbytes(v)) for v in equation.outvars)
        there: dict[int, int] = {}
        for v in needed - later:
            group = groups.of(v)
            there[group] = max(width.get(v, 0), there.get(group, 0))
        for v in self._inner(self._equations[product].invars):
            group = groups.of(v)
            there[group] = max(self._computed.get(v, 0), there.get(group, 0))
        results = sum(self._nbytes(v) for v in made if v in self._read_by_products)
        return results + sum(there.values())

    @cached_property
    def _useful(self) -> set[int]:
        """Positions of the operations that results depend on."""
        wanted, found = set(_variables(self._flow.outputs)), set[int]()
        for at in reversed(range(len(self._equations))):
            equation = self._equations[at]
            if not wanted.isdisjoint(equation.outvars):
                found.add(at)
                wanted.update(_variables(equation.invars))
        return found

    @cached_property
    def _read_by_products(self) -> set[Any]:
        """Values that products depend on."""
        found: set[Any] = set()
        for equation in reversed(self._equations):
            if _is_product(equation) or not found.isdisjoint(equation.outvars):
                found.update(_variables(equation.invars))
        return found

    @cached_property
    def _computed(self) -> dict[Any, int]:
        """The bytes of values that are computed and not only renamed, cast or transposed, at their
        narrowest since: an argument that is may be read as it is."""
        found: dict[Any, int] = {}
        for equation in self._equations:
            if _is_product(equation):
                continue
            reach = max((found.get(v, 0) for v in self._inner(equation.invars)), default=0)
            for v in equation.outvars:
                own = 0 if equation.primitive.name in _READ_AS_IT_IS else self._nbytes(v)
                found[v] = max(min(reach, self._nbytes(v)), own)
        return found

    def _before(self) -> dict[int, set[int]]:
        """Per product, the products that it depends on, by position."""
        found: dict[int, set[int]] = {}
        origins: dict[Any, set[int]] = {}
        for at, equation in enumerate(self._equations):
            reads = _variables(equation.invars)
            earlier = set[int]().union(*(origins.get(v, ()) for v in reads))
            if _is_product(equation):
                found[at] = earlier
                earlier = earlier | {at}
            origins.update(dict.fromkeys(equation.outvars, earlier))
        return found

    def _fresh_before(self) -> dict[int, int]:
        """Per product, bytes of the fresh results that it depends on."""
        found: dict[int, int] = {}
        made_of: dict[Any, frozenset[Any]] = {}
        for at, equation in enumerate(self._equations):
            reads = _variables(equation.invars)
            results = frozenset(v for v in reads if v in self._least_fresh).union(
                *(made_of.get(v, frozenset()) for v in reads)
            )
            made_of.update(dict.fromkeys(equation.outvars, results))
            if _is_product(equation):
                found[at] = sum(self._least_fresh[v] for v in results)
        return found

    def _inner(self, atoms: Iterable[Any]) -> list[Any]:
        """Those that are neither arguments nor results."""
        return [v for v in _variables(atoms) if v not in self._elsewhere]

    def _nbytes(self, value: Any) -> int:
        """At least; of those that have memory of their own."""
        return 0 if value in self._elsewhere else self._split.least_bytes(value)

    def most(self) -> int:
        """The upper bound."""
        first, last = self._lives(stores_reduced=True)
        made, dead = defaultdict(list), defaultdict(list)
        for value, at in first.items():
            if value not in self._elsewhere:
                made[at].append(value)
                dead[last[value]].append(value)
        live = peak = 0
        for at in sorted({*made, *dead}):
            live += sum(map(self._split.nbytes, made[at]))
            peak = max(peak, live)
            live -= sum(map(self._split.nbytes, dead[at]))
        return math.ceil(_MARGIN * peak) + _SCRATCH_BYTES + sum(self._fresh.values())

    def all(self) -> int:
        """The upper bound where nothing makes room for anything else."""
        first, _ = self._lives(stores_reduced=False)
        stored = sum(map(self._split.nbytes, first.keys() - self._elsewhere))
        return stored + _CPU_SCRATCH_BYTES + sum(self._fresh.values())

    def _lives(self, stores_reduced: bool) -> tuple[dict[Any, int], dict[Any, int]]:
        """The operations, by position, at which each value that stands in memory is first and last
        needed; what is summed up among them, or computed while it is."""
        equations = self._equations
        opaque = [equation for equation in equations if not _is_fused(equation)]
        reading = [e for e in opaque if stores_reduced or e.primitive.name not in REDUCTIONS]
        stored = {v for e in reading for v in _variables(e.invars)}
        stored.update(v for e in opaque for v in e.outvars)
        stored.update(_variables(self._flow.outputs))
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
                    for v in _variables(equation.invars)
                )
            )
            if _is_fused(equation):
                sources.update(dict.fromkeys(equation.outvars, reads))
                continue
            for value in (*reads, *equation.outvars):
                need(value, at)
        for value in _variables(self._flow.outputs):
            need(value, len(equations))
        return first, last


class _Groups:
    """Values that are joined, directly or through others."""

    def __init__(self) -> None:
        self._next: dict[Any, Any] = {}

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


def _product_sizes(equation: Any) -> tuple[int, int, int]:
    """Rows, columns and what is summed over, of a matrix product; nothing of anything else."""
    [result] = equation.outvars
    if equation.primitive.name != "dot_general" or result.aval.dtype.kind in "biu":
        return 0, 0, 0
    (contract, others), batch = equation.params["dimension_numbers"]
    shapes = [operand.aval.shape for operand in equation.invars]
    rows, columns = (
        math.prod(size for dim, size in enumerate(shape) if dim not in summed and dim not in apart)
        for shape, summed, apart in zip(shapes, (contract, others), batch, strict=True)
    )
    return rows, columns, math.prod(shapes[0][dim] for dim in contract)


def _is_product(equation: Any) -> bool:
    return equation.primitive.name in _PRODUCTS


def _variables(atoms: Iterable[Any]) -> Collection[Any]:
    return [atom for atom in atoms if is_variable(atom)]


def _chosen(split: ValueSplit, mesh: Any, value: Any) -> NamedSharding:
    return NamedSharding(mesh, split.spec(value) if is_variable(value) else PartitionSpec())


def _per_leaf(out_shardings: Any, shapes: Any) -> list[NamedSharding | None]:
    """What is asked for of every result; None leaves it open."""
    if out_shardings is None:
        return [None] * len(jax.tree.leaves(shapes))
    found = jax.tree.map(
        lambda asked, part: jax.tree.map(lambda _: asked, part) if asked is not None else part,
        out_shardings,
        shapes,
        is_leaf=lambda asked: asked is None,
    )
    return [
        each if isinstance(each, NamedSharding) else None
        for each in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, NamedSharding))
    ]


def _kind(struct: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    """Of results that one argument may hold."""
    assert struct.sharding is not None, "every argument and result has one"
    return struct.shape, struct.dtype, struct.sharding.shard_shape(struct.shape)


def _not_compiled(*args: Any) -> Any:
    raise AssertionError("the program was traced, not compiled")
