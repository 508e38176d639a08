"""A compiled step that trains one model, whatever the kind of its plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from capture.compiler.executable import Executable
from capture.model.workload import PyTree, WorkloadProtocol, takes_key
from capture.runtime.batch_parts import Need
from capture.runtime.dispatch import BoundStep, placed, to_host
from capture.runtime.frame import Call, Observer
from capture.runtime.layout import check_memory
from capture.runtime.microbatches import split_examples
from capture.runtime.optimizer import SlicedOptimizer
from capture.runtime.reference import ReferenceStep
from capture.runtime.state import (
    PipelineState,
    check_state,
    joined_params,
    made_by_host,
    optimizer_leaves,
    param_leaves,
)
from capture.step.holds import Params, State
from capture.step.ledger import Ledger
from capture.step.program import Run, Slot, Step, replay
from capture.tracing import TracedModel

if TYPE_CHECKING:
    from capture.runtime.hosts.part import StepPart
    from capture.runtime.multihost import Hosts


@dataclass(frozen=True)
class StepMetrics:
    """The losses and the processor time that a step reports.

    Attributes:
        losses: Per micro-batch, still on the device; ``loss`` waits for them.
        dispatch_seconds: Processor time of the calling thread, which issues the instructions; what
            it waited for devices is not in it.
        examples: Per micro-batch; None if all have as many.
    """

    losses: list[jax.Array]
    dispatch_seconds: float
    examples: tuple[int, ...] | None = None

    @property
    def loss(self) -> float:
        """The mean loss over the examples; waits for it."""
        losses = [np.asarray(loss) for loss in self.losses]
        return float(np.average(losses, weights=self.examples))


class Metered:
    """A list of instructions that can be executed, as meters ask of it.

    Attributes:
        devices: Device i of the plan is ``devices[i]``.
        hosts: The processes that share it; None for one.
        parts: What this one executes of lists that they share, by their id.
        reads_batch: Whether it is fed with a batch.
    """

    reads_batch = True
    devices: list[Any]
    hosts: Hosts | None = None
    parts: Mapping[int, StepPart] = MappingProxyType({})

    @property
    def program(self) -> Step:
        """The instructions; compiles the programs of this process."""
        raise NotImplementedError

    def executable(self, run: Run) -> Executable:
        """Return the compiled program that an instruction runs."""
        raise NotImplementedError

    def layout(self, slot: Slot) -> Sequence[jax.ShapeDtypeStruct]:
        """Return shapes and shardings of the arrays of a slot."""
        raise NotImplementedError

    @property
    def calls(self) -> Mapping[str, Call]:
        """The programs that are called otherwise (``BoundStep``)."""
        return {}

    @cached_property
    def bound_run_ahead(self) -> bool:
        """Whether the host waits where devices would else hold more than the replay books
        (``capture.step.run_ahead``). By default it does on CPU; a GPU's allocator hands out memory
        in the order of the programs."""
        return self.devices[0].platform == "cpu"

    @cached_property
    def bound(self) -> BoundStep:
        """The instructions, bound to what they run."""
        return self.bind(self.program)

    def bind(self, step: Step) -> BoundStep:
        """Bind instructions of this step's places and programs."""
        part = self.parts.get(id(step))
        return BoundStep(step, self.executable, self.layout, part, self.calls)

    def __call__(
        self,
        state: Any,
        batch: Any,
        key: jax.Array | None = None,
        *,
        observer: Observer | None = None,
    ) -> tuple[Any, Any]:
        """Execute the instructions, and return the new state and the metrics."""
        raise NotImplementedError


class Fed(NamedTuple):
    """The input of an execution: a batch, and a random key if the loss takes one."""

    batch: Any = None
    key: jax.Array | None = None


