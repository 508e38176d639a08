"""The ways of training models: which may be one program, and in which order passes are issued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise, product
from math import prod
from typing import Literal

from capture.plan.array import Order

#: Which partitions are weighed: pairs of equal sub-arrays, or all (READINGS.md, M-y); or those into
#: equal sub-arrays, whose programs are of the fewest sizes.
Rule = Literal["pairs", "all", "equal"]


@dataclass(frozen=True)
class Way:
    """A way of training models: which of them are one program, and in which order.

    Attributes:
        partition: Sub-arrays.
        order: Of their passes.
        parts: Where models are several programs, sub-arrays of each: for its name alone.
    """

    partition: tuple[tuple[int, ...], ...]
    order: Order
    parts: tuple[int, ...] = field(default=(), compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of models of each sub-array."""
        return tuple(map(len, self.partition))

    @property
    def name(self) -> str:
        """The name for people: ``multiplexed 4+4``; of programs ``multiplexed 2+2 and 3``."""
        if len(self.partition) == 1:
            return "all fused"
        if max(self.sizes) == 1 and self.order == "in turn":
            return "none fused"
        sizes = iter(self.sizes)
        parts = (islice(sizes, count) for count in self.parts or (len(self.sizes),))
        return f"{self.order} {' and '.join('+'.join(map(str, part)) for part in parts)}"


def equal_pairs(num_models: int) -> list[tuple[int, ...]]:
    """Return partitions into pairs of equal sub-arrays; one of an odd number has one model more.

    Source: Purandare et al. 2023 (mu-TWO), 3.2 (1), lists four of five: of eight models 4+4,
    3+3+1+1, 2+2+2+2 and 1+1+1+1+1+1+1+1.
    """
    found: dict[tuple[int, ...], None] = {}
    for halves in partitions(num_models // 2):
        twice = [size for size in halves for _ in range(2)]
        for at in range(len(twice)) if num_models % 2 else (None,):
            sizes = [size + (n == at) for n, size in enumerate(twice)]
            found[tuple(sorted(sizes, reverse=True))] = None
    return list(found)


def equal_partitions(num_models: int) -> list[tuple[int, ...]]:
    """Return all partitions of models into equal sub-arrays, the largest first."""
    whole = [parts for parts in range(1, num_models + 1) if num_models % parts == 0]
    return [(num_models // parts,) * parts for parts in whole]


def partitions(count: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the partitions of a count into positive numbers, the largest first.

    Example:
        >>> list(partitions(3))
        [(3,), (2, 1), (1, 1, 1)]
    """
    if not count:
        yield ()
    for first in range(min(count, largest or count), 0, -1):
        for rest in partitions(count - first, first):
            yield first, *rest


#: Sizes of sub-arrays that are multiplexed, by the rule.
RULES: dict[Rule, Callable[[int], Iterable[tuple[int, ...]]]] = {
    "pairs": equal_pairs,
    "all": partitions,
    "equal": equal_partitions,
}


#: Partitions of several programs that are weighed at most.
MOST_MIXED = 16


def ways(num_models: int, rule: Rule = "pairs") -> list[Way]:
    """Return the partitions of a rule, multiplexed and in turn; equal sub-arrays (by one model),
    all fused and none fused in turn.

    A partition is multiplexed as one cycle, the backward pass of each sub-array beside the forward
    pass of the next, the larger ones first; so any number of sub-arrays can be.
    """
    multiplexed = [one for one in RULES[rule](num_models) if len(one) > 1]
    found = [Way(placed(one), "multiplexed") for one in multiplexed]
    return [*found, *(Way(placed(one), "in turn") for one in _sizes(num_models, rule))]


def ways_of_each(models: Sequence[Sequence[int]], rule: Rule = "pairs") -> list[Way]:
    """Return the ways of models of several programs: the partitions that a rule makes of each
    program's models, combined, multiplexed and in turn.

    Sub-arrays of a program stay together in the cycle: their passes are as long as one another. Of
    many programs the coarsest partitions of all are combined, then the next finer ones, and so on.

    Args:
        models: Of each program; of one, these are all its ways.
        rule: Of the partitions of models that are one program.
    """
    if len(models) == 1:
        return ways(len(models[0]), rule)
    each = [sorted(_sizes(len(own), rule), key=len) for own in models]
    if prod(map(len, each)) <= MOST_MIXED:
        chosen = list(product(*each))
    else:
        count = min(MOST_MIXED, max(map(len, each)))
        chosen = [
            tuple(own[n * (len(own) - 1) // (count - 1)] for own in each) for n in range(count)
        ]
    found, orders = list[Way](), ("multiplexed", "in turn")
    for order, sizes_of_each in product(orders, dict.fromkeys(chosen)):
        partition = tuple(
            tuple(own[n] for n in group)
            for own, sizes in zip(models, sizes_of_each, strict=True)
            for group in placed(sizes)
        )
        found.append(Way(partition, order, tuple(map(len, sizes_of_each))))
    return found


def _sizes(num_models: int, rule: Rule) -> list[tuple[int, ...]]:
    """Return the sizes of sub-arrays in turn: of (nearly) equal ones, and by a rule."""
    parts = (1, num_models) if rule == "equal" else (1, 2, 3, 4, num_models)
    equal = [_equal(num_models, count) for count in parts]
    return list(dict.fromkeys([*(one for one in equal if min(one)), *RULES[rule](num_models)]))


def _equal(num_models: int, parts: int) -> tuple[int, ...]:
    least, more = divmod(num_models, parts)
    return (least + 1,) * more + (least,) * (parts - more)


def placed(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the partition whose sub-arrays have so many models each, in their order."""
    ends = accumulate(sizes, initial=0)
    return tuple(tuple(range(first, stop)) for first, stop in pairwise(ends))
