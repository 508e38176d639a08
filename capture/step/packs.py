"""The step of a plan of packs: layers that come from the memory of the host, pack by pack, and
their gradients that go back.

Every device is a place, and has a place in the memory of the host. Weights and optimizer state
stay there: a value of weights per run of layers that no pack divides, one of state per backward
pack. Where devices get casts instead of parameters, the host keeps those beside them, which follow
every update; where devices have shares, it has a value of each. Values are called ``weights``,
``casts``, ``state``, ``gradients``, ``batch``, ``activation``, ``gradient`` (of an activation),
``summary`` and ``loss``; programs ``forward``, ``backward`` (which computes the forward pass
again), ``summarize``, ``update``; of all devices ``reduce``, ``gather`` (weights of shares),
``scatter`` (shares of the sum of gradients); ``widen`` (gradients of casts become those of
parameters) and ``cast``.

A value between two packs is cut where the micro-batches of either direction end, so that it is
copied once in pieces, whatever their sizes (concatenation and split are the programs'). It goes
from device to device, or rests on the host where both packs are on one device, or p2p is off.

Passes are issued in the order of their beginnings, which is given; what is copied, awaited and
freed when is found by ``capture.step.passes``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from capture.machine.server import Server
from capture.plan.task_graph import PackTask, Span, TaskGraph
from capture.step import holds
from capture.step.pack_order import Begins, passes_by
from capture.step.pack_sizes import PackPass, PackSizes
from capture.step.pack_state import PackCall, PackState, Values
from capture.step.passes.frees import free
from capture.step.passes.residency import reside
from capture.step.passes.transfers import transfer
from capture.step.passes.waits import wait
from capture.step.program import Step
from capture.step.tasks import Arrival, Round, Task, Value


def build_step(graph: TaskGraph, sizes: PackSizes, server: Server, begins: Begins) -> Step:
    """Return the step of a plan of packs.

    Args:
        begins: The order in which passes are issued; a pass after those that it reads from.
    """
    state, on = PackState(graph, sizes, int(server.host_memory_bytes.value)), graph.switches
    step, limit = Step(state.places), server.usable_bytes.value
    turns = transfer(step, lower(state, begins), state.kept)
    reside(step, turns, limit, ahead=on.prefetch, behind=on.prefetch and on.grouping)
    free(step)
    wait(step)
    return step


def lower(state: PackState, begins: Begins) -> Iterator[Round]:
    """Yield what runs where, in program order."""
    return _Passes(state).rounds(begins)


class _Pass(NamedTuple):
    """A micro-batch of a task: its number there, its lane, its rows in pieces, and a label."""

    task: PackTask
    i: int
    lane: int
    rows: Sequence[Span]
    label: str

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - first for first, stop in self.rows)


class _Passes:
    """The lowering of the passes, with the values that packs hand on and keep."""

    def __init__(self, state: PackState):
        self._state, self._graph, self._layers = state, state.graph, state.layers
        self._ends, self._cuts = _microbatch_ends(self._graph, self._lane)
        #: By layer whose input is kept for the backward pass, ascending, what of it is kept there:
        #: what skips over several such layers is with the first.
        self._kept_at: dict[int, tuple[int, ...]] = {}
        before: tuple[int, ...] = ()
        for layer in sorted({one for task in self._graph.tasks for one, _ in task.stashes} - {0}):
            entering = self._layers.values[layer]
            self._kept_at[layer] = tuple(v for v in entering if v not in before)
            before = entering
        #: (lane, layer, rows) -> what keeps a piece on the host; None for nothing.
        self._kept: dict[tuple[int, int, Span], Value | None] = {}
        #: (lane, layer, rows, whether it is the gradient) -> a piece for the next pack.
        self._passed: dict[tuple[int, int, Span, bool], Value] = {}
        #: By task, how the weights come and what they are; and the gradients so far.
        self._weights: dict[int, tuple[Arrival, Values]] = {}
        self._summed: dict[int, Values] = {}

    def rounds(self, begins: Begins) -> Iterator[Round]:
        """Yield the passes in the order of ``begins``. Tasks behind a pass, such as updates, begin
        at once on all devices, before the next pack."""
        for task, i in passes_by(self._graph, begins):
            layers = f"layers {task.first} to {task.stop - 1}"
            label = f"{task.kind} {task.start + i} of {layers}"
            if task.kind == "update":
                yield from self._state.update(task, label)
            else:
                yield self._round(task, i, label)
        yield from self._state.update_all()

    def _lane(self, task: PackTask) -> int:
        """Return a task's lane: in data parallelism every rank has its own examples."""
        return task.rank if self._graph.mode == "dp" else 0

    def _round(self, task: PackTask, i: int, label: str) -> Round:
        lane = self._lane(task)
        ends, at = self._ends[lane, task.station], task.start + i
        cuts = (cut for cut in self._cuts[lane] if ends[at] < cut <= ends[at + 1])
        one = _Pass(task, i, lane, list(pairwise([ends[at], *cuts])), label)
        if task.id not in self._weights:
            self._weights[task.id] = self._state.weights(task, label)
        arrival, batch, x = self._weights[task.id][0], self._batch(one), self._entering(one)
        if task.kind == "forward":
            return Round(list(self._forward(one, batch, x)), task.rank, (arrival, batch, x))
        pieces = one.rows if task.gradient is not None else ()
        dy = tuple(self._passed.pop((lane, task.stop, rows, True)) for rows in pieces)
        return Round(self._backward(one, batch, x, dy), task.rank, (arrival, batch, x, dy))

    def _batch(self, one: _Pass) -> Values:
        """Return the batch, which is on the host: it need not be kept for the backward pass."""
        leaves = self._layers.leaves((one.task.first, one.task.stop))
        before = sum(len(cuts) for lane, cuts in self._cuts.items() if lane < one.lane)
        starts, new = (0, *self._cuts[one.lane]), self._state.value
        numbered = [(before + starts.index(rows[0]), rows) for rows in one.rows if leaves]
        return tuple(
            new("batch", "batch", holds.Leaves(leaves, rows), fed=(number, leaves))
            for number, rows in numbered
        )

    def _entering(self, one: _Pass) -> Values:
        """Return the values that enter a pass: those that the pack before handed on, or those that
        the host keeps, at several layers if values skip over some; of each, all pieces."""
        first, lane = one.task.first, one.lane
        if first == 0:
            return ()
        if one.task.source is not None and (lane, first, one.rows[0]) not in self._kept:
            return tuple(self._passed.pop((lane, first, rows, False)) for rows in one.rows)
        found, entering = [], self._layers.values[first]
        for layer, kept in self._kept_at.items():
            values = tuple(v for v in kept if v in entering) if layer <= first else ()
            for rows in one.rows if values else ():
                index = None if values == kept else tuple(map(kept.index, values))
                of, source = holds.Values(values, rows), self._kept[lane, layer, rows]
                found.append(self._activation(of, source=source, index=index))
        return tuple(found)

    def _activation(self, of: holds.Values, category: str = "activations", **more: Any) -> Value:
        return self._state.value("activation", category, of, **more)

    def _rows(self, one: _Pass, layer: int, *, gradient: bool) -> Values:
        """Return new values of what enters a layer, or of its gradient, one per piece."""
        of = [holds.Values(self._layers.values[layer], rows, gradient) for rows in one.rows]
        if not gradient:
            return tuple(map(self._activation, of))
        new = self._state.value
        return tuple(new("gradient", "cotangents", v, resting="activations") for v in of)

    def _keep(self, one: _Pass, layer: int, pieces: Values) -> Values:
        """Return the copies of a layer's input that go to the host for the backward pass; but for
        what is there already, since it has skipped over this layer and one before."""
        kept, entering = self._kept_at[layer], self._layers.values[layer]
        index = None if kept == entering else tuple(map(entering.index, kept))
        found = [
            self._activation(
                holds.Values(kept, rows), "kept activations", source=piece, index=index
            )
            for rows, piece in zip(one.rows, pieces, strict=True)
        ]
        keys = [(one.lane, layer, rows) for rows in one.rows]
        self._kept |= dict(zip(keys, found if kept else [None] * len(found), strict=True))
        return tuple(found) if kept else ()

    def _give(self, one: _Pass, layer: int, pieces: Values, *, gradient: bool) -> Values:
        """Hand pieces of a value to the next pack; return those that go there over the host."""
        sink = one.task.sink
        over_host = not self._graph.switches.p2p or (sink is not None and sink.medium == "swap")
        if over_host and not gradient and layer in self._kept_at:  # it is read there both times
            return self._keep(one, layer, pieces)
        keys = [(one.lane, layer, rows, gradient) for rows in one.rows]
        self._passed |= dict(zip(keys, pieces, strict=True))
        return pieces if over_host else ()

    def _run(self, kind: PackPass, span: Span, one: _Pass, *groups: Any, **more: Any) -> Task:
        rank = one.task.rank
        call = PackCall(kind, span, one.task.sizes[one.i], rank, one.counts)
        return self._state.task(call, self._state.devices[rank], *groups, label=one.label, **more)

    def _forward(self, one: _Pass, batch: Values, x: Values) -> Iterator[Task]:
        task, layers, host = one.task, self._layers, self._state.hosts[one.task.rank]
        new = not x or x[0].source is None  # what came from where it is kept is there
        for first, stop in task.sub_packs:
            away = self._keep(one, first, x) if new and first in self._kept_at else ()
            if stop == task.stop and task.sink is None:  # the backward pass computes it again
                y: Values = (self._state.value("loss", "loss", holds.Loss()),)
            else:
                y = self._rows(one, stop, gradient=False)
                away += self._give(one, stop, y, gradient=False) if stop == task.stop else ()
            params = {*layers.read((first, stop))}
            weights = self._weights[task.id][1]
            read = tuple(value for value in weights if not params.isdisjoint(value.holds.ids))
            reads = (read, x, batch if layers.leaves((first, stop)) else ())
            rests = tuple((value, host) for value in away)
            yield self._run("forward", (first, stop), one, reads, y, made=y, rests=rests)
            x, new = y, True

    def _backward(self, one: _Pass, batch: Values, x: Values, dy: Values) -> list[Task]:
        task, state, span = one.task, self._state, (one.task.first, one.task.stop)
        before = self._summed.pop(task.id) if one.i else state.summed(task)
        sums = self._summed[task.id] = state.sums(task)
        made = self._rows(one, task.first, gradient=True) if task.first else ()
        away = self._give(one, task.first, made, gradient=True) if made else ()
        rests, behind = tuple((value, state.hosts[task.rank]) for value in away), list[Task]()
        if task.criterion:
            made = (*made, state.value("loss", "loss", holds.Loss(), reported=True))
        if one.i == len(task.sizes) - 1:
            more, behind = state.made(task, sums, one.label)
            rests += more
        kind: PackPass = "accumulate" if before else "backward"
        groups = (self._weights[task.id][1], x, batch, dy, before), (*made, *sums), before
        return [self._run(kind, span, one, *groups, made=made, rests=rests), *behind]


def _microbatch_ends(
    graph: TaskGraph, lane_of: Callable[[PackTask], int]
) -> tuple[dict[tuple[int, int], tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Return examples at which micro-batches end: by (lane, station), 0 first; by lane, of all."""
    sizes: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for task in graph.tasks:
        if task.kind != "update":
            sizes[lane_of(task), task.station] |= dict(enumerate(task.sizes, task.start))
    ends = {key: (0, *accumulate(of[i] for i in sorted(of))) for key, of in sizes.items()}
    cuts: defaultdict[int, set[int]] = defaultdict(set)
    for (lane, _), of in ends.items():
        cuts[lane].update(of[1:])
    return ends, {lane: tuple(sorted(of)) for lane, of in cuts.items()}
