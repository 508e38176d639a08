"""The one question, ``search``, and the names of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from capture.registered import REGISTERED
from recommender.algorithms import algorithm_named
from recommender.capture.minmax import minmax
from recommender.capture.problem import SearchProblem
from recommender.capture.result import SearchResult
from recommender.capture.throughput import throughput

ALGORITHMS: Mapping[str, Callable[..., SearchResult]] = MappingProxyType(
    {
        "minmax": minmax,
        **{name: REGISTERED["search of stages"][name] for name in ("enumerate", "mcap", "mcap-bf")},
        "throughput": throughput,
    }
)


def search(problem: SearchProblem, algorithm: str = "minmax", **options: Any) -> SearchResult:
    """Find the plan with the least peak memory, or the fastest one, or why there is none.

    Args:
        problem: Layers, devices, choices, cost and limit.
        algorithm: ``minmax`` (exact, milliseconds to seconds), ``enumerate`` (the paper's; small
            problems), ``mcap`` and ``mcap-bf`` (pipeline only, one device per stage: exact, and
            brute force); ``throughput`` for the least step time.
        **options: What only that algorithm takes: see the function of its file. Unknown ones raise
            ``TypeError``.

    Raises:
        PlanError: ``search-algorithm`` for an unknown name.
    """
    run, start = algorithm_named(algorithm, ALGORITHMS), time.perf_counter()
    result = run(problem, **options)
    return replace(result, seconds=time.perf_counter() - start)
