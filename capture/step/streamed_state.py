"""What a step of packs keeps on the host, and how that is updated, there or on the devices: half of
the builder in ``capture.step.streamed``, which has the passes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from capture.machine.server import Server
from capture.plan.task_graph import Span, Task, TaskGraph
from capture.step.holds import Params, State, Summary
from capture.step.ledger import Ledger
from capture.step.pack_needs import PackNeeds
from capture.step.pack_sizes import PackSizes, PartOf
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
from capture.step.streamed_slots import StreamedSlots
from capture.step.streamed_units import Late, PackCall, Part, Rank, Unit


class StreamedState(StreamedSlots):
    """Slots of the host and of what every device holds for longer than a pass."""

    parts: dict[int, tuple[int, ...]]

    def __init__(self, graph: TaskGraph, sizes: PackSizes, server: Server, units: Sequence[Unit]):
        self._graph, self._switches = graph, graph.switches
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
        self.needs = PackNeeds(
            sizes, backward, lanes, reduces=self._reduces, num_shares=graph.num_shares
        )
        places = [place for rank in self._ranks for place in (rank.place, rank.host)]
        if self._reduces or graph.num_shares > 1:
            places.append(self._everywhere)
        super().__init__(Step(tuple(places)), sizes)
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
        self._state, self._weights, self._casts = self._kept()
        self._limit_bytes, self._ledger = server.usable_bytes.value, Ledger(graph.num_devices)
        begin(self._ledger, self.step)
        self._ended: set[int] = set()
        #: Tasks of all ranks that do the same, and per backward pack the gradients of those that
        #: are done, where devices have shares.
        self._same: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for task in graph.tasks:
            self._same[task.kind, task.station].append(task.id)
        self._unscattered: defaultdict[Span, dict[int, tuple[int, ...]]] = defaultdict(dict)

    def build(self) -> Step:
        """The step; once."""
        raise NotImplementedError

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

    def _kept(
        self,
    ) -> tuple[dict[Span, int], dict[Span, tuple[int, ...]], dict[Span, tuple[int, ...]]]:
        """Slots of the host: optimizer state per backward pack, weights per run of layers, a slot
        of each share, and likewise casts of those that devices get so."""
        state: dict[Span, int] = {}
        weights: dict[Span, tuple[int, ...]] = {}
        casts: dict[Span, tuple[int, ...]] = {}
        for (first, stop), rank in sorted(self._owner.items(), key=lambda item: item[0]):
            nbytes = self._sizes.state_bytes((first, stop))
            name = f"state of layers {first} to {stop - 1}"
            holds = State(self._sizes.owned((first, stop)))
            kept = self.step.keep(name, rank.host, "optimizer", nbytes, "state", holds)
            state[first, stop] = kept
            for span in self._of((first, stop)):
                nbytes = self._sizes.weight_bytes(span)
                weights[span] = self._keep_weights("weights", span, rank.host, nbytes)
                if nbytes := self._sizes.cast_bytes(span):
                    casts[span] = self._keep_weights("casts", span, rank.host, nbytes)
        return state, weights, casts

    def _keep_weights(self, what: PartOf, span: Span, place: Place, nbytes: int) -> tuple[int, ...]:
        slots, count, sizes = [], self._graph.num_shares, self._sizes
        holds = Params(sizes.cast(span), "sent") if what == "casts" else Params(sizes.owned(span))
        for which in range(count):
            name = f"{what} of {span[0]} to {span[1] - 1}"
            if count > 1:
                name += f", share {which + 1} of {count}"
                nbytes, holds = sizes.share_bytes(what, span, which), replace(holds, share=which)
            slots.append(self.step.keep(name, place, "parameters", nbytes, what, holds))
        return tuple(slots)

    def _lane(self, task: Task) -> int:
        """In data parallelism every rank has its own examples."""
        return task.rank if self._graph.mode == "dp" else 0

    def _of(self, span: Span) -> list[Span]:
        return [one for one in self._segments if span[0] <= one[0] < span[1]]

    def _program(self, call: PackCall, place: Place, transient: int = 0) -> str:
        """Enter a program; its name. What one on a host needs beside its slots is not booked."""
        kind = "backward" if call.kind == "accumulate" else call.kind
        self.step.programs.setdefault(call.name, Program(kind, place, transient, call))
        return call.name

    def _parts(self, pack: Span) -> Iterator[Part]:
        """What a device gets of the weights of a pack."""
        sizes = self._sizes
        for span in self._of(pack):
            nbytes = sizes.whole_bytes(span)
            owned, casts = sizes.owned(span), sizes.cast(span)
            if nbytes or span not in self._casts:
                at = tuple(i for i, p in enumerate(owned) if p not in casts)
                holds = Params(tuple(owned[i] for i in at))
                sources, arrays = self._weights[span], at if casts else None
                yield Part("whole", span, holds, nbytes, sources, arrays)
            if span in self._casts:
                nbytes = sizes.cast_bytes(span)
                yield Part("casts", span, Params(casts, "sent"), nbytes, self._casts[span])
        for param in sizes.shared(pack):
            span, nbytes = self._segment(sizes.owner(param)), sizes.streamed_bytes(param)
            is_cast = nbytes != sizes.param_bytes(param)
            sources = self._casts[span] if is_cast else self._weights[span]
            index = (sizes.cast(span) if is_cast else sizes.owned(span)).index(param)
            yield Part("shared", param, Params((param,), "sent"), nbytes, sources, index)

    def _part_slot(self, part: Part, place: Place) -> int:
        what = "weights" if part.what == "whole" else part.what
        return self._slot(what, place, "parameters", part.nbytes, part.holds)

    def _bring_weights(
        self, pack: Span, rank: Rank
    ) -> Generator[Instruction, None, dict[int, Part]]:
        slots: dict[int, Part] = {}
        for part in self._parts(pack):
            slot = self._part_slot(part, rank.place)
            slots[slot] = part
            yield Copy(part.sources[0], slot, part.nbytes, self._label, part.arrays)
        return slots

    def _gather(self, task: Task) -> Iterator[Instruction]:
        """Every device fetches its share of the weights of a pack, and gets those of the others
        from them, for its task of these layers."""
        pack, parts = (task.first, task.stop), list(self._parts((task.first, task.stop)))
        given: list[tuple[int, ...]] = []
        made: list[int] = []
        for which, rank in enumerate(self._ranks):
            yield from self._make_room(rank, self.needs.streamed(pack))
            shares = []
            for part in parts:
                nbytes = self._sizes.share_bytes(part.what, part.of, which)
                share = part._replace(nbytes=nbytes, holds=replace(part.holds, share=which))
                shares.append(self._part_slot(share, rank.place))
                yield Copy(part.sources[which], shares[-1], nbytes, self._label, part.arrays)
            given.append(tuple(shares))
        for rank, own in zip(self._ranks, self._same[task.kind, task.station], strict=True):
            rank.weights[own] = {self._part_slot(part, rank.place): part for part in parts}
            made += rank.weights[own]
        name = self._program(PackCall("gather", pack), self._everywhere, self.needs.gather(pack))
        donated = tuple(slot for shares in given for slot in shares)
        yield Run(name, tuple(given), tuple(made), donated, self._label)

    def _scatter(self, task: Task, gradients: tuple[int, ...]) -> Iterator[Instruction]:
        """When all devices have made gradients of a pack, each gets its share of the sum, and gives
        it to the host."""
        span, sizes, waiting = (task.first, task.stop), self._sizes, self._unscattered
        waiting[span][task.rank] = gradients
        if len(waiting[span]) < self._graph.num_shares:
            return
        given = [slots for _, slots in sorted(waiting.pop(span).items())]
        parts: list[Span | int] = [span, *sizes.shared(span)]
        made: list[tuple[int, ...]] = []
        for which, rank in enumerate(self._ranks):
            slots = []
            for slot, of in zip(given[which], parts, strict=True):
                what: PartOf = "shared gradient" if isinstance(of, int) else "weights"
                nbytes = sizes.share_bytes(what, of, which)
                slots.append(self._share_slot(slot, rank.place, which, nbytes))
            made.append(tuple(slots))
        transient = self.needs.scatter(span)
        for rank in self._ranks:
            yield from self._make_room(rank, transient)
        name = self._program(PackCall("scatter", span), self._everywhere, transient)
        donated = tuple(slot for slots in given for slot in slots)
        yield Run(
            name, tuple(given), tuple(s for slots in made for s in slots), donated, self._label
        )
        owners = [self._updated_by(of) if isinstance(of, int) else of for of in parts]
        outs: list[list[int]] = []
        for rank, own in zip(self._ranks, made, strict=True):
            of_rank: list[int] = []
            for slot, pack in zip(own, owners, strict=True):
                of_rank += yield from self._put_out((slot,), self._owner[pack], "gradients")
            rank.late.append(Late(tuple(of_rank), own))
            outs.append(of_rank)
        self._gradients[span] = {which: (slots[0],) for which, slots in enumerate(outs)}
        for i, param in enumerate(sizes.shared(span), 1):
            self._shared[param] += [slots[i] for slots in outs]

    def _put_out(
        self, slots: Sequence[int], rank: Rank, category: str
    ) -> Generator[Instruction, None, list[int]]:
        outs = []
        for slot in slots:
            outs.append(self._alike(slot, rank.host, category))
            yield self._copy(slot, outs[-1])
        return outs

    def _gradient_slots(self, task: Task, rank: Rank) -> tuple[int, ...]:
        """Of what a pack owns, and of each parameter that it shares. A sum over micro-batches is
        that of the parameters, which casts cannot hold."""
        span, sizes = (task.first, task.stop), self._sizes
        alone = not task.start and task.last and len(task.sizes) == 1
        alone = alone and self._graph.num_shares == 1
        nbytes = sizes.alone_bytes(span) if alone else sizes.weight_bytes(span)
        parts = [("gradients", nbytes, Params(sizes.owned(span), "alone" if alone else "whole"))]
        parts += [
            ("shared gradient", sizes.param_bytes(param), Params((param,)))
            for param in sizes.shared(span)
        ]
        return tuple(self._slot(of[0], rank.place, "gradients", *of[1:]) for of in parts)

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
            gradients[span] = yield from self._widened(span, gradients[span], label)
            call = PackCall("summarize", span, device=rank.host.devices[0])
            name = self._program(call, rank.host)
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
        holds = Summary(self._sizes.owned(span))
        nbytes = self._sizes.summary_bytes(span)
        return self._slot("summary", place, "optimizer", nbytes, holds)

    def _weights_of(self, span: Span) -> tuple[int, ...]:
        """On the host."""
        return tuple(slot for one in self._of(span) for slot in self._weights[one])

    def _update_on_host(self, span: Span, label: str) -> Iterator[Instruction]:
        gradients = yield from self._widened(span, self._summands(span), label)
        yield from self._run_on_host(span, gradients, (), label)

    def _widened(
        self, span: Span, gradients: Sequence[int], label: str
    ) -> Generator[Instruction, None, tuple[int, ...]]:
        """Those of casts as those of parameters. The update adds nothing to that: it would be
        another program, which may round otherwise."""
        place, found = self._owner[span].host, []
        yield from self._waited(*gradients)  # those of other ranks may still be on their way
        for slot in gradients:
            found.append(slot)
            given = self.step.slots[slot]
            if given.nbytes < self._sizes.weight_bytes(span) and given.holds.form == "alone":
                found[-1] = self._gradients_slot(place, span)
                name = self._program(PackCall("widen", span, device=place.devices[0]), place)
                yield Run(name, ((slot,),), (found[-1],), (slot,), label)
        return tuple(found)

    def _run_on_host(
        self, span: Span, gradients: tuple[int, ...], summaries: Sequence[int], label: str
    ) -> Iterator[Instruction]:
        place = self._owner[span].host
        name = self._program(PackCall("update", span, device=place.devices[0]), place)
        weights, state = self._weights_of(span), (self._state[span],)
        changed = (*weights, *state)
        inputs = (weights, state, gradients, tuple(summaries))
        yield Run(name, inputs, changed, (*changed, *gradients), label)
        for one in self._of(span):
            for source, cast in zip(self._weights[one], self._casts.get(one, ()), strict=False):
                name = self._program(PackCall("cast", one, device=place.devices[0]), place)
                yield Run(name, ((source,), (cast,)), (cast,), (cast,), label)

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
                rank: self._gradients_slot(self._ranks[rank].place, span) for rank in gradients
            }
            transient = self.needs.reduction(span)
            for number in gradients:
                yield from self._make_room(self._ranks[number], transient)
            name = self._program(PackCall("reduce", span), self._everywhere, transient)
            given = tuple(gradients.values())
            groups = tuple((slot,) for slot in given)
            yield Run(name, groups, tuple(reduced.values()), given, self._label)
            gradients = reduced
        for number, gradient in sorted(gradients.items()):
            rank = self._ranks[number]
            yield from self._make_room(rank, self.needs.update(span))
            held = next(id for id in rank.weights if self._spans_of[id] == span)
            own = yield from self._without_shared(rank.weights.pop(held))
            last = number == max(gradients)
            summands = [gradient, *(yield from self._fetched(others, rank, free=last))]
            yield from self._update_on_device(span, rank, own, (summands, ()), writes=last)

    def _update_on_first(
        self, span: Span, rank: Rank, gradients: Sequence[int], summaries: Sequence[int] = ()
    ) -> Iterator[Instruction]:
        """A device that has nothing of it."""
        come = 2 * self.needs.weights(span) + self.needs.update(span)
        yield from self._make_room(rank, come)
        weights = yield from self._bring_weights(span, rank)
        fetched = yield from self._fetched(gradients, rank)
        own = yield from self._without_shared(weights)
        groups = fetched, summaries
        yield from self._update_on_device(span, rank, own, groups, writes=True)

    def _without_shared(
        self, weights: Mapping[int, Part]
    ) -> Generator[Instruction, None, tuple[int, ...]]:
        """Parameters of other packs are freed, when those of this one are to be updated."""
        if shared := tuple(slot for slot, part in weights.items() if part.what == "shared"):
            yield from self._waited(*shared)
            yield Free(shared)
        return tuple(slot for slot in weights if slot not in shared)

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
        state = self._state_slot(rank.place, span)
        yield self._copy(self._state[span], state)
        call = PackCall("update", span, device=rank.place.devices[0])
        transient = self._sizes.transient_bytes("update", span, 0, 0)
        name = self._program(call, rank.place, transient)
        changed = (*weights, state)
        # They are written over where they came from, or given back.
        yield from self._waited(*changed)
        inputs = (tuple(weights), (state,), tuple(gradients), tuple(summaries))
        yield Run(name, inputs, changed, (*changed, *gradients), self._label)
        if not writes:
            yield Free(changed)
            return
        hosts = (*self._weights_of(span), self._state[span])
        yield Free(hosts)
        for slot, host in zip(changed, hosts, strict=True):
            yield self._copy(slot, host)
        rank.late.append(Late(hosts, changed))
