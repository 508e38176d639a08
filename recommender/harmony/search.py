"""The question of Harmony, ``search``, and its answers by name. A new search is an entry in
``ALGORITHMS``.

Source: Li et al. 2022 (Harmony), Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from recommender.algorithms import algorithm_named
from recommender.harmony.bound import least_seconds
from recommender.harmony.problem import PackedConfiguration, PacksProblem
from recommender.harmony.result import PacksResult, Point
from recommender.harmony.wide import wide_choices

#: Algorithm 1, whose best points are compared as instructions.
JUDGED = "judged"


def search(problem: PacksProblem, algorithm: str = "bounded") -> PacksResult:
    """Search for the configuration of least estimated time.

    Args:
        problem: Layers, server, minibatch, packings.
        algorithm: ``"paper"`` simulates every point of Algorithm 1, as released; ``"bounded"``
            answers the same and simulates what can be better; ``"judged"`` has the same points,
            for who compares the best of them as instructions; ``"wide"`` has all sizes, other
            packs, and holds whole tasks below the limit, also for such a comparison.

    Raises:
        PlanError: ``search-algorithm`` for an unknown name.
    """
    run, start = algorithm_named(algorithm, ALGORITHMS), time.perf_counter()
    points = tuple(run(problem))
    return PacksResult(
        "ok" if points else "infeasible",
        algorithm,
        points,
        problem.single_first,
        time.perf_counter() - start,
    )


def finds_packs(problem: PacksProblem, algorithm: str) -> bool:
    """Return whether a search finds any packs; nothing is simulated for it."""
    if algorithm == "wide":
        return bool(wide_choices(problem, float("inf")))
    return next(problem.choices(), None) is not None


def evaluated(problem: PacksProblem, choice: PackedConfiguration) -> Point:
    """Simulate a configuration by the paper's rules and return it as a point."""
    found = problem.estimate(choice.configuration)
    idle = found.idle_fractions
    return Point(choice, found.seconds, found.peak_bytes, max(idle), sum(idle) / len(idle))


def paper(problem: PacksProblem) -> list[Point]:
    """Simulate every configuration in order (Algorithm 1)."""
    return [evaluated(problem, choice) for choice in problem.choices()]


def bounded(problem: PacksProblem) -> list[Point]:
    """Simulate the configurations whose lower bounds leave open whether they are the best."""
    choices = list(problem.choices())
    singles = [choice for choice in choices if choice.single]
    return _bounded(problem, singles if problem.single_first and singles else choices)


def wide(problem: PacksProblem) -> list[Point]:
    """Simulate the configurations of Algorithm 1 and of ``wide_choices`` whose whole tasks stay
    below the limit. The best is never slower than the best such one of ``paper``."""
    known = [point for point in paper(problem) if point.task_bytes <= problem.limit_bytes]
    best = min((point.seconds for point in known), default=float("inf"))
    return [*known, *_bounded(problem, wide_choices(problem, best), best)]


ALGORITHMS: Mapping[str, Callable[[PacksProblem], list[Point]]] = {
    "bounded": bounded,
    "paper": paper,
    JUDGED: paper,
    "wide": wide,
}


def _bounded(
    problem: PacksProblem, choices: Sequence[PackedConfiguration], best: float = float("inf")
) -> list[Point]:
    """Simulate choices by ascending lower bound until no bound is below the best time. Return the
    simulated points, in the order of the choices."""
    bounds = [least_seconds(problem, choice.configuration) for choice in choices]
    found: dict[int, Point] = {}
    for i in sorted(range(len(choices)), key=lambda i: bounds[i]):
        if bounds[i] > best:
            break
        found[i] = evaluated(problem, choices[i])
        best = min(best, found[i].seconds)
    return [found[i] for i in sorted(found)]
