"""From a training task to a sharding plan: trace, search, and ask the target's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from capture.errors import TargetError
from capture.machine.cluster import Machine
from capture.machine.target import Target
from capture.model.operators import Operator
from capture.plan.sharding import OperatorCost, ShardingPlan
from capture.quantities import format_bytes
from capture.step.attribution import attribute_keys
from capture.step.operator_cost import StepCost
from capture.step.sharded import build_step
from recommender.osdp.over_step import fastest_over_step, least_over_step, reserved_fraction
from recommender.osdp.question import ShardingQuestion
from recommender.osdp.result import ShardingResult
from recommender.osdp.verified import fastest_compiled


@dataclass(frozen=True, eq=False)
class OsdpResult:
    """The answer to a question of ``osdp``, as data; ``capture.shard`` trains with its plan.

    Attributes:
        search: The answer of the search. Where it is infeasible, ``why`` says what is missing, and
            there is no plan.
        plan: Batch size and modes, with the names of operators and parameters; it can be saved.
        cost: The model of costs that it was chosen by.
        target: Whose compiler was asked, or was not.
        unverified_why: Why the plan was not compiled, where it was not.
    """

    search: ShardingResult
    plan: ShardingPlan | None
    cost: StepCost
    target: str
    unverified_why: str | None

    @property
    def status(self) -> str:
        return self.search.status

    @property
    def why(self) -> str | None:
        return self.search.why

    @property
    def verified(self) -> bool:
        """Whether the train step of the plan was compiled, and needs no more than the limit."""
        return self.compiled_peak_bytes is not None

    @property
    def estimated_peak_bytes(self) -> int | None:
        """Of a device, by the model of costs; None without a plan."""
        return None if self.plan is None else self.plan.peak_bytes

    @property
    def compiled_peak_bytes(self) -> int | None:
        """Of a device, by the target's compiler; None if it was not asked."""
        return None if self.plan is None else self.plan.compiled_peak_bytes

    def __str__(self) -> str:
        if self.plan is None:
            return f"infeasible: {self.why}"
        plan = self.plan
        modes = ", ".join(
            f"{count} {name}" for name, count in plan.summary()["operators_by_mode"].items()
        )
        memory = (
            f"{format_bytes(plan.peak_bytes)} per device (estimated, not compiled: "
            f"{self.unverified_why})"
        )
        if plan.compiled_peak_bytes is not None:
            compiled = format_bytes(plan.compiled_peak_bytes)
            memory = (
                f"{compiled} per device as compiled for {self.target} (estimated: "
                f"{format_bytes(plan.peak_bytes)})"
            )
        speed = f"{plan.batch_size} examples per device, {plan.examples_per_second:.4g} examples/s"
        return f"{len(plan.modes)} operators: {modes}; {speed}, {memory}"


def osdp(
    question: ShardingQuestion,
    *,
    verify: bool = True,
    watch: Callable[[str], None] = lambda text: None,
) -> OsdpResult:
    """Choose for every operator of a loss whether to replicate, shard or split its parameters, for
    the largest throughput that fits.

    Args:
        question: What is asked.
        verify: Whether the workload's whole train step is compiled for the target, up to six times,
            seconds to a minute each, until a plan is found that compiles within the limit. Where
            the target's compiler is not installed, or refuses the step, the plan is an estimate,
            and ``unverified_why`` says so.
        watch: Is told what is being done, in words.

    Returns:
        The result; ``infeasible`` with ``why`` if no plan fits.

    Raises:
        TargetError: ``osdp-dtype``, and those of ``Machine.of``;
        ClusterError: ``osdp-nodes``; TracingError: those of ``trace``.

    Source: Jiang et al. 2023 (OSDP), 3.3 and Figure 3.
    """
    from capture.tracing.operators import traced_operators

    workload, where, dtype = question.workload, question.where, question.dtype
    described = Target.load(question.cluster.target)
    operators = traced_operators(workload, "traced", products=described.products)
    machine = Machine.of(
        question.cluster, *((dtype, "highest") if dtype else (operators.dtype, operators.precision))
    )
    question.check_dtype()
    if question.limit_bytes is not None:
        machine = machine.with_limit(question.limit_bytes)
    smallest_bytes, batch_size = question.smallest_bytes, question.batch_size
    cost = StepCost(
        operators.sharded_over(machine.num_devices, smallest_bytes),
        machine,
        question.granularities,
        question.remat,
        question.overlap_fraction,
        node_groups=question.node_groups,
        partly=question.partly,
    )
    memory = machine.memory_limit_bytes
    described_by: dict[str, Any] = {
        "names": tuple(operator.name for operator in _all(cost)),
        "params": operators.names,
        "remat": question.remat,
        "smallest_bytes": smallest_bytes,
        "look_ahead": question.overlap_fraction > 0,
    }

    def fastest(limit: float) -> ShardingResult:
        return fastest_over_step(
            cost, operators, smallest_bytes, limit, batch_size, question.max_batch_size
        )

    def least() -> ShardingPlan:
        return least_over_step(cost, operators, smallest_bytes, batch_size or 1)

    found, unverified_why = None, None if verify else "verify=False"
    if verify:
        from capture.profiler.sharded_step import StepCompiler
        from capture.runtime.sharded import Sharded

        try:
            compiler = StepCompiler(described, where)

            def measure(plan: ShardingPlan) -> int:
                whole = replace(plan, **described_by)
                return compiler.measure(Sharded(workload, whole, compiler.mesh, operators.traced))[
                    0
                ]

            found = fastest_compiled(fastest, least, measure, memory, watch)
        except TargetError as error:
            unverified_why = str(error)
            watch(f"not compiled: {unverified_why}")
    found = found or fastest(memory * (1 - reserved_fraction(described.platform, operators.dtype)))
    plan = None if found.plan is None else replace(found.plan, **described_by)
    plan = plan and replace(plan, cluster=question.cluster, costs=tuple(_costs(cost, plan)))
    return OsdpResult(found, plan, cost, described.name, unverified_why)


def _costs(model: StepCost, plan: ShardingPlan) -> Iterator[OperatorCost]:
    at_peak = attribute_keys(build_step(model, plan.modes, plan.batch_size, plan.names)).layers
    for i, (operator, mode) in enumerate(zip(_all(model), plan.modes, strict=True)):
        cost = model.cost(operator, mode, plan.batch_size)
        yield OperatorCost(
            operator.parameter_bytes + operator.replicated_bytes,
            float(cost.resident_bytes),
            float(cost.transient_bytes),
            float(cost.seconds),
            at_peak.get(i, {}),
        )


def _all(cost: StepCost) -> tuple[Operator, ...]:
    (block,) = cost.model.blocks
    return block.operators
