"""Train an array of models on one device of this process:

    train = train_array(workload, plan)
    state = train.init()
    for state, losses in train(state, batches): ...    # losses[model]
    params = train.params(state, 3)

Where the order is multiplexed, sub-array 0 is one forward pass ahead of sub-array 1: a batch is
taken from ``batches`` before the update before it is complete. When they end, the last update is
completed without another; a loop that stops earlier leaves a state that is ahead, with which
``train`` goes on, or ``finish`` ends the update that was begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from capture import environment
from capture.compiler.executable import HOST_MEMORY, Compiler
from capture.errors import ExecutionError, PlanError, Violation
from capture.model.workload import PyTree, WorkloadProtocol
from capture.plan.array import ArrayPlan, Member
from capture.plan.files import traced_for
from capture.quantities import format_bytes, nearest
from capture.runtime.array_programs import ArrayPrograms
from capture.runtime.dispatch import BoundStep, Call, Observer
from capture.runtime.fast_paths import flat_call
from capture.runtime.fused import Fuser, LayerwiseOptimizer
from capture.runtime.layout import check_host_memory, first_devices
from capture.runtime.state import joined_params, param_leaves
from capture.step.ledger import Ledger
from capture.step.multiplexed import (
    HOST,
    ArrayStep,
    ArraySteps,
    build_array,
    lifetimes,
    peak_of,
)
from capture.step.program import Run, Slot


@dataclass(frozen=True)
class ArrayState:
    """Everything that an update changes. An update takes it over: use the one that it returns.

    Attributes:
        slots: Parameters, optimizer state and, of a state that is ahead, the feature maps of
            sub-array 0, by name.
        num_steps: Complete updates.
        ahead: Of a state that is ahead, on the host: the batch of the update that was begun, and
            the losses of sub-array 0 in it.
    """

    slots: dict[str, list[jax.Array]]
    num_steps: int = 0
    ahead: tuple[Sequence[Any], Any] | None = None


class Losses(Sequence[float]):
    """Of an update, one per model; the first that is asked for waits until they are there."""

    def __init__(self, partition: Sequence[Sequence[int]], arrays: Sequence[Any]):
        self._partition, self._arrays = partition, arrays

    @cached_property
    def _values(self) -> list[float]:
        found = {
            model: float(loss)
            for group, losses in zip(self._partition, self._arrays, strict=True)
            for model, loss in zip(group, np.asarray(losses), strict=True)
        }
        return [found[model] for model in sorted(found)]

    def __getitem__(self, model):
        return self._values[model]

    def __len__(self) -> int:
        return sum(map(len, self._partition))

    def __repr__(self) -> str:
        return f"Losses({self._values})"


def train_array(
    workload: WorkloadProtocol,
    plan: ArrayPlan,
    devices: Sequence[jax.Device] | None = None,
    *,
    fast_compile: bool = False,
) -> ArrayTraining:
    """Compile a plan's programs and return its training.

    Args:
        workload: The task of the plan; its optimizer is made with ``optax.inject_hyperparams``
            where the models' hyperparameters differ.
        plan: What is fused, in which order.
        devices: The first is used; by default that of ``jax.devices()``.
        fast_compile: As for ``pipeshard``.

    Raises:
        PlanError: ``plan-other-model``, ``array-hyperparameter`` for one that the optimizer does
            not inject, ``array-bundle`` for a decision about what the model has not.
        WorkloadError: ``array-optimizer``, ``array-key``.
        ExecutionError: ``run-devices``, ``run-host-memory``.
    """
    environment.warn()
    (device,) = first_devices(devices, 1)
    swaps = any(decision.choice == "swap" for own in plan.decisions for decision in own)
    kinds = {memory.kind for memory in device.addressable_memories()}
    if swaps and HOST_MEMORY not in kinds:
        raise ExecutionError.of(
            f"devices of platform {device.platform} have no memory of kind {HOST_MEMORY}, to which "
            "the plan swaps; run it on GPUs, TPUs or CPU devices.",
            "run-host-memory",
        )
    fuser = traced_for(
        plan,
        workload,
        lambda: Fuser(
            workload,
            plan.batch_size,
            plan.num_layers,
            shared_batches=plan.shared_batches,
            bundle_bytes=plan.bundle_bytes,
        ),
        lambda fuser: fuser.traced.graph,
    )
    programs = ArrayPrograms(device, Compiler(fast_compile=fast_compile))
    return ArrayTraining(fuser, programs, plan, device)


class ArrayTraining:
    """The training of an array of models. Made by ``train_array``.

    Attributes:
        plan, device: As given.
        fuser: Of the models; with the plan's numbers.
        programs: What is compiled.
        arrays: By sub-array, its models as one program.
    """

    def __init__(self, fuser: Fuser, programs: ArrayPrograms, plan: ArrayPlan, device: Any):
        self.fuser, self.programs, self.plan, self.device = fuser, programs, plan, device
        self.traced, self.optimizer = fuser.traced, fuser.optimizer
        PlanError.check(hyperparameter_violations(self.optimizer, plan.models))
        self.arrays = [fuser.of(len(group)) for group in plan.partition]
        self._bound: dict[int, BoundStep] = {}

    def of(self, plan: ArrayPlan) -> ArrayTraining:
        """That of another plan for the same models and batches: what is compiled, is."""
        same = ("batch_size", "shared_batches", "bundle_bytes", "num_layers")
        other = [name for name in same if getattr(plan, name) != getattr(self.plan, name)]
        assert not other, f"plans that share programs differ in {other}"
        traced_for(plan, self.fuser.workload, lambda: self.traced.graph)
        return ArrayTraining(self.fuser, self.programs, plan, self.device)

    @cached_property
    def steps(self) -> ArraySteps:
        """The instructions; all programs are compiled when they are made."""
        decided = [
            lifetimes(array, chosen)
            for array, chosen in zip(self.arrays, self.plan.decisions, strict=True)
        ]
        limit = self.plan.memory_limit_bytes
        return build_array(decided, self.plan.order, self.programs, limit)

    def replay(self) -> tuple[Ledger, ...]:
        """The ledgers of all steps, without running them."""
        return self.steps.replay()

    # ---- state -----------------------------------------------------------------------------------

    def init(self) -> ArrayState:
        """Fresh parameters and optimizer states, every model's by its own seed."""
        seeds = [member.seed for member in self.plan.models]
        return self.init_from([self.fuser.workload.init(jax.random.key(seed)) for seed in seeds])

    def init_from(self, params: Sequence[PyTree]) -> ArrayState:
        """The state of trainings that begin at the given parameters.

        Raises:
            ExecutionError: ``run-params`` naming every parameter that the model does not have so,
                ``array-count`` unless there is one tree per model.
        """
        _check_count("params", params, len(self.plan.models))
        leaves = [param_leaves(self.traced, tree) for tree in params]
        begin = jax.jit(self.fuser.workload.optimizer.init)
        given = [member.hyperparameters for member in self.plan.models]
        states = [
            jax.tree.leaves(
                self.optimizer.with_hyperparameters(begin(self.traced.split_params(tree)), values)
            )
            for tree, values in zip(params, given, strict=True)
        ]
        slots: dict[str, list[jax.Array]] = {}
        for name, a, bundle in self._state_slots:
            slot = self.steps.body.step.slots[self.steps.body.step.persistent[name]]
            sharding = self.programs.sharding(slot.place)
            group, own = self.plan.partition[a], []
            for is_state, index in self._origins[a, bundle]:
                of = states if is_state else leaves
                stacked = np.stack([np.asarray(of[model][index]) for model in group])
                own.append(jax.device_put(stacked, sharding, may_alias=False))
            slots[name] = own
        return ArrayState(slots)

    def params(self, state: ArrayState, model: int) -> PyTree:
        """One model's parameters, as the workload's ``init`` returns them."""
        found = self._leaves(state, model, of_state=False)
        return joined_params(self.traced, found)

    def optimizer_state(self, state: ArrayState, model: int) -> PyTree:
        """One model's optimizer state, as optax holds it over ``traced.split_struct``."""
        found = self._leaves(state, model, of_state=True)
        return self.optimizer.sliced.unflatten_state([found[n] for n in sorted(found)])

    def _leaves(self, state: ArrayState, model: int, of_state: bool) -> dict[int, np.ndarray]:
        if not 0 <= model < len(self.plan.models):
            raise ExecutionError.of(
                f"model={model} is not of this array; models run from 0 to "
                f"{len(self.plan.models) - 1}.",
                "array-count",
            )
        a = next(a for a, group in enumerate(self.plan.partition) if model in group)
        row = self.plan.partition[a].index(model)
        return {
            index: np.array(array[row])
            for name, other, bundle in self._state_slots
            if other == a
            for (is_state, index), array in zip(
                self._origins[a, bundle], map(np.asarray, state.slots[name]), strict=True
            )
            if is_state == of_state
        }

    @cached_property
    def _state_slots(self) -> list[tuple[str, int, int]]:
        """Name, sub-array and bundle."""
        body = self.steps.body
        named = [(name, *body.keys[slot]) for name, slot in body.step.persistent.items()]
        return [(name, a, n) for name, a, n in named if self.arrays[a].bundles[n].is_state]

    @cached_property
    def _origins(self) -> dict[tuple[int, int], list[tuple[bool, int]]]:
        """By sub-array and bundle of state: whether of the optimizer, and which leaf."""
        found = {}
        for a, array in enumerate(self.arrays):
            of = {value: (False, index) for index, value in enumerate(array.params)}
            for stage, values in zip(self.optimizer.sliced.stages, array.state, strict=True):
                of |= {v: (True, leaf) for leaf, v in zip(stage.state, values, strict=True)}
            for number, bundle in enumerate(array.bundles):
                if bundle.is_state:
                    found[a, number] = [of[value] for value in array.values[number]]
        return found

    # ---- execution -------------------------------------------------------------------------------

    def __call__(
        self, state: ArrayState, batches: Iterable[Any]
    ) -> Iterator[tuple[ArrayState, Losses]]:
        """One update of every model per batch.

        Args:
            state: Consumed by the first update, as each one's by the next.
            batches: Of every update a sequence of one batch per model, or one for all where the
                plan shares them; on the host or a device. A multiplexed order takes one more than
                it has completed updates.

        Yields:
            The state after the update, and the losses, which need not be ready yet.

        Raises:
            ExecutionError: ``run-batch``, ``array-count``, ``array-state``.
        """
        for batch in batches:
            state, losses = self.advance(state, batch)
            if losses is not None:
                yield state, losses
        if state.ahead is not None:
            yield self.finish(state)

    def step_of(self, state: ArrayState) -> ArrayStep:
        """The instructions that ``advance`` executes."""
        steps = self.steps
        return steps.body if state.ahead is not None or not steps.prologue else steps.prologue

    def advance(
        self, state: ArrayState, batch: Any, *, observer: Observer | None = None
    ) -> tuple[ArrayState, Losses | None]:
        """Take one batch.

        Args:
            state, batch: As for the training itself.
            observer: Called before every instruction.

        Returns:
            The state, and the losses of the update that is complete; None if it was only begun.
        """
        begun = [] if state.ahead is None else [state.ahead[0]]
        batches = [*begun, self._stacked(batch)]
        return self._execute(self.step_of(state), state, batches, observer)

    def finish(
        self, state: ArrayState, *, observer: Observer | None = None
    ) -> tuple[ArrayState, Losses]:
        """Complete the update that a state is ahead by.

        Raises:
            ExecutionError: ``array-state`` if it is not.
        """
        if state.ahead is None or self.steps.epilogue is None:
            raise ExecutionError.of(
                "the state is not ahead: no update was begun that is not complete.", "array-state"
            )
        state, losses = self._execute(self.steps.epilogue, state, [state.ahead[0]], observer)
        assert losses is not None, "an epilogue completes an update"
        return state, losses

    def _execute(
        self,
        built: ArrayStep,
        state: ArrayState,
        batches: Sequence[Sequence[Any]],
        observer: Observer | None,
    ) -> tuple[ArrayState, Losses | None]:
        self._check_state(built, state)
        slots, reported = self._bind(built)(
            state.slots,
            batches,
            bound_run_ahead=self.device.platform == "cpu",
            observer=observer,
        )
        losses = dict(zip(built.reported, reported, strict=True))
        begins = self.steps.prologue is not None and built is not self.steps.epilogue
        ahead = (batches[-1], losses[0]) if begins else None
        if built is self.steps.prologue:
            return ArrayState(slots, state.num_steps, ahead), None
        if state.ahead is not None:
            losses[0] = state.ahead[1]
        done = Losses(self.plan.partition, [losses[a] for a in range(len(self.arrays))])
        return ArrayState(slots, state.num_steps + 1, ahead), done

    def _check_state(self, built: ArrayStep, state: ArrayState) -> None:
        named = set(built.step.persistent)
        deleted = [name for name, own in state.slots.items() for x in own if x.is_deleted()]
        if set(state.slots) != named or deleted:
            said = "was already taken over by an update" if deleted else "is of another plan"
            raise ExecutionError.of(
                f"the state {said}; go on with the one that this training returned last, or begin "
                "with train.init().",
                "array-state",
            )

    def _stacked(self, batch: Any) -> list[Any]:
        """Leaves of all sub-arrays, on the host."""
        plan, graph = self.plan, self.traced.graph
        if plan.shared_batches:
            leaves = self._checked(batch, "the batch")
            return [leaf for _ in plan.partition for leaf in leaves]
        _check_count("batch", batch, len(plan.models))
        own = [self._checked(one, f"the batch of model {m}") for m, one in enumerate(batch)]
        return [
            np.stack([own[model][leaf] for model in group])
            for group in plan.partition
            for leaf in range(len(graph.batch))
        ]

    def _checked(self, batch: Any, name: str) -> list[np.ndarray]:
        leaves = [np.asarray(leaf) for leaf in self.traced.batch_leaves(batch)]
        ExecutionError.check(
            Violation(
                f"{tensor.name} of {name} has shape {leaf.shape} {leaf.dtype}; the plan's has "
                f"{tuple(tensor.shape)} {tensor.dtype}.",
                "run-batch",
            )
            for tensor, leaf in zip(self.traced.graph.batch, leaves, strict=True)
            if leaf.shape != tuple(tensor.shape) or str(leaf.dtype) != tensor.dtype
        )
        return leaves

    # ---- binding ---------------------------------------------------------------------------------

    def _bind(self, built: ArrayStep) -> BoundStep:
        if id(built) not in self._bound:
            self._check_memory()
            calls = {name: self._call(built, name) for name in built.step.programs}
            slots = {slot.name: number for number, slot in enumerate(built.step.slots)}

            def layout(slot: Slot) -> list[jax.ShapeDtypeStruct]:
                a, bundle = built.keys[slots[slot.name]]
                sharding = self.programs.sharding(slot.place)
                return self.programs.structs(self.arrays[a], bundle, sharding)

            self._bound[id(built)] = BoundStep(built.step, calls, layout)
        return self._bound[id(built)]

    def _call(self, built: ArrayStep, name: str) -> Call:
        call = flat_call(self.programs.executables[name].call)
        run = next(
            each
            for each in built.step.instructions
            if isinstance(each, Run) and each.program == name
        )
        keys = [built.keys[slot] for slot in run.outputs]
        sizes = [len(self.arrays[a].values[bundle]) for a, bundle in keys]

        def cut(flat: list[jax.Array]) -> list[list[jax.Array]]:
            results, found, start = call(flat), [], 0
            for size in sizes:
                found.append(results[start : start + size])
                start += size
            return found

        return cut

    def transient_bytes(self, run: Run) -> int:
        """What the program that an instruction runs needs beside its operands."""
        return self.programs.executables[run.program].transient_bytes

    def _check_memory(self) -> None:
        """Refuse what the plan's limit does not hold, or the host may not.

        Raises:
            ExecutionError: ``array-device-memory``, ``run-host-memory``.
        """
        limit, ledgers = self.plan.memory_limit_bytes, self.replay()
        check_host_memory(self.device, peak_of(ledgers, HOST)[0])
        fullest = max((led.peak_of(0) for led in ledgers), key=lambda peak: peak.peak_bytes)
        if limit is not None and fullest.peak_bytes > limit:
            parts = ", ".join(f"{what} {format_bytes(n)}" for what, n in fullest.parts.items())
            raise ExecutionError.of(
                f"the device needs {format_bytes(fullest.peak_bytes)} at {fullest.instant!r} "
                f"({parts}), and the plan's limit is memory_limit_bytes={limit}; plan it again for "
                "this machine, or raise the limit.",
                "array-device-memory",
            )


def _check_count(what: str, given: Any, count: int) -> None:
    if not isinstance(given, Sequence) or len(given) != count:
        had = len(given) if isinstance(given, Sequence) else f"a {type(given).__name__}"
        raise ExecutionError.of(
            f"{what} is {had}; give a sequence of {count}, one per model.", "array-count"
        )


def hyperparameter_violations(optimizer: LayerwiseOptimizer, models: Sequence[Member]):
    """Values for what the optimizer does not take."""
    known = optimizer.hyperparameters
    wanted = dict.fromkeys(name for member in models for name in member.hyperparameters)
    for name in wanted:
        if name not in known:
            yield Violation(
                f"the models set {name!r}, and the optimizer injects "
                f"{', '.join(sorted(known)) or 'nothing'}; make it with "
                f"optax.inject_hyperparams(...)({name}=...).{nearest(name, (*known, 'seed'))}",
                "array-hyperparameter",
            )
