"""Questions around the search: the best of several micro-batch counts and schedules, the fewest devices, the largest batch.

Each is a loop over searches; every search is exact, and so is the answer over what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from capture.cluster import Cluster
from capture.errors import PlanError
from capture.plan import batch_violations
from recommender.recommendation import Recommendation

#: ``question(cluster, global_batch_size, num_microbatches, schedule)``
Question = Callable[[Cluster, int, int, str], Recommendation]


@dataclass(frozen=True)
class Attempt:
    """One search of a loop."""

    cluster: Cluster
    global_batch_size: int
    num_microbatches: int
    schedule: str
    result: Recommendation

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": str(self.cluster),
            "num_devices": self.cluster.num_devices,
            "global_batch_size": self.global_batch_size,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "status": self.result.status,
            "peak_bytes": self.result.peak_bytes,
            "step_seconds": self.result.search.step_seconds,
        }


def best_of(
    question: Question, cluster: Cluster, global_batch_size: int, microbatches: Sequence[int], schedules: Sequence[str]
) -> tuple[Attempt, tuple[Attempt, ...]]:
    """The best answer over numbers of micro-batches and schedules, and all attempts.

    Args:
        question: Asks for one objective: the step time decides where it was searched for, else the peak.
        cluster, global_batch_size: The same for all.
        microbatches, schedules: What is tried; earlier ones win ties.

    Raises:
        PlanError: ``plan-batch`` if a number of micro-batches does not divide the batch.
    """
    PlanError.check(violation for m in microbatches for violation in batch_violations(global_batch_size, m))
    attempts = tuple(
        Attempt(cluster, global_batch_size, m, schedule, question(cluster, global_batch_size, m, schedule))
        for schedule in schedules
        for m in microbatches
    )
    return min(attempts, key=_rank), attempts


def _rank(attempt: Attempt) -> tuple[bool, bool, float, int]:
    result = attempt.result
    seconds = result.search.step_seconds if result.status == "ok" and result.search.step_seconds is not None else 0.0
    return result.status != "ok", result.plan is None, seconds, result.peak_bytes


def smallest_cluster(
    question: Question, cluster: Cluster, global_batch_size: int, num_microbatches: int, schedule: str
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """The fewest devices of a cluster on which a plan fits, and all attempts.

    Tried are parts of the first node in powers of two, then 1, 2, 3, ... whole nodes, by ascending number of devices.

    Returns:
        None first if nothing fits on the whole cluster either.
    """
    size, parts = cluster.nodes[0], []
    devices = 1
    while devices < size:
        parts.append(Cluster((devices,), cluster.target))
        devices *= 2
    parts += [Cluster(cluster.nodes[: n + 1], cluster.target) for n in range(len(cluster.nodes))]
    attempts = []
    for part in parts:
        result = question(part, global_batch_size, num_microbatches, schedule)
        attempts.append(Attempt(part, global_batch_size, num_microbatches, schedule, result))
        if result.status == "ok":
            return attempts[-1], tuple(attempts)
    return None, tuple(attempts)


def largest_batch(
    question: Question, cluster: Cluster, microbatch_step: int, num_microbatches: int, schedule: str, max_doublings: int = 20
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """The largest global batch that fits with a number of micro-batches, and all attempts.

    Micro-batches grow in steps: doubled until nothing fits, then bisected. **Assumes** that a larger micro-batch never needs less.

    Args:
        microbatch_step: Micro-batch sizes are multiples of it.
        max_doublings: Where doubling ends.

    Returns:
        None first if not even one step fits.
    """
    attempts: list[Attempt] = []

    def fits(steps: int) -> bool:
        batch = steps * microbatch_step * num_microbatches
        attempts.append(Attempt(cluster, batch, num_microbatches, schedule, question(cluster, batch, num_microbatches, schedule)))
        return attempts[-1].result.status == "ok"

    low, high = 0, 1
    while high <= 1 << max_doublings and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    best = [attempt for attempt in attempts if attempt.result.status == "ok"]
    return (max(best, key=lambda attempt: attempt.global_batch_size) if best else None), tuple(attempts)
