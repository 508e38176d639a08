"""Plans that look at no memory: one degree for all stages, layers shared out by count, parameters
or FLOPs.

What pipeline frameworks do by default (equal layers, equal parameters), and the throughput-minded
plan (equal FLOPs) that memory-aware plans are compared with.

Source: CAPTURE II-D.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.space import StageSpace
from recommender.capture.result import PlacedStage
from recommender.cuts import equal_cuts


def fixed_degree_plan(
    cluster: Cluster, weights: Sequence[float], choice: StageChoice, schedule: str = "1f1b"
) -> tuple[PlacedStage, ...]:
    """D / degree groups of the schedule's stages, of one choice, cut at ``equal_cuts``; the memory
    is left 0.

    Args:
        cluster: D devices. Every stage must lie in one node, or on 2, 4, 8, ... whole nodes.
        weights: Per layer.
        choice: What every stage does with its devices.
        schedule: Where the stages lie.

    Raises:
        PlanError: ``baseline-degree`` if the stages do not fit the nodes, ``baseline-stages`` if
            there are fewer layers than stages.
    """
    d = choice.num_devices
    degrees = StageSpace(whole_nodes=True, any_divisor=True).degrees(cluster)
    if cluster.num_devices % d or any(
        d not in degrees[p] for p in range(0, cluster.num_devices, d)
    ):
        raise PlanError.of(
            f"data_parallel={choice.data_parallel} x tensor_parallel={choice.tensor_parallel} = "
            f"{d} devices per stage do not divide the "
            f"nodes of cluster {cluster}; use a degree that divides each node, or 2, 4, 8, ... "
            "whole equal nodes.",
            "baseline-degree",
        )
    placement = SCHEDULES[schedule].placement(cluster.num_devices // d)
    cuts = equal_cuts(weights, len(placement))
    return tuple(
        PlacedStage.at(d * group, first, stop, choice)
        for group, (first, stop) in zip(placement, pairwise(cuts), strict=True)
    )
