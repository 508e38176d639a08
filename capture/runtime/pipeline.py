"""Run a plan on the devices of this process: ``step = pipeshard(workload, plan); state, metrics = step(state, batch)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from capture.errors import ExecutionError, PlanError, Violation
from capture.graph import Tensor
from capture.interface import owned_and_borrowed, plan_interfaces
from capture.ledger import Ledger
from capture.plan import Plan
from capture.runtime.optimizer import SlicedOptimizer, TracedOptimizer
from capture.runtime.programs import Executable, StagePrograms
from capture.runtime.reshard import reshard
from capture.runtime.sharding import ModelSharding
from capture.runtime.tensor_parallel import Rule
from capture.step import Feed, Free, Instruction, Move, Run, StepProgram, build_step, replay
from capture.tracing import TracedModel, trace
from capture.workload import PyTree, WorkloadProtocol

Observer = Callable[[Instruction, list[Any]], None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """Everything a step changes, on the devices of the stages. A step takes it over: use the one that it returns.

    Attributes:
        slots: Per persistent slot of the step program, its arrays: parameters, optimizer state, gradient accumulators.
        num_steps: Updates so far.
    """

    slots: dict[str, list[jax.Array]]
    num_steps: int = field(metadata={"static": True}, default=0)


@dataclass(frozen=True)
class StepMetrics:
    """What a step reports.

    Attributes:
        losses: Per micro-batch, still on the device; ``loss`` waits for them.
    """

    losses: list[jax.Array]

    @property
    def loss(self) -> float:
        """Mean over the micro-batches."""
        return float(np.mean([np.asarray(loss) for loss in self.losses]))


def pipeshard(
    workload: WorkloadProtocol, plan: Plan, devices: Sequence[jax.Device] | None = None, rule: Rule | None = None
) -> PipelinedStep:
    """Compile a plan's stages and return its training step.

    Args:
        workload: The task of the plan.
        plan: Device id i of the plan is ``devices[i]``.
        devices: By default the first devices of ``jax.devices()``.
        rule: How parameters are split; by default ``plan.tensor_parallel_rule``.

    Returns:
        ``step(state, batch)`` or ``step(state, batch, key)``, with ``step.init(key)``.

    Raises:
        PlanError: ``plan-other-model`` if the plan was made for another model, ``plan-num-layers``.
        ExecutionError: ``run-devices`` if there are fewer devices than the plan uses.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < plan.cluster.num_devices:
        raise ExecutionError.of(
            f"the plan uses {plan.cluster.num_devices} devices and this process has {len(devices)} ({devices[0].platform}); on CPU set "
            f"--xla_force_host_platform_device_count={plan.cluster.num_devices} in XLA_FLAGS before JAX loads (capture run does).",
            "run-devices",
        )
    traced = trace_for_plan(workload, plan)
    return PipelinedStep(workload, plan, traced, list(devices), ModelSharding(traced, rule or plan.tensor_parallel_rule))


def trace_for_plan(workload: WorkloadProtocol, plan: Plan) -> TracedModel:
    """The model cut into the plan's layers, at the plan's micro-batch size.

    Raises:
        PlanError: ``plan-other-model`` or ``plan-num-layers`` if it is not the model that the plan was made for.
    """
    traced = trace(workload, plan.microbatch_size, plan.num_layers if plan.auto_layers else None)
    violations = []
    if traced.graph.num_layers != plan.num_layers:
        violations.append(
            Violation(
                f"the plan has num_layers={plan.num_layers} and the model {traced.graph.num_layers}; plan this model again.",
                "plan-num-layers",
            )
        )
    elif plan.model_hash and traced.graph.model_hash != plan.model_hash:
        violations.append(
            Violation(
                f"the plan was made for model_hash={plan.model_hash} and this model has {traced.graph.model_hash}: the model, its shapes or "
                "the version of JAX changed. Plan it again with capture plan.",
                "plan-other-model",
            )
        )
    PlanError.check(violations)
    return traced


