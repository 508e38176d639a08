"""What a program needs while it runs, between two bounds, from tracing: no compiler is asked.

A compiler fuses: what opaque products (``capture.runtime.opaque``) make and read stands in memory;
what is computed element by element does only where one of them, or the caller, reads it. So

    least    the results that no donated argument may hold; or, if that is more, what has to be
             there while some opaque product runs, whatever the order: what such products before it
             made for those behind it or for the caller, its operands where they are computed, and
             what it makes. A result that is still to come may lend its memory, whether it is of its
             own or a donated argument's (``capture.runtime.lent``)
    most     those results, and the largest live set of what stands in memory, in the order of the
             program (what is computed element by element is there from its first reader on), with
             a margin; where the compiler puts speed before memory, all of it at once

The first rests on how XLA treats opaque products, not on anything that it promises: a compiled
program below it is an error of this module, which searches report
(``recommender.capture.refuted``). What a compiler adds of its own, such as scratch of libraries,
copies and another order, has no bound that is known.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from capture.compiler.executable import Executable, LayerOf
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops
from capture.measured.work import ProgramWork
from capture.runtime.layout import shard_bytes, split_dim
from capture.runtime.lent import Lent, held_results, lendable
from capture.runtime.residuals import ValueSplit
from capture.runtime.traced_program import Opaque, TracedOperation, TracedProgram
from capture.runtime.traced_work import TracedWork
from capture.tracing.jaxprs import is_variable

#: What compilers were seen to need beside a live set, of programs of transformers, mixtures of
#: experts and convolutions for h100: copies and gradients that wait, and scratch of libraries.
_MARGIN, _SCRATCH_BYTES = 1.15, 8 * 2**20
_CPU_SCRATCH_BYTES = 2**16


@dataclass(frozen=True, eq=False)
class BoundedProgram(Executable):
    """A program that was traced and not compiled: it cannot be called, ``transient_bytes`` is what
    it is expected to take at most, and ``work`` what it is expected to do.

    Attributes:
        least_bytes: The lower bound of the same.
        least_outputs: Those of its results, one by one.
        least_work: What the program does at least; None where that is not counted.
        sizes: Bytes per device of donated arguments, and of results.
    """

    least_bytes: int = 0
    least_outputs: tuple[int, ...] = ()
    least_work: ProgramWork | None = None
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Bounder:
    """An ``AnyCompiler`` that compiles nothing.

    Attributes:
        is_cpu: XLA's CPU compiler orders operations so that they may run side by side, and gives
            every program its memory as a whole.
        keeps_products: Whether the compiler puts into memory what opaque products read and make.
            XLA's for CPUs computes several in one operation, and what is in between in none; that
            for TPUs computes operands in the product, takes broadcasts out of it, and holds values
            on the chip.
        product_scratch_bytes: What a compiler gives to every matrix product while it runs, at
            least.
        counts_work: Whether to say what programs compute, read, write and send.
        for_devices: Products are taken to be split over no fewer devices: what is said then holds
            of programs with the same examples on each of up to so many.
        gathers_alone: Whether the compiler gathers every split parameter by a collective of its
            own, as that for TPUs does; others put those of a layer together.
    """

    is_cpu: bool = False
    keeps_products: bool = True
    product_scratch_bytes: int = 0
    counts_work: bool = False
    for_devices: int = 1
    gathers_alone: bool = False

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
        """Trace a function and return its program with bounds, uncompiled; see ``AnyCompiler``."""
        if not jax.tree.leaves(tuple(args)):  # a layer without parameters has nothing to update
            nothing = ProgramWork(0, "float32", 0, 0, kernels=()) if self.counts_work else None
            results = jax.eval_shape(function, *args)
            return BoundedProgram(_not_compiled, results, 0, nothing, least_work=nothing)
        return self.bounds(TracedProgram.of(function, args), args, donate, out_shardings)

    def bounds(
        self,
        program: TracedProgram,
        args: Sequence[object],
        donate: Sequence[int] = (),
        out_shardings: object = None,
    ) -> BoundedProgram:
        """Return the bounds of a traced program, with the shardings of these arguments."""
        flow, shapes, given = program.flow, program.shapes, jax.tree.leaves(tuple(args))
        mesh = given[0].sharding.mesh
        asked = _per_leaf(out_shardings, shapes)
        split = ValueSplit(
            flow,
            [
                (axis, degree, [split_dim(each.sharding.spec, axis) for each in given])
                for axis, degree in mesh.shape.items()
            ],
            [None if sharding is None else sharding.spec for sharding in asked],
            program.spread,
        )
        wanted = list(zip(asked, flow.outputs, strict=True))
        results = [
            jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=sharding or _chosen(split, mesh, value)
            )
            for shape, (sharding, value) in zip(jax.tree.leaves(shapes), wanted, strict=True)
        ]
        least = [
            split.least_bytes(value)
            if sharding is None and is_variable(value)
            else shard_bytes(result)
            for result, (sharding, value) in zip(results, wanted, strict=True)
        ]
        positions = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        donated = [
            (value, each)
            for i, value, each in zip(positions, flow.inputs, given, strict=True)
            if i in donate
        ]
        keys = [value if is_variable(value) else object() for value in flow.outputs]
        held = held_results([each for _, each in donated], results, least)
        fresh = _fresh([each for _, each in donated], list(zip(keys, results, strict=True)))
        least_fresh = {keys[i]: nbytes for i, nbytes in enumerate(least) if i not in held}
        lent = lendable(program, donated, [(keys[i], nbytes) for i, nbytes in held.items()])
        num_devices = max(mesh.size, self.for_devices)
        memory = Memory(program, split, fresh, least_fresh, lent, self, num_devices)
        work = None
        if self.counts_work:
            rules = self.keeps_products, self.gathers_alone
            work = TracedWork(program, split, memory.computed, mesh.shape, *rules)
        return BoundedProgram(
            _not_compiled,
            jax.tree.unflatten(jax.tree.structure(shapes), results),
            memory.all() if self.is_cpu else memory.most(),
            None if work is None else work.expected(),
            least_bytes=memory.least(),
            least_outputs=tuple(least),
            least_work=None if work is None else work.least(),
            sizes=(tuple(shard_bytes(each) for _, each in donated), tuple(least)),
        )


@dataclass(frozen=True, eq=False)
class Memory:
    """The bytes per device that a program takes beside its arguments; see the module.

    Args:
        fresh: Bytes per device of the results that no donated argument holds.
        least_fresh: The same, at least.
        lent: What donated arguments may lend before results are written to them.
        num_devices: That share what the program computes.
    """

    _program: TracedProgram
    _split: ValueSplit
    _fresh: Mapping[object, int]
    _least_fresh: Mapping[object, int]
    _lent: Lent
    _rules: Bounder
    _num_devices: int

    def least(self) -> int:
        """Return the lower bound: over the products, the most that has to be there while one runs,
        in any order of the operations."""
        found = sum(self._least_fresh.values())
        if not self._rules.keeps_products:
            return found
        beside = {p: self._beside(p) for p in self._opaque.products}
        at_most = {p: nbytes + self._groups_at_most(p) for p, nbytes in beside.items()}
        for product in sorted(at_most, key=lambda p: -at_most[p]):
            if at_most[product] <= found:
                break  # as of all that follow
            found = max(found, beside[product] + self._groups(product))
        return found

    def _beside(self, product: int) -> int:
        """Return the bytes of what a product makes that is needed behind it, of results that
        products before it made, and of its scratch; less what is lent."""
        made = self._program.equations[product].outvars
        needed = self._opaque.needed(product)
        there = sum(self._nbytes[v] for v in needed.results)
        there -= self._lent.nbytes(needed.arguments)
        there += sum(self._left[v] for v in made)
        is_large = self._program.products.is_large(product, self._num_devices)
        return there + self._rules.product_scratch_bytes * is_large

    def _groups(self, product: int) -> int:
        """Return the bytes of what is read with a product or after it, or is a result. That comes
        from products before it, at its narrowest on the widest way; operands may also be computed
        from arguments.

        Nothing that depends on the product is there yet. Values that are computed from each other
        may stand for each other, so of those the largest counts.
        """
        needed = self._opaque.needed(product)
        width = self._widths(needed.steps())
        return sum(
            max(
                max(width.get(v, 0) for v in values),
                max((self.computed.get(v, 0) for v in operands), default=0),
            )
            for values, operands in needed.groups
        )

    def _groups_at_most(self, product: int) -> int:
        """Return no less than ``_groups``, faster: no value counts more than its own bytes."""
        groups = self._opaque.needed(product).groups
        return sum(max(self._nbytes.get(v, 0) for v in values) for values, _ in groups)

    @cached_property
    def _opaque(self) -> Opaque:
        return self._program.opaque(self._num_devices)

    @cached_property
    def _nbytes(self) -> Mapping[Any, int]:
        """The least bytes of each value that the program makes; a result that a donated argument
        holds has no memory of its own."""
        made = (v for e in self._program.equations for v in e.outvars)
        return {
            v: self._least_fresh.get(v, 0)
            if v in self._program.results
            else self._split.least_bytes(v)
            for v in made
        }

    @cached_property
    def _left(self) -> Mapping[Any, int]:
        """The bytes that each value needs from where it is made on. Until products or the caller
        read it, or what is computed from it, it may be at its narrowest on the widest way."""
        found: dict[Any, int] = {}
        for value, readers in self._opaque.leaving:
            own = self._nbytes[value]
            reach = own if value in self._program.results else 0
            for equation, is_opaque in readers:
                parts = [found[v] for v in equation.outvars]
                # The parts of a split are disjoint.
                more = sum(parts) if equation.primitive.name == "split" else max(parts, default=0)
                reach = max(reach, own if is_opaque else more)
            found[value] = min(reach, own)
        return found

    @cached_property
    def computed(self) -> Mapping[Any, int]:
        """The bytes of values that are computed and cannot be read as anything else, at their
        narrowest since: an argument that is only renamed, cast, moved or scaled may be read as it
        is."""
        return self._widths(self._opaque.computing)

    def _widths(self, steps: Iterable[TracedOperation]) -> dict[Any, int]:
        """Return the bytes of what the steps make, at the narrowest on the widest way to each."""
        found: dict[Any, int] = {}
        nbytes = self._nbytes
        for reads, makes, sizes, new in steps:
            reach = 0
            for v in reads:
                if (width := found[v]) > reach:
                    reach = width
            for v, size in zip(makes, sizes, strict=True):
                own = nbytes[v]
                width = own if own < reach else reach
                if new and size:
                    width = max(own * min(new, size) // size, width)
                found[v] = width
        return found

    def most(self) -> int:
        """Return the expected upper bound, in bytes, which some programs exceed."""
        first, last = self._program.lives(stores_reduced=True)
        made, dead = defaultdict(list), defaultdict(list)
        for value, at in first.items():
            if value not in self._program.elsewhere:
                made[at].append(value)
                dead[last[value]].append(value)
        live = peak = 0
        for at in sorted({*made, *dead}):
            live += sum(map(self._split.expected_bytes, made[at]))
            peak = max(peak, live)
            live -= sum(map(self._split.expected_bytes, dead[at]))
        return math.ceil(_MARGIN * peak) + _SCRATCH_BYTES + sum(self._fresh.values())

    def all(self) -> int:
        """Return the bytes of all that is stored, where nothing makes room for anything else."""
        first, _ = self._program.lives(stores_reduced=False)
        stored = sum(map(self._split.expected_bytes, first.keys() - self._program.elsewhere))
        return stored + _CPU_SCRATCH_BYTES + sum(self._fresh.values())


def _chosen(split: ValueSplit, mesh: Any, value: Any) -> NamedSharding:
    return NamedSharding(mesh, split.spec(value) if is_variable(value) else PartitionSpec())


def _per_leaf(out_shardings: object, shapes: object) -> list[NamedSharding | None]:
    """Return the sharding that is asked for of every result; None leaves it open."""
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


def _fresh(donated: Sequence[Any], results: Sequence[tuple[Any, Any]]) -> dict[Any, int]:
    """Return the bytes of results that are written over nothing that is donated."""
    kinds, fresh = Counter(map(_kind, donated)), dict[Any, int]()
    for key, result in results:
        if kinds[_kind(result)]:
            kinds[_kind(result)] -= 1
        else:
            fresh[key] = shard_bytes(result)
    return fresh


def _kind(struct: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    """Return what makes a donated argument fit a result: shape, dtype and shard shape."""
    assert struct.sharding is not None, "every argument and result has one"
    return struct.shape, struct.dtype, struct.sharding.shard_shape(struct.shape)


def _not_compiled(*args: Any) -> Any:
    raise AssertionError("the program was traced, not compiled")
