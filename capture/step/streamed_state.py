"""What a step of packs keeps on the host, and how that is updated, there or on the devices: half of
the builder in ``capture.step.streamed``, which has the passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Span, Task, TaskGraph
from capture.step.program import Copy, Free, Host, Instruction, Place, Program, Run, Step, Wait


def program_name(kind: str, span: Span, size: int, rank: int) -> str:
    return f"{kind} {span[0]} {span[1]} {size} {rank}"


def parts_of_name(name: str) -> tuple[str, int, int, int, int]:
    kind, first, stop, size, rank = name.split()
    return kind, int(first), int(stop), int(size), int(rank)


@dataclass
class Unit:
    """A pass: one micro-batch of a task, or an update.

    Attributes:
        task: Whose.
        i: Its micro-batch among those of the task.
        inputs: Pieces of X, once they are issued: slots, and where on the host they came from.
        gradients: Likewise of dY.
    """

    task: Task
    i: int
    inputs: list[Came] | None = None
    gradients: list[Came] | None = None

    @property
    def at(self) -> int:
        """Its micro-batch among all of the pack."""
        return self.task.start + self.i

    @property
    def size(self) -> int:
        return self.task.sizes[self.i]


Came = tuple[int, int | None]
"""A slot on a device, and the slot on the host that it was copied from."""


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
        weights: Of a task, by id, their slots.
        summed: Gradients of the backward task that is under way.
        late: Of the pass before.
    """

    place: Place
    host: Place
    units: list[Unit]
    weights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    summed: int | None = None
    late: list[Late] = field(default_factory=list)


