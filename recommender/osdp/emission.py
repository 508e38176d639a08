"""From a training task to a sharding plan: trace, search, and ask the target's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from capture.errors import ClusterError, PlanError, TargetError, Violation
from capture.machine.cluster import Cluster, Machine
from capture.machine.target import Target
from capture.model.operators import Operator
from capture.model.workload import WorkloadProtocol
from capture.plan.sharding import Mode, ShardingPlan
from capture.quantities import format_bytes, parse_bytes
from capture.step.operator_cost import PAPER_GRANULARITY, StepCost
from recommender.osdp.over_step import fastest_over_step, least_over_step, reserved_fraction
from recommender.osdp.result import ShardingResult
from recommender.osdp.verified import fastest_compiled

#: Smaller parameters are replicated: gathering one takes as long as latency allows, and a thousand
#: of them are 4 GB at most with Adam.
SMALLEST_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class OperatorRow:
    """One operator of a plan, on every device.

    Attributes:
        name, mode: Of the operator.
        parameter_bytes: Of all of its parameters, unsharded.
        resident_bytes, transient_bytes, seconds: See ``Cost``.
    """

    name: str
    mode: Mode
    parameter_bytes: int
    resident_bytes: float
    transient_bytes: float
    seconds: float


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

    @property
    def rows(self) -> list[OperatorRow]:
        """The plan's operators in program order; none without a plan."""
        return (
            []
            if self.plan is None
            else [
                self._row(*row)
                for row in zip(_all(self.cost), self.plan.names, self.plan.modes, strict=True)
            ]
        )

    def _row(self, operator: Operator, name: str, mode: Mode) -> OperatorRow:
        assert self.plan is not None
        cost = self.cost.cost(operator, mode, self.plan.batch_size)
        total = operator.parameter_bytes + operator.replicated_bytes
        return OperatorRow(
            name,
            mode,
            total,
            float(cost.resident_bytes),
            float(cost.transient_bytes),
            float(cost.seconds),
        )

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
    workload: WorkloadProtocol,
    where: Any,
    memory_limit: str | float | None = None,
    *,
    target: str | None = None,
    devices_per_node: int | None = None,
    batch_size: int | None = None,
    max_batch_size: int | None = None,
    granularities: tuple[int, ...] = (1, PAPER_GRANULARITY),
    partly: bool = False,
    remat: bool = False,
    overlap_fraction: float = 0.0,
    smallest_bytes: int = SMALLEST_BYTES,
    dtype: str | None = None,
    verify: bool = True,
    watch: Callable[[str], None] = lambda text: None,
) -> OsdpResult:
    """Choose for every operator of a loss whether to replicate, shard or split its parameters, for
    the largest throughput that fits.

    Args:
        workload: The task; nothing is allocated. Where the loop's own loss returns ``(loss, aux)``
            or takes more arguments, that of the workload is the scalar alone, and the loop's is
            given to ``Sharded.transform``.
        where: A ``Cluster``, or a ``jax.sharding.Mesh`` whose axes are all data-parallel.
        memory_limit: Per device, in bytes or as text ("30GiB"); None: what the target can use. The
            compiled step stays within it; a plan that is not compiled leaves a part of it to the
            compiler (``reserved_fraction``).
        target: Rates and memory of the mesh's devices, such as ``"h100"``; a cluster names its own.
        devices_per_node: Of a mesh; None: those of a process.
        batch_size: Examples per device; None to choose it.
        max_batch_size: The largest to choose from.
        granularities: Slices per operator to choose from; 1 is unsplit.
        partly: Whether k of g slices may be sharded: such leaves become two arrays (``split``).
        remat: Whether the backward pass computes every operator again from its input. The model's
            own ``jax.checkpoint`` needs no option.
        overlap_fraction: Of computation and communication, what hides the other (``StepCost``).
            Above 0, the forward pass may gather an operator's parameters while the one before it
            runs; backwards, gathers and reduce-scatters run beside the two products of their own
            operator in any case, as far as XLA can.
        smallest_bytes: Smaller parameters are replicated.
        dtype: Whose rate products have, also ``"tf32"`` where the target has it; None: that in
            which the target computes most of the loss's products at the precision that they ask for
            (``Rates.computed_in``).
        verify: Whether the workload's whole train step is compiled for the target, up to six times,
            seconds to a minute each, until a plan is found that compiles within the limit. Where
            the target's compiler is not installed, or refuses the step, the plan is an estimate,
            and ``unverified_why`` says so.
        watch: Is told what is being done, in words.

    Returns:
        The result; ``infeasible`` with ``why`` if no plan fits.

    Raises:
        TargetError: ``osdp-target`` for a mesh without a target, ``osdp-dtype``, and those of
            ``Machine.of``;
        ClusterError: ``osdp-where``, ``osdp-nodes``;
        PlanError: ``memory-syntax``, ``osdp-limit``, ``osdp-batch-size``, ``osdp-granularity``,
            ``osdp-smallest``; TracingError: those of
        ``trace``.

    Source: Jiang et al. 2023 (OSDP), 3.3 and Figure 3.
    """
    from capture.runtime.sharded.mesh import cluster_of, has_groups
    from capture.tracing.operators import traced_operators

    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    PlanError.check(
        _wrong(
            limit,
            {"batch_size": batch_size, "max_batch_size": max_batch_size},
            granularities,
            smallest_bytes,
        )
    )
    cluster = where
    if not isinstance(where, Cluster):
        if not hasattr(where, "devices"):
            raise ClusterError.of(
                f"{where!r} is neither a cluster nor a mesh; give Cluster.parse('1x8', 'h100') or "
                "a mesh.",
                "osdp-where",
            )
        cluster = cluster_of(where, _named(target), devices_per_node)
    described = Target.load(cluster.target)
    operators = traced_operators(workload, "traced", products=described.products)
    machine = Machine.of(
        cluster, *((dtype, "highest") if dtype else (operators.dtype, operators.precision))
    )
    if (
        dtype is not None
        and described.rates is not None
        and dtype not in described.rates.flops_per_second
    ):
        known = ", ".join(described.rates.flops_per_second)
        raise TargetError.of(
            f"dtype={dtype!r} has no rate in target={cluster.target!r}; choose one of {known}.",
            "osdp-dtype",
        )
    if limit is not None:
        machine = machine.with_limit(limit)
    cost = StepCost(
        operators.sharded_over(machine.num_devices, smallest_bytes),
        machine,
        granularities,
        remat,
        overlap_fraction,
        node_groups=isinstance(where, Cluster) or has_groups(where, machine.devices_per_node),
        partly=partly,
    )
    memory = machine.memory_limit_bytes
    described_by: dict[str, Any] = {
        "names": tuple(operator.name for operator in _all(cost)),
        "params": operators.names,
        "remat": remat,
        "smallest_bytes": smallest_bytes,
        "look_ahead": overlap_fraction > 0,
    }

    def question(limit: float) -> ShardingResult:
        return fastest_over_step(cost, operators, smallest_bytes, limit, batch_size, max_batch_size)

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

            found = fastest_compiled(question, least, measure, memory, watch)
        except TargetError as error:
            unverified_why = str(error)
            watch(f"not compiled: {unverified_why}")
    found = found or question(memory * (1 - reserved_fraction(described.platform, operators.dtype)))
    plan = None if found.plan is None else replace(found.plan, **described_by)
    return OsdpResult(found, plan, cost, described.name, unverified_why)


