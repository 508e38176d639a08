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
from dataclasses import dataclass, replace
from typing import Any

from capture.step.sub_array import SubArray, movable
from recommender.mutwo.descent import families
from recommender.mutwo.problem import (
    RECOMPUTE,
    RETAIN,
    ArrayProblem,
    Chosen,
    Space,
    Weighed,
)
from recommender.mutwo.ways import Way, placed


@dataclass(frozen=True)
class Baseline:
    """A simple way of training the models.

    Attributes:
        name: For people.
        sizes: Models of its programs, one after the other.
        in_rounds: Whether each trains to its end before the next begins.
        step_seconds: Of an update of every model; infinite if it does not fit.
        peak_bytes: Of the device.
        fits: Whether it keeps the limits.
        why: It does not, for people.
        space, chosen: Of a step of all models, what is decided.
    """

    name: str
    sizes: tuple[int, ...]
    in_rounds: bool
    step_seconds: float
    peak_bytes: int
    fits: bool
    why: str
    space: Space
    chosen: Chosen

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sizes": list(self.sizes),
            "in_rounds": self.in_rounds,
            "step_seconds": self.step_seconds if self.fits else None,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "why": self.why,
        }


def all_baselines(problem: ArrayProblem) -> list[Baseline]:
    """Each with the best that it can do within the limits."""
    count = problem.num_models
    fused, alone = (count,), (1,) * count
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
    sizes: Sequence[int],
    family: Callable[[Space], Iterator[Chosen]],
) -> Baseline:
    space = problem.space(Way(placed(sizes), "in turn"))
    found, chosen = min((space.weigh(chosen), chosen) for chosen in family(space))
    return Baseline(
        name, tuple(sizes), False, found.seconds, found.peak_bytes, found.fits, _why(found),
        space, chosen,
    )  # fmt: skip


def _why(found: Weighed) -> str:
    return "" if found.fits else "it needs more than the limit"


def _rounds(problem: ArrayProblem, name: str, sizes: Sequence[int]) -> Baseline:
    """Sizes that train one after the other, everything retained."""
    spaces = {
        size: replace(problem, num_models=size).space(Way(placed((size,)), "in turn"))
        for size in sorted(set(sizes))
    }
    found = {size: space.weigh(space.retained) for size, space in spaces.items()}
    fullest = max(found.values(), key=lambda one: one.peak_bytes)
    seconds = sum(found[size].seconds for size in sizes)
    largest = spaces[max(sizes)]
    return Baseline(
        name, tuple(sizes), True, seconds, fullest.peak_bytes, fullest.fits, _why(fullest),
        largest, largest.retained,
    )  # fmt: skip


def _largest_subsets(problem: ArrayProblem) -> Baseline:
    """HFTA-NoMemOpt: the largest subsets that fit, and the rest."""
    count = problem.num_models

    def tried(size: int) -> Baseline:
        return _rounds(problem, "HFTA-NoMemOpt", _subsets(count, size))

    fitting, low, high = tried(1), 1, count + 1
    while fitting.fits and high - low > 1:
        middle = (low + high) // 2
        # What is there between the passes needs no program to be known.
        array = problem.profiled.sub_array(middle)
        one = tried(middle) if resident_bytes(array) <= problem.limit_bytes else None
        if one is not None and one.fits:
            fitting, low = one, middle
        else:
            high = middle
    return fitting


def resident_bytes(array: SubArray) -> int:
    """Between the passes, where everything is retained: state and feature maps."""
    maps = sum(array.bundles[number].nbytes for number in movable(array))
    return maps + sum(bundle.nbytes for bundle in array.bundles if bundle.is_state)


def _subsets(count: int, size: int) -> list[int]:
    whole, rest = divmod(count, size)
    return [size] * whole + ([rest] if rest else [])


def _retained(space: Space) -> Iterator[Chosen]:
    yield space.retained


def _swaps(space: Space) -> Iterator[Chosen]:
    """The first layers swapped, which rest longest, and the others retained."""
    yield space.swapped
    yield from (one for one in families(space) if RECOMPUTE not in one)


def _capuchin(space: Space) -> Iterator[Chosen]:
    """Swaps of what rests longest, and where they are not enough, recomputation."""
    yield space.swapped
    yield from families(space)


def _rematerialised(space: Space) -> Iterator[Chosen]:
    """All that one layer alone uses is made again."""
    yield tuple(RECOMPUTE if unit.own else RETAIN for unit in space.units)
