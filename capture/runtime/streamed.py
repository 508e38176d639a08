"""Run a plan of packs on the devices of this process: ``step = streamed(workload, plan); state,
metrics = step(state, batch)``.

Parameters and optimizer state live in the memory of the host; packs of layers come to the devices
and their gradients go back (``capture.step.packs``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capture import environment
from capture.compiler.executable import AnyCompiler, Compiler, Executable
from capture.errors import ExecutionError, PlanError, WorkloadError
from capture.model.workload import PyTree, WorkloadProtocol
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import PackTask, Span
from capture.quantities import format_bytes
from capture.runtime.dispatch import BoundStep, to_device, to_host
from capture.runtime.exchange import joined, share_of
from capture.runtime.layout import (
    check_device_memory,
    check_host_memory,
    check_hosts,
    first_devices,
)
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.microbatches import split_examples
from capture.runtime.optimizer import SlicedOptimizer
from capture.runtime.pack_traces import traced_at
from capture.runtime.packs import PackPrograms, TracedSizes
from capture.runtime.state import (
    PipelineState,
    joined_params,
)
from capture.runtime.train_step import TrainStep
from capture.step.interface import owned_and_borrowed
from capture.step.ledger import Ledger
from capture.step.pack_order import Begins, begins_without_copies
from capture.step.packs import build_step
from capture.step.program import Feed, Instruction, Run, Slot, Step, replay
from capture.tracing.leaf_uses import Cast


def streamed(
    workload: WorkloadProtocol,
    plan: PacksPlan,
    devices: Sequence[jax.Device] | None = None,
    *,
    begins: Begins | None = None,
    fast_compile: bool = False,
) -> StreamedStep:
    """Compile a plan's packs and return its training step.

    Args:
        workload: The task of the plan.
        plan: Device i of the plan is ``devices[i]``.
        devices: By default the first devices of ``jax.devices()``.
        begins: The order in which passes are issued; by default their floating-point operations
            are compared.
        fast_compile: As for ``pipeshard``.

    Returns:
        ``step(state, batch)`` or ``step(state, batch, key)``, with ``step.init(key)``.

    Raises:
        PlanError: ``plan-other-model`` if the plan was made for another model, ``packs-sizes``
            where the loss is another program at another micro-batch size,
            ``packs-coupled`` where its examples meet and both directions cut them differently,
            ``packs-stream`` where no parameter is read as the plan streams it.
        WorkloadError: ``packs-optimizer`` for an optimizer that needs parameters which the loss
            does not read.
        ExecutionError: ``run-devices`` if there are fewer devices than the plan uses,
            ``run-host-memory`` where a device cannot use its host's, or may use too little.
    """
    environment.warn()
    count = plan.machine.devices
    devices = first_devices(devices, count)
    check_hosts(devices)
    return StreamedStep(workload, plan, devices, Compiler(fast_compile=fast_compile), begins)


class StreamedStep(TrainStep):
    """A compiled training step of a plan of packs. Made by ``streamed``; with a ``host`` to compile
    for (``PackPrograms``), it does not run.

    Attributes:
        workload, plan: As given.
        traced: The loss at the largest micro-batch size.
        devices: Of the plan.
        optimizer: Cut by backward packs.
        bound_run_ahead: As of ``PipelinedStep``.
    """

    #: Makes the instructions.
    build = staticmethod(build_step)

    def __init__(
        self,
        workload: WorkloadProtocol,
        plan: PacksPlan,
        devices: list[Any],
        compiler: AnyCompiler,
        begins: Begins | None = None,
        host: Any = None,
    ):
        self.workload, self.plan, self.devices = workload, plan, devices
        self.bound_run_ahead = devices[0].platform == "cpu"
        tasks = plan.tasks()
        sizes = {size for task in tasks.tasks for size in task.sizes}
        traces = traced_at(workload, plan, sizes)
        self.traced = traces[max(traces)]
        graph, packs = self.traced.graph, plan.configuration.backward.packs
        whole = [owned_and_borrowed(graph, *pack)[0] for pack in packs]
        self._unused = graph.unread_params
        update = traced_optimizer(workload.optimizer, self.traced, self._unused)
        partition = whole + [self._unused] * bool(self._unused)
        self.optimizer = SlicedOptimizer(update, partition)
        #: Examples of each, in order; a loss of random numbers is the same function of these alone.
        self.microbatch_sizes = tuple(
            size for task in tasks.tasks if task.criterion for size in task.sizes
        )
        #: Whether the optimizer needs the gradients of all packs, such as their norm: they wait on
        #: the host, and the updates come after all passes.
        self.updates_last = self.optimizer.exchanges
        if self._unused and self.optimizer.stages[-1].exports:
            raise WorkloadError.of(
                "the optimizer needs values of parameters that the loss does not read, before it "
                "updates any other; leave those out of the model, or of the optimizer.",
                "packs-optimizer",
            )
        self._begins = begins or begins_without_copies(tasks, self._operations)
        self._sizes = TracedSizes(graph, self.optimizer, self._casts(), tasks.num_shares)
        # What programs need is known when they are compiled; what is fetched before it is needed,
        # when that is.
        self._uncompiled = self.build(tasks, self._sizes, plan.machine, self._begins)
        self.programs = PackPrograms(
            traces,
            self._uncompiled,
            self._sizes,
            update,
            plan.minibatch_size,
            devices,
            compiler,
            host,
        )

    def _casts(self) -> dict[int, Cast]:
        """Return the casts of the parameters that devices get as casts, by parameter."""
        dtype = self.plan.swaps.stream
        found = {
            p: cast for p, cast in enumerate(self.traced.casts) if cast and cast.dtype == dtype
        }
        if dtype and not found:
            raise PlanError.of(
                f"the plan has stream={dtype!r}, and this model reads no parameter only through a "
                "cast to it; plan without --stream, or have the model compute in it.",
                "packs-stream",
            )
        return found

    def _operations(self, task: PackTask, examples: int) -> float:
        """Return the FLOPs of a pass; a backward one computes the forward pass again."""
        flops = sum(self.traced.graph.layers[layer].flops for layer in task.layers)
        return examples * (flops + 1) * (1 if task.kind == "forward" else 3)

    @cached_property
    def program(self) -> Step:
        """The step's instructions; compiles every program.

        Raises:
            ExecutionError: ``packs-device-memory`` if a device needs more than it has,
                ``step-host-memory`` if the host does, ``run-host-memory`` if JAX may not use it.
        """
        self._check_memory(replay(self.compiled))
        return self.compiled

    @cached_property
    def compiled(self) -> Step:
        """The step's instructions, whether or not a device has room; compiles every program."""
        executables = self.programs.executables
        return self.given({name: one.transient_bytes for name, one in executables.items()})

    def given(self, transient_bytes: Mapping[str, int]) -> Step:
        """Return the step's instructions, given what programs need beside what they read."""
        for name, nbytes in transient_bytes.items():
            key, known = self._uncompiled.programs[name].call[:3], self._sizes.compiled
            known[key] = max(nbytes, known.get(key, 0))
        step = self.build(self.plan.tasks(), self._sizes, self.plan.machine, self._begins)
        self.programs = self.programs.of(step)
        for name, nbytes in transient_bytes.items():
            step.programs[name] = replace(step.programs[name], transient_bytes=nbytes)
        return step

    def _check_memory(self, ledger: Ledger) -> None:
        check_host_memory(self.devices[0], ledger.peak_of("host").peak_bytes)
        fullest = max(ledger.peaks[: len(self.devices)], key=lambda peak: peak.peak_bytes)
        limit = int(self.plan.machine.usable_bytes.value)
        if fullest.peak_bytes > limit:
            parts = ", ".join(f"{what} {format_bytes(n)}" for what, n in fullest.parts.items())
            raise ExecutionError.of(
                f"a device needs {format_bytes(fullest.peak_bytes)} at {fullest.instant!r} "
                f"({parts}), and the plan's machine has usable_bytes={limit}; plan smaller packs "
                "or micro-batches, or give it more.",
                "packs-device-memory",
            )
        peaks = [peak.peak_bytes for peak in ledger.peaks[: len(self.devices)]]
        check_device_memory(self.devices, peaks)

    def executable(self, run: Run) -> Executable:
        return self.programs.executables[run.program]

    # ---- state -----------------------------------------------------------------------------------

    def params(self, state: PipelineState) -> PyTree:
        found = dict(state.unused)
        parts: defaultdict[int, list[Any]] = defaultdict(list)
        for name, slot in self._kept("weights"):
            for p, array in zip(slot.holds.ids, state.slots[name], strict=True):
                parts[p].append(array)
        found |= {p: self._whole(p, arrays) for p, arrays in parts.items()}
        return joined_params(self.traced, found)

    def _whole(self, param: int, arrays: Sequence[Any]) -> np.ndarray:
        """Return an array of the host, or its shares, as the parameter's."""
        struct, given = self._sizes.param(param), [np.array(array) for array in arrays]
        return (joined(given, struct.shape) if len(given) > 1 else given[0]).astype(struct.dtype)

    def state_leaves(self, state: PipelineState) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for name, slot in self._kept("state"):
            leaves = self._sizes.stage(slot.holds.params).state
            # Copies: what is on the host, a step writes over.
            arrays = (to_host(array).copy() for array in state.slots[name])
            found |= zip(leaves, arrays, strict=True)
        return found

    def _kept(self, what: str) -> list[tuple[str, Slot]]:
        """Return the slots of the host of one kind, such as ``weights``, and their names."""
        slots = self._uncompiled.slots
        named = ((name, slots[n]) for name, n in self._uncompiled.persistent.items())
        return [(name, slot) for name, slot in named if slot.what == what]

    def state_from(
        self, leaves: Sequence[np.ndarray], state_leaves: Sequence[Any] | None, num_steps: int
    ) -> PipelineState:
        slots: dict[str, list[jax.Array]] = {}
        for name, slot in (*self._kept("weights"), *self._kept("casts")):
            for p, struct in zip(slot.holds.ids, self.programs.layout(slot), strict=True):
                array = leaves[p].astype(struct.dtype)
                if slot.holds.share is not None:
                    array = share_of(array, slot.holds.share, self._sizes.num_shares)
                slots.setdefault(name, []).append(to_device(array, struct.sharding))
            slots.setdefault(name, [])
        for name, slot in self._kept("state"):
            stage = self._sizes.stage(slot.holds.params)
            sharding = self.programs.sharding(slot.place)
            given = (
                jax.jit(stage.init)([jnp.asarray(leaves[p]) for p in stage.params])
                if state_leaves is None
                else [state_leaves[k] for k in stage.state]
            )
            slots[name] = [to_device(to_host(array), sharding) for array in given]
        return PipelineState(slots, num_steps, {p: leaves[p] for p in self._unused})

    # ---- execution -------------------------------------------------------------------------------

    def _split(self, batch: PyTree, key: jax.Array | None) -> Sequence[Sequence[Any]]:
        return split_examples(self.traced, self._parts, batch, key)

    def first_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> PyTree:
        found: dict[int, np.ndarray] = {}
        count = self._sizes.num_shares
        updated: set[Span] = set()

        def observer(instruction: Instruction, slots: list[Any]) -> None:
            if not isinstance(instruction, Run):
                return
            # Where devices update, each does so with the sum over all.
            call = self.program.programs[instruction.program].call
            if call.kind != "update" or call.span in updated:
                return
            updated.add(call.span)
            for first in range(0, len(instruction.inputs[2]), count):
                of = instruction.inputs[2][first : first + count]
                arrays = zip(*(slots[slot] for slot in of), strict=True)
                for p, given in zip(self.program.slots[of[0]].holds.ids, arrays, strict=True):
                    whole = self._whole(p, given)
                    found[p] = found[p] + whole if p in found else whole

        state, _ = self(self.init_from(params), batch, key, observer=observer)
        for p, array in state.unused.items():
            found[p] = np.zeros_like(array)
        return joined_params(self.traced, found)

    @cached_property
    def _parts(self) -> list[int]:
        """The examples of each part of the batch that is fed."""
        step = self._uncompiled
        rows = {each.microbatch: step.slots[each.slot].holds.rows for each in step.all_of(Feed)}
        return [stop - first for _, (first, stop) in sorted(rows.items())]

    @cached_property
    def _loss_examples(self) -> tuple[int, ...]:
        reported = set(self.program.reported)
        return tuple(
            self.program.programs[each.program].call.size
            for each in self.program.runs
            if reported.intersection(each.outputs)
        )

    def _bind(self, step: Step) -> BoundStep:
        of = self.programs
        return BoundStep(step, self.executable, of.layout, calls=of.exchanges())