def _wrong(
    limit: float | None,
    batch_sizes: Mapping[str, int | None],
    granularities: tuple[int, ...],
    smallest_bytes: int,
) -> Iterator[Violation]:
    if limit is not None and not 0 < limit < float("inf"):
        yield Violation(
            f"memory_limit={limit} is no memory of a device; give bytes, more than 0.", "osdp-limit"
        )
    for name, size in batch_sizes.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            yield Violation(
                f"{name}={size!r} is no batch per device; give a whole number, at least 1.",
                "osdp-batch-size",
            )
    if (
        not isinstance(granularities, Sequence)
        or not granularities
        or any(not isinstance(g, int) or g < 0 for g in granularities)
    ):
        yield Violation(
            f"granularities={granularities!r} are no numbers of slices; give some, such as (1, "
            "4); 1 is unsplit.",
            "osdp-granularity",
        )
    if smallest_bytes < 0:
        yield Violation(
            f"smallest_bytes={smallest_bytes} is no size; give 0 or more.", "osdp-smallest"
        )


def _named(target: str | None) -> str:
    if target is None:
        raise TargetError.of(
            'a mesh does not say how fast its devices are; give target=, such as "h100".',
            "osdp-target",
        )
    return target


def _all(cost: StepCost) -> tuple[Operator, ...]:
    (block,) = cost.model.blocks
    return block.operators
