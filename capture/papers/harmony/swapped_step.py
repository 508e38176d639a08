"""The step of plain data parallelism over virtual memory: what Harmony is compared with, on the
same layers and programs.

Every device runs all layers, one by one, on its micro-batches, accumulates gradients, and updates
with the sum over all devices. Its own manager (``virtual_memory``) swaps tensors when
they do not fit: it evicts what is used farthest in the future, writes back always, and nothing is
there before it is missed. Between steps nothing stays on a device.

Slots and programs are those of packs of one layer (``capture.step.streamed``); the backward pass
computes the forward pass again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from capture.errors import PlanError
from capture.machine.server import Server
from capture.papers.harmony.virtual_memory import LayerTensors, Manager, Operation, Tensor
from capture.plan.task_graph import Span, TaskGraph, microbatches, shares
from capture.step.holds import Leaves, Loss, Params, State
from capture.step.pack_sizes import PackPass, PackSizes
from capture.step.program import Feed, Free, Instruction, Run, Step, Wait
from capture.step.streamed import Begins
from capture.step.streamed_state import StreamedState
from capture.step.streamed_units import PackCall, Rank


class SwappedBuilder(StreamedState):
    """Emits the instructions.

    Args:
        graph: Of packs of one layer in data parallelism, updated on the devices.
        sizes: Bytes of the layers.
        server: Memory of a device and of the host.
        begins: Of no meaning here: operations have one order.

    Attributes:
        operations: Of every device.
        nbytes: Of the tensors.
        initial: Tensors that are on the host before a step.
        managed_bytes: What the manager of a device has.

    Raises:
        PlanError: ``swap-batch`` where micro-batches are not all of one size, ``swap-shared`` where
            layers share parameters.
    """

    def __init__(self, graph: TaskGraph, sizes: PackSizes, server: Server, begins: Begins):
        size = max(graph.sizes[1])
        if len({*graph.sizes[0], *graph.sizes[1]}) > 1 or graph.minibatch_size % graph.num_devices:
            raise PlanError.of(
                f"minibatch_size={graph.minibatch_size} on {graph.num_devices} devices is not cut "
                f"into micro-batches of one size, {graph.sizes[1]}; give a multiple of both.",
                "swap-batch",
            )
        if sizes.shared((0, sizes.num_layers)) or any(
            sizes.shared((i, i + 1)) for i in range(sizes.num_layers)
        ):
            raise PlanError.of(
                "layers share parameters, and a manager of virtual memory knows each by one layer; "
                "take a model whose layers have their own.",
                "swap-shared",
            )
        super().__init__(graph, sizes, server, [])
        self._size = size
        share = shares(graph.minibatch_size, graph.num_devices)[0]
        self._count = len(microbatches(share, size))
        ends = tuple(size * (m + 1) for m in range(self._count))
        self.parts = dict.fromkeys(range(graph.num_devices), ends)
        layers = self._layers()
        self.nbytes, self.initial = layers.nbytes(self._count), layers.initial(self._count)
        self.operations = self._operations(layers)
        # Losses stay; what does not fit by itself is said when the step is replayed.
        least = max(map(self._need, self.operations))
        self.managed_bytes = max(self._limit_bytes - 4 * self._count, least)
        self._managers = [Manager(self.nbytes, self.managed_bytes) for _ in self._ranks]
        for manager in self._managers:
            manager.on_host.update(self.initial)
            for at, operation in enumerate(self.operations):
                for tensor in dict.fromkeys((*operation.reads, *operation.writes)):
                    manager.uses[tensor].append(at)
        #: By device and tensor, its slot there.
        self._there: dict[tuple[int, Tensor], int] = {}

    def build(self) -> Step:
        """The step; once."""
        for at, operation in enumerate(self.operations):
            self.step.instructions += self._operation(at, operation)
        for number, manager in enumerate(self._managers):
            for tensor in manager.left():
                self.step.instructions += self._write_back(number, tensor)
        self.step.num_passes = len(self.step.instructions)
        self.step.instructions.append(Free(tuple(self.step.reported)))
        return self.step

    # ---- what there is ---------------------------------------------------------------------------

    def _kept(
        self,
    ) -> tuple[dict[Span, int], dict[Span, tuple[int, ...]], dict[Span, tuple[int, ...]]]:
        """Weights and state of every device, in the memory of its host; told of are the first's."""
        #: By device and tensor, its slot on the host.
        self._on_host: dict[tuple[int, Tensor], int] = {}
        spans = sorted(self._owner)
        for number, rank in enumerate(self._ranks):
            for span in spans:
                owned = self._sizes.owned(span)
                for what, name, category, nbytes, holds in (
                    ("W", "weights", "parameters", self._sizes.weight_bytes(span), Params(owned)),
                    ("K", "state", "optimizer", self._sizes.state_bytes(span), State(owned)),
                ):
                    label = f"{name} of layer {span[0]} for device {number}"
                    slot = self.step.keep(label, rank.host, category, nbytes, name, holds)
                    self._on_host[number, (what, span[0], 0)] = slot
        state = {span: self._on_host[0, ("K", span[0], 0)] for span in spans}
        weights: dict[Span, tuple[int, ...]] = {
            span: (self._on_host[0, ("W", span[0], 0)],) for span in spans
        }
        return state, weights, {}

    def _layers(self) -> LayerTensors:
        sizes, u = self._sizes, self._size
        spans = [(i, i + 1) for i in range(sizes.num_layers)]
        made = [sizes.value_bytes(stop, u) for _, stop in spans]
        made[-1] = 4  # the loss
        handed = [sizes.gradient_bytes(i, u) if i else 0 for i, _ in spans]

        def work(which: PackPass, i: int, made: int) -> int:
            return max(0, sizes.transient_bytes(which, spans[i], u, made) - made)

        every, weights = range(len(spans)), [sizes.weight_bytes(span) for span in spans]
        backward = [
            max(
                work("accumulate", i, handed[i]),
                work("backward", i, handed[i] + weights[i]),
            )
            for i in every
        ]
        return LayerTensors(
            weights,
            [sizes.state_bytes(span) for span in spans],
            [sizes.batch_bytes((0, 1), u), *made[:-1]],
            handed,
            [0] * len(spans),
            [work("forward", i, made[i]) for i in every],
            backward,
            [0.0] * len(spans),
            [0.0] * len(spans),
            remat=True,
        )

    def _operations(self, layers: LayerTensors) -> list[Operation]:
        passes = layers.data_parallel(self._count, [])
        updates = [
            replace(layers.update(0, i, 0.0, 1), workspace_bytes=self._updating_bytes((i, i + 1)))
            for i in range(layers.count)
        ]
        return [*passes, *updates]

    def _updating_bytes(self, span: Span) -> int:
        programs = self._sizes.transient_bytes("update", span, 0, 0)
        return max(programs, self.needs.reduction(span))

    def _need(self, operation: Operation) -> int:
        tensors = {*operation.reads, *operation.writes}
        return sum(self.nbytes[tensor] for tensor in tensors) + operation.workspace_bytes

    # ---- swaps -----------------------------------------------------------------------------------

    def _make_room_for(self, at: int, operation: Operation, number: int) -> Iterator[Instruction]:
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
            host = self._alike(slot, self._ranks[number].host)
            self._on_host[number, tensor] = host
        else:
            yield Free((host,))
        yield self._copy(slot, host)
        yield Wait(host)
        yield Free((slot,))

    def _fetch(self, number: int, tensor: Tensor) -> Iterator[Instruction]:
        source, rank = self._on_host.get((number, tensor)), self._ranks[number]
        if source is None:
            assert tensor[:2] == ("X", 0), f"{tensor} was never made"
            self._there[number, tensor] = yield from self._feed(rank, (0, 1), tensor[2])
            return
        slot = self._there[number, tensor] = self._alike(source, rank.place)
        yield self._copy(source, slot)
        yield Wait(slot)

    def _feed(self, rank: Rank, span: Span, m: int) -> Generator[Instruction, None, int]:
        number, rows = rank.place.devices[0], self._rows(m)
        nbytes = self._sizes.batch_bytes(span, self._size)
        leaves = self._sizes.batch(span)
        slot = self._slot("batch", rank.place, "batch", nbytes, Leaves(leaves, rows))
        part = number * self._count + m
        yield Feed(slot, part, leaves, self._label)
        return slot

    def _rows(self, m: int) -> Span:
        return m * self._size, (m + 1) * self._size

    # ---- operations ------------------------------------------------------------------------------

    def _operation(self, at: int, operation: Operation) -> Iterator[Instruction]:
        """On all devices."""
        i = operation.reads[0][1]
        if ("K", i, 0) in operation.writes:
            self._label = f"update of layer {i}"
            for number in range(len(self._ranks)):
                yield from self._make_room_for(at, operation, number)
            yield from self._update_layer(i)
        else:
            m = operation.reads[1][2]
            ahead = ("dW", i, 0) not in operation.writes
            self._label = f"{'forward' if ahead else 'backward'} {m} of layer {i}"
            for number, rank in enumerate(self._ranks):
                yield from self._make_room_for(at, operation, number)
                yield from (self._forward if ahead else self._backward)(rank, i, m)
        for number in range(len(self._ranks)):
            yield from self._freed(number, operation)

    def _freed(self, number: int, operation: Operation) -> Iterator[Instruction]:
        for tensor in operation.frees:
            for slots in (self._there, self._on_host):
                if (slot := slots.pop((number, tensor), None)) is not None:
                    yield Free((slot,))

    def _read(
        self, rank: Rank, i: int, m: int
    ) -> Generator[Instruction, None, tuple[tuple[int, ...], ...]]:
        """Argument groups of a pass: weights, inputs, batch."""
        number, span = rank.place.devices[0], (i, i + 1)
        entering = self._there[number, ("X", i, m)]
        batch: tuple[int, ...] = ()
        if i and self._sizes.batch(span):
            batch = ((yield from self._feed(rank, span, m)),)
        groups = ((), (entering,)) if i == 0 else ((entering,), batch)
        return ((self._there[number, ("W", i, 0)],), *groups)

    def _forward(self, rank: Rank, i: int, m: int) -> Iterator[Instruction]:
        number, sizes, span = rank.place.devices[0], self._sizes, (i, i + 1)
        groups = yield from self._read(rank, i, m)
        is_last = i + 1 == sizes.num_layers
        if is_last:
            out = self._slot("loss", rank.place, "loss", 4, Loss())
        else:
            out = self._row_slot("activation", rank.place, "activations", i + 1, self._rows(m))
            self._there[number, ("X", i + 1, m)] = out
        made = self.step.slots[out].nbytes
        transient = sizes.transient_bytes("forward", span, self._size, made)
        name = self._program(PackCall("forward", span, self._size, number), rank.place, transient)
        yield Run(name, groups, (out,), (), self._label)
        again = groups[2] if i else ()
        if done := (*again, *((out,) if is_last else ())):
            yield Free(done)

    def _backward(self, rank: Rank, i: int, m: int) -> Iterator[Instruction]:
        number, sizes, span = rank.place.devices[0], self._sizes, (i, i + 1)
        groups = yield from self._read(rank, i, m)
        is_last, place = i + 1 == sizes.num_layers, rank.place
        arrived = () if is_last else (self._there[number, ("dX", i + 1, m)],)
        before = self._there.pop((number, ("dW", i, 0)), None)
        summed = () if before is None else (before,)
        outputs = []
        if i:
            outputs = [self._row_slot("gradient", place, "cotangents", i, self._rows(m))]
            self._there[number, ("dX", i, m)] = outputs[0]
        if is_last:
            outputs.append(self._slot("loss", place, "loss", 4, Loss()))
            self.step.reported.append(outputs[-1])
        gradients = self._there[number, ("dW", i, 0)] = self._gradients_slot(place, span)
        kind: PackPass = "accumulate" if summed else "backward"
        made = sum(self.step.slots[slot].nbytes for slot in outputs)
        transient = sizes.transient_bytes(kind, span, self._size, made)
        name = self._program(PackCall(kind, span, self._size, number), place, transient)
        yield Run(name, (*groups, arrived, summed), (*outputs, gradients), summed, self._label)
        if i and groups[2]:
            yield Free(groups[2])

    def _update_layer(self, i: int) -> Iterator[Instruction]:
        span, sizes = (i, i + 1), self._sizes
        numbers = range(len(self._ranks))
        gradients = [self._there.pop((number, ("dW", i, 0))) for number in numbers]
        if self._reduces:
            reduced = [self._gradients_slot(rank.place, span) for rank in self._ranks]
            transient = self.needs.reduction(span)
            name = self._program(PackCall("reduce", span), self._everywhere, transient)
            groups = tuple((slot,) for slot in gradients)
            yield Run(name, groups, tuple(reduced), tuple(gradients), self._label)
            gradients = reduced
        for number, rank in enumerate(self._ranks):
            changed = tuple(self._there[number, (what, i, 0)] for what in "WK")
            transient = sizes.transient_bytes("update", span, 0, 0)
            name = self._program(PackCall("update", span, device=number), rank.place, transient)
            inputs = ((changed[0],), (changed[1],), (gradients[number],), ())
            yield Run(name, inputs, changed, (*changed, gradients[number]), self._label)
