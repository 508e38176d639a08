"""Donated arguments: which results they may hold, and what they may lend before.

JAX gives a result the memory of a donated argument of its shape and type, then of its number of
elements, and leaves it to XLA to find one of as many bytes. From when the argument was last read
until the result is written, XLA may keep anything else there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from capture.runtime.layout import shard_bytes
from capture.runtime.traced_program import TracedProgram


@dataclass(frozen=True)
class Lent:
    """The memory of donated arguments that results may be written to.

    Attributes:
        arguments: The arguments that may be read for the last time before, by bytes per device.
        num_held: How many results of as many bytes may be written to such memory.
    """

    arguments: Mapping[int, Collection[Any]]
    num_held: Mapping[int, int]

    def nbytes(self, still_read: Collection[object]) -> int:
        """Return the bytes that may be lent, at most, while some arguments are still to be read."""
        return sum(
            nbytes * min(self.num_held[nbytes], sum(v not in still_read for v in arguments))
            for nbytes, arguments in self.arguments.items()
        )


def held_results(
    donated: Sequence[object], results: Sequence[jax.ShapeDtypeStruct], nbytes: Sequence[int]
) -> Mapping[int, int]:
    """Return the results that donated arguments may hold, by position, and the bytes of those.

    Args:
        nbytes: Bytes per device of each result, at least.
    """
    left, found = list(range(len(donated))), dict[int, int]()
    sizes = [*map(shard_bytes, donated)]
    kinds: tuple[Callable[[Any, int], Any], ...] = (
        lambda struct, _: (struct.shape, struct.dtype),
        lambda struct, _: math.prod(struct.shape),
        lambda _, nbytes: nbytes,
    )
    for kind in kinds:
        there = defaultdict[Any, list[int]](list)
        for i in left:
            there[kind(donated[i], sizes[i])].append(i)
        for i, result in enumerate(results):
            if i not in found and (same := there[kind(result, nbytes[i])]):
                left.remove(argument := same.pop())
                found[i] = sizes[argument]
    return found


def lendable(
    program: TracedProgram,
    donated: Sequence[tuple[object, object]],
    held: Sequence[tuple[object, int]],
) -> Lent:
    """Return what may be lent.

    An argument that is read once, by what makes a result of as many bytes, lends nothing: the one
    or the other is there. (Sums of gradients are such.)

    Args:
        donated: Arguments, as variables and structures.
        held: Results, as variables, that donated arguments of so many bytes may hold.
    """
    num_held = Counter(nbytes for _, nbytes in held)
    size_of = dict(held)
    arguments = defaultdict[int, list[Any]](list)
    updated = set[Any]()
    for v, struct in donated:
        nbytes = shard_bytes(struct)
        made = program.given_readers[v]
        is_updated = len(made) == 1 and size_of.get(made[0]) == nbytes and made[0] not in updated
        if is_updated:
            updated.add(made[0])
        elif num_held[nbytes]:
            arguments[nbytes].append(v)
    return Lent(arguments, num_held)