class StreamedState:
    """Slots of the host and of what every device holds for longer than a pass."""

    def __init__(
        self, graph: TaskGraph, profile: LayerProfile, server: Server, units: Sequence[Unit]
    ):
        self._graph, self._profile, self._switches = graph, profile, graph.switches
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
        #: Whether devices add their gradients; otherwise the host does.
        self._reduces = graph.mode == "dp" and graph.num_devices > 1 and not self._switches.offload
        places = [place for rank in self._ranks for place in (rank.place, rank.host)]
        self.step = Step(tuple(places) + ((self._everywhere,) if self._reduces else ()))
        cuts = {end for task in graph.tasks for end in (task.first, task.stop)}
        self._segments = tuple(pairwise(sorted(cuts)))
        #: Per backward pack: the updates that are still to come, and the gradients of every rank.
        self._updates: Counter[Span] = Counter(
            (task.first, task.stop) for task in graph.tasks if task.kind == "update"
        )
        self._gradients: defaultdict[Span, dict[int, int]] = defaultdict(dict)
        self._spans_of = {task.id: (task.first, task.stop) for task in graph.tasks}
        self._owner: dict[Span, Rank] = {}
        for task in graph.tasks:
            if task.kind == "update":
                self._owner.setdefault((task.first, task.stop), self._ranks[task.rank])
        self._state, self._weights = self._kept()
        self._ended: set[int] = set()
        self._label = ""

    def _flushed(self, rank: Rank) -> Iterator[Instruction]:
        late, rank.late = rank.late, []
        for one in late:
            yield from self._waited(*one.waits)
            if one.frees:
                yield Free(tuple(one.frees))
            yield from one.then()

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
            nbytes = sum(self._profile.k_bytes[first:stop])
            name = f"state of layers {first} to {stop - 1}"
            state[first, stop] = self.step.keep(name, rank.host, "optimizer", nbytes, "state")
            for span in self._of((first, stop)):
                nbytes, name = self._weight_bytes(span), f"weights of {span[0]} to {span[1] - 1}"
                weights[span] = self.step.keep(name, rank.host, "parameters", nbytes, "weights")
        return state, weights

    def _lane(self, task: Task) -> int:
        """In data parallelism every rank has its own examples."""
        return task.rank if self._graph.mode == "dp" else 0

    def _weight_bytes(self, span: Span) -> int:
        layers = slice(*span)
        return sum(self._profile.w_bytes[layers]) + sum(self._profile.b_bytes[layers])

    def _of(self, span: Span) -> list[Span]:
        return [one for one in self._segments if span[0] <= one[0] < span[1]]

    def _slot(self, what: str, place: Place, category: str, nbytes: int) -> int:
        return self.step.slot(f"{what} {len(self.step.slots)}", place, category, nbytes, what)

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
            slots.append(self._slot("weights", rank.place, "parameters", self._weight_bytes(span)))
            yield self._copy(self._weights[span], slots[-1])
        return tuple(slots)

    # ---- updates ---------------------------------------------------------------------------------

    def _update(self, task: Task, rank: Rank) -> Iterator[Instruction]:
        """When the gradients of all ranks are there: on the host a pass later, so that nothing
        waits for their copies; or on the devices."""
        span = task.first, task.stop
        self._updates[span] -= 1
        if self._updates[span]:
            return
        if self._switches.offload:
            label = self._label
            rank.late.append(Late((), (), lambda: self._update_on_host(span, label)))
            return
        yield from self._update_on_devices(span)

    def _update_on_host(self, span: Span, label: str) -> Iterator[Instruction]:
        place = self._owner[span].host
        name = program_name("update", span, 0, place.devices[0])
        self.step.programs[name] = Program("update", place, 0)
        weights = tuple(self._weights[one] for one in self._of(span))
        state, gradients = (self._state[span],), tuple(self._gradients.pop(span).values())
        changed = (*weights, *state)
        yield Run(name, (weights, state, gradients), changed, (*changed, *gradients), label)

    def _update_on_devices(self, span: Span) -> Iterator[Instruction]:
        """Every rank updates the weights that it has; those of the last go to the host, when nobody
        reads there any more. Where none has them, the first fetches all."""
        gradients = self._gradients.pop(span)
        first = self._ranks[min(gradients)]
        if not self._switches.jit:
            for rank in self._ranks:
                yield from self._flushed(rank)
            weights = yield from self._bring_weights(span, first)
            fetched = []
            for source in gradients.values():
                fetched.append(
                    self._slot("gradients", first.place, "gradients", self._weight_bytes(span))
                )
                yield self._copy(source, fetched[-1])
                yield from self._waited(fetched[-1])
                yield Free((source,))
            yield from self._update_on_device(span, first, weights, fetched, writes=True)
            return
        if self._reduces:
            reduced = {
                rank: self._slot(
                    "gradients", self._ranks[rank].place, "gradients", self._weight_bytes(span)
                )
                for rank in gradients
            }
            name = self._program("reduce", program_name("reduce", span, 0, 0), None, 0)
            given = tuple(gradients.values())
            yield Run(name, (given,), tuple(reduced.values()), given, self._label)
            gradients = reduced
        for number, gradient in sorted(gradients.items()):
            rank = self._ranks[number]
            held = next(id for id in rank.weights if self._spans_of[id] == span)
            weights = rank.weights.pop(held)
            last = number == max(gradients)
            yield from self._update_on_device(span, rank, weights, (gradient,), writes=last)

    def _update_on_device(
        self,
        span: Span,
        rank: Rank,
        weights: Sequence[int],
        gradients: Sequence[int],
        *,
        writes: bool,
    ) -> Iterator[Instruction]:
        nbytes = sum(self._profile.k_bytes[slice(*span)])
        state = self._slot("state", rank.place, "optimizer", nbytes)
        yield self._copy(self._state[span], state)
        name = self._program(
            "update", program_name("update", span, 0, rank.place.devices[0]), rank, 0
        )
        changed = (*weights, state)
        # They are written over where they came from, or given back.
        yield from self._waited(*changed)
        inputs = (tuple(weights), (state,), tuple(gradients))
        yield Run(name, inputs, changed, (*changed, *gradients), self._label)
        if not writes:
            yield Free(changed)
            return
        hosts = (*(self._weights[one] for one in self._of(span)), self._state[span])
        yield Free(hosts)
        for slot, host in zip(changed, hosts, strict=True):
            yield self._copy(slot, host)
        rank.late.append(Late(hosts, changed))
