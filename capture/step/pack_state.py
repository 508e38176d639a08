"""What a step of packs keeps on the host, and how that is updated, there or on the devices: half of
the lowering in ``capture.step.packs``, which has the passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

from capture.plan.task_graph import PackTask, Span, TaskGraph
from capture.step.holds import Params, State, Summary
from capture.step.pack_sizes import PackPass, PackSizes
from capture.step.program import Host, Place, Program
from capture.step.tasks import Arrival, Round, Task, Value

Values = tuple[Value, ...]


class PackCall(NamedTuple):
    """The computation of one program of a step of packs.

    Attributes:
        size: Examples of the micro-batch; 0 of what has none.
        device: On which it runs; 0 of all.
        pieces: Examples of each piece in which its rows come: it puts them together.
    """

    kind: PackPass
    span: Span
    size: int = 0
    device: int = 0
    pieces: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The program's name: kind, layers, micro-batch size, device and pieces."""
        rows = "+".join(map(str, self.pieces)) if len(self.pieces) > 1 else ""
        first, stop = self.span
        return f"{self.kind} {first} {stop} {self.size} {self.device} {rows}".rstrip()


class PackState:
    """The weights and optimizer state, which rest on the host, and what becomes of gradients.

    Attributes:
        devices, hosts: By rank, the place, and that in the memory of its host.
        places: Also all devices, where they work together.
        kept: Values that are on the host before the step and after it.
        reduces: Whether devices add their gradients; otherwise the host does.
    """

    def __init__(self, graph: TaskGraph, sizes: PackSizes, host_bytes: int):
        self.graph, self.sizes, self.layers, on = graph, sizes, sizes.layers, graph.switches
        ranks, host = range(graph.num_devices), Host("host", host_bytes)
        self.devices = [Place(f"device {rank}", (rank,)) for rank in ranks]
        self.hosts = [Place(f"host of device {rank}", (rank,), host) for rank in ranks]
        self._all = Place("all devices", tuple(ranks))
        #: By backward pack, the rank whose host keeps it, and the updates that are to come.
        self._owner: dict[Span, int] = {}
        self._updates = defaultdict[Span, int](int)
        for task in graph.tasks:
            if task.kind == "update":
                self._owner.setdefault((task.first, task.stop), task.rank)
                self._updates[task.first, task.stop] += 1
        #: Whether updates need the gradients of all packs: then they come after all passes.
        self._last = any(sizes.nbytes(Summary(self.layers.owned(pack))) for pack in self._owner)
        #: Whether a device updates what it has as soon as it has the gradients.
        self._at_once = on.jit and not on.offload and not self._last
        self.reduces = graph.mode == "dp" and graph.num_devices > 1 and self._at_once
        together = [self._all] if self.reduces or graph.num_shares > 1 else []
        self.places = (*chain(*zip(self.devices, self.hosts, strict=True)), *together)
        self._runs = tuple(pairwise(sorted({n for t in graph.tasks for n in (t.first, t.stop)})))
        self.kept: list[Value] = []
        self._state: dict[Span, Values] = {}
        #: By run of layers that no pack divides, a value of each share.
        self._weights: dict[Span, Values] = {}
        self._casts: dict[Span, Values] = {}
        for pack, rank in sorted(self._owner.items()):
            held, name = (
                State(self.layers.owned(pack)),
                f"state of layers {pack[0]} to {pack[1] - 1}",
            )
            self._state[pack] = (self._keep("state", "optimizer", held, rank, name),)
            for run in self._of(pack):
                owned, cast = Params(self.layers.owned(run)), Params(self.layers.cast(run), "sent")
                self._weights[run] = self._keep_shares("weights", run, owned, rank)
                if cast.ids:
                    self._casts[run] = self._keep_shares("casts", run, cast, rank)
        #: By backward pack and rank, the sums of gradients of what the pack owns, and the weights
        #: that the device has; by parameter, the gradients that other packs made.
        self._gradients = defaultdict[Span, dict[int, Values]](dict)
        self._held: dict[tuple[Span, int], Values] = {}
        self._shared = defaultdict[int, list[Value]](list)
        #: By kind and station, where devices have shares: what makes weights, and by rank these.
        self._gathers: dict[tuple[str, int], tuple[Task, list[Values]]] = {}

    def _keep(self, what: str, category: str, holds: object, rank: int, name: str) -> Value:
        """Return a new value that rests on the host of a device."""
        kept = self.value(what, category, holds, home=self.hosts[rank], name=name)
        self.kept.append(kept)
        return kept

    def _keep_shares(self, what: str, run: Span, holds: Params, rank: int) -> Values:
        """Return a new value that rests on the host for each share of parameters."""
        count, name = self.graph.num_shares, f"{what} of {run[0]} to {run[1] - 1}"
        shares = [(holds, name)]
        if count > 1:
            numbered = ((n, f"{name}, share {n + 1} of {count}") for n in range(count))
            shares = [(replace(holds, share=n), named) for n, named in numbered]
        return tuple(self._keep(what, "parameters", one, rank, named) for one, named in shares)

    def _of(self, span: Span) -> list[Span]:
        return [run for run in self._runs if span[0] <= run[0] < span[1]]

    def _updated_by(self, param: int) -> Span:
        """Return the backward pack that a parameter belongs to, which updates it."""
        return next(span for span in self._owner if span[0] <= self.layers.owner[param] < span[1])

    def value(self, what: str, category: str, holds: object, **more: Any) -> Value:
        return Value(what, category, self.sizes.nbytes(holds), holds, **more)

    def task(
        self,
        call: PackCall,
        place: Place,
        reads: tuple[Values, ...],
        makes: Values,
        takes: Values = (),
        *,
        made: Values = (),
        **more: Any,
    ) -> Task:
        """Return a task with its temporaries booked. ``made``: results that are written over
        nothing, without the sum of the gradients. What a program on a host needs beside its values
        is not booked."""
        nbytes = sum(value.nbytes for value in made)
        nbytes = 0 if place.host else self.sizes.transient_bytes(*call[:3], nbytes)
        kind = "backward" if call.kind == "accumulate" else call.kind
        return Task(call.name, Program(kind, place, nbytes, call), reads, makes, takes, **more)

    def _together(
        self, call: PackCall, reads: Mapping[int, Values], makes: Sequence[Values], **more: Any
    ) -> Task:
        """Return a task of all devices, which takes what each has and makes something of each."""
        groups, takes, every = tuple(reads.values()), chain(*reads.values()), tuple(chain(*makes))
        ranks = [*zip(reads, groups, strict=True), *zip(reads, makes, strict=True)]
        more["at"] = {value: self.devices[rank] for rank, values in ranks for value in values}
        return self.task(call, self._all, groups, every, tuple(takes), made=makes[-1], **more)

    # ---- weights ---------------------------------------------------------------------------------

    def weights(self, task: PackTask, label: str) -> tuple[Arrival, Values]:
        """Return what brings a device the weights of a pack, and their values."""
        pack, key = (task.first, task.stop), (task.kind, task.station)
        if self.graph.num_shares == 1:
            parts = tuple(self._parts(pack))
            if task.kind == "backward":
                self._held[pack, task.rank] = tuple(v for v in parts if v.what != "shared")
            return parts, parts
        if key not in self._gathers:
            shares = {rank: tuple(self._parts(pack, rank)) for rank in range(len(self.devices))}
            whole = [tuple(replace(v, source=None) for v in self._parts(pack)) for _ in shares]
            gather = self._together(PackCall("gather", pack), shares, whole, label=label)
            self._gathers[key] = gather, whole
        gather, whole = self._gathers[key]
        return gather if whole[0] else (), whole[task.rank]

    def _parts(self, pack: Span, share: int | None = None) -> Iterator[Value]:
        """Yield a device's values of a pack's weights, whole or in shares, from the host's."""
        layers = self.layers

        def part(what: str, holds: Params, sources: Values, index: object = None) -> Value:
            holds, source = replace(holds, share=share), sources[share or 0]
            return self.value(what, "parameters", holds, source=source, index=index)

        for run in self._of(pack):
            owned, cast = layers.owned(run), layers.cast(run)
            at = tuple(i for i, p in enumerate(owned) if p not in cast)
            if at:
                whole = Params(tuple(owned[i] for i in at))
                yield part("weights", whole, self._weights[run], at if cast else None)
            if cast:
                yield part("casts", Params(cast, "sent"), self._casts[run])
        for param in layers.shared(pack):
            run = next(one for one in self._runs if one[0] <= layers.owner[param] < one[1])
            is_cast = param in layers.casts
            sources, ids = (
                (self._casts, layers.cast(run)) if is_cast else (self._weights, layers.owned(run))
            )
            yield part("shared", Params((param,), "sent"), sources[run], ids.index(param))

    # ---- gradients -------------------------------------------------------------------------------

    def summed(self, task: PackTask) -> Values:
        """Return the gradients that the task before, of the same pack, has made."""
        return self._gradients[task.first, task.stop].pop(task.rank) if task.start else ()

    def sums(self, task: PackTask) -> Values:
        """Return new values for the gradients of what a pack owns, and of each parameter that it
        shares. A sum over micro-batches is that of the parameters, which casts cannot hold."""
        span = task.first, task.stop
        alone = not task.start and task.last and len(task.sizes) == 1
        form: Any = "alone" if alone and self.graph.num_shares == 1 else "whole"
        own = self.value("gradients", "gradients", Params(self.layers.owned(span), form))
        shared = (Params((param,)) for param in self.layers.shared(span))
        return own, *(self.value("shared gradient", "gradients", holds) for holds in shared)

    def made(self, task: PackTask, gradients: Values, label: str) -> tuple[Any, list[Task]]:
        """Record a task's gradients; they go to the host, but for those with which a device updates
        at once; where devices have shares, when all have made theirs. Returns what rests behind the
        pass, and what runs behind it."""
        span = task.first, task.stop
        self._gradients[span][task.rank] = gradients
        if self.graph.num_shares > 1:
            all_have = len(self._gradients[span]) == self.graph.num_devices
            return (), [self._scatter(span, label)] if all_have else []
        if task.last:
            self._sort(span, task.rank, gradients)
        away = self._away(span, gradients)
        return away[1:] if task.last and self._at_once else away, []

    def _sort(self, span: Span, rank: int, gradients: Values) -> None:
        self._gradients[span][rank], shared = gradients[:1], self.layers.shared(span)
        for param, value in zip(shared, gradients[1:], strict=True):
            self._shared[param].append(value)

    def _away(self, span: Span, gradients: Iterable[Value]) -> tuple[tuple[Value, Place], ...]:
        owners = [span, *map(self._updated_by, self.layers.shared(span))]
        places = [self.hosts[self._owner[pack]] for pack in owners]
        return tuple(zip(gradients, places, strict=True))

    def _scatter(self, span: Span, label: str) -> Task:
        """Return the task that gives devices their shares of a pack's summed gradients."""
        given = dict(sorted(self._gradients.pop(span).items()))
        made = [
            tuple(self.value(v.what, v.category, replace(v.holds, share=rank)) for v in values)
            for rank, values in given.items()
        ]
        for rank, values in enumerate(made):
            self._sort(span, rank, values)
        rests = tuple(rest for values in made for rest in self._away(span, values))
        return self._together(PackCall("scatter", span), given, made, rests=rests, label=label)

    # ---- updates ---------------------------------------------------------------------------------

    def update(self, task: PackTask, label: str) -> Iterator[Round]:
        """Yield the update of a pack when the gradients of all ranks are there: on the host a pass
        later, so that nothing waits for their copies; or on the devices. Nothing where an update
        needs the gradients of all packs."""
        span, on = (task.first, task.stop), self.graph.switches
        self._updates[span] -= 1
        if self._updates[span] or self._last:
            return
        if on.offload:
            yield Round([*self._widened(span, label), *self._on_host(span, (), label)], task.rank)
        elif on.jit:
            yield from self._on_devices(span, label)
        else:
            rank = min(self._gradients[span])
            yield Round([self._on_first(span, rank, (), label)], rank, settled=True)

    def update_all(self) -> Iterator[Round]:
        """Yield all updates after the passes, where an update needs the gradients of all packs:
        they wait on the host, which makes of each pack's the small value that others need."""
        made, tasks = dict[Span, Value](), list[Task]()
        for span, rank in self._owner.items() if self._last else ():
            label = f"summarize gradients of layers {span[0]} to {span[1] - 1}"
            made[span] = self.value("summary", "optimizer", Summary(self.layers.owned(span)))
            tasks += self._widened(span, label)
            reads = (self._weights_of(span), self._state[span], self._summands(span))
            call = PackCall("summarize", span, device=rank)
            tasks.append(self.task(call, self.hosts[rank], reads, (made[span],), label=label))
            self._gradients[span][rank] = reads[2]
        if tasks:
            yield Round(tasks, settled=True)
        for span, rank in self._owner.items() if self._last else ():
            others = tuple(made[other] for other in sorted(self._owner) if other != span)
            label = f"update of layers {span[0]} to {span[1] - 1}"
            if self.graph.switches.offload:
                yield Round([*self._on_host(span, others, label)])
            else:
                yield Round([self._on_first(span, rank, others, label)], rank)

    def _weights_of(self, span: Span) -> Values:
        """Return the values of a pack's weights on the host."""
        return tuple(chain.from_iterable(self._weights[run] for run in self._of(span)))

    def _summands(self, span: Span) -> Values:
        """Return the gradients of all ranks, and those of other packs for what this one owns."""
        return (*chain(*self._gradients.pop(span).values()), *self._from_others(span))

    def _from_others(self, span: Span) -> Values:
        shared = sorted(param for param in self._shared if self._updated_by(param) == span)
        return tuple(value for param in shared for value in self._shared.pop(param))

    def _widened(self, span: Span, label: str) -> Iterator[Task]:
        """Yield tasks that make gradients of casts those of parameters. The update adds nothing to
        that: it would be another program, which may round otherwise."""
        call, whole = PackCall("widen", span, device=self._owner[span]), self._own(span)
        for rank, given in self._gradients[span].items():
            if given[0].nbytes < whole.nbytes and given[0].holds.form == "alone":
                self._gradients[span][rank] = made = (self._own(span),)
                yield self.task(call, self.hosts[call.device], (given,), made, given, label=label)

    def _own(self, span: Span) -> Value:
        """Return a new value for the gradients of what a pack owns."""
        return self.value("gradients", "gradients", Params(self.layers.owned(span)))

    def _on_host(self, span: Span, summaries: Values, label: str) -> Iterator[Task]:
        host, rank = self.hosts[self._owner[span]], self._owner[span]
        reads = (self._weights_of(span), self._state[span], self._summands(span), summaries)
        yield self._updated(host, span, reads, label=label)
        for run in self._of(span):
            call = PackCall("cast", run, device=rank)
            for source, cast in zip(self._weights[run], self._casts.get(run, ()), strict=False):
                yield self.task(call, host, ((source,), (cast,)), (cast,), (cast,), label=label)

    def _updated(self, place: Place, span: Span, reads: tuple[Values, ...], **more: Any) -> Task:
        call, changed = PackCall("update", span, device=place.devices[0]), (*reads[0], *reads[1])
        return self.task(call, place, reads, changed, (*changed, *reads[2]), **more)

    def _on_devices(self, span: Span, label: str) -> Iterator[Round]:
        """Yield the update of the weights that each rank has; those of the last go to the host,
        when nobody reads there any more."""
        ranks, others = self._gradients.pop(span), self._from_others(span)
        if self.reduces:
            added, call = [(self._own(span),) for _ in ranks], PackCall("reduce", span)
            yield Round([self._together(call, ranks, added, label=label)])
            ranks = dict(zip(ranks, added, strict=True))
        for rank, gradients in sorted(ranks.items()):
            groups = self._held[span, rank], (*gradients, *others), ()
            last = rank == max(ranks)
            yield Round([self._on_device(span, rank, *groups, label=label, writes=last)], rank)

    def _on_first(self, span: Span, rank: int, summaries: Values, label: str) -> Task:
        """Return the update of a pack on a device that first has to get all that it reads."""
        weights = tuple(value for value in self._parts(span) if value.what != "shared")
        groups = weights, self._summands(span), summaries
        return self._on_device(span, rank, *groups, label=label, writes=True)

    def _on_device(self, span: Span, rank: int, *groups: Values, label: str, writes: bool) -> Task:
        (weights, *others), (home,) = groups, self._state[span]
        state, host = replace(home, home=None, name="", source=home), self.hosts[self._owner[span]]
        rests = [(value, host) for value in (*weights, state) if writes]
        reads = (weights, (state,), *others)
        return self._updated(self.devices[rank], span, reads, rests=rests, label=label)
