"""Run a plan of packs on the devices of this process: ``step = streamed(workload, plan); state,
metrics = step(state, batch)``.

Parameters and optimizer state live in the memory of the host; packs of layers come to the devices
and their gradients go back (``capture.step.packs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from capture import environment
from capture.compiler.executable import AnyCompiler, Compiler, Executable
from capture.errors import ExecutionError, PlanError, WorkloadError
from capture.model.workload import PyTree, WorkloadProtocol
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import PackTask, Span
from capture.runtime.exchange import joined, share_of
from capture.runtime.frame import Call
from capture.runtime.layout import check_hosts, check_memory, first_devices
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer
from capture.runtime.pack_traces import traced_at
from capture.runtime.packs import PackPrograms, TracedSizes
from capture.runtime.state import joined_params
from capture.runtime.train_step import TrainStep
from capture.step.interface import owned_and_borrowed
from capture.step.pack_order import Begins, begins_in, begins_without_copies
from capture.step.packs import build_step
from capture.step.program import Feed, Instruction, Run, Slot, Step
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
        begins: The order in which passes are issued; by default the plan's, or that in which
            they begin if they take as long as their floating-point operations.
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
        traced: The loss at the largest micro-batch size.
        optimizer: Cut by backward packs.
    """

    #: Makes the instructions.
    build = staticmethod(build_step)

    def __init__(
        self,
        workload: WorkloadProtocol,
        plan: PacksPlan,
        devices: list[object],
        compiler: AnyCompiler,
        begins: Begins | None = None,
        host: object = None,
    ):
        self.workload, self.plan, self.devices = workload, plan, devices
        tasks = plan.tasks()
        sizes = {size for task in tasks.tasks for size in task.sizes}
        traces = traced_at(workload, plan, sizes)
        self.traced = traces[max(traces)]
        graph, packs = self.traced.graph, plan.configuration.backward.packs
        whole = [owned_and_borrowed(graph, *pack)[0] for pack in packs]
        self.unused = graph.unread_params
        update = traced_optimizer(workload.optimizer, self.traced, self.unused)
        partition = whole + [self.unused] * bool(self.unused)
        self.optimizer = SlicedOptimizer(update, partition)
        #: Examples of each, in order; a loss of random numbers is the same function of these alone.
        self.microbatch_sizes = tuple(
            size for task in tasks.tasks if task.criterion for size in task.sizes
        )
        #: Whether the optimizer needs the gradients of all packs, such as their norm: they wait on
        #: the host, and the updates come after all passes.
        self.updates_last = self.optimizer.exchanges
        if self.unused and self.optimizer.stages[-1].exports:
            raise WorkloadError.of(
                "the optimizer needs values of parameters that the loss does not read, before it "
                "updates any other; leave those out of the model, or of the optimizer.",
                "packs-optimizer",
            )
        if begins is None and plan.order:
            begins = begins_in(plan.order)
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
        peak, limit = check_memory(self.devices, self.compiled), self.plan.machine.usable_bytes
        if peak.peak_bytes > int(limit.value):
            raise ExecutionError.of(
                f"a device needs {peak}, and the plan's machine has "
                f"usable_bytes={int(limit.value)}; plan smaller packs or micro-batches, or give it "
                "more.",
                "packs-device-memory",
            )
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

    @property
    def calls(self) -> Mapping[str, Call]:
        return self.programs.exchanges()

    def layout(self, slot: Slot) -> Sequence[jax.ShapeDtypeStruct]:
        return self.programs.layout(slot)

    def executable(self, run: Run) -> Executable:
        return self.programs.executables[run.program]

    # ---- state -----------------------------------------------------------------------------------

    def _param(self, param: int, arrays: Sequence[object]) -> np.ndarray:
        struct = self._sizes.param(param)
        whole = joined(arrays, struct.shape) if len(arrays) > 1 else arrays[0]
        return np.asarray(whole).astype(struct.dtype)

    def _leaves_in(
        self, slot: Slot, leaves: Sequence[object], state_leaves: Sequence[object] | None
    ) -> Sequence[Any]:
        found = super()._leaves_in(slot, leaves, state_leaves)
        if slot.category != "parameters":
            return found
        count, share = self._sizes.num_shares, slot.holds.share
        found = [a.astype(s.dtype) for a, s in zip(found, self.layout(slot), strict=True)]
        return found if share is None else [share_of(array, share, count) for array in found]

    # ---- execution -------------------------------------------------------------------------------

    def first_gradients(
        self, params: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> PyTree:
        found: dict[int, np.ndarray] = {}
        count = self._sizes.num_shares
        updated: set[Span] = set()

        def observer(instruction: Instruction, slots: list[object]) -> None:
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
                    whole = self._param(p, list(map(np.array, given)))
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
