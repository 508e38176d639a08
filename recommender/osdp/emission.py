"""From a training task to a sharded one: trace, search, and hand out shardings and the transformed
loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from capture.errors import PlanError, TargetError
from capture.machine.cluster import Cluster, Machine
from capture.machine.target import Target
from capture.model.operators import Operator
from capture.model.workload import WorkloadProtocol
from capture.plan.sharding import Mode, OperatorCost, ShardingPlan
from capture.quantities import format_bytes
from capture.step.operator_cost import StepCost
from recommender.osdp.over_step import fastest_over_step, least_over_step, reserved_fraction
from recommender.osdp.question import ShardingQuestion
from recommender.osdp.result import ShardingResult
from recommender.osdp.verified import fastest_compiled


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """One operator of a plan, on every device.

    Attributes:
        name, mode: Of the operator.
        parameter_bytes, resident_bytes, transient_bytes, seconds: See ``OperatorCost``.
    """

    name: str
    mode: Mode
    parameter_bytes: int
    resident_bytes: float
    transient_bytes: float
    seconds: float


@dataclass(frozen=True, eq=False)
class OsdpResult:
    """What to train with: use it in place of the shardings of fully sharded data parallelism.

    Attributes:
        search: The answer of the search. Where it is infeasible, ``why`` says what is missing, and
            there is no plan and nothing to emit.
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
    _workload: WorkloadProtocol
    _operators: Any
    _where: Any

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

    @cached_property
    def mesh(self) -> Any:
        """The mesh that was given; for a cluster, one of this process's devices."""
        from capture.runtime.sharded.emission import mesh_of

        return mesh_of(self._where) if isinstance(self._where, Cluster) else self._where

    @cached_property
    def emission(self) -> Any:
        """The plan on the mesh (``capture.runtime.sharded.emission.Emission``).

        Raises:
            PlanError: ``osdp-infeasible`` if there is no plan.
        """
        from capture.runtime.sharded.emission import Emission

        if self.plan is None:
            raise PlanError.of(f"there is no plan to emit: {self.why}", "osdp-infeasible")
        return Emission(self.plan, self.mesh, self._operators, self._workload.optimizer)

    def shardings(self, params: Any = None) -> Any:
        """See ``Emission.shardings``."""
        return self.emission.shardings(params)

    @property
    def opt_state_shardings(self) -> Any:
        """See ``Emission.opt_state_shardings``."""
        return self.emission.opt_state_shardings

    @property
    def batch_sharding(self) -> Any:
        """See ``Emission.batch_sharding``."""
        return self.emission.batch_sharding

    @property
    def replicated(self) -> tuple[str, ...]:
        """See ``Emission.replicated``."""
        return self.emission.replicated

    def transform(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """See ``Emission.transform``."""
        return self.emission.transform(loss_fn, has_aux)

    def split(self, params: Any) -> Any:
        """See ``Emission.split``."""
        return self.emission.split(params)

    def join(self, params: Any) -> Any:
        """See ``Emission.join``."""
        return self.emission.join(params)

    @property
    def rows(self) -> list[OperatorRow]:
        """The plan's operators in program order; none without a plan."""
        if self.plan is None:
            return []
        each = zip(self.plan.names, self.plan.modes, self.plan.costs, strict=True)
        return [OperatorRow(name, mode, **vars(cost)) for name, mode, cost in each]

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
    emitted: dict[str, Any] = {
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
        from capture.runtime.sharded.emission import Emission

        try:
            compiler = StepCompiler(described, where)

            def measure(plan: ShardingPlan) -> int:
                emission = Emission(
                    replace(plan, **emitted), compiler.mesh, operators, workload.optimizer
                )
                return compiler.measure(workload, emission, plan.batch_size)[0]

            found = fastest_compiled(fastest, least, measure, memory, watch)
        except TargetError as error:
            unverified_why = str(error)
            watch(f"not compiled: {unverified_why}")
    found = found or fastest(memory * (1 - reserved_fraction(described.platform, operators.dtype)))
    plan = None if found.plan is None else replace(found.plan, **emitted)
    plan = plan and replace(plan, cluster=question.cluster, costs=tuple(_costs(cost, plan)))
    return OsdpResult(found, plan, cost, described.name, unverified_why, workload, operators, where)


def _costs(model: StepCost, plan: ShardingPlan) -> Iterator[OperatorCost]:
    for operator, mode in zip(_all(model), plan.modes, strict=True):
        cost = model.cost(operator, mode, plan.batch_size)
        yield OperatorCost(
            operator.parameter_bytes + operator.replicated_bytes,
            float(cost.resident_bytes),
            float(cost.transient_bytes),
            float(cost.seconds),
        )


def _all(cost: StepCost) -> tuple[Operator, ...]:
    (block,) = cost.model.blocks
    return block.operators
