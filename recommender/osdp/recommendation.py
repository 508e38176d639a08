"""The sharding plan of a training task: trace, search, and ask the target's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from capture.errors import TargetError
from capture.machine.cluster import Machine
from capture.machine.target import Target
from capture.model.operators import Operator
from capture.plan.sharding import OperatorCost, ShardingPlan
from capture.plan.why import Why
from capture.quantities import counted, format_bytes, format_rate
from capture.step.attribution import attribute_operators
from capture.step.operator_cost import StepCost
from capture.step.sharded import build_step
from recommender.answer import Answer
from recommender.osdp.over_step import OverStep, interval_of, reserved_fraction
from recommender.osdp.question import ShardingQuestion
from recommender.osdp.result import ShardingResult
from recommender.osdp.verified import fastest_compiled

#: Of sharding plans.
ShardingAnswer = Answer[ShardingPlan, ShardingResult]


_LEFT_FREE = (
    "; steps with jax.checkpoint were seen to compile to 1.27 times their estimate, so {:.0%} of "
    "the limit is left free"
)


def costs_of(question: ShardingQuestion) -> tuple[Any, StepCost]:
    """Return the operators of a workload (``capture.tracing.operators``), and what they cost on the
    devices.

    Raises:
        As ``osdp``.
    """
    from capture.tracing.operators import traced_operators

    cluster, dtype = question.cluster, question.dtype
    products = Target.load(cluster.target).products
    operators = traced_operators(question.workload, "traced", products=products)
    machine = Machine.of(
        cluster, *((dtype, "highest") if dtype else (operators.dtype, operators.precision))
    )
    question.check_dtype()
    if question.partly:
        from capture.runtime.sharded.placement import check_partly

        check_partly(
            question.workload.optimizer,
            operators.traced,
            machine.num_devices,
            question.smallest_bytes,
        )
    if question.limit_bytes is not None:
        machine = machine.with_limit(question.limit_bytes)
    return operators, StepCost(
        operators.sharded_over(machine.num_devices, question.smallest_bytes),
        machine,
        question.granularities,
        question.remat,
        question.overlap_fraction,
        node_groups=question.node_groups,
        partly=question.partly,
    )


def osdp(
    question: ShardingQuestion,
    *,
    verify: bool = True,
    watch: Callable[[str], None] = lambda text: None,
    left_out: str = "verify=False",
) -> ShardingAnswer:
    """Choose for every operator of a loss whether to replicate, shard or split its parameters, for
    the largest throughput that fits.

    Args:
        question: What is asked.
        verify: Whether the workload's whole train step is compiled for the target, up to six times,
            seconds to a minute each, until a plan is found that compiles within the limit. Where
            the target's compiler is not installed, or refuses the step, the plan is an estimate
            with an interval (``over_step.interval_of``), and ``why.uncompiled`` says so.
        watch: Is told what is being done, in words.
        left_out: How it was asked not to verify, as whoever asked wrote it.

    Returns:
        A plan that ``capture.shard`` trains with; ``infeasible`` if none fits.

    Raises:
        TargetError: ``osdp-dtype``, and those of ``Machine.of``;
        ClusterError: ``osdp-nodes``; TracingError: those of ``trace``;
        WorkloadError: ``optimizer-rows``, of ``partly``.

    Source: Jiang et al. 2023 (OSDP), 3.3 and Figure 3.
    """
    operators, cost = costs_of(question)
    described, memory = cost.machine.target, cost.machine.memory_limit_bytes
    described_by = _described(question, operators, cost)
    sizes = question.smallest_bytes, question.batch_size, question.max_batch_size
    search = OverStep(cost, operators, *sizes)
    found, uncompiled = None, None if verify else left_out
    if verify:
        try:
            measure = _measuring(question, described, operators, described_by)
            found = fastest_compiled(search.fastest, search.least, measure, memory, watch)
        except TargetError as error:
            uncompiled = str(error)
            watch(f"not compiled: {uncompiled}")
    checkpointed = any(operator.again_bytes for operator in _all(cost))
    known = described.platform, operators.dtype, checkpointed
    reserved = reserved_fraction(*known)
    if uncompiled and checkpointed:
        uncompiled += _LEFT_FREE.format(reserved)
    found = found or search.fastest(memory * (1 - reserved))
    if found.plan is None:
        return Answer("infeasible", None, found, Why(found.why or "", uncompiled=uncompiled))
    of_model = {"model_hash": operators.traced.graph.model_hash, "cluster": question.cluster}
    plan = replace(found.plan, **described_by, **of_model)
    plan = replace(plan, costs=tuple(_costs(cost, plan)))
    if not plan.compiled:
        plan = replace(plan, interval_bytes=interval_of(plan.peak_bytes, *known))
    why = Why(_summary(plan, described.name, uncompiled), uncompiled=uncompiled)
    limit = None if question.limit_bytes is None else int(question.limit_bytes)
    return Answer(found.status, plan, found, why, plan.headroom(limit))


def _described(question: ShardingQuestion, operators: Any, cost: StepCost) -> dict[str, Any]:
    """Return the fields that every plan of the search gets: names of operators and parameters,
    remat, the smallest size to shard, and whether gathers look ahead."""
    return {
        "names": tuple(operator.name for operator in _all(cost)),
        "params": operators.names,
        "remat": question.remat,
        "smallest_bytes": question.smallest_bytes,
        "look_ahead": question.overlap_fraction > 0,
    }


def _measuring(
    question: ShardingQuestion,
    target: Target,
    operators: Any,
    described_by: Mapping[str, Any],
) -> Callable[[ShardingPlan], int]:
    """Return a function that compiles a plan's train step and returns how many bytes it needs."""
    from capture.profiler.sharded_step import StepCompiler
    from capture.runtime.sharded import Sharded

    compiler = StepCompiler(target, question.where)

    def measure(plan: ShardingPlan) -> int:
        whole = replace(plan, **described_by)
        step = Sharded(question.workload, whole, compiler.mesh, operators.traced)
        return compiler.measure(step)[0]

    return measure


def _summary(plan: ShardingPlan, target: str, uncompiled: str | None) -> str:
    modes = ", ".join(
        f"{count} {name}" for name, count in plan.summary()["operators_by_mode"].items()
    )
    estimated = format_bytes(plan.peak_bytes)
    memory = f"{estimated} per device ({plan.peaks.how}, by what other steps needed; {uncompiled})"
    if plan.compiled_peak_bytes is not None:
        compiled = format_bytes(plan.compiled_peak_bytes)
        memory = f"{compiled} per device as compiled for {target} (estimated: {estimated})"
    batch = f"{counted(plan.batch_size, 'example')} per device"
    speed = f"{batch}, {format_rate(plan.examples_per_second)} examples/s"
    return f"{counted(len(plan.modes), 'operator')}: {modes}; {speed}, {memory}"


def _costs(model: StepCost, plan: ShardingPlan) -> Iterator[OperatorCost]:
    at_peak = attribute_operators(build_step(model, plan.modes, plan.batch_size, plan.names)).layers
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
