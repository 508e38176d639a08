"""What others would do with the same models on the same device, weighed by the same code.

Two kinds: steps of all models, whose state is there throughout (`full rematerialisation`, `offload
without multiplexing`, `HFTA-Capuchin`, `one vmap`), and rounds (`sequential jit`, `HFTA-NoMemOpt`):
subsets that train to their end one after the other, of which only one is on the device. A round
holds less, so it may fit where nothing else does; its seconds are those of an update of every model
all the same.

Source: Purandare et al. 2023 (mu-TWO), 5 and B.2 (HFTA-NoMemOpt, HFTA-Capuchin).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from capture.step.sub_array import SubArray, movable
from recommender.bisection import last_that_holds
from recommender.mutwo.descent import families
from recommender.mutwo.problem import (
    RECOMPUTE,
    RETAIN,
    ArrayProblem,
    Chosen,
    Space,
    Weighed,
)
from recommender.mutwo.search import ArrayBaseline
from recommender.mutwo.ways import Way

#: Models of each sub-array.
Partition = tuple[tuple[int, ...], ...]


def all_baselines(problem: ArrayProblem) -> list[ArrayBaseline]:
    """Return each baseline with the best that it can do within the limits; where models are several
    programs, what fuses all fuses those of each, in turn."""
    fused = tuple(map(tuple, problem.models))
    alone = tuple((model,) for own in problem.models for model in own)
    return [
        _rounds(problem, "sequential jit", alone),
        _step(problem, "one vmap", fused, _retained),
        _largest_subsets(problem),
        _step(problem, "HFTA-Capuchin swap", fused, _swaps),
        _step(problem, "HFTA-Capuchin", fused, _capuchin),
        _step(problem, "full rematerialisation", fused, _rematerialised),
        _step(problem, "full rematerialisation, one by one", alone, _rematerialised),
        _step(problem, "offload without multiplexing", alone, _swaps),
    ]


def _step(
    problem: ArrayProblem,
    name: str,
    partition: Partition,
    family: Callable[[Space], Iterator[Chosen]],
) -> ArrayBaseline:
    space = problem.space(Way(partition, "in turn"))
    found, chosen = min((space.weigh(chosen), chosen) for chosen in family(space))
    return ArrayBaseline(
        name, space.way.sizes, False, found.seconds, found.peak_bytes, found.fits, _why(found),
        space, chosen,
    )  # fmt: skip


def _why(found: Weighed) -> str:
    return "" if found.fits else "it needs more than the limit"


def _rounds(problem: ArrayProblem, name: str, partition: Partition) -> ArrayBaseline:
    """Weigh sub-arrays that train one after the other, everything retained."""
    alone = replace(problem)  # what is weighed for it is not of the search
    spaces = {problem.kind(group): alone.space(Way((group,), "in turn")) for group in partition}
    found = {kind: space.weigh(space.retained) for kind, space in spaces.items()}
    fullest = max(found.values(), key=lambda one: one.peak_bytes)
    seconds = sum(found[problem.kind(group)].seconds for group in partition)
    largest = spaces[problem.kind(max(partition, key=len))]
    return ArrayBaseline(
        name, tuple(map(len, partition)), True, seconds, fullest.peak_bytes, fullest.fits,
        _why(fullest), largest, largest.retained,
    )  # fmt: skip


def _largest_subsets(problem: ArrayProblem) -> ArrayBaseline:
    """Weigh HFTA-NoMemOpt: of each program, the largest subsets that fit, and the rest."""
    found = tuple(group for own in problem.models for group in _largest(problem, own))
    return _rounds(problem, "HFTA-NoMemOpt", found)


def _largest(problem: ArrayProblem, models: Sequence[int]) -> Partition:
    """Return models of one program in the largest subsets that fit; one by one where none fits."""

    def tried(size: int) -> Partition:
        starts = range(0, len(models), size)
        return tuple(tuple(models[start : start + size]) for start in starts)

    def fits(size: int) -> bool:
        # What is there between the passes needs no program to be known.
        array = problem.sub_array(problem.kind(models[:size]))
        if size > 1 and resident_bytes(array) > problem.limit_bytes:
            return False
        return _rounds(problem, "", tried(size)).fits

    return tried(max(1, last_that_holds(fits, 1, len(models))))


def resident_bytes(array: SubArray) -> int:
    """Return the bytes between the passes, where everything is retained: state and feature maps."""
    maps = sum(array.bundles[number].nbytes for number in movable(array))
    return maps + sum(bundle.nbytes for bundle in array.bundles if bundle.is_state)


def _retained(space: Space) -> Iterator[Chosen]:
    yield space.retained


def _swaps(space: Space) -> Iterator[Chosen]:
    """Yield choices that swap everything, or the first layers, which rest longest."""
    yield space.swapped
    yield from (one for one in families(space) if RECOMPUTE not in one)


def _capuchin(space: Space) -> Iterator[Chosen]:
    """Yield choices that swap what rests longest, and where that is not enough, recompute."""
    yield space.swapped
    yield from families(space)


def _rematerialised(space: Space) -> Iterator[Chosen]:
    """Yield the choice in which all that one layer alone uses is made again."""
    yield tuple(RECOMPUTE if unit.own else RETAIN for unit in space.units)
