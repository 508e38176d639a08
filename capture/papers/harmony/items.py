"""The items of a step of packs on the streams of its ranks: which there are, how long they take,
and what they wait for. See ``estimate``, whose other half this is.

Without prefetch a task brings an input when the micro-batch before it is done. With it the inputs
of the first two micro-batches come while the task before computes, and later ones while the one
before does, into a second buffer; nothing waits for what goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Channel, PackTask, TaskGraph, completed_by

STREAMS = ("SwapIn", "SwapOut", "P2PIn", "P2POut", "Compute", "CPU")
_IN, _OUT, P2P_IN, P2P_OUT, _COMPUTE, _CPU = range(len(STREAMS))


class What(NamedTuple):
    """The identity of an item: its task, kind, micro-batch and layers.

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


@dataclass(slots=True)
class _Done:
    """The items of a task that later tasks of its rank may wait for; per micro-batch, but for the
    last.

    Attributes:
        task: The task.
        computes: The last pass.
        recomputes: The forward pass again.
        deleted: When the task's memory is given back.
    """

    task: PackTask
    computes: list[int] = field(default_factory=list)
    recomputes: list[int] = field(default_factory=list)
    deleted: int = -1


@dataclass(slots=True)
class _Station:
    """The items that other packs may wait for, per micro-batch of all tasks of a pack one way.

    Attributes:
        last: The last of its tasks so far.
        computes: The last pass.
        swapped: Where the output went to the host: when it is there.
        told: By what it is (X, dY, sX), the message that brings it.
        gradients: When its gradients are on the host.
    """

    last: PackTask
    computes: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    told: dict[str, list[int]] = field(default_factory=lambda: {"X": [], "dY": [], "sX": []})
    gradients: int = -1


