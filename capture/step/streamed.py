"""The step of a plan of packs: layers that come from the memory of the host, pack by pack, and
their gradients that go back.

Every device is a place, and has a place in the memory of the host. Weights and optimizer state
stay there: a slot of weights per run of layers that no pack divides, one of state per backward
pack. Slots are called ``weights``, ``state``, ``gradients``, ``batch``, ``activation``,
``gradient`` (of an activation) and ``loss``; programs ``forward``, ``backward`` (which computes the
forward pass again), ``reduce`` and ``update``.

A value between two packs is cut where the micro-batches of either direction end, so that it is
copied once in pieces, whatever their sizes (concatenation and split are the programs'). It goes
from device to device, or over the host where both packs are on one device, or p2p is off. What a
copy to the host reads is freed a pass later, when that copy has most likely ended.

Passes are issued in the order of their beginnings, which is given; with prefetch, what the next
pass of a device needs is issued before this one, if it has been made and the device has room for
it beside this one; where there is none for this one, what goes out is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Span, Task, TaskGraph
from capture.step.ledger import Ledger
from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Step, begin, book
from capture.step.streamed_state import (
    Came,
    Late,
    Rank,
    StreamedState,
    Unit,
    parts_of_name,
    program_name,
)
from capture.step.timeline import Seconds

Begins = Mapping[tuple[int, int], float]
"""(task, micro-batch) -> when its pass begins; of an update, micro-batch 0."""


def build_step(graph: TaskGraph, profile: LayerProfile, server: Server, begins: Begins) -> Step:
    """The instructions of one step.

    Args:
        graph: Tasks of all ranks.
        profile: Bytes of the layers.
        server: Memory of a device and of the host.
        begins: The order in which passes are issued; a pass after those that it reads from.
    """
    return StreamedBuilder(graph, profile, server, begins).build()


def streamed_seconds(
    step: Step, graph: TaskGraph, profile: LayerProfile, server: Server
) -> Seconds:
    """Times of its programs and copies: those of the profile, and bytes over the bandwidths that
    the devices share."""
    working = len({task.rank for task in graph.tasks})
    swap = server.swap_bytes_per_second.value / working
    p2p = server.p2p_bytes_per_second.value

    def of(name: str) -> float:
        kind, first, stop, size, _ = parts_of_name(name)
        if kind == "update":
            on_host = step.programs[name].place.host is not None
            return sum(profile.update_cpu_time[first:stop]) if on_host else 0.0
        if kind == "reduce":
            nbytes = sum(profile.w_bytes[first:stop]) + sum(profile.b_bytes[first:stop])
            return 2 * (working - 1) / working * nbytes / p2p
        return profile.at("forward" if kind == "forward" else "backward", size).time(first, stop)

    def transfer(
        instruction: Feed | Copy, nbytes: int, source: Place | None, target: Place
    ) -> float:
        over_host = source is None or source.host is not None or target.host is not None
        return nbytes / (swap if over_host else p2p)

    return Seconds({name: of(name) for name in step.programs}, transfer)


def volumes_bytes(step: Step) -> dict[str, int]:
    """What is copied over the hosts' links, by what the slots are and the direction; between
    devices it is ``p2p``, and what comes from the batch ``batch in``."""
    found: defaultdict[str, int] = defaultdict(int)
    for instruction in step.instructions:
        match instruction:
            case Feed(slot=slot):
                found["batch in"] += step.slots[slot].nbytes
            case Copy(source=source, target=target, nbytes=nbytes):
                one, other = step.slots[source], step.slots[target]
                if one.place.host is not None:
                    found[f"{other.what} in"] += nbytes
                elif other.place.host is not None:
                    found[f"{one.what} out"] += nbytes
                else:
                    found["p2p"] += nbytes
    return dict(found)


class StreamedBuilder(StreamedState):
    """Emits the instructions; remembers where every piece of a value is.

    Args:
        graph: Tasks of all ranks.
        profile: Bytes of the layers.
        server: Memory of a device and of the host.
        begins: When passes begin.
    """

    def __init__(self, graph: TaskGraph, profile: LayerProfile, server: Server, begins: Begins):
        units = [Unit(task, i) for task in graph.tasks for i in range(max(1, len(task.sizes)))]
        units.sort(key=lambda unit: (begins[unit.task.id, unit.i], unit.task.id, unit.i))
        super().__init__(graph, profile, server, units)
        self._units = units
        self._limit_bytes, self._room_bytes = server.usable_bytes.value, 0.0
        self._ledger = Ledger(graph.num_devices)
        begin(self._ledger, self.step)
        self._ends, self._cuts = _microbatch_ends(graph, self._lane)
        #: (lane, layer, what) -> by end in examples, the slot of a piece.
        self._pieces: defaultdict[tuple[int, int, str], dict[int, int]] = defaultdict(dict)

    def build(self) -> Step:
        """The step; once."""
        step = self.step
        for unit in self._units:
            task, rank = unit.task, self._ranks[unit.task.rank]
            rank.units.pop()
            self._label = f"{task.kind} {unit.at} of layers {task.first} to {task.stop - 1}"
            self._issue(self._emit(unit, rank))
        for rank in self._ranks:
            self._issue(self._flushed(rank))
        step.num_passes = len(step.instructions)
        if step.reported:
            step.instructions.append(Free(tuple(step.reported)))
        return step

    def _issue(self, instructions: Iterable[Instruction]) -> None:
        """Each is booked before the next is made, which may depend on the room that is left."""
        for instruction in instructions:
            self.step.instructions.append(instruction)
            book(self._ledger, self.step, instruction)

    def _emit(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        if unit.task.kind == "update":
            yield from self._update(unit.task, rank)
            return
        if not (self._switches.prefetch and self._switches.grouping):
            yield from self._flushed(rank)
        yield from self._bring(unit, rank)
        self._room_bytes = self._limit_bytes - self._running_bytes(unit)
        if not self._has_room(rank, 0):  # wait for what goes out
            yield from self._flushed(rank)
        late, rank.late = rank.late, []
        coming = (after for after in reversed(rank.units) if after.task.kind != "update")
        if self._switches.prefetch and (after := next(coming, None)) is not None:
            yield from self._bring(after, rank, early=True)
        yield from (self._forward if unit.task.kind == "forward" else self._backward)(unit, rank)
        new, rank.late = rank.late, late
        yield from self._flushed(rank)
        rank.late = new

    # ---- what comes in ---------------------------------------------------------------------------

    def _bring(self, unit: Unit, rank: Rank, *, early: bool = False) -> Iterator[Instruction]:
        """Weights and inputs of a pass, those that are not there yet; early, as far as they have
        been made and have room beside the pass that comes first."""
        task, profile = unit.task, self._profile
        if task.id not in rank.weights:
            if early and not self._has_room(rank, self._weight_bytes((task.first, task.stop))):
                return
            rank.weights[task.id] = yield from self._bring_weights((task.first, task.stop), rank)
        x = unit.size * profile.x_bytes_per_sample[task.first]
        if unit.inputs is None and not (early and not self._has_room(rank, x)):
            if task.first == 0:
                unit.inputs = yield from self._feed(unit, rank)
            else:
                what = "input" if task.source else "kept"
                unit.inputs = yield from self._bring_pieces(unit, rank, task.first, what, early)
        if unit.gradients is None and task.gradient is not None:
            what, above = "input gradient", unit.size * profile.x_bytes_per_sample[task.stop]
            if early and not self._has_room(rank, above):
                return
            unit.gradients = yield from self._bring_pieces(unit, rank, task.stop, what, early)

    def _has_room(self, rank: Rank, nbytes: int) -> bool:
        return self._ledger.live_bytes[rank.place.devices[0]] + nbytes <= self._room_bytes

    def _running_bytes(self, unit: Unit) -> int:
        """What the programs of a pass take beside what is live when they run."""
        task, size = unit.task, unit.size
        if task.kind == "backward":
            return self._backward_bytes(task, size, again=False)
        return max(self._forward_bytes(span, size) for span in task.sub_packs)

    def _forward_bytes(self, span: Span, size: int) -> int:
        """The peak of the layers holds weights and the input."""
        layers, (first, stop) = self._profile.at("forward", size), span
        own = layers.pack_bytes(first, stop) - self._weight_bytes(span) - layers.inputs[first]
        return max(own, layers.inputs[stop], 0)

    def _backward_bytes(self, task: Task, size: int, *, again: bool) -> int:
        """The peak of the layers holds weights, their gradients and the input; gradients of an
        earlier micro-batch are taken over."""
        layers, span = self._profile.at("backward", size), (task.first, task.stop)
        weights = self._weight_bytes(span)
        own = layers.pack_bytes(*span) - weights - layers.inputs[task.first]
        out = (layers.inputs[task.first] if task.first else 0) + 4 * task.criterion
        return max(own - weights, out) if again else max(own, out + weights)

    def _feed(self, unit: Unit, rank: Rank) -> Generator[Instruction, None, list[Came]]:
        """The batch, which is on the host: it need not be kept for the backward pass."""
        came: list[Came] = []
        cuts = (0, *self._cuts[self._lane(unit.task)])
        for first, stop in self._spans(unit):
            nbytes = (stop - first) * self._profile.x_bytes_per_sample[0]
            slot = self._slot("batch", rank.place, "batch", nbytes)
            yield Feed(slot, cuts.index(first), (0,), self._label)
            came.append((slot, None))
        return came

    def _bring_pieces(
        self, unit: Unit, rank: Rank, layer: int, what: str, early: bool
    ) -> Generator[Instruction, None, list[Came] | None]:
        """The pieces of a value that enters a pass; None if it is too early."""
        known = self._pieces[self._lane(unit.task), layer, what]
        ends = [stop for _, stop in self._spans(unit)]
        if early and any(end not in known for end in ends):
            return None
        came: list[Came] = []
        for source in [known.pop(end) for end in ends]:
            given = self.step.slots[source]
            if given.place is rank.place:
                came.append((source, None))
                continue
            category = "cotangents" if what == "input gradient" else "activations"
            slot = self._slot(given.what, rank.place, category, given.nbytes)
            yield self._copy(source, slot)
            if given.place.host is None:
                yield Free((source,))
            came.append((slot, None if given.place.host is None else source))
        return came

    def _used(self, came: Iterable[Came], *, but: bool = False) -> Iterator[Instruction]:
        """Pieces are freed, and where they came from; but for that, which is kept on."""
        for slot, source in came:
            if source is not None:
                yield from self._waited(source, slot)
            yield Free((slot,) if source is None or but else (slot, source))

    # ---- what goes out ---------------------------------------------------------------------------

    def _give(
        self, unit: Unit, rank: Rank, layer: int, what: str, slots: Sequence[int]
    ) -> Iterator[Instruction]:
        """Pieces of a value for the next pack: they stay for its device, or go to the host."""
        sink = unit.task.sink
        if not slots:
            return
        over_host = not self._switches.p2p or (sink is not None and sink.medium == "swap")
        known = self._pieces[self._lane(unit.task), layer, what]
        ends = [stop for _, stop in self._spans(unit)]
        if not over_host:
            known |= dict(zip(ends, slots, strict=True))
            return
        outs = yield from self._put_out(slots, rank, "activations")
        known |= dict(zip(ends, outs, strict=True))
        rank.late.append(Late(outs, slots))

    def _put_out(
        self, slots: Sequence[int], rank: Rank, category: str
    ) -> Generator[Instruction, None, list[int]]:
        outs = []
        for slot in slots:
            given = self.step.slots[slot]
            outs.append(self._slot(given.what, rank.host, category, given.nbytes))
            yield self._copy(slot, outs[-1])
        return outs

    def _keep(
        self, unit: Unit, rank: Rank, layer: int, came: Sequence[Came]
    ) -> Generator[Instruction, None, bool]:
        """An input of a layer, for the backward pass; whether it has to be copied out for that.
        What came from the host stays there."""
        known = self._pieces[self._lane(unit.task), layer, "kept"]
        ends = [stop for _, stop in self._spans(unit)]
        sources = [source for _, source in came if source is not None]
        if len(sources) == len(came):
            known |= dict(zip(ends, sources, strict=True))
            return False
        slots = [slot for slot, _ in came]
        outs = yield from self._put_out(slots, rank, "kept activations")
        known |= dict(zip(ends, outs, strict=True))
        rank.late.append(Late(outs, slots))
        return True

    def _leave(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        """Weights go with the last micro-batch of a task."""
        task = unit.task
        if unit.i == len(task.sizes) - 1:
            weights = rank.weights.pop(task.id)
            if not self._switches.offload:  # they will be written over where they came from
                yield from self._waited(*weights)
            yield Free(weights)

    # ---- passes ----------------------------------------------------------------------------------

    def _forward(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        task, layers = unit.task, self._profile.at("forward", unit.size)
        kept = {layer for layer, _ in task.stashes} - {0}
        came, spans = unit.inputs or [], self._of((task.first, task.stop))
        weights = dict(zip(spans, rank.weights[task.id], strict=True))
        for first, stop in task.sub_packs:
            copied = False
            if first in kept:
                copied = yield from self._keep(unit, rank, first, came)
            ends = stop == task.stop and task.sink is None
            of_value = self._profile.x_bytes_per_sample[stop] if stop < len(layers.seconds) else 0
            outputs = (
                []
                if ends
                else [
                    self._slot("activation", rank.place, "activations", (b - a) * of_value)
                    for a, b in self._spans(unit)
                ]
            )
            transient = self._forward_bytes((first, stop), unit.size)
            name = program_name("forward", (first, stop), unit.size, task.rank)
            used = tuple(weights[span] for span in self._of((first, stop)))
            inputs = tuple(slot for slot, _ in came)
            self._program("forward", name, rank, transient)
            yield Run(name, (used, inputs), tuple(outputs), (), self._label)
            if not copied:
                yield from self._used(came, but=first in kept)
            came = [(slot, None) for slot in outputs]
        yield from self._give(unit, rank, task.stop, "input", [slot for slot, _ in came])
        yield from self._leave(unit, rank)

    def _backward(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        task = unit.task
        span = task.first, task.stop
        if task.start and unit.i == 0:  # what the task before summed is on the host
            source = self._gradients[span].pop(task.rank)
            rank.summed = self._slot("gradients", rank.place, "gradients", self._weight_bytes(span))
            yield self._copy(source, rank.summed)
            yield from self._waited(rank.summed)
            yield Free((source,))
        came, cotangents = unit.inputs or [], unit.gradients or []
        outputs = [
            self._slot(
                "gradient",
                rank.place,
                "cotangents",
                (b - a) * self._profile.x_bytes_per_sample[task.first],
            )
            for a, b in (self._spans(unit) if task.first else ())
        ]
        losses = []
        if task.criterion:
            losses = [self._slot("loss", rank.place, "loss", 4)]
            self.step.reported += losses
        nbytes = self._weight_bytes(span)
        summed = () if rank.summed is None else (rank.summed,)
        gradients = self._slot("gradients", rank.place, "gradients", nbytes)
        transient = self._backward_bytes(task, unit.size, again=bool(summed))
        kind = "accumulate" if summed else "backward"
        name = self._program(
            "backward", program_name(kind, span, unit.size, task.rank), rank, transient
        )
        inputs = (
            rank.weights[task.id],
            tuple(slot for slot, _ in came),
            tuple(slot for slot, _ in cotangents),
            summed,
        )
        yield Run(name, inputs, (*outputs, *losses, gradients), summed, self._label)
        rank.summed = gradients
        yield from self._used([*came, *cotangents])
        yield from self._give(unit, rank, task.first, "input gradient", outputs)
        if unit.i < len(task.sizes) - 1:
            return
        at_once = task.last and self._switches.jit and not self._switches.offload
        if not at_once:
            yield from self._leave(unit, rank)
            (out,) = yield from self._put_out((gradients,), rank, "gradients")
            self._gradients[span][task.rank] = out
            rank.late.append(Late((out,), (gradients,)))
        else:
            self._gradients[span][task.rank] = gradients
        rank.summed = None

    def _spans(self, unit: Unit) -> list[Span]:
        """Pieces of a micro-batch, in examples."""
        lane = self._lane(unit.task)
        ends = self._ends[lane, unit.task.station]
        first, last = ends[unit.at], ends[unit.at + 1]
        return list(pairwise([first, *(cut for cut in self._cuts[lane] if first < cut <= last)]))


def _microbatch_ends(
    graph: TaskGraph, lane_of: Callable[[Task], int]
) -> tuple[dict[tuple[int, int], tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Examples at which micro-batches end: by (lane, station), 0 first; by lane those of all."""
    sizes: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for task in graph.tasks:
        if task.kind != "update":
            sizes[lane_of(task), task.station] |= dict(enumerate(task.sizes, task.start))
    ends = {
        key: (0, *accumulate(size for _, size in sorted(of.items()))) for key, of in sizes.items()
    }
    lanes = {lane for lane, _ in ends}
    cuts = {
        one: tuple(sorted({end for (lane, _), of in ends.items() if lane == one for end in of[1:]}))
        for one in lanes
    }
    return ends, cuts