class TrainStep(Metered):
    """A compiled step that trains one model, as meters, checkpoints and training loops ask of it.

    Attributes:
        optimizer: Cut as the plan cuts the model.
        microbatch_sizes: Examples of each, in order.
        updates_last: Whether the updates come after all passes, whatever the plan says.
        unused: Parameters of the layer graph that the loss does not read: no slot has them.
    """

    workload: WorkloadProtocol
    traced: TracedModel
    optimizer: SlicedOptimizer
    microbatch_sizes: tuple[int, ...]
    updates_last = False
    unused: Sequence[int] = ()

    def replay(self, *, record_timeline: bool = False) -> Ledger:
        """Return the ledger of a step, without running it."""
        return replay(self.program, record_timeline=record_timeline)

    # ---- a training ------------------------------------------------------------------------------

    @property
    def models(self) -> list[tuple[TracedModel, int]]:
        """The loss of each model that is trained, with its examples in a step."""
        return [(self.traced, sum(self.microbatch_sizes))]

    def first_params(self, seed: int) -> PyTree:
        """Return the parameters with which a training of a seed begins."""
        return made_by_host(self.workload.init, _keys(seed)[0])

    def executions(self, num_steps: int) -> list[Metered]:
        """Return the lists of instructions that a training of some updates executes."""
        return [self] * num_steps

    def drawn(self, seed: int, first: int) -> Iterator[PyTree]:
        """Yield the global batches that a training draws from the workload, without an end.

        Args:
            first: Updates before them; a training that goes on gets the data that come next.
        """
        key, size = _keys(seed)[1], sum(self.microbatch_sizes)

        def batch(key: jax.Array) -> PyTree:
            return self.workload.batch(key, size)

        return (made_by_host(batch, jax.random.fold_in(key, n)) for n in count(first))

    def fed(self, batches: Iterable[PyTree], seed: int, first: int) -> Iterator[Fed]:
        """Yield what each update is fed with, from its global batch.

        Args:
            batches: Global batches, of the updates from ``first`` on.
        """
        return (Fed(batch, self._key(seed, n)) for n, batch in enumerate(batches, first))

    def comparison(
        self, params: PyTree, batches: Sequence[PyTree], seed: int
    ) -> Callable[[PipelineState], dict[str, Any]]:
        """Return what compares a training with one device when it has ended, and says by how much
        losses and the gradients of the first update are off."""
        keys = [self._key(seed, n) for n in range(len(batches))]
        gradients = self.first_gradients(params, batches[0], keys[0])
        reference = ReferenceStep(self.workload, self.traced, self.microbatch_sizes)
        return lambda state: reference.compare(gradients, params, batches, keys)

    def _key(self, seed: int, update: int) -> jax.Array | None:
        """Return the random key of an update, if the loss takes one."""
        return jax.random.fold_in(_keys(seed)[2], update) if takes_key(self.workload) else None

    # ---- state -----------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> PipelineState:
        """Return fresh parameters and optimizer state from the workload's ``init``."""
        return self.init_from(made_by_host(self.workload.init, key))

    def init_from(self, params: PyTree) -> PipelineState:
        """Return the state of a training that begins at parameters as ``init`` returns them.

        Raises:
            ExecutionError: ``run-params`` naming every parameter that the model does not have so.
        """
        return self.state_from(param_leaves(self.traced, params), None, 0)

    def restore(self, params: PyTree, optimizer_state: PyTree, num_steps: int = 0) -> PipelineState:
        """Return the state from whole-model trees, as ``params`` and ``optimizer_state`` of a plan
        of any kind for this model return them.

        Raises:
            ExecutionError: ``run-params`` or ``run-optimizer`` naming every leaf that the model
                does not have so.
        """
        leaves = param_leaves(self.traced, params)
        state_leaves = optimizer_leaves(self.optimizer.state_structs, optimizer_state)
        return self.state_from(leaves, state_leaves, num_steps)

    def state_from(
        self, leaves: Sequence[object], state_leaves: Sequence[object] | None, num_steps: int
    ) -> PipelineState:
        """Return the state from host arrays: copies, since a step takes its state over.

        Args:
            leaves: By parameter of the layer graph; of several processes, those that it reads.
            state_leaves: Likewise, by leaf of the optimizer state; None: it begins.

        Raises:
            ExecutionError: ``run-device-memory`` if a GPU's allocator may take less than the step
                needs, ``run-host-memory`` of what rests on the host.
        """
        check_memory(self.devices, self.program)
        slots = {}
        for name, shardings in self.bound.state_shardings.items():
            arrays = self._leaves_in(self._kept[name], leaves, state_leaves)
            slots[name] = placed(arrays, shardings)
        return PipelineState(slots, num_steps, {p: leaves[p] for p in self.unused})

    @cached_property
    def _kept(self) -> dict[str, Slot]:
        """The slots of the state, by name; of all processes."""
        step = self.program
        return {name: step.slots[number] for name, number in step.persistent.items()}

    def _leaves_in(
        self, slot: Slot, leaves: Sequence[object], state_leaves: Sequence[object] | None
    ) -> Sequence[Any]:
        """Return the arrays of a slot of the state, of those of the whole model."""
        match slot.holds:
            case Params(ids):
                return [leaves[p] for p in ids]
            case State(params):
                update = self.optimizer.of(params)
                if state_leaves is not None:
                    return [state_leaves[k] for k in update.state]
                return made_by_host(jax.jit(update.init), [leaves[p] for p in params])
        raise AssertionError(f"{slot} holds no state")

    def _whole(
        self, slots: Mapping[str, Sequence[jax.Array]], wanted: Iterable[Slot]
    ) -> Iterator[tuple[Slot, list[Any]]]:
        """Yield slots with their arrays, whole on the host, also those of other processes; of what
        lies on the host, copies, as a step writes over it."""
        wanted = list(wanted)
        own = [slots.get(slot.name, ()) for slot in wanted]
        found: Iterable[Iterable[Any]] = (map(to_host, arrays) for arrays in own)
        if self.hosts is not None:
            found = self.hosts.gather(own, [self.layout(slot) for slot in wanted])
        for slot, arrays in zip(wanted, found, strict=True):
            yield slot, [array.copy() for array in arrays] if slot.place.host else list(arrays)

    def params(self, state: PipelineState) -> PyTree:
        """Return the whole model's parameters on the host, as the workload's ``init`` returns them.

        Several processes ask together, and each gets all; so of ``optimizer_state`` and
        ``first_gradients``.
        """
        found, parts = dict(state.unused), defaultdict[int, list[Any]](list)
        held = (slot for slot in self._kept.values() if slot.category == "parameters")
        owned = (slot for slot in held if slot.holds.form == "whole")
        for slot, arrays in self._whole(state.slots, owned):
            for p, array in zip(slot.holds.ids, arrays, strict=True):
                if p not in parts or slot.holds.share is not None:
                    parts[p].append(array)
        found |= {p: self._param(p, arrays) for p, arrays in parts.items()}
        return joined_params(self.traced, found)

    def _param(self, param: int, arrays: Sequence[object]) -> Any:
        """Return a parameter from the arrays of the slots that have it."""
        return arrays[0]

    def optimizer_state(self, state: PipelineState) -> PyTree:
        """Return the whole model's optimizer state on the host, as optax holds it over
        ``TracedModel.split_struct``.

        That of parameters that the loss does not read is zero.
        """
        found = self.state_leaves(state)
        return self.optimizer.unflatten_state(
            [
                found[k] if k in found else np.zeros(struct.shape, struct.dtype)
                for k, struct in enumerate(self.optimizer.state_structs)
            ]
        )

    def state_leaves(self, state: PipelineState) -> Mapping[int, Any]:
        """Return the leaves of the optimizer state that the step changes, on the host, by index."""
        found = dict[int, Any]()
        held = (slot for slot in self._kept.values() if slot.category == "optimizer")
        for slot, arrays in self._whole(state.slots, held):
            found |= zip(self.optimizer.of(slot.holds.params).state, arrays, strict=True)
        return found

    # ---- execution -------------------------------------------------------------------------------

    def first_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> PyTree:
        """Return the gradients, on the host, with which a training that begins at the given
        parameters makes its first update."""
        raise NotImplementedError

    def __call__(
        self,
        state: PipelineState,
        batch: PyTree,
        key: jax.Array | None = None,
        *,
        observer: Observer | None = None,
    ) -> tuple[PipelineState, StepMetrics]:
        """Make one update.

        Args:
            state: Consumed: its arrays are donated.
            batch: A global batch on the host or a device, as ``workload.batch(key, size)`` returns
                it; of several processes, of every leaf the whole or what each ``needs``.
            key: The step's random key, if the loss takes one; micro-batch m uses
                ``jax.random.fold_in(key, m)``.
            observer: Called before every instruction with the instruction and the environment, for
                meters and checks.

        Returns:
            The new state and the metrics; they need not be ready yet.

        Raises:
            ExecutionError: ``run-batch`` if the batch has other shapes than the plan's,
                ``run-batch-part`` if a leaf is neither whole nor what ``needs`` names,
                ``run-state`` for a state of another plan, ``run-state-consumed``.
        """
        slots, metrics = self._execute(self.bound, state, batch, key, observer=observer)
        return PipelineState(slots, state.num_steps + 1, state.unused), metrics

    def _execute(
        self,
        bound: BoundStep,
        state: PipelineState,
        batch: PyTree,
        key: jax.Array | None,
        *,
        observer: Observer | None = None,
        stop: int | None = None,
    ) -> tuple[dict[str, list[jax.Array]], StepMetrics]:
        """Return the slots that are left, and the metrics."""
        start = time.thread_time()
        check_state(state, bound.state_shardings)
        slots, losses = bound(
            state.slots,
            self._split(batch, key),
            stop=stop,
            bound_run_ahead=self.bound_run_ahead,
            observer=observer,
        )
        return slots, StepMetrics(losses, time.thread_time() - start, self._loss_examples)

    def _split(self, batch: PyTree, key: jax.Array | None) -> Sequence[Sequence[Any]]:
        """Return the parts of a batch that the step is fed."""
        return split_examples(self.traced, self._parts, batch, key, self._needs)

    @property
    def _parts(self) -> Sequence[int]:
        """The examples of each part."""
        return self.microbatch_sizes

    @property
    def _needs(self) -> Sequence[Need]:
        """The part of each leaf of the batch that this process reads; empty for all of them."""
        return ()

    @property
    def _loss_examples(self) -> tuple[int, ...] | None:
        """The examples of each loss in ``StepMetrics``; None if all have as many."""
        return None


def _keys(seed: int) -> jax.Array:
    """Return the keys of parameters, of batches and of steps."""
    return jax.random.split(jax.random.key(seed), 3)
