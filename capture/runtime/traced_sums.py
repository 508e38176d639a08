"""What the devices of a traced program send each other: at least, and as expected.

    sums      results that are parts of a sum over an axis that splits what is summed, once all that
              is added to them first is; narrower where they are cast first. If the sum may stay
              split, it is a reduce-scatter; else an all-reduce, which takes as long as that and an
              all-gather
    gathers   what a constraint makes whole; parameters that are split over replicas, where a
              product reads them beside the examples of a replica; results of an update that are
              whole, of states that are split

Those that do not depend on each other may be put together, so that their latencies count once; of
small ones over replicas, which may be put together with those of other layers, not at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from capture.measured.work import Collective
from capture.runtime.residuals import SplitAxis, ValueSplit
from capture.runtime.traced_products import LargeProducts, part_of
from capture.runtime.traced_program import TracedProgram
from capture.runtime.views import item_bytes
from capture.tracing.jaxprs import primitives, variables
from capture.tracing.recompute import RENAMED

#: What parts of a sum may go through before they are summed over devices.
_LINEAR = RENAMED - primitives("broadcast_in_dim broadcast_to")
_LINEAR |= primitives("neg reduce_sum slice transpose")
_ADDED = frozenset({"add", "add_any", "sub"})
#: What may make parts of a sum.
_MAY_BEGIN = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "gather"})
_MAY_BEGIN |= {"scatter-add", "scatter_add"}
#: Of a collective that is certain; smaller ones may be avoided.
_FEWEST_BYTES = 2**16
#: Above which a parameter is gathered alone, where any is: XLA for v5e and v6e gathered weights and
#: biases of 192 numbers so, and put those of 64 together (GPT and LLaMA tiny, jax 0.10.2).
_LEAST_ALONE_BYTES = 2**8
#: Up to which collectives of several layers may be put together.
_TOGETHER_BYTES = 2**25


@dataclass
class Sent:
    """A collective of a program.

    Attributes:
        nbytes: Of the whole array.
        level: How many of the kind are there before it, on its way.
    """

    kind: str
    nbytes: int
    level: int


@dataclass
class _Parts:
    """Parts of one sum, and of what is added to them before it is made.

    Attributes:
        level: How many sums come before it.
        others: Bytes that might be sent in its place, where it stays split.
        nbytes: Of what is summed.
        may_be_split, is_split: Whether it may stay split, or is expected to.
        is_done: Whether something is computed of the sum.
    """

    level: int
    others: int
    nbytes: int = 0
    may_be_split: bool = False
    is_split: bool = False
    is_done: bool = False
    joined: _Parts | None = None

    def last(self) -> _Parts:
        return self if self.joined is None else self.joined.last()

    def leave(self, nbytes: int) -> None:
        """Note that something is computed of the sum, or of a part of it of so many bytes."""
        self.is_done, self.nbytes = True, max(self.nbytes, nbytes)


def _together(parts: Sequence[_Parts], level: int) -> _Parts:
    """Join sums that are added up into the first, and return it."""
    one, *others = parts
    one.level = max(level, *(each.level for each in parts))
    one.others = min(each.others for each in parts)
    for other in others:
        other.joined = one
        one.may_be_split |= other.may_be_split
        one.is_split |= other.is_split
    return one


class _Gathered(NamedTuple):
    """A value that an all-gather makes whole.

    Attributes:
        nbytes: At least, where it is.
        expected_bytes: As expected; 0 where something else is expected to be sent in its place.
        others: Of what might be sent in its place.
        level: How many come before it.
    """

    nbytes: int
    expected_bytes: int
    others: float = math.inf
    level: int = 0


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The collectives of a program over one axis of a mesh.

    Args:
        stride: Distance of its neighbours in the order of the devices.
        over_replicas: Whether it splits examples.
        gathers_alone: As of ``Bounder``.
    """

    _program: TracedProgram
    _split: ValueSplit
    _products: LargeProducts
    _axis: SplitAxis
    _stride: int
    _over_replicas: bool
    _gathers_alone: bool

    def least(self) -> list[Collective]:
        """Return the collectives that nothing avoids, in order."""
        sums = [
            Sent("reduce-scatter" if each.may_be_split else "all-reduce", each.nbytes, each.level)
            for each in self._sums
            if each.nbytes >= _FEWEST_BYTES
            if not each.may_be_split or each.nbytes <= each.others
        ]
        gathers = [
            Sent("all-gather", nbytes, level)
            for nbytes, _, others, level in self._gathers
            if _FEWEST_BYTES <= nbytes <= others
        ]
        return [each for each, _ in self._together([*sums, *gathers])]

    def expected(self) -> list[Collective]:
        """Return the collectives that are expected, in order."""
        sums = [
            Sent("reduce-scatter" if each.is_split else "all-reduce", each.nbytes, each.level)
            for each in self._sums
        ]
        gathers = [
            Sent("all-gather", each.expected_bytes, each.level)
            for each in self._gathers
            if each.expected_bytes
        ]
        return [
            replace(
                each,
                nbytes=each.nbytes // count,
                count=count,
                is_part=False,
                over_replicas=self._over_replicas,
            )
            for each, count in self._together([*sums, *gathers])
        ]

    def _together(self, sent: list[Sent]) -> Iterator[tuple[Collective, int]]:
        """Yield each collective of what is put together, and how many it is expected to be: of a
        layer one of each kind, but for gathers where each value is gathered alone."""
        found: dict[tuple[str, int], list[int]] = {}
        for each in sent:
            found.setdefault((each.kind, each.level), []).append(each.nbytes)
        for (kind, _), nbytes in sorted(found.items(), key=lambda item: item[0][1]):
            is_part = self._over_replicas and max(nbytes) <= _TOGETHER_BYTES
            alone = kind == "all-gather" and self._over_replicas and self._gathers_alone
            one = Collective(kind, sum(nbytes), self._axis.degree, self._stride, is_part=is_part)
            large = sum(each > _LEAST_ALONE_BYTES for each in nbytes) if alone else 1
            yield one, max(large, 1)

    @cached_property
    def _sums(self) -> list[_Parts]:
        """The sums over the devices, in the order in which they begin."""
        found: list[_Parts] = []
        of: dict[Any, _Parts] = {}
        least: dict[Any, int] = {}  # bytes of what is summed, where it is narrowest so far
        level: dict[Any, int] = {}
        for equation, operands in self._program.useful_reads:
            name = equation.primitive.name
            begins = name in _MAY_BEGIN and self._begins(equation)
            if not begins and of.keys().isdisjoint(operands) and level.keys().isdisjoint(operands):
                continue  # nothing is summed before
            reads = [v for v in operands if v in of]
            parts = [*{id(one): one for v in reads if not (one := of[v].last()).is_done}.values()]
            if name not in _ADDED and name not in _LINEAR:
                for v in reads:
                    of[v].last().leave(least[v])
                parts = []
            before = max([level[v] for v in operands if v in level], default=0)
            before = max([before, *(o.level + 1 for v in reads if (o := of[v].last()).is_done)])
            if before:
                level.update(dict.fromkeys(equation.outvars, before))
            if len(equation.outvars) != 1:
                continue
            [out] = equation.outvars
            if begins:
                of[out], least[out] = (
                    _Parts(before, self._others(equation)),
                    self._whole_bytes(out),
                )
                found.append(of[out])
            elif parts:
                of[out] = _together(parts, before)
                known = [least[v] for v in reads if of[v].last() is of[out]]
                least[out] = min(self._whole_bytes(out), *known)
            if out in of:
                one = of[out].last()
                one.may_be_split |= out in self._axis.reached or self._axis.asked.get(out, False)
                one.is_split |= self._axis.dims.get(out) is not None
                one.is_split |= self._axis.asked.get(out, False)
        for v in variables(self._program.flow.outputs):
            if v in of:
                of[v].last().leave(least[v])
        return [each for each in found if each.joined is None]

    def _others(self, equation: JaxprEqn) -> int:
        """Return the bytes that devices might send instead of a sum that stays split: operands of a
        product, of which each device makes a part of the whole result. Of one with a parameter,
        which stays where it is, the other operand; none is certain of what is no such product."""
        if equation.primitive.name not in ("dot_general", "conv_general_dilated"):
            return 0
        reads, views = variables(equation.invars), self._program.views
        if self._over_replicas:
            return min(map(self._whole_bytes, reads))
        params = [v for v in reads if views.of(v).base in self._program.given]
        return min((self._whole_bytes(v) for v in reads if v not in params), default=0)

    def _begins(self, equation: JaxprEqn) -> bool:
        """Return whether the results of an operation are parts of a sum over the devices."""
        name, dims = equation.primitive.name, self._axis.dims
        if dims.get(equation.outvars[0]) is not None:
            return False
        if name in ("dot_general", "conv_general_dilated"):
            return part_of(equation, self._axis) == "terms"
        reads = variables(equation.invars)
        if name == "reduce_sum":
            return any(dims.get(v) in equation.params["axes"] for v in reads)
        if name in ("scatter-add", "scatter_add"):
            return dims.get(equation.invars[2]) is not None if len(equation.invars) > 2 else False
        if name == "gather":
            looked_up, table = equation.params["dimension_numbers"].start_index_map, reads[0]
            others = (axis for axis in self._split.axes if axis.name != self._axis.name)
            return dims.get(table) in looked_up and all(a.dims.get(table) is None for a in others)
        return False

    def _whole_bytes(self, value: Any) -> int:
        """Return the bytes of a value that this axis does not split, in its narrowest type."""
        others = math.prod(
            axis.degree
            for axis in self._split.axes
            if axis.name != self._axis.name and value in axis.reached
        )
        itemsize = self._program.views.written_itemsize.get(value, item_bytes(value))
        itemsize = min(itemsize, self._program.views.of(value).itemsize)
        return math.prod(value.aval.shape) * itemsize // others

    @cached_property
    def _gathers(self) -> list[_Gathered]:
        found = [*self._made_whole()]
        if self._over_replicas:
            found += [*self._params(), *self._updated()]
        return found

    def _made_whole(self) -> Iterator[_Gathered]:
        """Yield the values that sharding constraints make whole and products read."""
        if not self._program.once(_has_constraints):
            return
        dims, level, known = self._axis.dims, dict[Any, int](), set[Any]()
        for equation, reads in self._program.useful_reads:
            before = max([level[v] for v in reads if v in level], default=0)
            if equation.primitive.name == "sharding_constraint":
                [value], [out] = reads, equation.outvars
                is_whole = dims.get(value) is not None and dims.get(out) is None
                if is_whole and self._is_operand(out):
                    base = self._program.views.of(value).base
                    if base not in known:
                        nbytes = self._whole_bytes(value)
                        yield _Gathered(nbytes, nbytes, level=before)
                    known.add(base)
                    before += 1
            if before:
                level.update(dict.fromkeys(equation.outvars, before))

    def _is_operand(self, value: object) -> bool:
        """Return whether a product reads a value as it is: else it may only be split otherwise."""
        base_of = self._program.views.of
        return any(
            out in self._results
            or (base_of(out).base is base_of(value).base and self._is_operand(out))
            for reader in self._program.readers.get(value, ())
            for out in reader.outvars[:1]
        )

    @cached_property
    def _results(self) -> Collection[Any]:
        return {product.result for product in self._products.large.values()}

    def _params(self) -> Iterator[_Gathered]:
        """Yield the arguments that a product needs whole, as its results are split like another
        operand; which of its two that is, is known of what is expected alone."""
        known: set[Any] = set()
        for product in self._products.large.values():
            sides = product.equation.invars
            if len(variables(sides)) < 2:
                continue
            for side, value in enumerate(sides):
                base, other = self._program.views.of(value).base, sides[1 - side]
                if base not in self._program.given or base in known:
                    continue
                dim, part = self._axis.dims.get(value), _part_of_side(product.equation, side)
                if dim is None or self._axis.dims.get(other) is None or dim in part:
                    continue
                if (shared := part_of(product.equation, self._axis)) == "terms":
                    continue
                known.add(base)
                activations = min(self._whole_bytes(other), self._whole_bytes(product.result))
                is_whole, nbytes = shared != ("rows", "columns")[side], self._whole_bytes(value)
                yield _Gathered(nbytes, nbytes * is_whole, activations)

    def _updated(self) -> Iterator[_Gathered]:
        """Yield the results that are whole, made of arguments that are split; these may be less, as
        sums over rows and columns are, and are not expected to be sent instead."""
        dims, flow, asked = self._axis.dims, self._program.flow, self._axis.asked
        whole = [v for v, is_split in asked.items() if not is_split and dims.get(v) is not None]
        if not (whole := [v for v in whole if v not in self._program.given]):
            return
        split = [i for i, v in enumerate(flow.inputs) if dims.get(v) is not None]
        sources = flow.propagate({flow.inputs[i]: frozenset([i]) for i in split})
        for value in whole:
            states = sum(self._whole_bytes(flow.inputs[i]) for i in sources[value])
            nbytes = self._whole_bytes(value)
            yield _Gathered(min(states, nbytes), nbytes)


def _has_constraints(program: TracedProgram) -> bool:
    return any(e.primitive.name == "sharding_constraint" for e in program.equations)


def _part_of_side(equation: JaxprEqn, side: int) -> Sequence[int]:
    """Return the dimensions of an operand that both operands and the result have."""
    if equation.primitive.name != "dot_general":
        return ()
    return equation.params["dimension_numbers"][1][side]
