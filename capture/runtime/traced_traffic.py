"""What a traced program reads and writes beside its large products, per device: bytes that no
fusion avoids.

What is computed element by element stands in memory only where a product, or the caller, reads it.
What stands there was written once, and computed from values that stand in memory and are read once.
A library's product may end with what is added to its result, scaled, or computed of it alone: that
is neither written nor read apart. Nothing counts twice: several results may be computed at once,
and whole rows may stay on the chip while they are summed up and read again.

As expected, every sum ends a kernel, and what follows reads its operands again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from capture.measured.work import Kernel
from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS
from capture.runtime.residuals import ValueSplit
from capture.runtime.traced_moves import Moves
from capture.runtime.traced_program import TracedProgram
from capture.runtime.traced_rereads import (
    NONE,
    Dependence,
    ReadAgain,
    Ways,
    in_parts,
    joined,
    kernel_ends,
    shared_sums,
    stored,
    summed,
)
from capture.runtime.views import item_bytes
from capture.tracing.fusion import MULTIPLY
from capture.tracing.jaxprs import variables
from capture.tracing.recompute import (
    ELEMENTWISE,
    FUNCTIONS,
    LONG_FUNCTIONS,
    MOVES,
    REDUCTIONS,
    RENAMED,
)

#: Computed element by element: may be the end of the product that it reads.
_ELEMENTS = ELEMENTWISE | {"transpose"}
#: A library's product may add a matrix to its result.
_ADDED = RENAMED | {"add", "add_any", "sub", "neg", "transpose"}
#: What no library is known to end a product with.
_SLOW = (FUNCTIONS | LONG_FUNCTIONS) - {"tanh", "erf"}
#: Read no more of an operand than they make.
_PARTS = frozenset({"gather", "slice", "dynamic_slice", "split"})
#: May write no more than a part of what they are given.
_IN_PLACE = ("scatter", "dynamic_update_slice")
#: Computed inside of what reads the result, as expected.
_FREE = _ELEMENTS | MOVES
#: Operations whose results are made of all of their operands.
_KNOWN = _ELEMENTS | REDUCTIONS | (MOVES - {"dynamic_update_slice"})


class _Held(NamedTuple):
    """The memory that is read for a value: ``itemsize`` of each ``whole`` bytes of it, and no more
    than ``base`` has."""

    base: Any
    itemsize: int = 1
    whole: int = 1


class _Step(NamedTuple):
    """An operation on the way to what is written.

    Attributes:
        is_known: Whether its results are made of all of its operands.
        is_sum, ends, is_shared: Whether it is a sum, ends a kernel, or is needed for several.
        is_part: Whether it reads no more than it makes.
    """

    reads: Sequence[Any]
    outs: Sequence[Any]
    is_product: bool
    is_known: bool
    is_sum: bool
    ends: bool
    is_shared: bool
    is_part: bool
    is_written: bool


def _steps(
    program: TracedProgram,
    products: frozenset[int],
    made: frozenset[object],
    written: frozenset[object],
) -> Sequence[_Step]:
    """Return the large products, and all that the written values are computed from, between what
    stands in memory."""
    wanted = set(written)
    for equation in reversed(program.equations):
        if wanted.isdisjoint(equation.outvars) or equation.outvars[0] in made:
            continue
        wanted.update(v for v in variables(equation.invars) if v not in program.given)
    ends, shared = program.once(kernel_ends), program.once(shared_sums, written)
    return [
        _Step(
            program.reads[at],
            equation.outvars,
            at in products,
            name in _KNOWN,
            name in REDUCTIONS,
            at in ends,
            at in shared,
            name in _PARTS,
            not written.isdisjoint(equation.outvars),
        )
        for at, equation in enumerate(program.equations)
        if at in products or not wanted.isdisjoint(equation.outvars)
        for name in [equation.primitive.name]
    ]


class _Ends:
    """The values of a program that stand in memory, and what its products end with.

    Args:
        summed: Those of them whose results are parts of a sum over devices: nothing follows in
            them.

    Attributes:
        of: Per value that is the end of products, these.
        slow: Those that no library is known to end with.
        operands: What products read that does not end one: what holds it, its own name, and whether
            that is a cast.
        results: The same of what the caller is given: what holds it.
        stored: All that holds what products or the caller read.
    """

    def __init__(
        self, program: TracedProgram, products: frozenset[int], summed: frozenset[int]
    ) -> None:
        self._program = program
        self.made = frozenset(v for at in products for v in program.equations[at].outvars)
        self.of: dict[Any, frozenset[Any]] = {}
        self.slow: set[Any] = set()
        before: dict[Any, frozenset[Any]] = {}
        for at, equation in enumerate(program.equations):
            reads = program.reads[at]
            made = frozenset(equation.outvars if equation.primitive.name in MULTIPLY else ())
            if found := made.union(*(before[v] for v in reads if v in before)):
                before.update(dict.fromkeys(equation.outvars, found))
            if made:
                if at not in summed:
                    self.of[equation.outvars[0]] = frozenset(equation.outvars)
            elif ends := self._ends_of(equation, before):
                self.of[equation.outvars[0]] = ends
                if equation.primitive.name in _SLOW or not self.slow.isdisjoint(reads):
                    self.slow.update(equation.outvars)
        read = [v for at in sorted(products) for v in variables(program.equations[at].invars)]
        operands = [(*_base(program, v), v) for v in read]
        results = [_base(program, v)[0] for v in program.results]
        self._narrowest = np.dtype(program.narrowest_dtype).itemsize
        self.operands = [each for each in operands if each[0] not in self.of]
        self.results = [v for v in results if v not in self.of and self._is_written(v)]
        self.stored = {base for base, _, _ in operands}.union(results) - {
            value
            for value, ends in self.of.items()
            if value not in self.slow and item_bytes(value) <= max(map(item_bytes, ends))
        }

    @cached_property
    def held(self) -> Mapping[Any, _Held | None]:
        """The memory read for each value that is there, or ends products; None if read before."""
        reads = {v for each in self._program.reads for v in each}
        return {v: self._held(v) for v in reads if self._is_held(v)}

    def _is_held(self, value: object) -> bool:
        return value in self._program.given or value in self.of or value in self.made

    def _held(self, value: object) -> _Held | None:
        if value in self._program.given:
            return _Held(value)
        itemsize = item_bytes(value)
        if ends := self.of.get(value):
            one = min(ends, key=self._program.flow.order)
            return (
                _Held(one, min(itemsize, self._narrowest), itemsize) if one in self.made else None
            )
        return _Held(value, self._program.views.written_itemsize.get(value, itemsize), itemsize)

    def _ends_of(self, equation: Any, before: Mapping[Any, frozenset[Any]]) -> frozenset[Any]:
        """Return the products that an operation may be the end of: not of those that it also
        follows from in another way, such as a sum over rows.

        Args:
            before: The products that a value follows from in any way.
        """
        name, none = equation.primitive.name, frozenset[Any]()
        if name not in _ELEMENTS or len(equation.outvars) > 1:
            return none
        distinct = self._program.products.distinct
        reads = [v for v in equation.invars if distinct(v) > 1]
        ends = {self.of.get(v, none) for v in reads}
        if len(ends) > 1 and name not in _ADDED:
            size = math.prod(equation.outvars[0].aval.shape)
            large = {self.of.get(v, none) for v in reads if 2 * distinct(v) > size or v in self.of}
            if len(large) > 1:
                return none
        found, others = none.union(*ends), (v for v in reads if v not in self.of)
        return found.difference(*(before.get(v, none) for v in others))

    def _is_written(self, value: object) -> bool:
        """Return whether a result is written whole, and no constant nor an argument, scaled."""
        program = self._program
        maker = program.flow.maker(value)
        if maker is not None and maker.primitive.name.startswith(_IN_PLACE):
            return False
        while value not in program.given:
            maker = program.flow.maker(value)
            if maker is None or not program.products.distinct(value):
                return False
            reads = [v for v in maker.invars if program.products.distinct(v) > 1]
            if maker.primitive.name not in _ELEMENTS or len(reads) != 1:
                return True
            [value] = reads
        return False


def _base(program: TracedProgram, value: object) -> tuple[Any, bool]:
    """Return what stands in memory for a value, and whether it is an argument, cast narrower."""
    views, flow = program.views, program.flow
    while (maker := flow.maker(value)) is not None and views.of(value).base is not value:
        [source, *_] = maker.invars
        if item_bytes(source) > item_bytes(value):
            is_given = views.of(source).base in program.given
            return value, is_given
        value = source
    return value, False


@dataclass
class Traffic:
    """The bytes that a program reads and writes on a mesh beside its large products.

    Args:
        products: Positions of the large products.
        summed: Those of them whose results are parts of a sum over devices: nothing follows in
            them.
        computed: Bytes of values that are computed and cannot be read as anything else.
        reads_again: Whether to count what is read more than once.
    """

    program: TracedProgram
    split: ValueSplit
    products: Collection[int]
    summed: Collection[int]
    computed: Mapping[Any, int]
    reads_again: bool = True
    _written: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        products = frozenset(self.products)
        self._ends = self.program.once(_Ends, products, frozenset(self.summed))
        # What products and the caller read, and nothing else holds.
        for base, is_cast, value in self._ends.operands:
            own = self.split.least_bytes(value)
            self._write(base, own if is_cast else min(own, self.computed.get(value, 0)))
        for base in self._ends.results:
            self._write(base, self.split.least_bytes(base))

    def _write(self, value: object, nbytes: int) -> None:
        if value not in self.program.given and value not in self._ends.made and nbytes:
            self._written[value] = max(self._written.get(value, 0), nbytes)

    def least(self) -> list[Kernel]:
        """Return what is written and read at least, in four parts: of what replicas split, and of
        what is the same on each (parameters and gradients). Of both, first what tensor parallelism
        splits, then what it does not; with a count of 0 where there is none of it."""
        products, written = frozenset(self.products), frozenset(self._written)
        steps = self.program.once(_steps, products, self._ends.made, written)
        read = self._read_once(steps)
        found: list[Mapping[Any, int]] = [self._written, read]
        if self.reads_again:
            found += [self._read_again(steps), self._moved(read)]
        parts = [0] * 4
        for each in found:
            for value, nbytes in each.items():
                parts[self._part(value)] += nbytes
        return [Kernel(nbytes, count=int(nbytes > 0)) for nbytes in parts]

    def _read_once(self, steps: Sequence[_Step]) -> dict[Any, int]:
        """Return the values in memory that are read, and the bytes of that."""
        read: dict[Any, int] = {}
        sources: dict[Any, Mapping[Any, int]] = {}
        for step in steps:
            if step.is_product:
                continue
            found = self._sources(step, sources) if step.is_known else {}
            if step.is_sum or step.is_written:
                for source, nbytes in found.items():
                    read[source] = max(read.get(source, 0), nbytes)
            if found and not step.is_sum:
                sources.update(dict.fromkeys(step.outs, found))
        return read

    def _moved(self, read: dict[object, int]) -> Mapping[Any, int]:
        """Return the operands that are written because they have to lie otherwise, and the bytes of
        that; what they are of is read."""
        moved: dict[Any, int] = {}
        moves = Moves(self.program, self.split, self._ends.of)
        for value, base in moves.operands(self.products).items():
            if value not in self._written and base not in self._written:
                known = self._held.get(value, {})
                nbytes = known.get(base, self.split.least_bytes(value))
                moved[value] = nbytes
                read[base] = max(read.get(base, 0), nbytes)
        return moved

    def _part(self, value: object) -> int:
        """Return the place of a value in ``least``."""
        by_replicas, by_tensor = self._reached
        is_same = by_replicas is not None and value not in by_replicas
        is_whole = by_tensor is not None and value not in by_tensor
        return 2 * is_same + is_whole

    @cached_property
    def _reached(self) -> Sequence[Collection[Any] | None]:
        """The values that replicas and tensor parallelism may split; None where there is none."""
        reached = {axis.name: axis.reached for axis in self.split.axes}
        return [reached.get(name) for name in (DATA_AXIS, MODEL_AXIS)]

    def _read_again(self, steps: Sequence[_Step]) -> Mapping[Any, int]:
        """Return the values in memory that are read once more, and the bytes of that."""
        again, ways = ReadAgain(), dict[Any, Ways]()
        made = {value for base, _, value in self._ends.operands if base in self._written}
        for step in steps:
            if not (step.is_product or step.is_known):
                continue
            each = [self._ways(v, ways) for v in step.reads]
            if step.is_product:
                # What stands in memory anyway is read by the product, and by no kernel before it.
                each = [
                    summed(way, ends=v in made) for v, way in zip(step.reads, each, strict=True)
                ]
                ways.update(dict.fromkeys(step.outs, joined(each)))
                continue
            found = joined(each)
            if step.is_sum:
                again.read(found)
                found = summed(found, step.ends, step.is_shared)
            elif found:
                nbytes = sum(map(self.split.least_bytes, step.outs))
                if step.is_part:
                    found = in_parts(found, nbytes)
                if step.is_written:
                    again.read(found)
                found = stored(found, nbytes)
            if found:
                ways.update(dict.fromkeys(step.outs, found))
        return again.nbytes()

    def _ways(self, value: object, ways: dict[object, Ways]) -> Ways:
        """Return how a value depends on what stands in memory, itself if it does."""
        known, read = ways.get(value, NONE), self._held.get(value)
        if read is None:
            return known
        own = {s: Dependence(0, False, nbytes, nbytes) for s, nbytes in read.items()}
        return {**summed(known), **own} if known else own

    @cached_property
    def _held(self) -> Mapping[Any, Mapping[Any, int]]:
        """The bytes, per value in memory, that are read in the place of each value that stands
        there, or ends products."""
        least, found = self.split.least_bytes, dict[Any, Mapping[Any, int]]()
        for value, held in self._ends.held.items():
            found[value] = {}
            if held is not None:
                nbytes = least(value) * held.itemsize // held.whole
                found[value] = {held.base: min(nbytes, least(held.base))}
        return found

    def _sources(
        self, step: _Step, sources: Mapping[object, Mapping[object, int]]
    ) -> Mapping[Any, int]:
        """Return the values in memory that an operation is computed from, and the bytes of them."""
        each = [self._held[v] if v in self._held else sources.get(v) for v in step.reads]
        first, *others = [read for read in each if read] or [{}]
        if not (others or step.is_part):
            return first
        found = dict(first)
        for read in others:
            for source, nbytes in read.items():
                found[source] = max(found.get(source, 0), nbytes)
        if step.is_part:
            most = sum(map(self.split.least_bytes, step.outs))
            found = {source: min(nbytes, most) for source, nbytes in found.items()}
        return found

    def expected(self) -> list[Kernel]:
        """Return a kernel for all that is expected to be stored, in order; what is made of the same
        values, and of none that come later, is made together."""
        program, split = self.program, self.split
        stored = self._ends.stored
        found: list[_Stored] = []
        kernels_of = defaultdict[Any, set[int]](set)
        made_by: dict[Any, int] = {}
        sources: dict[Any, Mapping[Any, int]] = {}
        for at, (equation, reads) in zip(program.useful_at, program.useful_reads, strict=True):
            name, outs = equation.primitive.name, equation.outvars
            if at in self.products:
                made_by.update(dict.fromkeys(outs, len(found)))
                continue
            read: dict[Any, int] = {}
            for value in reads:
                read |= sources[value] if value in sources else {value: split.expected_bytes(value)}
            if name in _PARTS:
                most = sum(map(split.expected_bytes, outs))
                read = {source: min(nbytes, most) for source, nbytes in read.items()}
            if name in _FREE and stored.isdisjoint(outs):
                sources.update(dict.fromkeys(outs, read))
                continue
            # A number, such as a count of steps, is computed again.
            after = max((made_by.get(v, 0) for v in read if v.aval.size > 1), default=0)
            near = {i for v in _most_of(read) for i in kernels_of[v] if i >= after}
            together = next((i for i in sorted(near) if found[i].reads_like(read)), None)
            if together is None:
                together = len(found)
                found.append(_Stored())
            one = found[together]
            one.read |= {v: nbytes for v, nbytes in read.items() if v not in one.made}
            one.made |= {v: split.expected_bytes(v) for v in outs}
            for value in (*read, *outs):
                kernels_of[value].add(together)
            # What is summed is known when the kernel ends.
            made_by.update(dict.fromkeys(outs, together + (name not in _FREE)))
        return [Kernel(sum((one.made | one.read).values())) for one in found]


def _most_of(read: Mapping[object, int]) -> list[Any]:
    """Return the largest of values: whoever has half of all bytes has one of them."""
    found, rest, half = [], sum(read.values()), sum(read.values()) / 2
    for value in sorted(read, key=lambda each: -read[each]):
        if rest < half:
            break
        found.append(value)
        rest -= read[value]
    return found


@dataclass
class _Stored:
    """The values that one kernel is expected to read and make, with their bytes per device."""

    read: dict[Any, int] = field(default_factory=dict)
    made: dict[Any, int] = field(default_factory=dict)

    def reads_like(self, read: Mapping[object, int]) -> bool:
        """Return whether most of what is read is what this kernel reads or makes."""
        common = sum(nbytes for v, nbytes in read.items() if v in self.read or v in self.made)
        return common > 0 and 2 * common >= max(sum(read.values()), sum(self.read.values()))
