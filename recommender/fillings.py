"""Counting the ways to fill the devices with stages, and the plans that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

from recommender.problem import SearchProblem


def count_fillings(degrees: Sequence[Sequence[int]], weights: Mapping[int, int] | None = None) -> list[list[int]]:
    """counts[p][s]: ordered sequences of s stage sizes that fill exactly the devices from p on; exact integers.

    Args:
        degrees: Per device p, the sizes that a stage starting there may have.
        weights: Per size, how many different stages count; 1 if None.

    Example:
        >>> count_fillings([[1, 2], [1]])[0]  # one stage of two devices, or two of one
        [0, 1, 1]
    """
    num_devices = len(degrees)
    counts = [[0] * (num_devices + 1) for _ in range(num_devices + 1)]
    counts[num_devices][0] = 1
    for p in reversed(range(num_devices)):
        for d in degrees[p]:
            weight = 1 if weights is None else weights[d]
            for num_stages in range(num_devices - p - d + 1):
                counts[p][num_stages + 1] += weight * counts[p + d][num_stages]
    return counts


def count_plans(problem: SearchProblem) -> int:
    """All plans of a problem: fillings with their choices, times the ways to cut the layers into as many stages.

    Source: CAPTURE III-C; Algorithm 4 enumerates them.
    """
    weights = {d: len(problem.choices[d]) for d in problem.used_degrees}
    fillings = count_fillings(problem.degrees, weights)[0]
    return sum(count * comb(problem.num_layers - 1, num_stages - 1) for num_stages, count in enumerate(fillings) if num_stages)
