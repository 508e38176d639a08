"""What to change where nothing fits, as ``capture plan`` finds and says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from profiling_runs.measurements import Measurements
from profiling_runs.question import ProfileQuestion
from recommender.capture.changes import Measuring
from recommender.capture.least_state import least_state
from recommender.capture.result import SearchResult


def least_state_of(
    of_profile: ProfileQuestion, measurements: Measurements, size: int, limit: int | None = None
) -> SearchResult:
    """Compute the least bytes that any plan needs for its state, at the cost of tracing at one
    micro-batch size (``recommender.capture.least_state``)."""
    backend = measurements.backend
    sharding = backend.sharding(size)
    return least_state(
        backend.traced(size).graph,
        {
            split: sharding.param_bytes(split)
            for split in {choice.param_split for choice in of_profile.stage_choices}
        },
        backend.state_bytes(size),
        of_profile.stage_choices,
        of_profile.cluster,
        space=of_profile.space,
        memory_limit_bytes=limit,
    )


def measuring(
    of_profile: ProfileQuestion,
    measurements: Measurements,
    made: Callable[[ProfileQuestion], Profile],
) -> Measuring:
    """Return the functions that measure changes of a question: profiles, and bytes of state.

    Args:
        of_profile: The question that is changed.
        measurements: Measurements of its workload.
        made: Function that makes the profile of a changed question.
    """

    def measured(**changes: Any) -> Profile:
        # Of a plan that is not made, no interval is shown: nothing is compiled to calibrate it.
        return made(replace(of_profile, **changes, calibration_plans=0))

    def state_bytes(cluster: Cluster, **changes: Any) -> int | None:
        changed = replace(of_profile, cluster=cluster, **changes)
        result = least_state_of(changed, measurements, of_profile.microbatch_size)
        return result.peak_bytes if result.stages else None

    return Measuring(of_profile.remat, of_profile.shard_optimizer, measured, state_bytes)
