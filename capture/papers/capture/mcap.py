"""Pipeline only, one device per stage: mCAP, which CAPTURE extends."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, islice, pairwise

import numpy as np

from capture.plan.space import StageSpace
from recommender.capture.minmax import TieBreakOption, minmax
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.result import SearchResult, found, nothing_found, place

_PARTITIONINGS_AT_ONCE = 1 << 14


def pipeline_only(problem: SearchProblem) -> SearchProblem:
    """Return the same problem with stages on single devices, so that every plan has as many stages
    as the cluster has devices."""
    return replace(
        problem, choices={1: problem.choices[1]}, cost={1: problem.cost[1]}, space=StageSpace()
    )


def mcap(problem: SearchProblem, tie_break: TieBreakOption = "auto") -> SearchResult:
    """Run the exact search, restricted to pipeline parallelism.

    Source: CAPTURE II-E; mCAP (Euro-Par 2022) finds the same peak by brute force or Bayesian
    optimisation.
    """
    return replace(minmax(pipeline_only(problem), tie_break), algorithm="mcap")


def mcap_brute_force(problem: SearchProblem) -> SearchResult:
    """Search by mCAP-BF: all C(L - 1, G - 1) partitionings of L layers over G devices, with the
    full tie-break.

    Source: CAPTURE II-E.
    """
    problem = pipeline_only(problem)
    num_layers, num_devices = problem.num_layers, problem.cluster.num_devices
    table = np.moveaxis(problem.spread(problem.cost[1].min(axis=0)), 0, -1)
    rows = np.minimum(np.arange(num_devices, 0, -1), problem.num_positions) - 1
    best_key, best, num_explored = None, None, 0
    partitionings = combinations(range(1, num_layers), num_devices - 1)
    while chunk := list(islice(partitionings, _PARTITIONINGS_AT_ONCE)):
        cuts = np.pad(np.array(chunk, dtype=np.int64).reshape(len(chunk), -1), ((0, 0), (1, 1)))
        cuts[:, -1] = num_layers
        keys = -np.sort(-table[cuts[:, :-1], cuts[:, 1:], rows], axis=1)
        num_explored += keys.size
        least = np.lexsort(keys.T[::-1])[0]
        key = tuple(keys[least].tolist())
        if key[0] < NEVER and (best_key is None or key < best_key):
            best_key, best = key, cuts[least].tolist()
    if best is None:
        return nothing_found(problem, algorithm="mcap-bf", num_explored=num_explored)
    stages = place(problem, [(first, stop, 1) for first, stop in pairwise(best)])
    return found(
        problem,
        stages,
        "mcap-bf",
        optimal=True,
        num_explored=num_explored,
        tie_break_columns=num_devices,
    )
