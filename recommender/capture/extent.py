"""Questions around the search: the best of several micro-batch counts and schedules, the fewest
devices, the largest batch.

Each is a loop over searches; every search is exact, and so is the answer over what was asked.
Predictions of micro-batch sizes that were not profiled only say where to look: ``settled`` answers
with what is compiled (``recommender.capture.verified.Knowledge``), and only such an answer is
given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.stages import batch_violations
from recommender.bisection import last_that_holds
from recommender.capture.recommendation import Recommendation

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

    @property
    def rests_on(self) -> str:
        """Where its peak is from."""
        return (
            "compiled"
            if self.result.compiled
            else "extrapolated"
            if self.result.extrapolated
            else "predicted"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": str(self.cluster),
            "num_devices": self.cluster.num_devices,
            "global_batch_size": self.global_batch_size,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "status": self.result.status,
            "extrapolated": self.result.extrapolated,
            "compiled": self.result.compiled,
            "peak_bytes": self.result.peak_bytes,
            "step_seconds": self.result.search.step_seconds,
        }


def best_of(
    question: Question,
    settled: Question,
    cluster: Cluster,
    global_batch_size: int,
    microbatches: Sequence[int],
    schedules: Sequence[str],
) -> tuple[Attempt, tuple[Attempt, ...]]:
    """The best answer over numbers of micro-batches and schedules, and all attempts.

    Args:
        question: Asks for one objective: the step time decides where it was searched for, else the
            peak.
        settled: The same without extrapolation; asked until the best answer is one of its own.
        cluster, global_batch_size: The same for all.
        microbatches, schedules: What is tried; earlier ones win ties.

    Raises:
        PlanError: ``plan-batch`` if a number of micro-batches does not divide the batch.
    """
    PlanError.check(
        violation for m in microbatches for violation in batch_violations(global_batch_size, m)
    )
    asked = [
        (cluster, global_batch_size, m, schedule) for schedule in schedules for m in microbatches
    ]
    attempts = [Attempt(*about, question(*about)) for about in asked]
    is_settled = [not attempt.result.extrapolated for attempt in attempts]
    while not is_settled[best := min(range(len(attempts)), key=lambda i: _rank(attempts[i]))]:
        attempts[best] = replace(attempts[best], result=settled(*asked[best]))
        is_settled[best] = True
    return attempts[best], tuple(attempts)


def _rank(attempt: Attempt) -> tuple[bool, bool, float, int]:
    result = attempt.result
    seconds = (
        result.search.step_seconds
        if result.status == "ok" and result.search.step_seconds is not None
        else 0.0
    )
    return result.status != "ok", result.plan is None, seconds, result.peak_bytes


def smallest_cluster(
    settled: Question,
    cluster: Cluster,
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """The fewest devices of a cluster on which a plan fits, and all attempts.

    Tried are parts of the first node in powers of two, then 1, 2, 3, ... whole nodes, by ascending
    number of devices. ``settled`` is asked without extrapolation.

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
        result = settled(part, global_batch_size, num_microbatches, schedule)
        attempts.append(Attempt(part, global_batch_size, num_microbatches, schedule, result))
        if result.status == "ok":
            return attempts[-1], tuple(attempts)
    return None, tuple(attempts)


def largest_batch(
    question: Question,
    settled: Question,
    cluster: Cluster,
    microbatch_step: int,
    num_microbatches: int,
    schedule: str,
    max_doublings: int = 20,
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """The largest global batch that fits with a number of micro-batches, and all attempts.

    Micro-batches grow in steps: doubled until nothing is predicted to fit, then bisected. From
    where that ends, the answers without extrapolation are asked for, in steps that double until one
    fits and the next does not, then bisected. **Assumes** that a larger micro-batch never needs
    less.

    Args:
        question: Asks for a plan.
        settled: The same without extrapolation.
        microbatch_step: Micro-batch sizes are multiples of it.
        max_doublings: Where doubling ends.

    Returns:
        None first if not even one step fits.
    """
    attempts: dict[int, Attempt] = {}

    def fits(steps: int, ask: Question) -> bool:
        batch = steps * microbatch_step * num_microbatches
        attempts[steps] = Attempt(
            cluster,
            batch,
            num_microbatches,
            schedule,
            ask(cluster, batch, num_microbatches, schedule),
        )
        return attempts[steps].result.status == "ok"

    def fits_settled(steps: int) -> bool:
        if steps in attempts and not attempts[steps].result.extrapolated:
            return attempts[steps].result.status == "ok"
        return fits(steps, settled)

    most = (2 << max_doublings) - 1
    guess = last_that_holds(lambda steps: fits(steps, question), 1, most)
    best = last_that_holds(fits_settled, max(1, guess), most)
    return attempts.get(best), tuple(attempts.values())
