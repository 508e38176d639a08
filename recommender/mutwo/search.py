"""The one question of mu-TWO, ``search``, and its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from typing import Any

from recommender.mutwo.problem import ArrayProblem, Choice, Evaluation, Unit, Way, ways


@dataclass(frozen=True)
class Candidate:
    """A way, and the best choices that were found for it.

    Attributes:
        way: Partition and order.
        chosen: By unit; what is not named is retained.
        evaluation: Of both.
        fits: Whether it keeps the limits.
    """

    way: Way
    chosen: dict[Unit, Choice]
    evaluation: Evaluation
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.way.name,
            "partition": [list(group) for group in self.way.partition],
            "order": self.way.order,
            "step_seconds": self.evaluation.seconds,
            "peak_bytes": self.evaluation.peak_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class ArrayResult:
    """What a search found.

    Attributes:
        candidates: One per way, in the order of ``ways``.
        algorithm: Name of the search.
        num_evaluated: Ways with choices that were replayed and simulated.
        bound_seconds: Least seconds of the programs alone, over all ways: no step of them is
            faster.
        seconds: Wall time.
    """

    candidates: tuple[Candidate, ...]
    algorithm: str
    num_evaluated: int
    bound_seconds: float
    seconds: float

    @property
    def best(self) -> Candidate:
        """The fastest that fits, or else that of least peak; of equal ones, that of less memory."""
        fitting = [one for one in self.candidates if one.fits]
        if fitting:
            return min(fitting, key=lambda one: (one.evaluation.seconds, one.evaluation.peak_bytes))
        return min(self.candidates, key=lambda one: one.evaluation.peak_bytes)

    @property
    def optimal(self) -> bool:
        """Whether it is proven that none of the ways is faster."""
        return self.best.fits and self.best.evaluation.seconds <= self.bound_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "optimal": self.optimal,
            "seconds": self.seconds,
            "num_evaluated": self.num_evaluated,
            "lower_bound_seconds": self.bound_seconds,
        }


def search(problem: ArrayProblem) -> ArrayResult:
    """The best of every way: feature maps move, one unit after the other, until the limit is kept.

    Each time the unit moves that costs the fewest seconds per byte that is above the limit, by
    replay and simulation of the whole step; then each choice is revised once.
    """
    start = time.perf_counter()
    candidates, bound = [], inf
    for way in ways(problem.num_models):
        bound = min(bound, problem.evaluate(way, {}).compute_seconds)
        candidates.append(_greedy(problem, way))
    return ArrayResult(
        tuple(candidates),
        "greedy",
        problem.num_evaluated,
        bound,
        time.perf_counter() - start,
    )


def _greedy(problem: ArrayProblem, way: Way) -> Candidate:
    chosen: dict[Unit, Choice] = {}
    now = problem.evaluate(way, chosen)
    units = problem.units(way)
    while now.excess_bytes:
        moves = [
            (found, {**chosen, unit: choice})
            for unit in units
            if unit not in chosen
            for choice in problem.choices(unit)
            if choice != "retain"
            if (found := problem.evaluate(way, {**chosen, unit: choice})).excess_bytes
            < now.excess_bytes
        ]
        if not moves:
            break
        now, chosen = min(moves, key=lambda move: _cost(now, move[0]))
    chosen = _revised(problem, way, chosen)
    now = problem.evaluate(way, chosen)
    return Candidate(way, chosen, now, now.fits(problem.limit_bytes, problem.host_bytes))


def _cost(now: Evaluation, then: Evaluation) -> tuple[float, int]:
    """Seconds that a move costs per byte of excess that it saves; of equal ones, that which saves
    most."""
    saved = now.excess_bytes - then.excess_bytes
    return max(0.0, then.seconds - now.seconds) / saved, -saved


def _revised(problem: ArrayProblem, way: Way, chosen: dict[Unit, Choice]) -> dict[Unit, Choice]:
    """Every choice once again, now that the others are made."""
    limits = problem.limit_bytes, problem.host_bytes
    for unit in list(chosen):
        options = [{**chosen, unit: choice} for choice in problem.choices(unit)]
        found = [(problem.evaluate(way, option), option) for option in options]
        fitting = [(one, option) for one, option in found if one.fits(*limits)]
        if fitting:
            _, chosen = min(fitting, key=lambda one: (one[0].seconds, one[0].peak_bytes))
    return {unit: choice for unit, choice in chosen.items() if choice != "retain"}
