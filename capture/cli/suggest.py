"""When nothing fits: the cheapest single change that does, found by planning again, not by
guessing.

Changes are tried in the order of what they cost a user: another schedule, more and smaller
micro-batches, a split optimizer state, rematerialisation (recomputing takes time), then more nodes.
One is passed over if not even the state fits (``recommender.capture.least_state``), or what is
measured already says that it cannot save enough; of the others, those that need new measurements
make them through the store, and one that fits by an extrapolation alone is compiled before it is
named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.space import StageSpace
from capture.quantities import format_bytes


@dataclass(frozen=True)
class Change:
    """One change of the question.

    Attributes:
        text: What a user would do.
        cluster, num_microbatches, schedule: Of the changed question.
        asks: Of a profile that is not there, as ``reprofile`` takes it; empty if the profile that
            is there serves.
    """

    text: str
    cluster: Cluster
    num_microbatches: int
    schedule: str
    asks: Mapping[str, Any] = field(default_factory=dict)


def cheapest_change(
    options: argparse.Namespace,
    knowledge: Any,
    num_layers: int,
    cluster: Cluster,
    global_batch: int,
    num_microbatches: int,
    limit: int,
    *,
    reprofile: Callable[..., Profile] | None,
    least_state: Callable[..., int | None],
) -> dict[str, Any] | None:
    """The first change under which some plan fits, with its peak; None if none does.

    Args:
        options: Of ``capture plan``.
        knowledge: Under which nothing fits (``recommender.capture.verified.Knowledge``); None if
            nothing was measured, because not even the state fits. Then nothing is measured for a
            change either, and the first under which the state fits is named, with that.
        num_layers: Of the model.
        cluster, global_batch, limit: Of the question.
        num_microbatches: The most that were asked for.
        reprofile: ``reprofile(remat=..., shard_optimizer=..., microbatch_size=...)`` measures what
            is missing; None leaves out changes that need it.
        least_state: ``least_state(cluster, remat=..., ...)`` is the least that plans of the changed
            question need for parameters, gradients and optimizer state; None where that is not
            known.
    """
    from recommender.capture.recommendation import recommend

    profile = None if knowledge is None else knowledge.profile
    for change in _changes(
        options, profile, num_layers, cluster, global_batch, num_microbatches, reprofile is not None
    ):
        least = least_state(change.cluster, **change.asks)
        if least is not None and least > limit:
            continue
        if knowledge is None:
            if least is None:
                continue
            text = (
                f"{change.text}: may fit, with at least {format_bytes(least)} per device of "
                "parameters, gradients and optimizer state"
            )
            return {
                "change": change.text,
                "peak_bytes": None,
                "least_state_bytes": least,
                "summary": text,
            }
        asked: dict[str, Any] = {
            "global_batch_size": global_batch,
            "num_microbatches": change.num_microbatches,
            "schedule": change.schedule,
            "space": StageSpace(options.whole_nodes, options.any_divisor),
        }
        # A stage on several of the added nodes may take more devices than this process was prepared
        # for.
        can_compile = change.cluster == cluster or not options.whole_nodes
        known = replace(knowledge, compiled=knowledge.compiled if can_compile else None)
        if change.asks:
            assert reprofile is not None, "such changes are left out without it"
            if (
                "microbatch_size" not in change.asks
                and _least_peak(knowledge.profile, change, asked) > limit
            ):
                continue
            known = replace(known, profile=reprofile(**change.asks))
        question = partial(recommend, cluster=change.cluster, memory_limit_bytes=limit, **asked)
        result = known.answer(question, any_that_fits=True)
        if result.status == "ok" and result.plan is not None:
            sure = "fits by extrapolation" if result.extrapolated else "fits"
            return {
                "change": change.text,
                "peak_bytes": result.peak_bytes,
                "extrapolated": result.extrapolated,
                "summary": f"{change.text}: peak {format_bytes(result.peak_bytes)} per device {sure}",
            }
    return None


def _least_peak(profile: Profile, change: Change, asked: Mapping[str, Any]) -> int:
    """The least peak of any plan if the change saved all that it could of what is measured without
    it.

    A split optimizer state is a part of what each replica holds, and its update needs nothing more;
    of what recomputing saves, and of what programs need meanwhile, nothing is left.
    """
    from recommender.capture.minmax import minmax
    from recommender.capture.recommendation import search_problem

    def at_best(config: StageConfig, cost: StageCost) -> StageCost:
        if "shard_optimizer" in change.asks:
            return replace(
                cost,
                optimizer_bytes=cost.optimizer_bytes // config.choice.data_parallel,
                update_bytes=0,
            )
        nothing: dict[str, Any] = {
            "residual_bytes": 0,
            "forward_bytes": 0,
            "backward_bytes": 0,
            "kept_inputs": (),
            "kept_outputs": (),
            "kept_batch": (),
        }
        return replace(cost, **nothing)

    costs = {config: at_best(config, cost) for config, cost in profile.measurements.items()}
    problem = search_problem(
        replace(profile, measurements=costs, verified={}), change.cluster, **asked, least=True
    )
    return minmax(problem, tie_break="none").peak_bytes


def _changes(
    options: argparse.Namespace,
    profile: Profile | None,
    num_layers: int,
    cluster: Cluster,
    global_batch: int,
    m: int,
    may_measure: bool,
) -> Iterator[Change]:
    schedule = options.schedule
    if schedule != "1f1b":
        yield Change("--schedule 1f1b", cluster, m, "1f1b")
    size = global_batch // (2 * m)
    if global_batch % (2 * m) == 0:
        if profile is not None and (size in profile.microbatch_sizes or not may_measure):
            yield Change(f"--microbatches {2 * m}", cluster, 2 * m, schedule)
        elif may_measure:
            yield Change(
                f"--microbatches {2 * m}", cluster, 2 * m, schedule, {"microbatch_size": size}
            )
    if may_measure:
        if not options.shard_optimizer:
            yield Change("--shard-optimizer", cluster, m, schedule, {"shard_optimizer": True})
        for remat in ("dots", "full"):
            if options.remat not in (remat, "full", "auto"):
                yield Change(f"--remat {remat}", cluster, m, schedule, {"remat": remat})
    for factor in (2, 4, 8):
        larger = Cluster(cluster.nodes * factor, cluster.target)
        if larger.num_devices <= num_layers * max(cluster.nodes):
            yield Change(f"--cluster {larger}", larger, m, schedule)
