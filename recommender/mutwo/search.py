"""The one question of mu-TWO, ``search``, and its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

from capture.documents import fields_of
from capture.registered import REGISTERED
from recommender.algorithms import algorithm_named
from recommender.mutwo.bound import TOLERANCE, bound_seconds, floor_seconds
from recommender.mutwo.descent import descend
from recommender.mutwo.enumerate import enumerate_choices
from recommender.mutwo.problem import ArrayProblem, Chosen, Space, Weighed, WrittenWay
from recommender.mutwo.ways import Way

Algorithm = Literal["descent", "enumerate", "paper", "corrected"]
#: mu-TWO's own, as printed and as corrected: they know multiplexed sub-arrays alone.
OF_THE_PAPER: tuple[Algorithm, ...] = ("paper", "corrected")
#: From the choices of a way, and seconds that are enough, to the best of them.
ALGORITHMS: dict[Algorithm, Callable[[Space, float], tuple[Chosen, Weighed]]] = {
    "descent": descend,
    "enumerate": enumerate_choices,
    **{name: REGISTERED["search of model arrays"][name] for name in OF_THE_PAPER},
}
#: Ways whose choices are revised, where none fits with everything retained.
MOST_REVISED = 4


@dataclass(frozen=True)
class Candidate:
    """A way of training the models, and the best choices that were found for it.

    Attributes:
        space: Its choices.
        chosen: Those.
        weighed: Of them.
        bound_seconds: Of the way: none of its choices is faster.
        limit_bytes: For which they were found.
    """

    space: Space
    chosen: Chosen
    weighed: Weighed
    bound_seconds: float
    limit_bytes: int

    @property
    def way(self) -> Way:
        return self.space.way

    @property
    def fits(self) -> bool:
        """Whether the way keeps the limits of the device and the host."""
        return self.weighed.fits

    @cached_property
    def evaluation(self) -> WrittenWay:
        """The step of the candidate, written, replayed and simulated."""
        return self.space.evaluate(self.chosen, self.limit_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.way.name,
            "partition": [list(group) for group in self.way.partition],
            "order": self.way.order,
            "step_seconds": self.weighed.seconds if self.fits else None,
            "bound_seconds": self.bound_seconds,
            "peak_bytes": self.weighed.peak_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class ArrayBaseline:
    """A simple way of training the models, to compare with.

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
        names = ("name", "sizes", "in_rounds", "step_seconds", "peak_bytes", "fits", "why")
        return fields_of(self, *names) | ({} if self.fits else {"step_seconds": None})


@dataclass(frozen=True)
class ArrayResult:
    """The result of a search for a model array: the candidates, and how far the best one is proven.

    Attributes:
        candidates: Ways that were searched; others are slower by their programs alone.
        algorithm: Name of the search.
        num_evaluated: Ways with choices that were issued.
        bound_seconds: Over all ways: no step of them that keeps the limit is faster.
        seconds: Wall time.
        baselines: What others would do, where it was asked for.
    """

    candidates: tuple[Candidate, ...]
    algorithm: Algorithm
    num_evaluated: int
    bound_seconds: float
    seconds: float
    baselines: tuple[ArrayBaseline, ...] = ()

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits, else that of least peak; ties go to less memory."""
        return min(self.candidates, key=lambda one: _rank(one.weighed))

    @property
    def optimal(self) -> bool:
        """Whether it is proven that none of the ways is faster."""
        return self.best.fits and (
            self.best.weighed.seconds <= self.bound_seconds * (1 + 2 * TOLERANCE)
        )

    def to_json(self) -> dict[str, Any]:
        written = fields_of(self, "algorithm", "optimal", "seconds", "num_evaluated")
        return {**written, "lower_bound_seconds": self.bound_seconds}


def _rank(weighed: Weighed) -> tuple[float, ...]:
    if weighed.fits:
        return 0, weighed.seconds, weighed.peak_bytes
    return 1, weighed.peak_bytes, weighed.excess_bytes


def search(problem: ArrayProblem, algorithm: Algorithm = "descent") -> ArrayResult:
    """Search all ways for the fastest step that keeps the limits.

    A way that fits with everything retained takes what its programs take. The others are searched
    in the order of their bounds, and left alone once these are no less than what was found.

    Raises:
        PlanError: ``search-algorithm`` for an unknown one.
    """
    start, chosen_by = time.perf_counter(), algorithm_named(algorithm, ALGORITHMS)
    candidates: list[Candidate] = []
    # Of the best so far, but for what bounds may be wrong by.
    enough, bound = inf, inf
    floors = sorted(
        ((floor_seconds(space), n, space) for n, space in enumerate(_spaces(problem, algorithm))),
        key=lambda one: one[:2],
    )

    def add(space: Space, found: tuple[Chosen, Weighed], least: float) -> None:
        nonlocal enough
        candidates[:] = [one for one in candidates if one.space is not space]
        candidates.append(Candidate(space, *found, least, problem.limit_bytes))
        enough = min(enough, found[1].seconds * (1 - 2 * TOLERANCE))

    left = []
    for floor, n, space in floors:
        if space.least_fits(space.retained):
            bound = min(bound, floor)
            if floor < enough or not candidates:
                add(space, (space.retained, space.weigh(space.retained)), floor)
        else:
            left.append((floor, n, space))
    bounded = []
    for floor, n, space in left:
        least = floor if floor >= enough else max(floor, bound_seconds(space))
        bound = min(bound, least)
        # Those first of which more is known than what their programs take.
        bounded.append((least <= floor, least, n, space))
    bounded.sort(key=lambda one: one[:3])
    if len(bounded) > MOST_REVISED and algorithm not in OF_THE_PAPER:
        # What each begins with says well enough which are worth it.
        begun = []
        for known, least, n, space in bounded:
            if least < enough or not candidates:
                found = descend(space, budget=0)
                add(space, found, least)
                begun.append((found[1], n, (known, least, n, space)))
        bounded = [one for *_, one in sorted(begun, key=lambda one: one[:2])[:MOST_REVISED]]
    for _, least, _, space in bounded:
        if least < enough or not candidates:
            add(space, chosen_by(space, least * (1 + TOLERANCE)), least)
    if not any(one.fits for one in candidates) and algorithm not in OF_THE_PAPER:
        # No bound ranks what does not fit, so the first was the only one: what all others need.
        seen = {one.way for one in candidates}
        for floor, _, space in left:
            if space.way not in seen:
                add(space, (space.swapped, space.weigh(space.swapped)), floor)
    seconds = time.perf_counter() - start
    return ArrayResult(tuple(candidates), algorithm, problem.num_evaluated, bound, seconds)


def beside_baselines(problem: ArrayProblem, result: ArrayResult) -> ArrayResult:
    """Return the result with the baselines of other systems. Those of one step that fit and are
    faster become candidates, so that ours is never slower."""
    found = tuple(REGISTERED["baselines"]["model arrays"](problem))
    better = [
        Candidate(
            one.space,
            one.chosen,
            one.space.weigh(one.chosen),
            result.bound_seconds,
            problem.limit_bytes,
        )
        for one in found
        if result.algorithm not in OF_THE_PAPER
        and not one.in_rounds
        and one.fits
        and one.step_seconds < result.best.weighed.seconds
    ]
    return replace(result, candidates=(*result.candidates, *better), baselines=found)


def _spaces(problem: ArrayProblem, algorithm: Algorithm) -> list[Space]:
    return [
        problem.space(way)
        for way in problem.ways
        if algorithm not in OF_THE_PAPER or way.order == "multiplexed"
    ]
