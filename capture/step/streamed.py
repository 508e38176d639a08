"""The step of a plan of packs: layers that come from the memory of the host, pack by pack, and
their gradients that go back.

Every device is a place, and has a place in the memory of the host. Weights and optimizer state
stay there: a slot of weights per run of layers that no pack divides, one of state per backward
pack. Where devices get casts instead of parameters, the host keeps those in a slot beside them,
which follow every update; where devices have shares, it has a slot of each. Slots are called
``weights``, ``casts``, ``state``, ``gradients``, ``batch``, ``activation``, ``gradient`` (of an
activation), ``summary`` and ``loss``; programs ``forward``, ``backward`` (which computes the
forward pass again), ``summarize``, ``update``; of all devices ``reduce``, ``gather`` (weights of
shares), ``scatter`` (shares of the sum of gradients); ``widen`` (gradients of casts become those of
parameters) and ``cast``.

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
from capture.step.holds import Leaves, Loss
from capture.step.pack_sizes import PackPass, PackSizes
from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Step, book
from capture.step.streamed_state import StreamedState
from capture.step.streamed_units import Came, Late, PackCall, Rank, Unit
from capture.step.timeline import Seconds

Begins = Mapping[tuple[int, int], float]
"""(task, micro-batch) -> when its pass begins; of an update, micro-batch 0."""


def streamed_seconds(
    step: Step, graph: TaskGraph, profile: LayerProfile, server: Server
) -> Seconds:
    """Times of its programs and copies: those of the profile, and bytes over the bandwidths that
    the devices share."""
    working = len({task.rank for task in graph.tasks})
    swap = server.swap_bytes_per_second.value / working
    p2p = server.p2p_bytes_per_second.value

    def of(name: str) -> float:
        kind, (first, stop), size, *_ = step.programs[name].call
        if kind == "update":
            on_host = step.programs[name].place.host is not None
            return profile.update_seconds(first, stop) if on_host else 0.0
        if kind == "cast":
            return profile.cast_seconds(first, stop) / graph.num_shares
        if kind in ("gather", "scatter"):
            whole = profile.streamed_bytes if kind == "gather" else profile.weight_bytes
            return (1 - 1 / working) * whole(first, stop) / p2p
        if kind == "widen":
            return profile.widen_seconds(first, stop)
        if kind == "summarize":  # one of the seven that an update of Adam reads and writes
            return profile.update_seconds(first, stop) / 7
        if kind == "reduce":
            return 2 * (working - 1) / working * profile.weight_bytes(first, stop) / p2p
        seconds = profile.at("forward" if kind == "forward" else "backward", size).time(first, stop)
        return seconds + (profile.adding_seconds(first, stop) if kind == "accumulate" else 0.0)

    def transfer(
        instruction: Feed | Copy, nbytes: int, source: Place | None, target: Place
    ) -> float:
        over_host = source is None or source.host is not None or target.host is not None
        return nbytes / (swap if over_host else p2p)

    return Seconds({name: of(name) for name in step.programs}, transfer)


def volumes_bytes(step: Step) -> dict[str, int]:
    """What is copied over the hosts' links, by what the slots are and the direction; between
    devices it is ``p2p``, and what comes from the batch ``batch in``. What devices get of each
    other to make weights of shares is ``weights gathered``, and likewise of gradients."""
    found: defaultdict[str, int] = defaultdict(int)
    for instruction in step.instructions:
        match instruction:
            case Run(program=name, inputs=groups, outputs=made):
                given = sum(step.slots[slot].nbytes for group in groups for slot in group)
                more = sum(step.slots[slot].nbytes for slot in made) - given
                if step.programs[name].kind == "gather":
                    found["weights gathered"] += more
                elif step.programs[name].kind == "scatter":
                    found["gradients scattered"] -= more
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
        sizes: Bytes of the layers.
        server: Memory of a device and of the host.
        begins: The order in which passes are issued; a pass after those that it reads from.
    """

    def __init__(self, graph: TaskGraph, sizes: PackSizes, server: Server, begins: Begins):
        units = [Unit(task, i) for task in graph.tasks for i in range(max(1, len(task.sizes)))]
        # At once begins, on all devices, what is behind a pass, before the next pack.
        units.sort(
            key=lambda u: (begins[u.task.id, u.i], u.task.station, u.task.id, u.i),
        )
        super().__init__(graph, sizes, server, units)
        self.units = units
        self._ends, self._cuts = _microbatch_ends(graph, self._lane)
        self.parts = dict(sorted(self._cuts.items()))
        #: (lane, layer, what) -> by end in examples, the slot of a piece.
        self._pieces: defaultdict[tuple[int, int, str], dict[int, int]] = defaultdict(dict)

    def build(self) -> Step:
        """The step; once."""
        step = self.step
        for unit in self.units:
            task, rank = unit.task, self._ranks[unit.task.rank]
            rank.units.pop()
            self._label = f"{task.kind} {unit.at} of layers {task.first} to {task.stop - 1}"
            self._issue(self._emit(unit, rank))
        for rank in self._ranks:
            self._issue(self._flushed(rank))
        self._issue(self._update_all())
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
        running = self.needs.running(unit.task, unit.i)
        yield from self._make_room(rank, self._missing_bytes(unit, rank) + running)
        yield from self._bring(unit, rank)
        late, rank.late = rank.late, []
        coming = (after for after in reversed(rank.units) if after.task.kind != "update")
        if self._switches.prefetch and (after := next(coming, None)) is not None:
            beside = max(running, self._updating_bytes(unit, rank))
            yield from self._bring(after, rank, beside=beside)
        yield from (self._forward if unit.task.kind == "forward" else self._backward)(unit, rank)
        new, rank.late = rank.late, late
        yield from self._flushed(rank)
        rank.late = new

    # ---- what comes in ---------------------------------------------------------------------------

    def _bring(self, unit: Unit, rank: Rank, *, beside: int | None = None) -> Iterator[Instruction]:
        """Weights and inputs of a pass, those that are not there yet; early, as far as they have
        been made and have room beside what is still to come before it."""
        task, early = unit.task, beside is not None
        reads = self.needs.reads(task, unit.size)

        def fits(what: str) -> bool:
            together = what == "weights" and self._graph.num_shares > 1
            ranks = self._ranks if together else (rank,)
            return beside is None or all(self._has_room(r, reads[what] + beside) for r in ranks)

        if task.id not in rank.weights:
            if not fits("weights"):
                return
            if self._graph.num_shares > 1:
                yield from self._gather(task)
            else:
                pack = task.first, task.stop
                rank.weights[task.id] = yield from self._bring_weights(pack, rank)
        if unit.batch is None:
            if not fits("batch"):
                return
            unit.batch = yield from self._feed(unit, rank)
        if unit.inputs is None and fits("inputs"):
            stash = self._stash[self._lane(task), task.first]
            if task.first == 0:
                unit.inputs = []
            elif task.source is None or self._spans(unit)[0][1] in stash:
                unit.inputs = yield from self._bring_kept(unit, rank, early)
            else:
                unit.inputs = yield from self._bring_pieces(unit, rank, task.first, "input", early)
        if unit.gradients is None and task.gradient is not None and fits("gradients"):
            what = "input gradient"
            unit.gradients = yield from self._bring_pieces(unit, rank, task.stop, what, early)

    def _missing_bytes(self, unit: Unit, rank: Rank) -> int:
        """Of what a pass reads, what has not come."""
        came = {
            "weights": rank.weights.get(unit.task.id),
            "batch": unit.batch,
            "inputs": unit.inputs,
            "gradients": unit.gradients,
        }
        reads = self.needs.reads(unit.task, unit.size)
        return sum(nbytes for what, nbytes in reads.items() if came[what] is None)

    def _updating_bytes(self, unit: Unit, rank: Rank) -> int:
        """What updates on a device, which this pass completes or which wait for other devices, take
        beside what is live when it begins."""
        if not self._updates_at_once:
            return 0
        task, number = unit.task, rank.place.devices[0]
        spans = {span for span, of in self._gradients.items() if number in of}
        if task.kind == "backward" and task.last and unit.i == len(task.sizes) - 1:
            spans.add((task.first, task.stop))
        if not spans:
            return 0
        return self.needs.leaves(task, unit.i) + self.needs.updates(spans)

    def _feed(self, unit: Unit, rank: Rank) -> Generator[Instruction, None, list[int]]:
        """The batch, which is on the host: it need not be kept for the backward pass."""
        came: list[int] = []
        span, lane = (unit.task.first, unit.task.stop), self._lane(unit.task)
        if not (leaves := self._sizes.batch(span)):
            return came
        before = sum(len(cuts) for other, cuts in self.parts.items() if other < lane)
        cuts = (0, *self._cuts[lane])
        for first, stop in self._spans(unit):
            nbytes = self._sizes.batch_bytes(span, stop - first)
            holds = Leaves(leaves, (first, stop))
            slot = self._slot("batch", rank.place, "batch", nbytes, holds)
            yield Feed(slot, before + cuts.index(first), leaves, self._label)
            came.append(slot)
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
                came.append(Came(source))
                continue
            category = "cotangents" if what == "input gradient" else "activations"
            slot = self._alike(source, rank.place, category)
            yield self._copy(source, slot)
            if given.place.host is None:
                yield Free((source,))
            came.append(Came(slot, None if given.place.host is None else source))
        return came

    def _bring_kept(
        self, unit: Unit, rank: Rank, early: bool
    ) -> Generator[Instruction, None, list[Came] | None]:
        """An input that the host keeps, at several layers if values skip over some: of each, all
        pieces. The backward pass of a layer is the last to read what is kept there."""
        task, lane, spans = unit.task, self._lane(unit.task), self._spans(unit)
        if early and any(stop not in self._stash[lane, task.first] for _, stop in spans):
            return None
        came: list[Came] = []
        entering = self._sizes.values(task.first)
        for layer, kept in self._kept_at.items():
            values = tuple(v for v in kept if v in entering) if layer <= task.first else ()
            if not values:
                continue
            index = None if values == kept else tuple(map(kept.index, values))
            for rows in spans:
                source = self._stash[lane, layer][rows[1]]
                assert source is not None, f"{self._label}: nothing is kept at layer {layer}"
                slot = self._values_slot(rank.place, "activations", task.first, rows, values)
                yield Copy(source, slot, self.step.slots[slot].nbytes, self._label, index)
                last = task.kind == "backward" and layer == task.first
                came.append(Came(slot, source, last))
        return came

    def _used(self, came: Iterable[Came]) -> Iterator[Instruction]:
        """Pieces are freed, and where they came from, if that is not kept on."""
        for slot, source, last in came:
            if source is not None:
                yield from self._waited(source, slot)
            yield Free((slot,) if source is None or not last else (slot, source))

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
        if what == "input" and layer in self._kept_at:  # it is read from there both times
            yield from self._keep(unit, rank, layer, slots)
            return
        outs = yield from self._put_out(slots, rank, "activations")
        known |= dict(zip(ends, outs, strict=True))
        rank.late.append(Late(outs, slots))

    def _keep(
        self, unit: Unit, rank: Rank, layer: int, slots: Sequence[int]
    ) -> Iterator[Instruction]:
        """An input of a layer goes to the host, for the backward pass; but for what is there
        already, since it has skipped over this layer and one before."""
        kept, entering = self._kept_at[layer], self._sizes.values(layer)
        index = None if kept == entering else tuple(map(entering.index, kept))
        stash, outs = self._stash[self._lane(unit.task), layer], []
        for rows, slot in zip(self._spans(unit), slots, strict=True):
            stash[rows[1]] = None
            if kept:
                out = self._values_slot(rank.host, "kept activations", layer, rows, kept)
                yield Copy(slot, out, self.step.slots[out].nbytes, self._label, index)
                stash[rows[1]] = out
                outs.append(out)
        rank.late.append(Late(outs, slots))

    def _leave(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        """Weights go with the last micro-batch of a task."""
        task = unit.task
        if unit.i == len(task.sizes) - 1:
            weights = rank.weights.pop(task.id)
            if not self._switches.offload:  # they will be written over where they came from
                yield from self._waited(*weights)
            yield Free(tuple(weights))

    # ---- passes ----------------------------------------------------------------------------------

    def _forward(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        task, sizes = unit.task, self._sizes
        came, spans = unit.inputs or [], self._spans(unit)
        readers = [sub_pack for sub_pack in task.sub_packs if sizes.batch(sub_pack)]
        for sub_pack in task.sub_packs:
            first, stop = sub_pack
            # What came from where it is kept is there.
            keeps = first in self._kept_at and all(one.last for one in came)
            if keeps:
                yield from self._keep(unit, rank, first, [one.slot for one in came])
            ends = stop == task.stop and task.sink is None
            outputs = (
                [self._slot("loss", rank.place, "loss", 4, Loss())]
                if ends
                else [
                    self._row_slot("activation", rank.place, "activations", stop, rows)
                    for rows in spans
                ]
            )
            made = sum(self.step.slots[slot].nbytes for slot in outputs)
            transient = sizes.transient_bytes("forward", sub_pack, unit.size, made)
            call = PackCall("forward", sub_pack, unit.size, task.rank, _counts(spans))
            inputs = (
                self._read_by(sub_pack, task, rank),
                tuple(one.slot for one in came),
                tuple(unit.batch or ()) if sub_pack in readers else (),
            )
            name = self._program(call, rank.place, transient)
            yield Run(name, inputs, tuple(outputs), (), self._label)
            if not keeps:
                yield from self._used(came)
            if unit.batch and sub_pack == readers[-1]:
                yield Free(tuple(unit.batch))
            came = list(map(Came, outputs))
        if task.sink is None:  # the loss, which the backward pass computes again
            yield from self._used(came)
            came = []
        yield from self._give(unit, rank, task.stop, "input", [one.slot for one in came])
        yield from self._leave(unit, rank)

    def _read_by(self, sub_pack: Span, task: Task, rank: Rank) -> tuple[int, ...]:
        """Slots of the weights of a task that some of its layers read."""
        params = self._sizes.shared(sub_pack)
        spans = {*self._of(sub_pack), *(self._segment(self._sizes.owner(p)) for p in params)}
        return tuple(
            slot for slot, part in rank.weights[task.id].items() if part.of in (*params, *spans)
        )

    def _backward(self, unit: Unit, rank: Rank) -> Iterator[Instruction]:
        task, sizes = unit.task, self._sizes
        span, spans = (task.first, task.stop), self._spans(unit)
        if task.start and unit.i == 0:  # what the task before summed is on the host
            sources = self._gradients[span].pop(task.rank)
            rank.summed = yield from self._fetched(sources, rank)
        came, cotangents = unit.inputs or [], unit.gradients or []
        outputs = [
            self._row_slot("gradient", rank.place, "cotangents", task.first, rows)
            for rows in (spans if task.first else ())
        ]
        losses = []
        if task.criterion:
            losses = [self._slot("loss", rank.place, "loss", 4, Loss())]
            self.step.reported += losses
        gradients = self._gradient_slots(task, rank)
        made = sum(self.step.slots[slot].nbytes for slot in (*outputs, *losses))
        kind: PackPass = "accumulate" if rank.summed else "backward"
        name = self._program(
            PackCall(kind, span, unit.size, task.rank, _counts(spans)),
            rank.place,
            sizes.transient_bytes(kind, span, unit.size, made),
        )
        inputs = (
            tuple(rank.weights[task.id]),
            tuple(one.slot for one in came),
            tuple(unit.batch or ()),
            tuple(one.slot for one in cotangents),
            rank.summed,
        )
        yield Run(name, inputs, (*outputs, *losses, *gradients), rank.summed, self._label)
        rank.summed = gradients
        yield from self._used([*came, *cotangents])
        if unit.batch:
            yield Free(tuple(unit.batch))
        yield from self._give(unit, rank, task.first, "input gradient", outputs)
        if unit.i == len(task.sizes) - 1:
            rank.summed = ()
            yield from self._summed(unit, rank, gradients)

    def _summed(self, unit: Unit, rank: Rank, gradients: Sequence[int]) -> Iterator[Instruction]:
        """Gradients of a task go to the host, but for those with which a device updates at once."""
        task = unit.task
        span, shared = (task.first, task.stop), self._sizes.shared((task.first, task.stop))
        here: tuple[int, ...] = ()
        if self._graph.num_shares > 1:
            yield from self._leave(unit, rank)
            yield from self._scatter(task, tuple(gradients))
            return
        if task.last and self._updates_at_once:
            here, gradients = (gradients[0],), gradients[1:]
        else:
            yield from self._leave(unit, rank)
        outs: list[int] = []
        if gradients:
            owners = [span, *map(self._updated_by, shared)][-len(gradients) :]
            for slot, pack in zip(gradients, owners, strict=True):
                outs += yield from self._put_out((slot,), self._owner[pack], "gradients")
            rank.late.append(Late(tuple(outs), tuple(gradients)))
        if not task.last:
            self._gradients[span][task.rank] = tuple(outs)
            return
        self._gradients[span][task.rank] = here or (outs.pop(0),)
        for param, slot in zip(shared, outs, strict=True):
            self._shared[param].append(slot)

    def _spans(self, unit: Unit) -> list[Span]:
        """Pieces of a micro-batch, in examples."""
        lane = self._lane(unit.task)
        ends = self._ends[lane, unit.task.station]
        first, last = ends[unit.at], ends[unit.at + 1]
        return list(pairwise([first, *(cut for cut in self._cuts[lane] if first < cut <= last)]))


def _counts(pieces: Iterable[Span]) -> tuple[int, ...]:
    return tuple(stop - first for first, stop in pieces)


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
