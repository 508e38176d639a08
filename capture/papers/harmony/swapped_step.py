"""The step of plain data parallelism over virtual memory: what Harmony is compared with, on the
same layers and programs.

Every device runs all layers, one by one, on its micro-batches, accumulates gradients, and updates
with the sum over all devices. Its own manager (``virtual_memory``) swaps tensors when
they do not fit: it evicts what is used farthest in the future, writes back always, and nothing is
there before it is missed. Between steps nothing stays on a device.

Slots and programs are those of packs of one layer (``capture.step.packs``); the backward pass
computes the forward pass again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from capture.errors import PlanError
from capture.machine.server import Server
from capture.papers.harmony.virtual_memory import GpuOperation, LayerTensors, Manager, Tensor
from capture.plan.task_graph import Span, TaskGraph, microbatches, shares
from capture.step.holds import Leaves, Loss, Params, State, Values
from capture.step.pack_order import Begins
from capture.step.pack_sizes import PackPass, PackSizes
from capture.step.pack_state import PackCall, PackState
from capture.step.program import Copy, Feed, Free, Instruction, Place, Program, Run, Step, Wait


def build_swapped(graph: TaskGraph, sizes: PackSizes, server: Server, begins: Begins) -> Step:
    """Return the step; ``begins`` has no meaning here: operations have one order."""
    return SwappedBuilder(graph, sizes, server).build()


class SwappedBuilder:
    """The builder of a step over virtual memory, which emits its instructions.

    Args:
        graph: Of packs of one layer in data parallelism, updated on the devices.
        sizes: Bytes of the layers.
        server: Memory of a device and of the host.

    Attributes:
        operations: Of every device.
        nbytes: Of the tensors.
        initial: Tensors that are on the host before a step.
        managed_bytes: What the manager of a device has.

    Raises:
        PlanError: ``swap-batch`` where micro-batches are not all of one size, ``swap-shared`` where
            layers share parameters.
    """

    def __init__(self, graph: TaskGraph, sizes: PackSizes, server: Server):
        self._sizes, layers, size = sizes, sizes.layers, max(graph.sizes[1])
        if len({*graph.sizes[0], *graph.sizes[1]}) > 1 or graph.minibatch_size % graph.num_devices:
            raise PlanError.of(
                f"minibatch_size={graph.minibatch_size} on {graph.num_devices} devices is not cut "
                f"into micro-batches of one size, {graph.sizes[1]}; give a multiple of both.",
                "swap-batch",
            )
        if any(layers.shared((i, i + 1)) for i in range(len(layers))):
            raise PlanError.of(
                "layers share parameters, and a manager of virtual memory knows each by one layer; "
                "take a model whose layers have their own.",
                "swap-shared",
            )
        self._state = PackState(graph, sizes, int(server.host_memory_bytes.value))
        self.step, self._numbers = Step(self._state.places), range(graph.num_devices)
        self._size, self._label = size, ""
        share = shares(graph.minibatch_size, graph.num_devices)[0]
        self._count = len(microbatches(share, size))
        tensors = self._layers()
        self.nbytes, self.initial = tensors.nbytes(self._count), tensors.initial(self._count)
        self.operations = self._operations(tensors)
        # Losses stay; what does not fit by itself is said when the step is replayed.
        least = max(operation.need(self.nbytes) for operation in self.operations)
        self.managed_bytes = max(server.usable_bytes.value - 4 * self._count, least)
        self._managers = [Manager(self.nbytes, self.managed_bytes) for _ in self._numbers]
        for manager in self._managers:
            manager.on_host.update(self.initial)
            for at, operation in enumerate(self.operations):
                for tensor in operation.tensors:
                    manager.uses[tensor].append(at)
        #: By device and tensor, its slot there, and on the host.
        self._there: dict[tuple[int, Tensor], int] = {}
        self._on_host = self._kept()

    def build(self) -> Step:
        """Return the step; may be called once."""
        for at, operation in enumerate(self.operations):
            self.step.instructions += self._operation(at, operation)
        for number, manager in enumerate(self._managers):
            for tensor in manager.left():
                self.step.instructions += self._write_back(number, tensor)
        self.step.num_passes = len(self.step.instructions)
        self.step.instructions.append(Free(tuple(self.step.reported)))
        return self.step

    # ---- what there is ---------------------------------------------------------------------------

    def _kept(self) -> dict[tuple[int, Tensor], int]:
        """Return the host's slots of weights and state, by device and tensor."""
        found: dict[tuple[int, Tensor], int] = {}
        for number, layer in product(self._numbers, range(len(self._sizes.layers))):
            owned = self._sizes.layers.owned((layer, layer + 1))
            for what, name, category, holds in (
                ("W", "weights", "parameters", Params(owned)),
                ("K", "state", "optimizer", State(owned)),
            ):
                label, nbytes = f"{name} of layer {layer} for device {number}", self._nbytes(holds)
                place = self._state.hosts[number]
                slot = self.step.keep(label, place, category, nbytes, name, holds)
                found[number, (what, layer, 0)] = slot
        return found

    def _nbytes(self, *holds: Any) -> int:
        return sum(map(self._sizes.nbytes, holds))

    def _slot(self, what: str, place: Place, category: str, holds: object) -> int:
        name = f"{what} {len(self.step.slots)}"
        return self.step.slot(name, place, category, self._nbytes(holds), what, holds)

    def _copy(self, source: int, place: Place) -> Copy:
        """Return the copy of a slot into a new one at a place."""
        given = self.step.slots[source]
        target = self._slot(given.what, place, given.category, given.holds)
        return Copy(source, target, given.nbytes, self._label)

    def _program(self, call: PackCall, place: Place, made: int) -> str:
        kind = "backward" if call.kind == "accumulate" else call.kind
        nbytes = self._sizes.transient_bytes(*call[:3], made)
        self.step.programs.setdefault(call.name, Program(kind, place, nbytes, call))
        return call.name

    def _layers(self) -> LayerTensors:
        sizes, u, layers = self._sizes, self._size, self._sizes.layers
        spans = [(i, i + 1) for i in range(len(layers))]
        owned = [layers.owned(span) for span in spans]
        entering = [Values(values, (0, u)) for values in layers.values]
        made = [self._nbytes(entering[stop]) for _, stop in spans]
        made[-1] = 4  # the loss
        handed = [self._nbytes(replace(v, gradients=True)) for v in entering[: len(spans)]]
        handed[0] = 0

        def work(which: PackPass, i: int, made: int) -> int:
            return max(0, sizes.transient_bytes(which, spans[i], u, made) - made)

        every, weights = range(len(spans)), [self._nbytes(Params(ids)) for ids in owned]
        backward = [
            max(
                work("accumulate", i, handed[i]),
                work("backward", i, handed[i] + weights[i]),
            )
            for i in every
        ]
        return LayerTensors(
            weights,
            [self._nbytes(State(ids)) for ids in owned],
            [self._nbytes(Leaves(layers.leaves((0, 1)), (0, u))), *made[:-1]],
            handed,
            [0] * len(spans),
            [work("forward", i, made[i]) for i in every],
            backward,
            [0.0] * len(spans),
            [0.0] * len(spans),
            remat=True,
        )

    def _operations(self, layers: LayerTensors) -> list[GpuOperation]:
        passes = layers.data_parallel(self._count, [])
        updates = [
            replace(layers.update(0, i, 0.0, 1), workspace_bytes=self._updating_bytes((i, i + 1)))
            for i in range(layers.count)
        ]
        return [*passes, *updates]

    def _updating_bytes(self, span: Span) -> int:
        update, weights = self._sizes.transient_bytes("update", span, 0, 0), self._weights(span)
        reduction = self._sizes.transient_bytes("reduce", span, 0, weights)
        return max(update, reduction if self._state.reduces else 0)

    def _weights(self, span: Span) -> int:
        return self._nbytes(Params(self._sizes.layers.owned(span)))

    # ---- swaps -----------------------------------------------------------------------------------

    def _make_room_for(
        self, at: int, operation: GpuOperation, number: int
    ) -> Iterator[Instruction]:
        moved = self._managers[number].step(at, operation)
        assert moved is not None, "the limit is no less than any operation needs"
        ins, outs = moved
        for tensor in outs:
            yield from self._write_back(number, tensor)
        for tensor in ins:
            yield from self._fetch(number, tensor)

    def _write_back(self, number: int, tensor: Tensor) -> Iterator[Instruction]:
        slot = self._there.pop((number, tensor), None)
        if slot is None:  # behind the last layer there is nothing
            return
        if (host := self._on_host.get((number, tensor))) is None:
            out = self._copy(slot, self._state.hosts[number])
            self._on_host[number, tensor] = host = out.target
        else:
            yield Free((host,))
            out = Copy(slot, host, self.step.slots[slot].nbytes, self._label)
        yield out
        yield Wait(host)
        yield Free((slot,))

    def _fetch(self, number: int, tensor: Tensor) -> Iterator[Instruction]:
        if (source := self._on_host.get((number, tensor))) is None:
            assert tensor[:2] == ("X", 0), f"{tensor} was never made"
            self._there[number, tensor] = yield from self._feed(number, (0, 1), tensor[2])
            return
        copy = self._copy(source, self._state.devices[number])
        self._there[number, tensor] = copy.target
        yield copy
        yield Wait(copy.target)

    def _feed(self, number: int, span: Span, m: int) -> Generator[Instruction, None, int]:
        leaves, place = self._sizes.layers.leaves(span), self._state.devices[number]
        slot = self._slot("batch", place, "batch", Leaves(leaves, self._rows(m)))
        part = number * self._count + m
        yield Feed(slot, part, leaves, self._label)
        return slot

    def _rows(self, m: int) -> Span:
        return m * self._size, (m + 1) * self._size

    # ---- operations ------------------------------------------------------------------------------

    def _operation(self, at: int, operation: GpuOperation) -> Iterator[Instruction]:
        """Yield the instructions of an operation on all devices, with the swaps before it."""
        i = operation.reads[0][1]
        if ("K", i, 0) in operation.writes:
            self._label = f"update of layer {i}"
            for number in self._numbers:
                yield from self._make_room_for(at, operation, number)
            yield from self._update_layer(i)
        else:
            m = operation.reads[1][2]
            ahead = ("dW", i, 0) not in operation.writes
            self._label = f"{'forward' if ahead else 'backward'} {m} of layer {i}"
            for number in self._numbers:
                yield from self._make_room_for(at, operation, number)
                yield from (self._forward if ahead else self._backward)(number, i, m)
        for number in self._numbers:
            yield from self._freed(number, operation)

    def _freed(self, number: int, operation: GpuOperation) -> Iterator[Instruction]:
        for tensor in operation.frees:
            for slots in (self._there, self._on_host):
                if (slot := slots.pop((number, tensor), None)) is not None:
                    yield Free((slot,))

    def _read(
        self, number: int, i: int, m: int
    ) -> Generator[Instruction, None, tuple[tuple[int, ...], ...]]:
        """Yield the feed of a pass, if any; return its argument groups: weights, inputs, batch."""
        entering = self._there[number, ("X", i, m)]
        batch: tuple[int, ...] = ()
        if i and self._sizes.layers.leaves((i, i + 1)):
            batch = ((yield from self._feed(number, (i, i + 1), m)),)
        groups = ((), (entering,)) if i == 0 else ((entering,), batch)
        return ((self._there[number, ("W", i, 0)],), *groups)

    def _value(self, number: int, i: int, m: int, *, gradient: bool) -> int:
        """Return a new slot of what enters a layer, or of its gradient."""
        what, category = ("gradient", "cotangents") if gradient else ("activation", "activations")
        holds = Values(self._sizes.layers.values[i], self._rows(m), gradient)
        slot = self._slot(what, self._state.devices[number], category, holds)
        self._there[number, ("dX" if gradient else "X", i, m)] = slot
        return slot

    def _forward(self, number: int, i: int, m: int) -> Iterator[Instruction]:
        place = self._state.devices[number]
        groups = yield from self._read(number, i, m)
        is_last = i + 1 == len(self._sizes.layers)
        if is_last:
            out = self._slot("loss", place, "loss", Loss())
        else:
            out = self._value(number, i + 1, m, gradient=False)
        call = PackCall("forward", (i, i + 1), self._size, number)
        name = self._program(call, place, self.step.slots[out].nbytes)
        yield Run(name, groups, (out,), (), self._label)
        again = groups[2] if i else ()
        if done := (*again, *((out,) if is_last else ())):
            yield Free(done)

    def _gradients(self, number: int, span: Span) -> int:
        holds = Params(self._sizes.layers.owned(span))
        return self._slot("gradients", self._state.devices[number], "gradients", holds)

    def _backward(self, number: int, i: int, m: int) -> Iterator[Instruction]:
        place, span = self._state.devices[number], (i, i + 1)
        groups = yield from self._read(number, i, m)
        is_last = i + 1 == len(self._sizes.layers)
        arrived = () if is_last else (self._there[number, ("dX", i + 1, m)],)
        before = self._there.pop((number, ("dW", i, 0)), None)
        summed = () if before is None else (before,)
        outputs = [self._value(number, i, m, gradient=True)] if i else []
        if is_last:
            outputs.append(self._slot("loss", place, "loss", Loss()))
            self.step.reported.append(outputs[-1])
        gradients = self._there[number, ("dW", i, 0)] = self._gradients(number, span)
        kind: PackPass = "accumulate" if summed else "backward"
        made = sum(self.step.slots[slot].nbytes for slot in outputs)
        name = self._program(PackCall(kind, span, self._size, number), place, made)
        yield Run(name, (*groups, arrived, summed), (*outputs, gradients), summed, self._label)
        if i and groups[2]:
            yield Free(groups[2])

    def _update_layer(self, i: int) -> Iterator[Instruction]:
        span = i, i + 1
        gradients = [self._there.pop((number, ("dW", i, 0))) for number in self._numbers]
        if self._state.reduces:
            reduced = [self._gradients(number, span) for number in self._numbers]
            place = self._state.places[-1]
            name = self._program(PackCall("reduce", span), place, self._weights(span))
            groups = tuple((slot,) for slot in gradients)
            yield Run(name, groups, tuple(reduced), tuple(gradients), self._label)
            gradients = reduced
        for number, place in enumerate(self._state.devices):
            changed = tuple(self._there[number, (what, i, 0)] for what in "WK")
            name = self._program(PackCall("update", span, device=number), place, 0)
            inputs = ((changed[0],), (changed[1],), (gradients[number],), ())
            yield Run(name, inputs, changed, (*changed, gradients[number]), self._label)
