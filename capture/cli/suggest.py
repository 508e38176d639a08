"""When nothing fits: the cheapest single change that does, found by planning again, not by guessing.

Changes are tried in the order of what they cost a user: another schedule, more and smaller micro-batches, a split optimizer state,
rematerialisation (recomputing takes time), then more nodes. Those that need new measurements make them through the store, and one that fits
by an extrapolation alone is compiled before it is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from capture.cluster import Cluster
from capture.profile import Profile
from capture.quantities import format_bytes


@dataclass(frozen=True)
class Change:
    """One change of the question.

    Attributes:
        text: What a user would do.
        profile: Makes the profile that the changed question needs.
        cluster, global_batch_size, num_microbatches, schedule: Of the changed question.
    """

    text: str
    profile: Callable[[], Profile]
    cluster: Cluster
    num_microbatches: int
    schedule: str


def cheapest_change(
    options: argparse.Namespace,
    knowledge: Any,
    cluster: Cluster,
    global_batch: int,
    num_microbatches: int,
    limit: int,
    reprofile: Callable[..., Profile] | None,
) -> dict[str, Any] | None:
    """The first change under which some plan fits, with its peak; None if none does.

    Args:
        options: Of ``capture plan``.
        knowledge: Under which nothing fits (``recommender.verified.Knowledge``).
        cluster, global_batch, limit: Of the question.
        num_microbatches: The most that were asked for.
        reprofile: ``reprofile(remat=..., shard_optimizer=..., microbatch_size=...)`` measures what is missing; None leaves out changes
            that need it.
    """
    from recommender.recommendation import recommend

    for change in _changes(options, knowledge.profile, cluster, global_batch, num_microbatches, reprofile):
        question = partial(
            recommend,
            cluster=change.cluster,
            global_batch_size=global_batch,
            num_microbatches=change.num_microbatches,
            schedule=change.schedule,
            memory_limit_bytes=limit,
            whole_nodes=options.whole_nodes,
            any_divisor=options.any_divisor,
        )
        # A stage on several of the added nodes may take more devices than this process was prepared for.
        can_compile = change.cluster == cluster or not options.whole_nodes
        known = replace(knowledge, profile=change.profile(), compiled=knowledge.compiled if can_compile else None)
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


def _changes(
    options: argparse.Namespace, profile: Profile, cluster: Cluster, global_batch: int, m: int, reprofile: Callable[..., Profile] | None
) -> Iterator[Change]:
    schedule = options.schedule
    if schedule != "1f1b":
        yield Change("--schedule 1f1b", lambda: profile, cluster, m, "1f1b")
    size = global_batch // (2 * m)
    if global_batch % (2 * m) == 0:
        if size in profile.microbatch_sizes or reprofile is None:
            yield Change(f"--microbatches {2 * m}", lambda: profile, cluster, 2 * m, schedule)
        else:
            yield Change(f"--microbatches {2 * m}", partial(reprofile, microbatch_size=size), cluster, 2 * m, schedule)
    if reprofile is not None:
        if not options.shard_optimizer:
            yield Change("--shard-optimizer", partial(reprofile, shard_optimizer=True), cluster, m, schedule)
        for remat in ("dots", "full"):
            if options.remat not in (remat, "full", "auto"):
                yield Change(f"--remat {remat}", partial(reprofile, remat=remat), cluster, m, schedule)
    for factor in (2, 4, 8):
        larger = Cluster(cluster.nodes * factor, cluster.target)
        if larger.num_devices <= profile.graph.num_layers * max(cluster.nodes):
            yield Change(f"--cluster {larger}", lambda: profile, larger, m, schedule)
