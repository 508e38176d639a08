"""The search for what becomes of the feature maps of one way: begun from several choices, revised
until nothing that is tried is better."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product

from recommender.mutwo.problem import PROMPTS, RECOMPUTE, RETAIN, Choice, Chosen, Space, Weighed

#: Units up to which every pair of choices is revised; of more, neighbours change places.
ALL_PAIRS = 10
NEAR = 4
#: Numbers of units that are swapped in a family, at most.
SWAPPED = 12
#: Choices that are weighed at most, for a way.
BUDGET = 4000


def descend(
    space: Space, enough_seconds: float = 0.0, *, budget: int = BUDGET
) -> tuple[Chosen, Weighed]:
    """Search for the best choices of a way within the limit of the problem.

    What is swapped needs least, so that where this does not fit, nothing does. From there, and from
    the best of each family, every choice is revised, and then two together, as long as the step
    gets faster; of few units once more from what is found where the limit is just below what that
    needs.

    Args:
        space: The choices.
        enough_seconds: What is as fast needs nothing better.
        budget: Choices that are weighed at most, from each begin.
    """
    everything = space.swapped
    if not space.least_fits(everything) and space.problem.host_bytes is None:
        return everything, space.weigh(everything)
    if space.weigh(space.retained).fits:
        return space.retained, space.weigh(space.retained)
    if (fewer := space.fewer()) is not None:
        # As of two of many equal sub-arrays, and from there as of all.
        chosen, _ = descend(fewer, budget=budget)
        begun = {one: space.weigh(one) for one in (everything, chosen)}
        budget = len(space.units)
    else:
        begun = {chosen: space.weigh(chosen) for chosen in (everything, *families(space))}
    ordered = sorted(begun.items(), key=lambda one: one[1])
    best = ordered[0]
    for start in _distinct(ordered) if fewer is None else ordered[:1]:
        if best[1].seconds <= enough_seconds:
            break
        best = min(best, _revised(space, start, enough_seconds, budget), key=lambda one: one[1])
    few = len(space.units) <= ALL_PAIRS
    if few and best[1].fits and best[1].seconds > enough_seconds:
        best = min(
            best, _by_way_of_less(space, best, enough_seconds, budget), key=lambda one: one[1]
        )
    return best


def _by_way_of_less(
    space: Space, found: tuple[Chosen, Weighed], enough_seconds: float, budget: int
) -> tuple[Chosen, Weighed]:
    """Revise choices first under a limit just below what they need, and then from there under the
    true limit: one more way out of a local optimum."""
    less = replace(space.problem, limit_bytes=found[1].peak_bytes - 1).space(space.way)
    chosen, weighed = _revised(less, (found[0], less.weigh(found[0])), 0.0, budget)
    if not weighed.fits:
        return found
    return _revised(space, (chosen, space.weigh(chosen)), enough_seconds, budget)


def _distinct(begun: list[tuple[Chosen, Weighed]]) -> list[tuple[Chosen, Weighed]]:
    """Return the best begin of each of the first three sets of kinds of choices (retain, swap,
    recompute per unit), in the order given."""
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


def families(space: Space) -> Iterator[Chosen]:
    """Yield choices to begin from: none or more of the first layers swapped, as their feature maps
    rest longest, and as many of the next, or of the last, recomputed as the limit asks."""
    units = sorted(
        range(len(space.units)), key=lambda n: (space.units[n].layer, space.units[n].kind)
    )
    own = [n for n in units if space.units[n].own]
    for ahead in PROMPTS:
        for swapped in range(0, len(units) + 1, -(-len(units) // SWAPPED)):
            swap = {n: space.swap(n, ahead) for n in units[:swapped]}
            for rest in (own, own[::-1]):
                again = [n for n in rest if n not in swap]
                count = _fewest(space, swap, again)
                if count is not None:
                    yield _chosen(space, {**swap, **dict.fromkeys(again[:count], RECOMPUTE)})


def _chosen(space: Space, choices: dict[int, Choice]) -> Chosen:
    return tuple(choices.get(n, RETAIN) for n in range(len(space.units)))


def _fewest(space: Space, swap: dict[int, Choice], again: list[int]) -> int | None:
    """Return how many units have to be recomputed until the limit is kept, by bisection; None if
    all are not enough."""

    def fits(count: int) -> bool:
        return space.least_fits(_chosen(space, {**swap, **dict.fromkeys(again[:count], RECOMPUTE)}))

    count = bisect_left(range(len(again) + 1), True, key=fits)
    return count if count <= len(again) else None


def _revised(
    space: Space, start: tuple[Chosen, Weighed], enough_seconds: float, budget: int
) -> tuple[Chosen, Weighed]:
    best, left = start, budget
    changes = list(_changes(space))
    # Since when nothing was better; what is better is gone on from.
    since, at = 0, 0
    while since < len(changes) and left > 0 and best[1].seconds > enough_seconds:
        change, at, since = changes[at], (at + 1) % len(changes), since + 1
        for chosen in change(best[0]):
            left -= 1
            weighed = space.weigh(chosen)
            if weighed < best[1]:
                best, since = (chosen, weighed), 0
    return best


def _changes(space: Space) -> Iterator[Callable[[Chosen], Iterator[Chosen]]]:
    """Yield changes to try on choices: another choice of every unit, then of every two units; of
    many units, only exchanges between near ones."""
    count = len(space.units)
    for n in range(count):
        yield partial(_one, space, n)
    for n, m in combinations(range(count), 2):
        if count <= ALL_PAIRS:
            yield partial(_two, space, n, m)
        elif m - n <= NEAR:
            yield partial(_exchanged, space, n, m)


def _one(space: Space, n: int, chosen: Chosen) -> Iterator[Chosen]:
    for choice in space.options[n]:
        if choice != chosen[n]:
            yield (*chosen[:n], choice, *chosen[n + 1 :])


def _two(space: Space, n: int, m: int, chosen: Chosen) -> Iterator[Chosen]:
    for first, second in product(space.options[n], space.options[m]):
        if first != chosen[n] and second != chosen[m]:
            yield (*chosen[:n], first, *chosen[n + 1 : m], second, *chosen[m + 1 :])


def _exchanged(space: Space, n: int, m: int, chosen: Chosen) -> Iterator[Chosen]:
    first, second = chosen[m], chosen[n]
    if first != second and first in space.options[n] and second in space.options[m]:
        yield (*chosen[:n], first, *chosen[n + 1 : m], second, *chosen[m + 1 :])