class Items:
    """The items of a step's tasks: lists of seconds, of what they wait for, of streams and of what
    they are."""

    def __init__(self, graph: TaskGraph, profile: LayerProfile, server: Server):
        self._profile, self._alone = profile, graph.alone
        self._switches, self._prefetch = graph.switches, graph.switches.prefetch
        self.num_working = (
            graph.num_devices if graph.mode == "dp" else len({task.rank for task in graph.tasks})
        )
        self.swap_bytes_per_second = server.swap_bytes_per_second.value / self.num_working
        self.p2p_bytes_per_second = server.p2p_bytes_per_second.value
        self._message = server.message_bytes_per_second.value / self.num_working
        self._delete = server.delete_seconds.value
        # In data parallelism the others do the same as the first rank, for their shares.
        self.num_alike = graph.num_devices if graph.mode == "dp" else 1
        self.examples_alike = graph.minibatch_size / sum(graph.sizes[0])
        self._sizes = graph.sizes
        #: Whether one micro-batch makes the gradients, so that they may go back as those of casts.
        self._makes_at_once = len(graph.sizes[1]) == 1 and graph.num_shares == 1
        self._shares = graph.num_shares
        self._completed = completed_by(*graph.sizes)
        self._completes = [i for i, row in enumerate(self._completed) for _ in row]
        self._reduces = graph.mode == "dp" and graph.num_devices > 1
        width = len(STREAMS)
        self._lanes = [
            tuple((rank * width + stream,) for stream in range(width))
            for rank in range(graph.num_devices)
        ]
        self._stations: dict[int, _Station] = {}
        self._station_of: dict[int, _Station] = {}
        for task in graph.tasks:
            station = self._stations.setdefault(task.station, _Station(task))
            self._station_of[task.id] = station
        self._past: dict[int, list[_Done]] = {task.rank: [] for task in graph.tasks}
        self.seconds: list[float] = []
        self.after: list[Sequence[int]] = []
        self.streams: list[tuple[int, ...]] = []
        self.whats: list[What] = []

    def add(self, task: PackTask) -> None:
        """Enter a task, after all that it reads from."""
        if task.kind == "update":
            self._update(task)
            return
        done = _Done(task)
        self._stations[task.station].last = task
        if task.kind == "forward":
            self._forward(task, done)
        else:
            self._backward(task, done)
        self._past[task.rank].append(done)

    def _item(
        self, streams: tuple[int, ...], seconds: float, after: Sequence[int], what: What
    ) -> int:
        self.seconds.append(seconds)
        self.after.append(after)
        self.streams.append(streams)
        self.whats.append(what)
        return len(self.seconds) - 1

    # ---- the two directions

    def _forward(self, task: PackTask, done: _Done) -> None:
        first, prefetch, compute = task.first, self._prefetch, self._lanes[task.rank][_COMPUTE]
        kept, of_size = dict(task.stashes), {}
        waits_late = self._waits_late(task)
        weights = () if waits_late else (self._weights(task),)
        for i, size in enumerate(task.sizes):
            if size not in of_size:
                layers = self._profile.at("forward", size)
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
            self._computed(done, after[0])
            self._output(task, i, inputs[task.stop])
        late = self._last_swapped(task) if self._alone and not prefetch else ()
        done.deleted = self._item(compute, self._delete, late, _whole(task, "DEL"))

    def _backward(self, task: PackTask, done: _Done) -> None:
        lanes, of_size = self._lanes[task.rank], {}
        waits_late = self._waits_late(task)
        weights = () if waits_late else (self._weights(task),)
        # What earlier micro-batches left, where they were tasks of their own.
        summed = (self._gradients_in(task),) if task.start else ()
        adding = self._profile.adding_seconds(task.first, task.stop)
        for i, size in enumerate(task.sizes):
            if size not in of_size:
                forward = self._profile.at("forward", size).time(task.first, task.stop)
                layers = self._profile.at("backward", size)
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
            waits = gradient if i else (*gradient, *summed)
            added = adding if i or summed else 0.0
            self._computed(done, self._item(lanes[_COMPUTE], backward + added, waits, what))
            self._output(task, i, inputs[task.first])
        self._finish(task, done)

    def _computed(self, done: _Done, item: int) -> None:
        done.computes.append(item)
        self._stations[done.task.station].computes.append(item)

    def _last_swapped(self, task: PackTask) -> Sequence[int]:
        """Return the swap-out of the last micro-batch's output, where it goes to the host."""
        return self._stations[task.station].swapped[-1:]

    def _finish(self, task: PackTask, done: _Done) -> None:
        """Add the items that reduce a task's gradients and bring them out."""
        lanes, pack = self._lanes[task.rank], (task.first, task.stop)
        nbytes = self._profile.gradient_bytes(*pack, alone=self._makes_at_once)
        late = self._last_swapped(task) if self._alone and not self._prefetch else ()
        after = [done.computes[-1], *late]
        if self._reduces and task.last:
            # Of a sum in shares, half: no device gets the whole.
            kind, times = ("ARD", 2) if self._shares == 1 else ("RSD", 1)
            share = times * (self.num_working - 1) / self.num_working
            reduce = share * nbytes / self.p2p_bytes_per_second
            after = [self._item(lanes[_COMPUTE], reduce, late, _whole(task, kind))]
        station = self._stations[task.station]
        if task.last and self._updates_at_once:
            # The update, which comes next, gives the memory back.
            station.gradients = after[0]
            return
        seconds = nbytes / self._shares / self.swap_bytes_per_second
        out = self._item(lanes[_OUT], seconds, after, _whole(task, "dWB"))
        station.gradients = out
        done.deleted = self._item(lanes[_COMPUTE], self._delete, (out,), _whole(task, "DEL"))

    @property
    def _updates_at_once(self) -> bool:
        """Whether weights are updated on the device, right behind their backward pass."""
        return self._switches.jit and not self._switches.offload

    def _update(self, task: PackTask) -> None:
        """Add an update, on the host when gradients are there, or on the device with its state."""
        lanes, first, stop = self._lanes[task.rank], task.first, task.stop
        gradients = self._stations[task.station].gradients
        after = [gradients]
        if not self._switches.jit:
            after.append(max(station.gradients for station in self._stations.values()))
        if self._switches.offload:
            seconds = self._profile.update_seconds(first, stop)
            seconds += self._profile.cast_seconds(first, stop)
            if self._makes_at_once:
                seconds += self._profile.widen_seconds(first, stop)
            # Every process updates its share.
            self._item(lanes[_CPU], seconds / self._shares, after, _whole(task, "Update"))
            return
        weights, state = (
            self._profile.streamed_bytes(first, stop),
            self._profile.state_bytes(first, stop),
        )
        past = self._past[task.rank]
        if self._updates_at_once:
            done = past[-1]
            gate = done.recomputes[-1:] if self._prefetch else after
            ready = [gradients]
        else:
            done = _Done(task)
            before = past[-1]
            gate = [*after, before.computes[-1] if self._prefetch else before.deleted]
            ready = [
                self._swap_in(task, weights, gate, _whole(task, kind)) for kind in ("WB", "dWB")
            ]
            past.append(done)
        ready.append(self._swap_in(task, state, gate, _whole(task, "K")))
        update = self._item(lanes[_COMPUTE], 0.0, ready, _whole(task, "Update"))
        if not done.computes:
            done.computes.append(update)
        outs = [
            self._item(
                lanes[_OUT], nbytes / self.swap_bytes_per_second, (update,), _whole(task, kind)
            )
            for kind, nbytes in (("WB", weights), ("K", state))
        ]
        done.deleted = self._item(lanes[_COMPUTE], self._delete, outs, _whole(task, "DEL"))

    # ---- what comes in

    def _before(self, task: PackTask, back: int = 1) -> _Done | None:
        past = self._past[task.rank]
        return past[-back] if len(past) >= back else None

    def _waits_late(self, task: PackTask) -> bool:
        """Return whether weights stand behind the first input in their queue."""
        in_order = task.kind == "forward" or task.criterion
        return self._prefetch and bool(self._past[task.rank]) and (self._alone or not in_order)

    def _weights(self, task: PackTask) -> int:
        before = self._before(task)
        after: tuple[int, ...] = ()
        if before is not None:
            after = (before.computes[-1] if self._prefetch else before.deleted,)
        nbytes = self._profile.streamed_bytes(task.first, task.stop)
        share = self._swap_in(task, nbytes / self._shares, after, _whole(task, "WB"))
        if self._shares == 1:
            return share
        seconds = (1 - 1 / self._shares) * nbytes / self.p2p_bytes_per_second
        return self._item(self._lanes[task.rank][_COMPUTE], seconds, (share,), _whole(task, "AGW"))

    def _gradients_in(self, task: PackTask) -> int:
        """Add the swap-in of the sum of gradients that the task before left, and return it."""
        nbytes = self._profile.gradient_bytes(task.first, task.stop)
        gate = (self._stations[task.station].gradients, *self._from_the_task_before(task))
        return self._swap_in(task, nbytes, gate, _whole(task, "dWB"))

    def _gate(self, task: PackTask, i: int, weights: Sequence[int], done: _Done) -> Sequence[int]:
        """Return the items that the first input of a micro-batch waits for, beside its data."""
        if not self._prefetch:
            if i == 0:
                return weights
            # The output of a device that is alone has to be out.
            out = self._last_swapped(task) if self._alone else ()
            return out or (done.computes[-1],)
        if i >= 2:
            return (done.computes[i - 2],)
        before = self._before(task)
        if i == 1:
            return () if before is None else (before.deleted,)
        return self._from_the_task_before(task)

    def _from_the_task_before(self, task: PackTask) -> Sequence[int]:
        """Return the item after which the second buffer is free for a task's first micro-batch."""
        before, before_that = self._before(task), self._before(task, 2)
        if before is None:
            return ()
        if len(before.computes) > 1:
            return (before.computes[-2],)
        return () if before_that is None else (before_that.deleted,)

    def _second_buffer(self, task: PackTask, i: int, done: _Done) -> Sequence[int]:
        """Return the items that keeping the first input of a task waits for."""
        if not self._prefetch:
            return ()
        if i > 0:
            return (done.computes[-1],)
        before = self._before(task)
        return () if before is None else (before.deleted,)

    def _input(self, task: PackTask, i: int, nbytes: int, gate: Sequence[int]) -> int:
        """Add the transfer of X of a micro-batch, or of what was kept of it, and return it."""
        what = What(task.id, "X", i, task.sizes[i], task.first, task.first + 1)
        at, told = task.start + i, self._stations[task.station].told
        source = task.source
        if source is None:
            return self._swap_in(task, nbytes, (told["sX"][at], *gate), what._replace(kind="sX"))
        if source.medium == "p2p":
            return self._transfer(task, source, nbytes, gate, what)
        if source.medium == "message":
            gate = (told["X"][at], *gate)
        if source.medium == "swap":
            from_ = self._completes[at] if task.criterion else at
            gate = (self._at(source).swapped[from_], *gate)
        return self._swap_in(task, nbytes, gate, what)

    def _prefetched_gradient(
        self, task: PackTask, i: int, nbytes: int, done: _Done
    ) -> tuple[int, ...]:
        if task.gradient is None or not self._prefetch:
            return ()
        if i > 0:
            return (self._gradient(task, i, nbytes, (done.recomputes[i - 1],)),)
        before = self._before(task)
        gate = self._from_the_task_before(task)
        if before and before.recomputes and (self._alone or not before.task.criterion):
            gate = (before.recomputes[-1],)
        return (self._gradient(task, i, nbytes, gate),)

    def _gradient(self, task: PackTask, i: int, nbytes: int, gate: Sequence[int]) -> int:
        """Add the transfer of dY of a micro-batch, and return it."""
        assert task.gradient is not None
        what = What(task.id, "dY", i, task.sizes[i], task.stop - 1, task.stop)
        at = task.start + i
        if task.gradient.medium == "p2p":
            return self._transfer(task, task.gradient, nbytes, gate, what)
        if task.gradient.medium == "message":
            gate = (self._stations[task.station].told["dY"][at], *gate)
        else:
            gate = (self._at(task.gradient).swapped[at], *gate)
        return self._swap_in(task, nbytes, gate, what)

    def _at(self, channel: Channel) -> _Station:
        assert channel.task is not None
        return self._station_of[channel.task]

    def _swap_in(self, task: PackTask, nbytes: float, after: Sequence[int], what: What) -> int:
        return self._item(
            self._lanes[task.rank][_IN], nbytes / self.swap_bytes_per_second, after, what
        )

    def _transfer(
        self, task: PackTask, source: Channel, nbytes: int, gate: Sequence[int], what: What
    ) -> int:
        sender = self._at(source)
        of = sender.last
        streams = self._lanes[of.rank][P2P_OUT] + self._lanes[task.rank][P2P_IN]
        sent = ("Y", of.stop - 1) if of.kind == "forward" else ("dX", of.first)
        what = what._replace(sender=(of.id, *sent))
        after = (sender.computes[task.start + what.microbatch], *gate)
        return self._item(streams, nbytes / self.p2p_bytes_per_second, after, what)

    # ---- what goes out

    def _output(self, task: PackTask, i: int, nbytes: int) -> None:
        """Add the swap-out of Y or dX of a micro-batch, where it goes to the host; another device
        takes it itself."""
        sink = task.sink
        if sink is None or sink.medium == "p2p":
            return
        kind, layer = ("Y", task.stop - 1) if task.kind == "forward" else ("dX", task.first)
        what = What(task.id, kind, i, task.sizes[i], layer, layer + 1)
        lane, station = self._lanes[task.rank][_OUT], self._stations[task.station]
        station.swapped.append(
            self._item(lane, nbytes / self.swap_bytes_per_second, station.computes[-1:], what)
        )
        if sink.medium == "message":
            at = layer + 1 if kind == "Y" else layer
            self._tell(task, sink, at, station.swapped[-1], what)

    def _keep(self, task: PackTask, i: int, layer: int, nbytes: int, after: Sequence[int]) -> int:
        """Add the swap-out of a layer's input that is kept for the backward pass, and return it."""
        what = What(task.id, "sX", i, task.sizes[i], layer, layer + 1)
        lane = self._lanes[task.rank][_OUT]
        out = self._item(lane, nbytes / self.swap_bytes_per_second, after, what)
        self._tell(task, dict(task.stashes)[layer], layer, out, what)
        return out

    def _tell(self, task: PackTask, to: Channel, layer: int, out: int, what: What) -> None:
        """Add messages for the micro-batches of the other task that this one completes; the bytes
        are written and read."""
        other, at = self._at(to), task.start + what.microbatch
        turns = task.kind == "forward" and other.last.kind == "backward"
        told = other.told["sX" if what.kind == "sX" else "X" if what.kind == "Y" else "dY"]
        sizes = self._sizes[other.last.kind == "backward"]
        for j in self._completed[at] if turns else (at,):
            same = to.rank == task.rank
            nbytes = 0 if same else self._profile.at("forward", sizes[j]).inputs[layer]
            message = What(task.id, f"MSG{what.kind}", j, sizes[j], what.first, what.stop)
            lane = self._lanes[task.rank][_CPU]
            told.append(self._item(lane, nbytes / self._message * 2, (out,), message))


def _whole(task: PackTask, kind: str) -> What:
    return What(task.id, kind, 0, None, task.first, task.stop)
