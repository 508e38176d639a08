"""The fastest plan whose compiled step stays within the limit: what the compiler says counts, not
the estimate.

An estimate follows operators and knows little of what a compiler fuses, keeps and schedules, so it
may be too low by a third. But plans of one model that are close to one another are off alike: by as
many bytes where only modes differ, by as large a part where the batch does. Every round compiles
the step of the best plan for a budget, and asks again with

    budget = the lesser of  limit - (compiled - estimated),  limit x estimated / compiled

until a plan fits, then once more where that leaves memory unused. If no estimate fits the budget
any more, the plan that needs least by estimate has the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from capture.plan.headroom import HOPELESS
from capture.plan.sharding import ShardingPlan
from capture.quantities import counted, format_bytes
from recommender.osdp.result import ShardingResult

#: Plans that are compiled, at most, before the one that needs least.
_MOST_ROUNDS = 4
#: Of the limit, what may be left unused before a larger budget is tried, and how far a budget stays
#: below what was scaled.
_CLOSE = 1 / 50


def fastest_compiled(
    question: Callable[[float], ShardingResult],
    least: Callable[[], ShardingPlan],
    measure: Callable[[ShardingPlan], int],
    limit: float,
    watch: Callable[[str], None],
) -> ShardingResult:
    """Search for the fastest plan among those that compile within the limit;
    ``plan.compiled_peak_bytes`` says with how many bytes.

    By how much an estimate is off, in bytes or as a factor, changes little from plan to plan. So
    after a plan that needs too much, the budget shrinks by the worse of the two and a little more,
    and after one that leaves memory it grows once, below the estimates of all that were above.

    Args:
        question: The fastest plan whose estimate is within so many bytes.
        least: The plan of the least estimate.
        measure: Bytes of a plan's compiled step.
        limit: Memory of a device, in bytes.
        watch: Is told what is being done.

    Returns:
        ``infeasible`` with ``why`` where also the plan that needs least is above the limit.
    """
    compiled: dict[ShardingPlan, int] = {}

    def ask(plan: ShardingPlan) -> int:
        if plan not in compiled:
            compiled[plan] = _measured(plan, measure, limit, watch)
        return compiled[plan]

    first = found = question(limit * (1 - _CLOSE / 2))
    for _ in range(_MOST_ROUNDS):
        if found.plan is None or ask(found.plan) <= limit:
            break
        found = question(_scaled(limit, found.plan, compiled[found.plan]) * (1 - _CLOSE))
    if found.plan is None or ask(found.plan) > limit:
        plan = least()
        if plan.peak_bytes > HOPELESS * limit:
            return first
        if ask(plan) > limit:
            return replace(
                first, status="infeasible", plan=None, why=_why(plan, compiled[plan], limit)
            )
        found = replace(first, status="ok", plan=plan, why=None)
    best = found.plan
    assert best is not None, "a plan fits"
    if compiled[best] < (1 - _CLOSE) * limit:
        beyond = min(
            (plan.peak_bytes for plan, nbytes in compiled.items() if nbytes > limit),
            default=float("inf"),
        )
        larger = question(min(_scaled(limit, best, compiled[best]), beyond) * (1 - _CLOSE / 2)).plan
        if (
            larger is not None
            and larger.seconds_per_example < best.seconds_per_example
            and ask(larger) <= limit
        ):
            best = larger
    return replace(found, plan=replace(best, compiled_peak_bytes=compiled[best]))


def _measured(
    plan: ShardingPlan,
    measure: Callable[[ShardingPlan], int],
    limit: float,
    watch: Callable[[str], None],
) -> int:
    """Compile a plan's step, tell ``watch`` about it, and return its bytes."""
    watch(
        f"compiling the train step of a plan for {counted(plan.batch_size, 'example')} per device, "
        f"estimated at {format_bytes(plan.peak_bytes)} per device ..."
    )
    nbytes = measure(plan)
    verdict = "within" if nbytes <= limit else "above"
    watch(
        f"compiled: {format_bytes(nbytes)} per device, {verdict} the limit of "
        f"{format_bytes(int(limit))}"
    )
    return nbytes


def _scaled(limit: float, plan: ShardingPlan, nbytes: int) -> float:
    return min(limit - (nbytes - plan.peak_bytes), limit * plan.peak_bytes / nbytes)


def _why(plan: ShardingPlan, nbytes: int, limit: float) -> str:
    examples = f"{counted(plan.batch_size, 'example')} per device"
    return (
        f"{examples}: the train step of the plan that needs least compiles to "
        f"{nbytes:,} bytes (estimated {plan.peak_bytes:,}), {int(nbytes - limit):,} above the "
        f"limit of {int(limit):,}. Raise it, use more "
        "devices, more slices per operator, or rematerialisation. [memory-limit]"
    )
