"""Counting the plans of a search space."""

from __future__ import annotations

from math import comb

from capture.plan.sampling import count_fillings
from recommender.capture.problem import SearchProblem


def count_plans(problem: SearchProblem) -> int:
    """All plans of a problem: fillings with their choices, times the ways to cut the layers into as
    many stages.

    Source: CAPTURE III-C; Algorithm 4 enumerates them.
    """
    weights = {d: len(problem.choices[d]) for d in problem.used_degrees}
    fillings = count_fillings(problem.degrees, weights)[0]
    return sum(
        count * comb(problem.num_layers - 1, num_stages - 1)
        for num_stages, count in enumerate(fillings)
        if num_stages
    )
