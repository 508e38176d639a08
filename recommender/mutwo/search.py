"""The one question of mu-TWO, ``search``, and its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Any, Literal

from recommender.algorithms import algorithm_named
from recommender.mutwo.bound import TOLERANCE, bound_seconds, floor_seconds
from recommender.mutwo.descent import descend
from recommender.mutwo.enumerate import enumerate_choices
from recommender.mutwo.paper.choices import by_policy
from recommender.mutwo.paper.readings import CORRECTED, PAPER
from recommender.mutwo.problem import ArrayProblem, Chosen, Evaluation, Space, Weighed
from recommender.mutwo.ways import Way, ways

Algorithm = Literal["descent", "enumerate", "paper", "corrected"]
#: From the choices of a way to the best of them.
ALGORITHMS: dict[Algorithm, Callable[[Space], tuple[Chosen, Weighed]]] = {
    "descent": descend,
    "enumerate": enumerate_choices,
    "paper": partial(by_policy, readings=PAPER),
    "corrected": partial(by_policy, readings=CORRECTED),
}
#: mu-TWO's own, as printed and as corrected: they know multiplexed sub-arrays alone.
OF_THE_PAPER: tuple[Algorithm, ...] = ("paper", "corrected")


@dataclass(frozen=True)
class Candidate:
    """A way, and the best choices that were found for it.

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
        """Whether it keeps the limits."""
        return self.weighed.fits

    @cached_property
    def evaluation(self) -> Evaluation:
        """Written, replayed and simulated."""
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
class ArrayResult:
    """What a search found.

    Attributes:
        candidates: Ways that were searched; others are slower by their programs alone.
        algorithm: Name of the search.
        num_evaluated: Ways with choices that were issued.
        bound_seconds: Over all ways: no step of them that keeps the limit is faster.
        seconds: Wall time.
    """

    candidates: tuple[Candidate, ...]
    algorithm: Algorithm
    num_evaluated: int
    bound_seconds: float
    seconds: float

    @property
    def best(self) -> Candidate:
        """The fastest that fits, or else that of least peak; of equal ones, that of less memory."""
        return min(self.candidates, key=lambda one: _rank(one.weighed))

    @property
    def optimal(self) -> bool:
        """Whether it is proven that none of the ways is faster."""
        return self.best.fits and (
            self.best.weighed.seconds <= self.bound_seconds * (1 + 2 * TOLERANCE)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "optimal": self.optimal,
            "seconds": self.seconds,
            "num_evaluated": self.num_evaluated,
            "lower_bound_seconds": self.bound_seconds,
        }


def _rank(weighed: Weighed) -> tuple[float, ...]:
    if weighed.fits:
        return 0, weighed.seconds, weighed.peak_bytes
    return 1, weighed.peak_bytes, weighed.excess_bytes


def search(problem: ArrayProblem, algorithm: Algorithm = "descent") -> ArrayResult:
    """The fastest step of all ways that keeps the limits.

    Ways are searched in the order of what their programs take, the fastest first, and left alone
    once that, or the bound of their choices, is no less than what was found.

    Raises:
        PlanError: ``search-algorithm`` for an unknown one.
    """
    start, chosen_by = time.perf_counter(), algorithm_named(algorithm, ALGORITHMS)
    weighed_ways = [
        way
        for way in ways(problem.num_models, problem.rule)
        if algorithm not in OF_THE_PAPER or way.order == "multiplexed"
    ]
    spaces = [problem.space(way) for way in weighed_ways]
    floors = sorted(((floor_seconds(space), n) for n, space in enumerate(spaces)))
    candidates: list[Candidate] = []
    # Of the best so far, but for what bounds may be wrong by.
    enough, bound = inf, inf
    for floor, n in floors:
        space = spaces[n]
        least = floor if floor >= enough else max(floor, bound_seconds(space))
        bound = min(bound, least)
        if candidates and least >= enough:
            continue
        chosen, weighed = chosen_by(space)
        candidates.append(Candidate(space, chosen, weighed, least, problem.limit_bytes))
        enough = min(enough, weighed.seconds * (1 - 2 * TOLERANCE))
    return ArrayResult(
        tuple(candidates),
        algorithm,
        problem.num_evaluated,
        bound,
        time.perf_counter() - start,
    )