class PipelinedStep:
    """A compiled training step of a plan. Made by ``pipeshard``."""

    def __init__(self, workload: WorkloadProtocol, plan: Plan, traced: TracedModel, devices: list[Any], sharding: ModelSharding):
        self.workload, self.plan, self.traced = workload, plan, traced
        graph = traced.graph
        owned = [owned_and_borrowed(graph, stage.first, stage.stop) for stage in plan.stages]
        unused = set(range(len(graph.params))) - {p for own, _ in owned for p in own}
        partition = [own for own, _ in owned] + [tuple(sorted(unused))] * bool(unused)
        self.optimizer = SlicedOptimizer(TracedOptimizer(workload.optimizer, traced.split_struct), partition)
        borrowers = [p for _, borrowed in owned for p in borrowed]
        self.stages = [
            StagePrograms(
                graph,
                traced.slice(stage.first, stage.stop),
                [devices[d] for d in stage.devices],
                stage.data_parallel,
                stage.tensor_parallel,
                sharding.specs(stage.tensor_parallel),
                self.optimizer.stages[s],
                remat=stage.remat,
                shard_optimizer=stage.shard_optimizer,
                num_arriving={p: borrowers.count(p) for p in borrowers},
                num_microbatches=plan.num_microbatches,
            )
            for s, stage in enumerate(plan.stages)
        ]
        self._param_bytes = {stage.tensor_parallel: sharding.param_bytes(stage.tensor_parallel) for stage in plan.stages}

    @cached_property
    def program(self) -> StepProgram:
        """The step's instructions; compiles every stage."""
        costs = [stage.cost for stage in self.stages]
        return build_step(plan_interfaces(self.plan, self.traced.graph, self._param_bytes, costs), self.plan.schedule_table)

    def replay(self, *, record_timeline: bool = False) -> Ledger:
        """The ledger of a step, without running it."""
        return replay(self.program, self.plan.cluster.num_devices, record_timeline=record_timeline)

    # ---- state -----------------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Fresh parameters and optimizer state from the workload's ``init``."""
        return self.init_from(self.workload.init(key))

    def init_from(self, params: PyTree) -> PipelineState:
        """The state of a training that begins at the given parameters (a pytree as ``workload.init`` returns)."""
        leaves = jax.tree.leaves(self.traced.split_params(params))
        optimizer = []
        for stage in self.stages:
            own = [jax.ShapeDtypeStruct(leaves[p].shape, leaves[p].dtype) for p in stage.owned]
            shardings = [stage.state_sharding(k) for k in stage.optimizer.state]
            init = jax.jit(stage.optimizer.init, out_shardings=shardings)
            arrays = [jax.device_put(np.asarray(leaves[p]), stage.param_sharding(p)) for p in stage.owned]
            optimizer.append(init(arrays) if own or shardings else [])
        return self._state(leaves, optimizer, 0)

    def restore(self, params: PyTree, optimizer_state: PyTree, num_steps: int = 0) -> PipelineState:
        """The state from whole-model trees, as ``params`` and ``optimizer_state`` of any plan of this model return them."""
        leaves = jax.tree.leaves(self.traced.split_params(params))
        state_leaves = jax.tree.leaves(optimizer_state)
        optimizer = [
            [jax.device_put(np.asarray(state_leaves[k]), stage.state_sharding(k)) for k in stage.optimizer.state] for stage in self.stages
        ]
        return self._state(leaves, optimizer, num_steps)

    def _state(self, leaves: Sequence[Any], optimizer: Sequence[list[jax.Array]], num_steps: int) -> PipelineState:
        slots = {}
        # From the host: an array that is already on the device would alias the caller's, and the first update would delete it.
        for (name, s), slot in self.program.persistent.items():
            stage = self.stages[s]
            if name == "optimizer":
                arrays = optimizer[s]
            else:
                param = None if name in ("params", "gradients") else int(name.removeprefix("param").removeprefix("gradient"))
                params = stage.owned if param is None else (param,)
                arrays = [
                    jax.device_put(
                        np.zeros(leaves[p].shape, leaves[p].dtype) if name.startswith("gradient") else np.asarray(leaves[p]),
                        stage.param_sharding(p),
                    )
                    for p in params
                ]
            slots[self.program.slots[slot].name] = arrays
        return PipelineState(slots, num_steps)

    def params(self, state: PipelineState) -> PyTree:
        """The whole model's parameters on the host, as the workload's ``init`` returns them."""
        leaves: list[Any] = [np.zeros(p.shape, p.dtype) for p in self.traced.graph.params]
        for s, stage in enumerate(self.stages):
            for p, array in zip(stage.owned, state.slots[f"params@{s}"], strict=True):
                leaves[p] = np.asarray(array)
        tree = jax.tree.structure(self.traced.split_struct)
        return self.traced.join_params(tree.unflatten(leaves))

    def gradients(self, state: PipelineState) -> PyTree:
        """The gradient accumulators on the host, shaped like the parameters; zero between steps."""
        leaves: list[Any] = [np.zeros(p.shape, p.dtype) for p in self.traced.graph.params]
        for s, stage in enumerate(self.stages):
            for p, array in zip(stage.owned, state.slots[f"gradients@{s}"], strict=True):
                leaves[p] = leaves[p] + np.asarray(array)
            for p in stage.borrowed:
                leaves[p] = leaves[p] + np.asarray(state.slots[f"gradient{p}@{s}"][0])
        return self.traced.join_params(jax.tree.structure(self.traced.split_struct).unflatten(leaves))

    def optimizer_state(self, state: PipelineState) -> PyTree:
        """The whole model's optimizer state on the host, as optax holds it over ``TracedModel.split_struct``."""
        leaves: list[Any] = [np.zeros(s.shape, s.dtype) for s in self.optimizer.state_structs]
        for s, stage in enumerate(self.stages):
            for k, array in zip(stage.optimizer.state, state.slots[f"optimizer@{s}"], strict=True):
                leaves[k] = np.asarray(array)
        return self.optimizer.unflatten_state(leaves)

    # ---- execution -------------------------------------------------------------------------------------------------

    def __call__(
        self, state: PipelineState, batch: PyTree, key: jax.Array | None = None, *, observer: Observer | None = None
    ) -> tuple[PipelineState, StepMetrics]:
        """One update.

        Args:
            state: Consumed: its arrays are donated.
            batch: A global batch on the host or a device, as ``workload.batch(key, global_batch_size)`` returns it.
            key: Of the step, if the loss takes one; micro-batch m uses ``jax.random.fold_in(key, m)``.
            observer: Called before every instruction with the instruction and the environment, for meters and checks.

        Returns:
            The new state and the metrics; nothing waits for the devices.

        Raises:
            ExecutionError: ``run-batch`` if the batch has other shapes than the plan's.
        """
        return self._execute(state, batch, key, observer, len(self.program.instructions))

    def accumulate(self, state: PipelineState, batch: PyTree, key: jax.Array | None = None) -> tuple[PipelineState, StepMetrics]:
        """The passes of a step without its updates: the gradients stay in the accumulators (see ``gradients``)."""
        return self._execute(state, batch, key, None, self.program.num_passes)

    def _execute(
        self, state: PipelineState, batch: PyTree, key: jax.Array | None, observer: Observer | None, stop: int
    ) -> tuple[PipelineState, StepMetrics]:
        program = self.program
        microbatches = self._microbatches(batch, key)
        environment: list[Any] = [None] * len(program.slots)
        for slot in program.persistent.values():
            environment[slot] = state.slots[program.slots[slot].name]
        losses: list[jax.Array] = []
        for instruction in program.instructions[:stop]:
            if observer is not None:
                observer(instruction, environment)
            match instruction:
                case Run():
                    self._run(instruction, environment, losses)
                case Move():
                    environment[instruction.target] = self._move(instruction, environment[instruction.source])
                case Feed(slot=slot, microbatch=m, batch=leaves):
                    stage = self.stages[program.slots[slot].stage_id]
                    environment[slot] = [jax.device_put(microbatches[m][b], stage.batch_sharding(b)) for b in leaves]
                case Free(slots=slots):
                    for slot in slots:
                        environment[slot] = None
        slots = {program.slots[slot].name: environment[slot] for slot in program.persistent.values()}
        return PipelineState(slots, state.num_steps + (stop == len(program.instructions))), StepMetrics(losses)

    def _microbatches(self, batch: PyTree, key: jax.Array | None) -> list[list[Any]]:
        """Per micro-batch, its leaves on the host (and its random key)."""
        return split_microbatches(self.traced, self.plan.num_microbatches, batch, key)

    def executable(self, run: Run) -> Executable:
        """The compiled program that an instruction runs."""
        return getattr(self.stages[run.stage_id], run.program)

    def _run(self, run: Run, environment: list[Any], losses: list[jax.Array]) -> None:
        stage = self.stages[run.stage_id]
        if run.program == "update":
            *groups, others = run.inputs
            args = [*_lists(groups, environment), [environment[slot] for slot in others]]
        else:
            args = _lists(run.inputs, environment)
        results = self.executable(run).call(*args)
        for slot in run.donated:
            environment[slot] = None
        match run.program:
            case "forward":
                outputs, residuals = results
                made = [*([a] for a in outputs), residuals]
                if stage.is_last:
                    losses.append(outputs[0])
            case "backward":
                gradients, accumulated = results
                count = len(stage.owned)
                made = [*([a] for a in gradients), accumulated[:count], *([a] for a in accumulated[count:])]
            case "update":
                params, optimizer, cleared, borrowed = results
                made = [params, optimizer, cleared, *([a] for a in borrowed)]
            case _:
                made = [results]
        for slot, arrays in zip(run.outputs, made, strict=True):
            environment[slot] = arrays

    def _move(self, move: Move, arrays: list[jax.Array]) -> list[jax.Array]:
        stage = self.stages[self.program.slots[move.target].stage_id]
        match move.kind:
            case "value":
                sharding = stage.value_sharding(move.key)
            case "param":
                sharding = stage.param_sharding(move.key)
            case _:
                sharding = stage.replicated
        chosen = arrays if move.index is None else [arrays[move.index]]
        return [reshard(array, sharding) for array in chosen]


