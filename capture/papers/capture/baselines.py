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
from capture.measured.profile import Profile
from capture.papers.capture.cuts import equal_cuts
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.space import StageSpace
from capture.plan.stages import Plan
from recommender.capture.recommendation import plan_of, predict_plan
from recommender.capture.result import PlacedStage
from recommender.question import PlanQuestion


def fixed_degree_plan(
    cluster: Cluster, weights: Sequence[float], choice: StageChoice, schedule: str = "1f1b"
) -> tuple[PlacedStage, ...]:
    """Return the stages of D / degree groups, in the schedule's order, all of one choice and cut at
    ``equal_cuts``; the memory is left 0.

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


def baseline_plan(profile: Profile, question: PlanQuestion, weigh: str) -> Plan:
    """Return stages of equal FLOPs, parameters or layers: see ``recommender.baseline_plan``."""
    cluster, graph, kind = question.cluster, profile.graph, SCHEDULES[question.schedule]
    weights = {
        "flops": [layer.flops for layer in graph.layers],
        "params": [sum(graph.params[p].size for p in layer.params) for layer in graph.layers],
        "layers": [1] * graph.num_layers,
    }[weigh]
    fitting = [
        choice
        for choice in sorted(profile.choices, key=lambda c: (c.num_devices, c.tensor_parallel))
        if cluster.num_devices % choice.num_devices == 0
        and (groups := cluster.num_devices // choice.num_devices) * kind.stages_per_group
        <= graph.num_layers
        and not kind.wrong(groups, question.num_microbatches)
        and question.microbatch_size % choice.data_parallel == 0
        and all(size % choice.num_devices == 0 for size in cluster.nodes)
    ]
    if not fitting:
        raise PlanError.of(
            f"no profiled degree divides the nodes of cluster {cluster} into at most "
            f"{graph.num_layers} stages of schedule={question.schedule!r}.",
            "baseline-degree",
        )
    plan = plan_of(
        profile, question, fixed_degree_plan(cluster, weights, fitting[0], question.schedule)
    )
    return plan.with_(prediction=predict_plan(profile, plan))
