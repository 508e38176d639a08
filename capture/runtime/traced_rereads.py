"""What a traced program reads more than once, per device: bytes that no fusion avoids because what
needs them can only begin when a kernel that has read them is over.

XLA for GPUs computes a sum over rows, and what follows from the sum, in one kernel only where it
finds the form of a softmax: the sum is needed there alone, and meets what it is a sum of, both
through operations of one large operand. A kernel that begins so may take in other sums; it makes
one value. So

    a sum that is also a result of the program ends its kernel, and so does
    any long sum over rows in a program without such a form
    of a long sum over rows that several stored values follow from, what it sums is read twice
    a product ends what it reads

What is read before such an end and behind it, to compute what depends on it, is read twice: as it
is, or as what is computed of it on the way, of which no more bytes count than that has.

Seen in compiled programs, and in the pass of XLA that makes the form one kernel
(``xla/backends/gpu/transforms/softmax_rewriter_triton.cc``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from capture.runtime.traced_program import TracedProgram
from capture.tracing.jaxprs import is_variable, variables
from capture.tracing.recompute import ELEMENTWISE, MOVES, REDUCTIONS

#: Elements that are summed up to one, from which on a sum has a kernel of its own.
_LONG = 128


class Dependence(NamedTuple):
    """The dependence of a value on one that stands in memory.

    Attributes:
        turn: Kernels, one after the other, that read that before one that makes the value can.
        is_shared: Whether another one reads it, before or beside that.
        nbytes: Of it, that this kernel reads to make the value.
        stored: The same, if it may read what earlier kernels have stored on the way.
    """

    turn: int
    is_shared: bool
    nbytes: int
    stored: int


Ways = Mapping[Any, Dependence]
NONE: Ways = {}


def joined(ways: Sequence[Ways]) -> Ways:
    """Return how a value depends on all that its operands do."""
    if len(ways) < 2:
        return ways[0] if ways else NONE
    found = dict(ways[0])
    for each in ways[1:]:
        for source, one in each.items():
            if (other := found.get(source)) is None or other == one:
                found[source] = one
                continue
            last = max(one.turn, other.turn), max(one.is_shared, other.is_shared)
            nbytes = max(w.nbytes if w[:2] == last else w.stored for w in (one, other))
            found[source] = Dependence(*last, nbytes, max(one.stored, other.stored))
    return found


def stored(ways: Ways, nbytes: int) -> Ways:
    """Return how a value of so many bytes depends on others, if it may be stored in their place."""
    if sum([one.stored for one in ways.values()]) <= nbytes:
        return ways
    found, left = {}, nbytes
    for source, one in ways.items():
        least = min(one.stored, left)
        found[source] = Dependence(one.turn, one.is_shared, one.nbytes, least)
        left -= least
    return found


def in_parts(ways: Ways, nbytes: int) -> Ways:
    """Return how a part of a value, of so many bytes, depends on others."""
    return {s: one._replace(nbytes=min(one.nbytes, nbytes)) for s, one in ways.items()}


def summed(ways: Ways, ends: bool = False, shares: bool = False) -> Ways:
    """Return how what is made of a value depends on others, if it reads no more of them: of a sum,
    which ends a kernel, or is needed for several values."""
    found = {}
    for source, (turn, is_shared, nbytes, _) in ways.items():
        turn += ends and nbytes > 0
        is_shared |= shares and nbytes > 0
        if turn or is_shared:
            found[source] = Dependence(turn, is_shared, 0, 0)
    return found


class ReadAgain:
    """Bytes that are read again, as they are found.

    Attributes:
        turns: Per value in memory, those of each turn but the first.
    """

    def __init__(self) -> None:
        self.turns: dict[Any, dict[int, int]] = {}

    def read(self, ways: Ways) -> None:
        """Note that something is made in one kernel, or several."""
        for source, one in ways.items():
            turn = max(one.turn, one.is_shared)
            if turn:
                turns = self.turns.setdefault(source, {})
                nbytes = one.nbytes if one.turn else one.stored
                turns[turn] = max(turns.get(turn, 0), nbytes)

    def nbytes(self) -> Mapping[Any, int]:
        """Return the bytes of all turns."""
        return {source: sum(turns.values()) for source, turns in self.turns.items()}


def kernel_ends(program: TracedProgram) -> Collection[int]:
    """Return the positions of the sums that end a kernel, see the module."""
    equations = program.equations
    sums = [at for at in program.useful if equations[at].primitive.name in REDUCTIONS]
    given = {at for at in sums if _is_result(program, equations[at].outvars[0])}
    others = [at for at in sums if at not in given]
    if any(_is_met_again(program, at) for at in others):
        return given
    return given.union(at for at in others if _is_long(equations[at]))


def shared_sums(program: TracedProgram, written: Collection[object]) -> Collection[int]:
    """Return the positions of the long sums over rows that several of some values follow from,
    through no product."""
    found, reached = set[int](), dict[Any, set[Any]]()
    for at in sorted(program.useful, reverse=True):
        equation = program.equations[at]
        name = equation.primitive.name
        after = {v for v in equation.outvars if v in written}
        for value in equation.outvars:
            after |= reached.pop(value, set())
        if len(after) > 1 and name in REDUCTIONS and _is_long(equation):
            found.add(at)
        if not after or name not in ELEMENTWISE | REDUCTIONS | MOVES:
            continue
        for value in program.reads[at]:
            if len(known := reached.setdefault(value, set())) < 2:
                known |= after
    return found


def _is_long(equation: Any) -> bool:
    """Return whether an operation sums up rows, and many elements to one."""
    operand, result = equation.invars[0].aval, equation.outvars[0].aval
    is_over_rows = operand.ndim - 1 in equation.params.get("axes", ())
    return is_over_rows and operand.size >= _LONG * result.size


def _is_result(program: TracedProgram, value: Any) -> bool:
    """Return whether the caller is given a value, or what is computed of it element by element."""
    waiting, seen = [value], {value}
    while waiting:
        if (one := waiting.pop()) in program.results:
            return True
        for reader in program.readers.get(one, ()):
            out = reader.outvars[0]
            if reader.primitive.name in ELEMENTWISE and out.aval.size == value.aval.size:
                waiting += [out] if out not in seen else []
                seen.add(out)
    return False


def _is_met_again(program: TracedProgram, at: int) -> bool:
    """Return whether what follows from a sum meets what it is a sum of, both through operations of
    one large operand: the form of a softmax."""
    equation = program.equations[at]
    if not is_variable(equation.invars[0]):
        return False
    size = equation.invars[0].aval.size
    behind, waiting = _behind(program, equation.invars[0], size), [*equation.outvars]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        for reader in program.readers.get(value, ()):
            if reader.primitive.name not in ELEMENTWISE | REDUCTIONS or id(reader) in seen:
                continue
            seen.add(id(reader))
            large = [
                v
                for v in variables(reader.invars)
                if v is not value and 2 * program.products.distinct(v) > size
            ]
            if not large:
                waiting.extend(reader.outvars)
            elif any(behind & _behind(program, v, size) for v in large):
                return True
    return False


def _behind(program: TracedProgram, value: object, size: int) -> set[Any]:
    """Return a value, and those that it follows from through operations of one large operand."""
    found = {value}
    while (maker := program.flow.maker(value)) is not None:
        if maker.primitive.name not in ELEMENTWISE:
            break
        large = [v for v in variables(maker.invars) if 2 * program.products.distinct(v) > size]
        if len({*large}) != 1:
            break
        [value] = {*large}
        found.add(value)
    return found
