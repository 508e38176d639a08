"""What a step of packs keeps on the host, and how that is updated, there or on the devices: half of
the builder in ``capture.step.streamed``, which has the passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from capture.machine.server import Server
from capture.plan.task_graph import Span, Task, TaskGraph
from capture.step.ledger import Ledger
from capture.step.pack_needs import PackNeeds
from capture.step.pack_sizes import PackSizes
from capture.step.program import (
    Copy,
    Free,
    Host,
    Instruction,
    Place,
    Program,
    Run,
    Step,
    Wait,
    begin,
)


def program_name(kind: str, span: Span, size: int, rank: int, pieces: Sequence[Span] = ()) -> str:
    """Of a pass whose rows come in pieces, those too: it puts them together."""
    rows = "+".join(str(stop - first) for first, stop in pieces) if len(pieces) > 1 else ""
    return f"{kind} {span[0]} {span[1]} {size} {rank} {rows}".rstrip()


def parts_of_name(name: str) -> tuple[str, int, int, int, int]:
    kind, first, stop, size, rank = name.split()[:5]
    return kind, int(first), int(stop), int(size), int(rank)


@dataclass
class Unit:
    """A pass: one micro-batch of a task, or an update.

    Attributes:
        task: Whose.
        i: Its micro-batch among those of the task.
        batch: Pieces of what it reads of the batch, once they are issued.
        inputs: Pieces of X, likewise: slots, and where on the host they came from.
        gradients: Likewise of dY.
    """

    task: Task
    i: int
    batch: list[int] | None = None
    inputs: list[Came] | None = None
    gradients: list[Came] | None = None

    @property
    def at(self) -> int:
        """Its micro-batch among all of the pack."""
        return self.task.start + self.i

    @property
    def size(self) -> int:
        return self.task.sizes[self.i]


class Came(NamedTuple):
    """What a pass reads.

    Attributes:
        slot: On the device.
        source: On the host, where it was copied from there.
        last: Whether nobody reads that again.
    """

    slot: int
    source: int | None = None
    last: bool = True


@dataclass
class Late:
    """What is done a pass later: copies to wait for, slots to free, and what may follow then."""

    waits: Sequence[int]
    frees: Sequence[int]
    then: Callable[[], Iterable[Instruction]] = tuple


@dataclass
class Rank:
    """What a device has.

    Attributes:
        place, host: Its memory, and its place in that of the host.
        units: Passes that are to come, the next one last.
        weights: Of a task, by id, their slots; then those of each parameter that is shared.
        summed: Gradients of the backward task that is under way; of what it owns, then of each
            parameter that is shared.
        late: Of the pass before.
    """

    place: Place
    host: Place
    units: list[Unit]
    weights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    summed: tuple[int, ...] = ()
    late: list[Late] = field(default_factory=list)


class StreamedState:
    """Slots of the host and of what every device holds for longer than a pass.

    Attributes:
        step: What is built.
        spans: By slot of weights, state or gradients, its layers.
        rows: By slot of rows: the layer that they enter, or whose batch they are, and which
            examples of the lane.
        values: By slot that holds some of the values which enter its layer, those.
    """

    def __init__(self, graph: TaskGraph, sizes: PackSizes, server: Server, units: Sequence[Unit]):
        self._graph, self._sizes, self._switches = graph, sizes, graph.switches
        self.spans: dict[int, Span] = {}
        self.rows: dict[int, tuple[int, Span]] = {}
        self.values: dict[int, tuple[int, ...]] = {}
        host = Host("host", int(server.host_memory_bytes.value))
        self._ranks = [
            Rank(
                Place(f"device {rank}", (rank,)),
                Place(f"host of device {rank}", (rank,), host),
                [unit for unit in reversed(units) if unit.task.rank == rank],
            )
            for rank in range(graph.num_devices)
        ]
        self._everywhere = Place("all devices", tuple(range(graph.num_devices)))
        backward = {(task.first, task.stop) for task in graph.tasks if task.kind == "update"}
        #: Whether updates need the gradients of all packs: then they come after all passes.
        self._updates_last = any(sizes.summary_bytes(pack) for pack in backward)
        #: Whether a device updates what it has as soon as it has the gradients.
        self._updates_at_once = (
            self._switches.jit and not self._switches.offload and not self._updates_last
        )
        #: Whether devices add their gradients; otherwise the host does.
        self._reduces = graph.mode == "dp" and graph.num_devices > 1 and self._updates_at_once
        lanes = graph.num_devices if graph.mode == "dp" else 1
        self.needs = PackNeeds(sizes, backward, lanes, reduces=self._reduces)
        places = [place for rank in self._ranks for place in (rank.place, rank.host)]
        self.step = Step(tuple(places) + ((self._everywhere,) if self._reduces else ()))
        cuts = {end for task in graph.tasks for end in (task.first, task.stop)}
        self._segments = tuple(pairwise(sorted(cuts)))
        #: Per backward pack: the updates that are still to come, and the gradients of every rank.
        self._updates: Counter[Span] = Counter(
            (task.first, task.stop) for task in graph.tasks if task.kind == "update"
        )
        self._gradients: defaultdict[Span, dict[int, tuple[int, ...]]] = defaultdict(dict)
        #: By parameter, the gradients that packs made which do not own it.
        self._shared: defaultdict[int, list[int]] = defaultdict(list)
        #: By layer whose input is kept for the backward pass, ascending, what of it is kept there:
        #: what skips over several such layers is with the first.
        self._kept_at: dict[int, tuple[int, ...]] = {}
        before: frozenset[int] = frozenset()
        for layer in sorted({one for task in graph.tasks for one, _ in task.stashes} - {0}):
            values = sizes.values(layer)
            self._kept_at[layer] = tuple(v for v in values if v not in before)
            before = frozenset(values)
        #: (lane, layer) -> by end in examples, the slot that keeps a piece; None for nothing.
        self._stash: defaultdict[tuple[int, int], dict[int, int | None]] = defaultdict(dict)
        self._spans_of = {task.id: (task.first, task.stop) for task in graph.tasks}
        self._owner: dict[Span, Rank] = {}
        for task in graph.tasks:
            if task.kind == "update":
                self._owner.setdefault((task.first, task.stop), self._ranks[task.rank])
        self._state, self._weights = self._kept()
        self._limit_bytes, self._ledger = server.usable_bytes.value, Ledger(graph.num_devices)
        begin(self._ledger, self.step)
        self._ended: set[int] = set()
        self._label = ""

    def _flushed(self, rank: Rank) -> Iterator[Instruction]:
        late, rank.late = rank.late, []
        for one in late:
            yield from self._waited(*one.waits)
            if one.frees:
                yield Free(tuple(one.frees))
            yield from one.then()

    def _has_room(self, rank: Rank, nbytes: int) -> bool:
        return self._ledger.live_bytes[rank.place.devices[0]] + nbytes <= self._limit_bytes

    def _make_room(self, rank: Rank, nbytes: int) -> Iterator[Instruction]:
        """Waits for what goes out, where a device has too little."""
        if not self._has_room(rank, nbytes):
            yield from self._flushed(rank)

    def _waited(self, *slots: int) -> Iterator[Instruction]:
        """For copies that the host has not waited for."""
        for slot in slots:
            if slot not in self._ended:
                self._ended.add(slot)
                yield Wait(slot)

    # ---- what there is ---------------------------------------------------------------------------

    def _kept(self) -> tuple[dict[Span, int], dict[Span, int]]:
        """Slots of the host: optimizer state per backward pack, weights per run of layers."""
        state: dict[Span, int] = {}
        weights: dict[Span, int] = {}
        for (first, stop), rank in sorted(self._owner.items(), key=lambda item: item[0]):
            nbytes = self._sizes.state_bytes((first, stop))
            name = f"state of layers {first} to {stop - 1}"
            state[first, stop] = self.step.keep(name, rank.host, "optimizer", nbytes, "state")
            self.spans[state[first, stop]] = (first, stop)
            for span in self._of((first, stop)):
                nbytes, name = (
                    self._sizes.weight_bytes(span),
                    f"weights of {span[0]} to {span[1] - 1}",
                )
                weights[span] = self.step.keep(name, rank.host, "parameters", nbytes, "weights")
                self.spans[weights[span]] = span
        return state, weights

    def _lane(self, task: Task) -> int:
        """In data parallelism every rank has its own examples."""
        return task.rank if self._graph.mode == "dp" else 0

    def _of(self, span: Span) -> list[Span]:
        return [one for one in self._segments if span[0] <= one[0] < span[1]]

    def _slot(
        self, what: str, place: Place, category: str, nbytes: int, key: int | None = None
    ) -> int:
        return self.step.slot(f"{what} {len(self.step.slots)}", place, category, nbytes, what, key)

    def _span_slot(self, what: str, place: Place, span: Span) -> int:
        """Of weights, gradients or optimizer state of layers."""
        state = what == "state"
        nbytes = self._sizes.state_bytes(span) if state else self._sizes.weight_bytes(span)
        category = {"weights": "parameters", "state": "optimizer"}.get(what, what)
        slot = self._slot(what, place, category, nbytes)
        self.spans[slot] = span
        return slot

    def _row_slot(self, what: str, place: Place, category: str, layer: int, rows: Span) -> int:
        """Of rows of a value that enters a layer, or of its gradient."""
        size = self._sizes.gradient_bytes if what == "gradient" else self._sizes.value_bytes
        slot = self._slot(what, place, category, size(layer, rows[1] - rows[0]))
        self.rows[slot] = layer, rows
        return slot

    def _values_slot(
        self, place: Place, category: str, layer: int, rows: Span, values: tuple[int, ...]
    ) -> int:
        """Likewise, of some of the values."""
        nbytes = self._sizes.value_bytes(layer, rows[1] - rows[0], values)
        slot = self._slot("activation", place, category, nbytes)
        self.rows[slot], self.values[slot] = (layer, rows), values
        return slot

    def _alike(self, slot: int, place: Place, category: str = "") -> int:
        """A slot for a copy."""
        given = self.step.slots[slot]
        made = self._slot(given.what, place, category or given.category, given.nbytes, given.key)
        if slot in self.spans:
            self.spans[made] = self.spans[slot]
        if slot in self.rows:
            self.rows[made] = self.rows[slot]
        if slot in self.values:
            self.values[made] = self.values[slot]
        return made

    def _copy(self, source: int, target: int) -> Copy:
        return Copy(source, target, self.step.slots[source].nbytes, self._label)

    def _program(self, kind: str, name: str, rank: Rank | None, transient: int) -> str:
        place = self._everywhere if rank is None else rank.place
        self.step.programs.setdefault(name, Program(kind, place, transient))
        return name

    def _bring_weights(
        self, pack: Span, rank: Rank
    ) -> Generator[Instruction, None, tuple[int, ...]]:
        slots = []
        for span in self._of(pack):
            slots.append(self._span_slot("weights", rank.place, span))
            yield self._copy(self._weights[span], slots[-1])
        for param in self._sizes.shared(pack):
            span = self._segment(self._sizes.owner(param))
            nbytes = self._sizes.param_bytes(param)
            slots.append(self._slot("shared", rank.place, "parameters", nbytes, param))
            index = self._sizes.owned(span).index(param)
            yield Copy(self._weights[span], slots[-1], nbytes, self._label, index)
        return tuple(slots)

    def _segment(self, layer: int) -> Span:
        """The run of layers that no pack divides."""
        return next(span for span in self._segments if span[0] <= layer < span[1])

    def _updated_by(self, param: int) -> Span:
        """The pack that a parameter belongs to."""
        layer = self._sizes.owner(param)
        return next(span for span in self._owner if span[0] <= layer < span[1])

    # ---- updates ---------------------------------------------------------------------------------

    def _update(self, task: Task, rank: Rank) -> Iterator[Instruction]:
        """When the gradients of all ranks are there: on the host a pass later, so that nothing
        waits for their copies; or on the devices. Not where they need those of all packs."""
        span = task.first, task.stop
        self._updates[span] -= 1
        if self._updates[span] or self._updates_last:
            return
        if self._switches.offload:
            label = self._label
            rank.late.append(Late((), (), lambda: self._update_on_host(span, label)))
            return
        yield from self._update_on_devices(span)

    def _update_all(self) -> Iterator[Instruction]:
        """After all passes, where an update needs the gradients of all packs: they have waited on
        the host, which makes of each pack's the small value that the others need."""
        if not self._updates_last:
            return
        gradients = {span: self._summands(span) for span in self._owner}
        made = {}
        for span, rank in self._owner.items():
            label = f"summarize gradients of layers {span[0]} to {span[1] - 1}"
            made[span] = self._summary_slot(span, rank.host)
            yield from self._waited(*gradients[span])
            name = program_name("summarize", span, 0, rank.host.devices[0])
            self.step.programs[name] = Program("summarize", rank.host, 0)
            inputs = (self._weights_of(span), (self._state[span],), gradients[span])
            yield Run(name, inputs, (made[span],), (), label)
        for span, rank in self._owner.items():
            self._label = f"update of layers {span[0]} to {span[1] - 1}"
            place = rank.host if self._switches.offload else rank.place
            came = []
            for other in sorted(self._owner):
                if other != span:
                    came.append(made[other])
                    if place is not self._owner[other].host:
                        came[-1] = self._summary_slot(other, place)
                        yield self._copy(made[other], came[-1])
            if self._switches.offload:
                yield from self._run_on_host(span, gradients[span], came, self._label)
            else:
                yield from self._update_on_first(span, rank, gradients[span], came)
            copies = [slot for slot in came if slot not in made.values()]
            yield from self._waited(*copies)
            if copies:
                yield Free(tuple(copies))
        yield Free(tuple(made.values()))

    def _summary_slot(self, span: Span, place: Place) -> int:
        slot = self._slot("summary", place, "optimizer", self._sizes.summary_bytes(span))
        self.spans[slot] = span
        return slot

    def _weights_of(self, span: Span) -> tuple[int, ...]:
        """On the host."""
        return tuple(self._weights[one] for one in self._of(span))

    def _update_on_host(self, span: Span, label: str) -> Iterator[Instruction]:
        yield from self._run_on_host(span, self._summands(span), (), label)

    def _run_on_host(
        self, span: Span, gradients: tuple[int, ...], summaries: Sequence[int], label: str
    ) -> Iterator[Instruction]:
        place = self._owner[span].host
        name = program_name("update", span, 0, place.devices[0])
        self.step.programs[name] = Program("update", place, 0)
        weights, state = self._weights_of(span), (self._state[span],)
        changed = (*weights, *state)
        yield from self._waited(*gradients)  # those of other ranks may still be on their way
        inputs = (weights, state, gradients, tuple(summaries))
        yield Run(name, inputs, changed, (*changed, *gradients), label)

    def _summands(self, span: Span) -> tuple[int, ...]:
        """Gradients of every rank, and those of other packs that read what this one owns."""
        gradients = [slot for slots in self._gradients.pop(span).values() for slot in slots]
        return (*gradients, *self._from_others(span))

    def _from_others(self, span: Span) -> list[int]:
        shared = sorted(param for param in self._shared if self._updated_by(param) == span)
        return [slot for param in shared for slot in self._shared.pop(param)]

    def _update_on_devices(self, span: Span) -> Iterator[Instruction]:
        """Every rank updates the weights that it has; those of the last go to the host, when nobody
        reads there any more. Where none has them, the first fetches all."""
        if not self._switches.jit:
            for rank in self._ranks:
                yield from self._flushed(rank)
            first = self._ranks[min(self._gradients[span])]
            yield from self._update_on_first(span, first, self._summands(span))
            return
        gradients = {rank: slot for rank, (slot,) in self._gradients.pop(span).items()}
        others = self._from_others(span)
        if self._reduces:
            reduced = {
                rank: self._span_slot("gradients", self._ranks[rank].place, span)
                for rank in gradients
            }
            transient = self.needs.reduction(span)
            for number in gradients:
                yield from self._make_room(self._ranks[number], transient)
            name = self._program("reduce", program_name("reduce", span, 0, 0), None, transient)
            given = tuple(gradients.values())
            yield Run(name, (given,), tuple(reduced.values()), given, self._label)
            gradients = reduced
        for number, gradient in sorted(gradients.items()):
            rank = self._ranks[number]
            yield from self._make_room(rank, self.needs.update(span))
            held = next(id for id in rank.weights if self._spans_of[id] == span)
            weights = rank.weights.pop(held)
            yield from self._free_shared(span, weights)
            last = number == max(gradients)
            summands = [gradient, *(yield from self._fetched(others, rank, free=last))]
            own = weights[: len(self._of(span))]
            yield from self._update_on_device(span, rank, own, (summands, ()), writes=last)

    def _update_on_first(
        self, span: Span, rank: Rank, gradients: Sequence[int], summaries: Sequence[int] = ()
    ) -> Iterator[Instruction]:
        """A device that has nothing of it."""
        come = 2 * self.needs.weights(span) + self.needs.update(span)
        yield from self._make_room(rank, come)
        weights = yield from self._bring_weights(span, rank)
        fetched = yield from self._fetched(gradients, rank)
        yield from self._free_shared(span, weights)
        weights = weights[: len(self._of(span))]
        groups = fetched, summaries
        yield from self._update_on_device(span, rank, weights, groups, writes=True)

    def _free_shared(self, span: Span, weights: Sequence[int]) -> Iterator[Instruction]:
        """Parameters of other packs, when those of this one are to be updated."""
        if shared := tuple(weights[len(self._of(span)) :]):
            yield from self._waited(*shared)
            yield Free(shared)

    def _fetched(
        self, sources: Sequence[int], rank: Rank, *, free: bool = True
    ) -> Generator[Instruction, None, tuple[int, ...]]:
        """Gradients that are on the host come to a device; the host keeps none."""
        fetched = []
        for source in sources:
            fetched.append(self._alike(source, rank.place))
            yield self._copy(source, fetched[-1])
            yield from self._waited(source, fetched[-1])  # another device may still put it there
            if free:
                yield Free((source,))
        return tuple(fetched)

    def _update_on_device(
        self,
        span: Span,
        rank: Rank,
        weights: Sequence[int],
        groups: tuple[Sequence[int], Sequence[int]],
        *,
        writes: bool,
    ) -> Iterator[Instruction]:
        """With gradients, and what the other packs summarized."""
        gradients, summaries = groups
        state = self._span_slot("state", rank.place, span)
        yield self._copy(self._state[span], state)
        name = program_name("update", span, 0, rank.place.devices[0])
        self._program("update", name, rank, self._sizes.transient_bytes("update", span, 0, 0))
        changed = (*weights, state)
        # They are written over where they came from, or given back.
        yield from self._waited(*changed)
        inputs = (tuple(weights), (state,), tuple(gradients), tuple(summaries))
        yield Run(name, inputs, changed, (*changed, *gradients), self._label)
        if not writes:
            yield Free(changed)
            return
        hosts = (*(self._weights[one] for one in self._of(span)), self._state[span])
        yield Free(hosts)
        for slot, host in zip(changed, hosts, strict=True):
            yield self._copy(slot, host)
        rank.late.append(Late(hosts, changed))
