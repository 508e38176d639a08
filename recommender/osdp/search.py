"""The one question of OSDP, ``search``, and the names of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from capture.registered import REGISTERED
from recommender.algorithms import algorithm_named
from recommender.osdp.exact import exact
from recommender.osdp.problem import ShardingProblem
from recommender.osdp.result import ShardingResult

ALGORITHMS: Mapping[str, Callable[..., ShardingResult]] = MappingProxyType(
    {"exact": exact, **REGISTERED["search of shardings"]}
)


def search(problem: ShardingProblem, algorithm: str = "exact", **options: Any) -> ShardingResult:
    """Find the modes and the batch size of least time per example, or why nothing fits.

    Args:
        problem: Operators, machine and cost.
        algorithm: ``exact`` (proven, milliseconds), or ``depth-first`` (the paper's; small models).
        **options: What only that algorithm takes: see the function of its file. Unknown ones raise
            ``TypeError``.

    Raises:
        PlanError: ``search-algorithm`` for an unknown name.

    Example:
        >>> from capture.machine.cluster import Cluster, Machine
        >>> from capture.step.operator_cost import StepCost
        >>> from capture.papers.osdp.transformer import transformer
        >>> model = transformer("1.3B", [(24, 2048)], seq_len=1024, vocab_size=51200)
        >>> machine = Machine.of(Cluster((8,), "a100-40g"))
        >>> result = search(ShardingProblem(StepCost(model, machine, (1, 4))))
        >>> result.optimal, 0 < result.plan.sharded_fraction < 1
        (True, True)
    """
    run, start = algorithm_named(algorithm, ALGORITHMS), time.perf_counter()
    result = run(problem, **options)
    return replace(result, seconds=time.perf_counter() - start)
