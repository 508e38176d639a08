"""Run a plan on the devices of this process, or of several, each of which executes its part: ``step
= pipeshard(workload, plan); state, metrics = step(state, batch)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from capture import environment
from capture.compiler.executable import Compiler, Executable
from capture.measured.profile import StageConfig
from capture.model.workload import PyTree, WorkloadProtocol
from capture.partition.sharding import ModelSharding
from capture.partition.tensor_parallel import Rule
from capture.plan.files import traced_for
from capture.plan.kinds import of_stages
from capture.plan.stages import Plan
from capture.runtime.batch_parts import Need, needs_of
from capture.runtime.dispatch import BoundStep
from capture.runtime.frame import Observer
from capture.runtime.layout import check_hosts, first_devices, on_host
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer
from capture.runtime.programs import StagePrograms
from capture.runtime.split_backward import SplitStagePrograms
from capture.runtime.state import PipelineState, joined_params
from capture.runtime.train_step import StepMetrics, TrainStep
from capture.step.evaluation import build_evaluation
from capture.step.interface import StageInterface, owned_and_borrowed, plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import Place, Run, Slot, Step
from capture.tracing import TracedModel, trace

if TYPE_CHECKING:
    from capture.runtime.hosts.part import StepPart
    from capture.runtime.multihost import Hosts


def pipeshard(
    workload: WorkloadProtocol,
    plan: Plan,
    devices: Sequence[jax.Device] | None = None,
    rule: Rule | None = None,
    *,
    fast_compile: bool = False,
    hosts: Hosts | None = None,
) -> PipelinedStep:
    """Compile a plan's stages and return its training step.

    Args:
        workload: The task of the plan.
        plan: Device id i of the plan is ``devices[i]``.
        devices: By default the first devices of ``jax.devices()``; of several processes, those that
            ``hosts`` has for the plan.
        rule: How parameters are split; by default ``plan.tensor_parallel_rule``.
        fast_compile: Compile in half the time, to programs that need the same memory and run
            slower.
        hosts: The processes that share the plan, one per node (``capture.runtime.multihost``); None
            for this one alone.

    Returns:
        ``step(state, batch)`` or ``step(state, batch, key)``, with ``step.init(key)``.

    Raises:
        PlanError: ``plan-other-model`` if the plan was made for another model.
        ExecutionError: ``run-devices`` if there are fewer devices than the plan uses; ``run-hosts``
            and ``run-hosts-differ`` of processes that cannot share it; ``run-host-memory`` where a
            stage keeps something on a host and its devices cannot use that.
    """
    environment.warn()
    of_stages(plan)
    found = (
        first_devices(devices, plan.cluster.num_devices) if hosts is None else hosts.devices(plan)
    )
    if any(stage.offload for stage in plan.stages):
        check_hosts([device for device in found if device.process_index == jax.process_index()])
    traced = trace_for_plan(workload, plan)
    if hosts is not None:
        hosts.compare({"model_hash": traced.graph.model_hash})
    sharding = ModelSharding(traced, rule or cast(Rule, plan.tensor_parallel_rule))
    return PipelinedStep(workload, plan, traced, found, sharding, fast_compile, hosts)


def trace_for_plan(workload: WorkloadProtocol, plan: Plan) -> TracedModel:
    """Trace the model at the plan's micro-batch size and cut it into the plan's layers.

    Raises:
        PlanError: ``plan-other-model`` if it is not the model that the plan was made for.
    """
    num_layers = plan.num_layers if plan.auto_layers else None
    size, unmarked = plan.microbatch_size, plan.num_layers
    made = partial(trace, workload, size, num_layers, unmarked_layers=unmarked)
    return traced_for(plan, workload, made, lambda traced: traced.graph)


class PipelinedStep(TrainStep):
    """A compiled training step of a plan of stages. Made by ``pipeshard``."""

    def __init__(
        self,
        workload: WorkloadProtocol,
        plan: Plan,
        traced: TracedModel,
        devices: list[jax.Device],
        sharding: ModelSharding,
        fast_compile: bool = False,
        hosts: Hosts | None = None,
    ):
        self.workload, self.plan, self.traced = workload, plan, traced
        self.devices, self.hosts = devices, hosts
        self.parts: dict[int, StepPart] = {}
        self.microbatch_sizes = (plan.microbatch_size,) * plan.num_microbatches
        graph = traced.graph
        owned = [owned_and_borrowed(graph, stage.first, stage.stop) for stage in plan.stages]
        self.unused = graph.unread_params
        partition = [own for own, _ in owned] + [self.unused] * bool(self.unused)
        self.optimizer = SlicedOptimizer(
            traced_optimizer(workload.optimizer, traced, self.unused), partition
        )
        borrowers = [p for _, borrowed in owned for p in borrowed]
        compiler = Compiler(fast_compile=fast_compile)
        programs = SplitStagePrograms if plan.schedule_table.splits_backward else StagePrograms
        self.stages = [
            programs(
                traced,
                StageConfig.of(stage, plan.microbatch_size),
                [devices[d] for d in stage.devices],
                sharding,
                self.optimizer.stages[s],
                num_arriving={p: borrowers.count(p) for p in borrowers},
                num_microbatches=plan.num_microbatches,
                compiler=compiler,
            )
            for s, stage in enumerate(plan.stages)
        ]
        self._param_bytes = {
            split: sharding.param_bytes(split)
            for split in {stage.choice.param_split for stage in plan.stages}
        }
        self._graph = sharding.graph(stage.choice for stage in plan.stages)

    @property
    def own_stages(self) -> list[tuple[int, StagePrograms]]:
        """The stages with devices of this process, with their numbers."""
        return [
            (s, stage)
            for s, stage in enumerate(self.stages)
            if self.hosts is None or self.hosts.has(stage.mesh)
        ]

    @cached_property
    def program(self) -> Step:
        return self._shared(self.program_of_one_process)

    @cached_property
    def program_of_one_process(self) -> Step:
        """The step's instructions as one process runs them, without waits for other hosts."""
        return build_step(self._interfaces, self.plan.schedule_table)

    @cached_property
    def evaluation(self) -> Step:
        """The instructions of ``evaluate``, whose replay says what it needs."""
        return self._shared(build_evaluation(self._interfaces, self.plan.schedule_table))

    def _shared(self, step: Step) -> Step:
        """Return a step as several processes execute it, if they do."""
        if self.hosts is None:
            return step
        part = self.hosts.part(step, self.layout, self.devices)
        self.parts[id(part.step)] = part
        return part.step

    @cached_property
    def _interfaces(self) -> list[StageInterface]:
        costs = {s: stage.cost for s, stage in self.own_stages}
        if self.hosts is not None:
            costs = self.hosts.costs(costs)
        ordered = [costs[s] for s in range(len(self.stages))]
        return plan_interfaces(self.plan, self._graph, self._param_bytes, ordered)

    def stage_of(self, place: Place) -> int:
        """Return the number of the stage that a place of the step is of."""
        return self.program_of_one_process.places.index(place) % len(self.stages)

    def layout(self, slot: Slot) -> Sequence[jax.ShapeDtypeStruct]:
        found = self.stages[self.stage_of(slot.place)].structs(slot.holds)
        return found if slot.place.host is None else list(map(on_host, found))

    def executable(self, run: Run) -> Executable:
        call = self.program.programs[run.program].call
        return getattr(self.stages[call.stage], call.kind)

    def owned(self, state: PipelineState, category: str, s: int) -> list[jax.Array]:
        """Return what a stage of this process owns of a state: its ``parameters``, or the state of
        its ``optimizer``."""
        own = (n for n, slot in self._kept.items() if self.stage_of(slot.place) == s)
        return state.slots[next(name for name in own if self._kept[name].category == category)]

    # ---- execution -------------------------------------------------------------------------------

    def needs(self) -> PyTree:
        """Return what this process reads of a global batch: a tree like it, of ``Need``.

        Example::

            batch = jax.tree.map(lambda need, leaf: need.part(leaf), step.needs(), whole)
        """
        return self.traced.batch_of(self._needs)

    @cached_property
    def _needs(self) -> list[Need]:
        own = [stage for _, stage in self.own_stages]
        return needs_of(self.traced.graph, self.plan.num_microbatches, own)

    def evaluate(
        self,
        state: PipelineState,
        batch: PyTree,
        key: jax.Array | None = None,
        *,
        observer: Observer | None = None,
    ) -> StepMetrics:
        """Compute the loss of a batch: the forward passes of a step alone, by the same programs.

        Args:
            state: Not consumed.
            batch, key, observer: As for a step.

        Raises:
            ExecutionError: ``run-batch``, ``run-state``, ``run-state-consumed``.
        """
        _, metrics = self._execute(self._evaluation, state, batch, key, observer=observer)
        if self.bound_run_ahead:  # the next step waits for its state alone
            jax.block_until_ready(metrics.losses)
        return metrics

    def accumulate(
        self, state: PipelineState, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, StepMetrics]:
        """Run the passes of a step without its updates: return the gradients on the host, shaped
        like the parameters, and the metrics. The state is not consumed."""
        stop = self.program.num_passes
        slots, metrics = self._execute(self.bound, state, batch, key, stop=stop)
        found = {p: np.zeros_like(array) for p, array in state.unused.items()}
        sums = [slot for slot in self.program.slots if slot.category == "gradients"]
        sums.sort(key=lambda slot: self.stage_of(slot.place))  # the owner is the first
        for slot, arrays in self._whole(slots, sums):
            for p, gradient in zip(slot.holds.ids, arrays, strict=True):
                found[p] = found[p] + gradient if p in found else gradient
        return joined_params(self.traced, found), metrics

    def first_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> PyTree:
        return self.accumulate(self.init_from(params), batch, key)[0]

    def _execute(self, *given: Any, **options: Any) -> tuple[Any, StepMetrics]:
        slots, metrics = super()._execute(*given, **options)
        if self.hosts is not None:
            last = self.stages[-1]
            structs = last.value_structs(last.layers.outputs) * self.plan.num_microbatches
            metrics = replace(metrics, losses=self.hosts.broadcast(metrics.losses, structs))
        return slots, metrics

    @cached_property
    def _evaluation(self) -> BoundStep:
        return self.bind(self.evaluation)
