"""The items of a step of packs on the streams of its ranks: which there are, how long they take,
and what they wait for. See ``capture.predictor.pack_times``, whose other half this is.

Without prefetch a task brings an input when the micro-batch before it is done. With it the inputs
of the first two micro-batches come while the task before computes, and later ones while the one
before does, into a second buffer; nothing waits for what goes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile, SizedLayers
from capture.plan.task_graph import Channel, Task, TaskGraph, completed_by

STREAMS = ("SwapIn", "SwapOut", "P2PIn", "P2POut", "Compute", "CPU")
_IN, _OUT, P2P_IN, P2P_OUT, _COMPUTE, _CPU = range(len(STREAMS))


class What(NamedTuple):
    """What an item is.

    Attributes:
        task: Of the item; of a transfer between devices, the receiver.
        kind: As in the module; of a transfer, what it is to the receiver.
        microbatch: Its index.
        size: Its examples; None where it is none.
        first, stop: Layers; of a tensor between layers, the one at whose end it is.
        sender: Of a transfer between devices: its task, kind and layer.
    """

    task: int
    kind: str
    microbatch: int
    size: int | None
    first: int
    stop: int
    sender: tuple[int, str, int] | None = None


class Sized:
    """A profile at micro-batch sizes, and sums over its layers."""

    def __init__(self, profile: LayerProfile):
        self.profile = profile

    def forward(self, size: int) -> SizedLayers:
        return self.profile.at("forward", size)

    def backward(self, size: int) -> SizedLayers:
        return self.profile.at("backward", size)

    @cached_property
    def _sums(self) -> Mapping[str, list[float]]:
        profile = self.profile
        rows = {"w": profile.w_bytes, "b": profile.b_bytes, "update": profile.update_cpu_time}
        found = {}
        for name, row in rows.items():
            sums = [0.0]
            for value in row:
                sums.append(sums[-1] + value)
            found[name] = sums
        return found

    def weight_bytes(self, first: int, stop: int) -> float:
        """w + b of layers [first, stop)."""
        w, b = self._sums["w"], self._sums["b"]
        return w[stop] - w[first] + b[stop] - b[first]

    def update_seconds(self, first: int, stop: int) -> float:
        """Of the updates on the host."""
        sums = self._sums["update"]
        return sums[stop] - sums[first]


@dataclass(slots=True)
class _Done:
    """What items of later tasks may wait for; per micro-batch, but for the last.

    Attributes:
        task: The task.
        computes: The last pass.
        recomputes: The forward pass again.
        swapped: Where the output went to the host: when it is there.
        deleted: When the task's memory is given back.
    """

    task: Task
    computes: list[int] = field(default_factory=list)
    recomputes: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    deleted: int = -1


class Items:
    """Turns tasks into items: lists of seconds, of what they wait for, of streams and of what they
    are."""

    def __init__(self, graph: TaskGraph, sized: Sized, server: Server, prefetch: bool):
        self._sized, self._prefetch, self._alone = sized, prefetch, graph.alone
        self.num_working = (
            graph.num_devices if graph.mode == "dp" else len({task.rank for task in graph.tasks})
        )
        self._swap = server.swap_bytes_per_second.value / self.num_working
        self._p2p = server.p2p_bytes_per_second.value
        self._message = server.message_bytes_per_second.value / self.num_working
        self._delete = server.delete_seconds.value
        forward, self._sizes_back = graph.sizes
        self._completed = completed_by(forward, self._sizes_back)
        self._completes = [i for i, row in enumerate(self._completed) for _ in row]
        self._reduces = graph.mode == "dp" and graph.num_devices > 1
        width = len(STREAMS)
        self._lanes = [
            tuple((rank * width + stream,) for stream in range(width))
            for rank in range(graph.num_devices)
        ]
        self._done: dict[int, _Done] = {}
        self._past: dict[int, list[_Done]] = {}
        #: By backward task, per micro-batch: the message that brings what was kept for it, or X.
        self._told: dict[int, list[int]] = {}
        self.seconds: list[float] = []
        self.after: list[Sequence[int]] = []
        self.streams: list[tuple[int, ...]] = []
        self.whats: list[What] = []

    def add(self, task: Task) -> None:
        """Enter a task, after all that it reads from."""
        self._past.setdefault(task.rank, [])
        done = _Done(task)
        if task.kind == "forward":
            self._forward(task, done)
        else:
            self._backward(task, done)
        self._past[task.rank].append(done)
        self._done[task.id] = done

    def _item(
        self, streams: tuple[int, ...], seconds: float, after: Sequence[int], what: What
    ) -> int:
        self.seconds.append(seconds)
        self.after.append(after)
        self.streams.append(streams)
        self.whats.append(what)
        return len(self.seconds) - 1

    # ---- the two directions

    def _forward(self, task: Task, done: _Done) -> None:
        first, prefetch, compute = task.first, self._prefetch, self._lanes[task.rank][_COMPUTE]
        kept, of_size = dict(task.stashes), {}
        waits_late = self._waits_late(task)
        weights = () if waits_late else (self._weights(task),)
        for i, size in enumerate(task.sizes):
            if size not in of_size:
                layers = self._sized.forward(size)
                passes = [(span, layers.time(*span)) for span in task.sub_packs]
                of_size[size] = layers.inputs, passes
            inputs, passes = of_size[size]
            x = self._input(task, i, inputs[first], self._gate(task, i, weights, done))
            if i == 0 and waits_late:
                weights = (self._weights(task),)
            after: list[int] = [x, *weights] if i == 0 else [x]
            for (start, stop), seconds in passes:
                if start in kept:
                    waits = (
                        list(after) if start > first else [x, *self._second_buffer(task, i, done)]
                    )
                    out = self._keep(task, i, start, inputs[start], waits)
                    if not prefetch:
                        after.append(out)
                after = [
                    self._item(compute, seconds, after, What(task.id, "FWD", i, size, start, stop))
                ]
            done.computes += after
            self._output(task, i, inputs[task.stop], done)
        late = done.swapped[-1:] if self._alone and not prefetch else ()
        done.deleted = self._item(compute, self._delete, late, _whole(task, "DEL"))

    def _backward(self, task: Task, done: _Done) -> None:
        lanes, of_size = self._lanes[task.rank], {}
        waits_late = self._waits_late(task)
        weights = () if waits_late else (self._weights(task),)
        for i, size in enumerate(task.sizes):
            if size not in of_size:
                forward = self._sized.forward(size).time(task.first, task.stop)
                layers = self._sized.backward(size)
                backward = layers.time(task.first, task.stop) - forward
                of_size[size] = layers.inputs, forward, backward
            inputs, forward, backward = of_size[size]
            x = self._input(task, i, inputs[task.first], self._gate(task, i, weights, done))
            after = [x]
            # Before the pass that it waits for is entered, the gradient can wait for none but that
            # of the micro-batch before.
            gradient = self._prefetched_gradient(task, i, inputs[task.stop], done)
            if i == 0 and waits_late:
                weights = (self._weights(task),)
            if i == 0:
                after += weights
            what = What(task.id, "REC", i, size, task.first, task.stop)
            done.recomputes.append(self._item(lanes[_COMPUTE], forward, after, what))
            if task.gradient is not None and not self._prefetch:
                gate = (done.recomputes[i],)
                gradient = (self._gradient(task, i, inputs[task.stop], gate),)
            what = What(task.id, "BWD", i, size, task.first, task.stop)
            done.computes.append(self._item(lanes[_COMPUTE], backward, gradient, what))
            self._output(task, i, inputs[task.first], done)
        self._finish(task, done)

    def _finish(self, task: Task, done: _Done) -> None:
        """Gradients are reduced and go out, the weights are updated."""
        lanes, nbytes = self._lanes[task.rank], self._sized.weight_bytes(task.first, task.stop)
        late = done.swapped[-1:] if self._alone and not self._prefetch else []
        after = [done.computes[-1], *late]
        if self._reduces:
            share = 2 * (self.num_working - 1) / self.num_working
            reduce = share * nbytes / self._p2p
            after = [self._item(lanes[_COMPUTE], reduce, late, _whole(task, "ARD"))]
        out = self._item(lanes[_OUT], nbytes / self._swap, after, _whole(task, "dWB"))
        done.deleted = self._item(lanes[_COMPUTE], self._delete, (out,), _whole(task, "DEL"))
        update = self._sized.update_seconds(task.first, task.stop)
        what = What(task.id + 1, "Update", 0, None, task.first, task.stop)
        self._item(lanes[_CPU], update, (out,), what)

    # ---- what comes in

    def _before(self, task: Task, back: int = 1) -> _Done | None:
        past = self._past[task.rank]
        return past[-back] if len(past) >= back else None

    def _waits_late(self, task: Task) -> bool:
        """Whether weights stand behind the first input in their queue."""
        in_order = task.kind == "forward" or task.criterion
        return self._prefetch and bool(self._past[task.rank]) and (self._alone or not in_order)

    def _weights(self, task: Task) -> int:
        before = self._before(task)
        after: tuple[int, ...] = ()
        if before is not None:
            after = (before.computes[-1] if self._prefetch else before.deleted,)
        seconds = self._sized.weight_bytes(task.first, task.stop) / self._swap
        return self._item(self._lanes[task.rank][_IN], seconds, after, _whole(task, "WB"))

    def _gate(self, task: Task, i: int, weights: Sequence[int], done: _Done) -> Sequence[int]:
        """What the first input of a micro-batch waits for, beside its data."""
        if not self._prefetch:
            if i == 0:
                return weights
            # The output of a device that is alone has to be out.
            return (done.swapped[-1],) if self._alone and done.swapped else (done.computes[-1],)
        if i >= 2:
            return (done.computes[i - 2],)
        before = self._before(task)
        if i == 1:
            return () if before is None else (before.deleted,)
        return self._from_the_task_before(task)

    def _from_the_task_before(self, task: Task) -> Sequence[int]:
        """What the first micro-batch waits for, to have the second buffer of the task before."""
        before, before_that = self._before(task), self._before(task, 2)
        if before is None:
            return ()
        if len(before.computes) > 1:
            return (before.computes[-2],)
        return () if before_that is None else (before_that.deleted,)

    def _second_buffer(self, task: Task, i: int, done: _Done) -> Sequence[int]:
        """What keeping the first input of a task waits for."""
        if not self._prefetch:
            return ()
        if i > 0:
            return (done.computes[-1],)
        before = self._before(task)
        return () if before is None else (before.deleted,)

    def _input(self, task: Task, i: int, nbytes: int, gate: Sequence[int]) -> int:
        """X of a micro-batch, or what was kept of it."""
        what = What(task.id, "X", i, task.sizes[i], task.first, task.first + 1)
        source = task.source
        if source is None:
            after = (self._told[task.id][i], *gate)
            return self._swap_in(task, nbytes, after, what._replace(kind="sX"))
        if source.medium == "p2p":
            return self._transfer(task.rank, source, nbytes, gate, what)
        if source.medium == "message":
            return self._swap_in(task, nbytes, (self._told[task.id][i], *gate), what)
        if source.medium == "swap":
            from_ = self._completes[i] if task.criterion else i
            gate = (self._done_of(source).swapped[from_], *gate)
        return self._swap_in(task, nbytes, gate, what)

    def _prefetched_gradient(self, task: Task, i: int, nbytes: int, done: _Done) -> tuple[int, ...]:
        if task.gradient is None or not self._prefetch:
            return ()
        if i > 0:
            return (self._gradient(task, i, nbytes, (done.recomputes[i - 1],)),)
        before = self._before(task)
        gate = self._from_the_task_before(task)
        if before and before.recomputes and (self._alone or not before.task.criterion):
            gate = (before.recomputes[-1],)
        return (self._gradient(task, i, nbytes, gate),)

    def _gradient(self, task: Task, i: int, nbytes: int, gate: Sequence[int]) -> int:
        """dY of a micro-batch."""
        assert task.gradient is not None
        what = What(task.id, "dY", i, task.sizes[i], task.stop - 1, task.stop)
        if task.gradient.medium == "p2p":
            return self._transfer(task.rank, task.gradient, nbytes, gate, what)
        after = (self._done_of(task.gradient).swapped[i], *gate)
        return self._swap_in(task, nbytes, after, what)

    def _done_of(self, channel: Channel) -> _Done:
        assert channel.task is not None
        return self._done[channel.task]

    def _swap_in(self, task: Task, nbytes: int, after: Sequence[int], what: What) -> int:
        return self._item(self._lanes[task.rank][_IN], nbytes / self._swap, after, what)

    def _transfer(
        self, rank: int, source: Channel, nbytes: int, gate: Sequence[int], what: What
    ) -> int:
        sender = self._done_of(source)
        streams = self._lanes[sender.task.rank][P2P_OUT] + self._lanes[rank][P2P_IN]
        of = sender.task
        sent = ("Y", of.stop - 1) if of.kind == "forward" else ("dX", of.first)
        what = what._replace(sender=(of.id, *sent))
        after = (sender.computes[what.microbatch], *gate)
        return self._item(streams, nbytes / self._p2p, after, what)

    # ---- what goes out

    def _output(self, task: Task, i: int, nbytes: int, done: _Done) -> None:
        """Y or dX of a micro-batch, where it goes to the host; another device takes it itself."""
        sink = task.sink
        if sink is None or sink.medium == "p2p":
            return
        kind, layer = ("Y", task.stop - 1) if task.kind == "forward" else ("dX", task.first)
        what = What(task.id, kind, i, task.sizes[i], layer, layer + 1)
        lane = self._lanes[task.rank][_OUT]
        done.swapped.append(self._item(lane, nbytes / self._swap, done.computes[-1:], what))
        if sink.medium == "message":
            self._tell(task, sink, layer + 1, done.swapped[-1], what)

    def _keep(self, task: Task, i: int, layer: int, nbytes: int, after: Sequence[int]) -> int:
        """The input of a layer, for the backward pass."""
        what = What(task.id, "sX", i, task.sizes[i], layer, layer + 1)
        lane = self._lanes[task.rank][_OUT]
        out = self._item(lane, nbytes / self._swap, after, what)
        self._tell(task, dict(task.stashes)[layer], layer, out, what)
        return out

    def _tell(self, task: Task, to: Channel, layer: int, out: int, what: What) -> None:
        """Messages for the micro-batches of the backward pass that this one completes; the bytes
        are written and read."""
        assert to.task is not None
        told = self._told.setdefault(to.task, [])
        for j in self._completed[what.microbatch]:
            size = self._sizes_back[j]
            same = to.rank == task.rank
            nbytes = 0 if same else self._sized.forward(size).inputs[layer]
            message = What(task.id, f"MSG{what.kind}", j, size, what.first, what.stop)
            lane = self._lanes[task.rank][_CPU]
            told.append(self._item(lane, nbytes / self._message * 2, (out,), message))


def _whole(task: Task, kind: str) -> What:
    return What(task.id, kind, 0, None, task.first, task.stop)