def split_microbatches(traced: TracedModel, num_microbatches: int, batch: PyTree, key: jax.Array | None) -> list[list[Any]]:
    """Per micro-batch, the leaves of ``graph.batch`` on the host, the micro-batch's own key last if the loss takes one.

    Args:
        traced: At the micro-batch size.
        num_microbatches: M; leaf dimensions that hold the examples are cut into M equal parts, other leaves are shared.
        batch: A global batch.
        key: Of the step; micro-batch m gets ``jax.random.fold_in(key, m)``.

    Raises:
        ExecutionError: ``run-batch`` naming every leaf of another shape or dtype.
    """
    tensors = traced.graph.batch
    host = jax.tree.map(np.asarray, batch)
    result = []
    for m in range(num_microbatches):
        own = None if key is None else jax.random.fold_in(key, m)
        leaves = traced.batch_leaves(host, own)
        if m == 0:
            ExecutionError.check(_batch_violations(tensors, leaves, num_microbatches))
        result.append([_part(leaf, tensor, m) for leaf, tensor in zip(leaves, tensors, strict=True)])
    return result


def _part(leaf: Any, tensor: Tensor, microbatch: int) -> Any:
    if tensor.batch_dim is None:
        return leaf
    size = tensor.shape[tensor.batch_dim]
    return leaf[(slice(None),) * tensor.batch_dim + (slice(microbatch * size, (microbatch + 1) * size),)]


def _batch_violations(tensors: Sequence[Tensor], leaves: Sequence[Any], num_microbatches: int) -> list[Violation]:
    found = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        expected = tuple(size * num_microbatches if d == tensor.batch_dim else size for d, size in enumerate(tensor.shape))
        if tuple(leaf.shape) != expected or str(leaf.dtype) != tensor.dtype:
            found.append(
                Violation(
                    f"{tensor.name} has shape {tuple(leaf.shape)} {leaf.dtype}; the plan was made for {expected} {tensor.dtype} "
                    f"({num_microbatches} micro-batches).",
                    "run-batch",
                )
            )
    return found


def _lists(groups: Sequence[tuple[int, ...]], environment: list[Any]) -> list[list[Any]]:
    """The arguments of a program: per group, the arrays of its slots in one list."""
    return [[array for slot in group for array in environment[slot]] for group in groups]
