"""What becomes of the feature maps of one way: begun from several choices, revised until nothing
that is tried is better."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from recommender.mutwo.problem import PROMPTS, RECOMPUTE, RETAIN, Choice, Chosen, Space, Weighed

#: Units up to which every pair of choices is revised; of more, those of neighbours.
ALL_PAIRS = 10
#: Choices that are weighed at most, for a way.
BUDGET = 4000


def descend(space: Space, budget: int = BUDGET) -> tuple[Chosen, Weighed]:
    """The best choices that are found within the limit of the problem.

    What is swapped needs least, so that where this does not fit, nothing does. From there, and from
    the best of each family, every choice is revised, and then every two together, as long as the
    step gets faster.
    """
    everything = space.swapped
    if not space.least_fits(everything) and space.problem.host_bytes is None:
        return everything, space.weigh(everything)
    if space.weigh(space.retained).fits:
        return space.retained, space.weigh(space.retained)
    begun = sorted(
        {chosen: space.weigh(chosen) for chosen in (everything, *_families(space))}.items(),
        key=lambda one: one[1],
    )
    best = begun[0]
    for start in _distinct(begun):
        found = _revised(space, start, budget)
        best = min(best, found, key=lambda one: one[1])
    return best


def _distinct(begun: list[tuple[Chosen, Weighed]]) -> list[tuple[Chosen, Weighed]]:
    """The best two, and the best with other kinds of choices."""
    found: list[tuple[Chosen, Weighed]] = []
    kinds: set[tuple[str, ...]] = set()
    for chosen, weighed in begun:
        kind = tuple(choice.kind for choice in chosen)
        if kind not in kinds:
            kinds.add(kind)
            found.append((chosen, weighed))
        if len(found) == 3:
            break
    return found


def _families(space: Space) -> Iterator[Chosen]:
    """The first layers swapped, as their feature maps rest longest, and as many of the next, or of
    the last, made again as the limit asks; and those made again alone."""
    units = sorted(
        range(len(space.units)), key=lambda n: (space.units[n].layer, space.units[n].size)
    )
    own = [n for n in units if space.units[n].own]
    for ahead in PROMPTS:
        for swapped in range(len(units) + 1):
            swap = {n: space.swap(n, ahead) for n in units[:swapped]}
            for rest in (own, own[::-1]):
                again = [n for n in rest if n not in swap]
                count = _fewest(space, swap, again)
                if count is not None:
                    yield _chosen(space, {**swap, **dict.fromkeys(again[:count], RECOMPUTE)})


def _chosen(space: Space, choices: dict[int, Choice]) -> Chosen:
    return tuple(choices.get(n, RETAIN) for n in range(len(space.units)))


def _fewest(space: Space, swap: dict[int, Choice], again: list[int]) -> int | None:
    """How many have to be made again until the limit is kept, by bisection; None if all are not
    enough."""

    def fits(count: int) -> bool:
        return space.least_fits(_chosen(space, {**swap, **dict.fromkeys(again[:count], RECOMPUTE)}))

    if fits(0):
        return 0
    if not fits(len(again)):
        return None
    low, high = 0, len(again)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _revised(space: Space, start: tuple[Chosen, Weighed], budget: int) -> tuple[Chosen, Weighed]:
    best, left = start, budget
    while True:
        for moves in (_ones(space, best[0]), _pairs(space, best[0])):
            found = best
            for chosen in moves:
                left -= 1
                weighed = space.weigh(chosen)
                if weighed < found[1]:
                    found = chosen, weighed
                    break
                if left < 0:
                    return best
            if found is not best:
                break
        else:
            return best
        best = found


def _ones(space: Space, chosen: Chosen) -> Iterator[Chosen]:
    for n, options in enumerate(space.options):
        for choice in options:
            if choice != chosen[n]:
                yield (*chosen[:n], choice, *chosen[n + 1 :])


def _pairs(space: Space, chosen: Chosen) -> Iterator[Chosen]:
    count = len(chosen)
    near = count if count <= ALL_PAIRS else 3
    for n, m in combinations(range(count), 2):
        if m - n > near:
            continue
        for first in space.options[n]:
            for second in space.options[m]:
                if first != chosen[n] and second != chosen[m]:
                    yield (*chosen[:n], first, *chosen[n + 1 : m], second, *chosen[m + 1 :])
