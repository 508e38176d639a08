"""Questions around the search: the best of several micro-batch counts and schedules, the fewest
devices, the largest batch.

Each is a loop over searches; every search is exact, and so is the answer over what was asked.
Predictions of micro-batch sizes that were not profiled only say where to look: ``settled`` answers
with what is compiled (``recommender.capture.knowledge.Knowledge``), and only such an answer is
given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.documents import fields_of, write
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.stages import batch_violations
from capture.plan.why import Front
from recommender.answer import StageAnswer
from recommender.bisection import last_that_holds
from recommender.capture.pareto import undominated
from recommender.money import Account
from recommender.question import PlanQuestion

#: Answers a question.
Ask = Callable[[PlanQuestion], StageAnswer]


@dataclass(frozen=True)
class Attempt:
    """A question of a loop of searches, and its answer.

    Attributes:
        account: Tokens, use of devices and cost of its plan's step, where these are known.
    """

    question: PlanQuestion
    result: StageAnswer
    account: Account | None = None

    @property
    def rests_on(self) -> str:
        """The origin of the peak, in words: compiled, extrapolated or predicted."""
        if self.result.compiled:
            return "compiled"
        return f"{'extrapolated' if self.result.extrapolated else 'predicted'}, not compiled"

    def to_json(self) -> dict[str, Any]:
        asked = self.question
        return {
            "cluster": str(asked.cluster),
            "num_devices": asked.cluster.num_devices,
            **fields_of(asked, "global_batch_size", "num_microbatches", "schedule"),
            **fields_of(self.result, "status", "extrapolated", "compiled", "peak_bytes"),
            "step_seconds": self.result.proof.step_seconds,
            **({} if self.account is None else {"account": write(self.account)}),
        }


def best_of(
    ask: Ask,
    settled: Ask,
    question: PlanQuestion,
    microbatches: Sequence[int],
    schedules: Sequence[str],
    is_settled: Callable[[StageAnswer], bool] = lambda result: not result.extrapolated,
) -> tuple[Attempt, tuple[Attempt, ...]]:
    """Return the best answer over numbers of micro-batches and schedules, and all attempts.

    Args:
        ask: Answers with predictions.
        settled: The same, so that the answer stands; asked until the best answer is one of its own.
        question: For one objective: the step time decides where it is searched for, else the peak.
        microbatches, schedules: What is tried of it; earlier ones win ties.
        is_settled: Whether an answer of ``ask`` stands, too.

    Raises:
        PlanError: ``plan-batch`` if a number of micro-batches does not divide the batch.
    """
    asked = [
        replace(one, schedule=schedule)
        for schedule in schedules
        for one in over_microbatches(question, microbatches)
    ]
    attempts = [Attempt(one, ask(one)) for one in asked]
    stands = [is_settled(attempt.result) for attempt in attempts]
    while not stands[best := min(range(len(attempts)), key=lambda i: _rank(attempts[i]))]:
        attempts[best] = replace(attempts[best], result=settled(asked[best]))
        stands[best] = True
    return attempts[best], tuple(attempts)


def over_microbatches(question: PlanQuestion, counts: Sequence[int]) -> Sequence[PlanQuestion]:
    """Return the question with each of several numbers of micro-batches.

    Raises:
        PlanError: ``plan-batch`` if one does not divide the batch.
    """
    batch = question.global_batch_size
    PlanError.check(violation for m in counts for violation in batch_violations(batch, m))
    return [replace(question, num_microbatches=m) for m in counts]


def front_of(attempts: Sequence[Attempt]) -> Front | None:
    """Return the front of all attempts: the plans of which none is both smaller and faster than
    another. None if no attempt has a front."""
    fronts = [
        (attempt.question, front)
        for attempt in attempts
        if (front := attempt.result.why.front) is not None
    ]
    if not fronts:
        return None
    every = [
        replace(point, schedule=asked.schedule, num_microbatches=asked.num_microbatches)
        for asked, front in fronts
        for point in front.points
    ]
    return Front(
        tuple(undominated(every, lambda point: (point.peak_bytes, point.step_seconds))),
        all(front.complete for _, front in fronts),
        any(front.extrapolated for _, front in fronts),
        sum(front.seconds for _, front in fronts),
    )


def _rank(attempt: Attempt) -> tuple[bool, bool, float, int]:
    result = attempt.result
    seconds = (result.proof.step_seconds or 0.0) if result.status == "ok" else 0.0
    return result.status != "ok", result.plan is None, seconds, result.peak_bytes


def smallest_cluster(
    settled: Ask, question: PlanQuestion
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """Find the fewest devices of a cluster on which a plan fits, and give all attempts.

    Tried are parts of the first node in powers of two, then its first nodes
    (``Cluster.first_nodes``), by ascending number of devices. ``settled`` answers without
    extrapolation.

    Returns:
        None first if nothing fits on the whole cluster either.
    """
    attempts = []
    for asked in _on_parts(question):
        attempts.append(Attempt(asked, settled(asked)))
        if attempts[-1].result.status == "ok":
            return attempts[-1], tuple(attempts)
    return None, tuple(attempts)


def cheapest_cluster(
    settled: Ask, question: PlanQuestion, rank: Callable[[StageAnswer], float]
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """Find the part of a cluster on which a plan that fits comes first, such as the cheapest, and
    give all attempts: those of ``smallest_cluster``, up to the whole cluster.

    Args:
        settled: Answers without extrapolation.
        question: On the whole cluster.
        rank: Key by which answers are sorted, such as ``Accountant.rank``; of equal ones the fewest
            devices win.

    Returns:
        None first if nothing fits.
    """
    attempts = tuple(Attempt(asked, settled(asked)) for asked in _on_parts(question))
    fitting = [attempt for attempt in attempts if attempt.result.status == "ok"]
    return min(fitting, key=lambda each: rank(each.result), default=None), attempts


def _on_parts(question: PlanQuestion) -> Iterator[PlanQuestion]:
    """Yield a question for each part of its cluster, by ascending number of devices."""
    cluster, devices = question.cluster, 1
    while devices < cluster.nodes[0]:
        yield replace(question, cluster=Cluster((devices,), cluster.target))
        devices *= 2
    for part in cluster.first_nodes():
        yield replace(question, cluster=part)


def check_limited(question: PlanQuestion) -> None:
    """Refuse to look for the largest batch without a memory limit.

    Raises:
        PlanError: ``plan-extent``.
    """
    if question.limit_bytes is None:
        raise PlanError.of(
            f"target={question.cluster.target!r} has no limit, so no batch is the largest; "
            "give --memory.",
            "plan-extent",
        )


def largest_batch(
    ask: Ask,
    settled: Ask,
    question: PlanQuestion,
    microbatch_step: int,
    max_doublings: int = 20,
    is_settled: Callable[[StageAnswer], bool] = lambda result: not result.extrapolated,
) -> tuple[Attempt | None, tuple[Attempt, ...]]:
    """Find the largest global batch that fits at a number of micro-batches, and give all attempts.

    Micro-batches grow in steps: doubled until nothing is predicted to fit, then bisected. From
    where that ends, settled answers are asked for, in steps that double until one fits and the next
    does not, then bisected. **Assumes** that a larger micro-batch never needs less.

    Args:
        ask: Answers with predictions.
        settled: The same, so that the answer stands.
        question: But for the global batch.
        microbatch_step: Micro-batch sizes are multiples of it.
        max_doublings: Where doubling ends.
        is_settled: Whether a prediction stands, too: as if it was not extrapolated.

    Returns:
        None first if not even one step fits.
    """
    attempts: dict[int, Attempt] = {}

    def fits(steps: int, ask: Ask) -> bool:
        batch = steps * microbatch_step * question.num_microbatches
        asked = replace(question, global_batch_size=batch)
        attempts[steps] = Attempt(asked, ask(asked))
        return attempts[steps].result.status == "ok"

    def fits_settled(steps: int) -> bool:
        if steps in attempts and is_settled(attempts[steps].result):
            return attempts[steps].result.status == "ok"
        return fits(steps, settled)

    most = (2 << max_doublings) - 1
    guess = last_that_holds(lambda steps: fits(steps, ask), 1, most)
    best = last_that_holds(fits_settled, max(1, guess), most)
    return attempts.get(best), tuple(attempts.values())
