"""The result of every search of OSDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from capture.documents import fields_of
from capture.plan.sharding import Mode, ShardingPlan
from recommender.osdp.problem import Options, ShardingProblem


@dataclass(frozen=True)
class ShardingResult:
    """The result of a search for a sharding: a plan, and how far it is proven.

    Attributes:
        status: ``infeasible`` if no plan fits, even for one example per device; ``why`` then says
            what is missing.
        plan: The fastest per example; None if infeasible.
        algorithm: Name of the answer.
        optimal: Whether no plan is faster per example.
        num_explored: Nodes or partial sums that were looked at.
        num_batch_sizes: Batch sizes that something fits.
        bound_fraction: The least time per example is proven to be at least that of the plan / (1 +
            bound_fraction); 0 if optimal, infinite if nothing is proven.
        seconds: Wall time of the search.
        why: Set exactly if infeasible.
    """

    status: Literal["ok", "infeasible"]
    plan: ShardingPlan | None
    algorithm: str
    optimal: bool
    num_explored: int
    num_batch_sizes: int
    bound_fraction: float = 0.0
    seconds: float = 0.0
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("seconds", "algorithm", "optimal", "num_explored", "num_batch_sizes")
        return fields_of(self, *names, "bound_fraction")


def plan_of(
    problem: ShardingProblem, batch_size: int, options: Options, chosen: Sequence[Sequence[int]]
) -> ShardingPlan:
    """Return the plan of a choice of options.

    Args:
        problem: What was asked.
        batch_size: Examples per device.
        options: At that batch size.
        chosen: By kind of operators, the option of each of them, in program order.
    """
    model = problem.cost.model
    modes: list[Mode] = [Mode()] * model.num_operators
    seconds, resident, transient = 0.0, 0.0, 0.0
    for kind, ((first, _), picks) in enumerate(zip(model.counts, chosen, strict=True)):
        positions = [
            i for i, operator in enumerate(model.operators) if operator is model.operators[first]
        ]
        for position, pick in zip(positions, picks, strict=True):
            modes[position] = options.modes[kind][pick]
            seconds += float(options.seconds[kind, pick])
            resident += float(options.resident_bytes[kind, pick])
            transient = max(transient, float(options.transient_bytes[kind, pick]))
    return ShardingPlan(
        batch_size,
        tuple(modes),
        seconds,
        int(resident + transient),
        problem.cost.machine.num_devices * batch_size / seconds,
    )


def answer(
    problem: ShardingProblem,
    plan: ShardingPlan | None,
    *,
    algorithm: str,
    optimal: bool,
    num_explored: int,
    num_batch_sizes: int,
    bound_fraction: float = 0.0,
) -> ShardingResult:
    """Return the result for the best plan found. ``search`` fills in the seconds."""
    if plan is not None:
        return ShardingResult(
            "ok", plan, algorithm, optimal, num_explored, num_batch_sizes, bound_fraction
        )
    if num_batch_sizes:
        why = (
            "The search stopped at its limit of nodes before it met a plan; raise the limit. "
            "[search-stopped]"
        )
    else:
        why = (
            f"One example per device needs {int(problem.least_bytes):,} bytes at least, "
            f"{int(problem.least_bytes - problem.memory_limit_bytes):,} above "
            f"memory_limit_bytes={int(problem.memory_limit_bytes):,}. "
            "Raise the limit, use more devices, more slices per operator, or rematerialisation. "
            "[memory-limit]"
        )
    return ShardingResult(
        "infeasible", None, algorithm, optimal, num_explored, num_batch_sizes, why=why
    )
