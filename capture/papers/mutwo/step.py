"""A merged graph in the language of all steps: what mu-TWO's graph rewriter makes of a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from capture.papers.mutwo.graph import Operation, TrainingGraph
from capture.papers.mutwo.schedule import Node, PairSchedule
from capture.step.program import Copy, Free, Host, Instruction, Place, Program, Run, Step, Wait

Key = tuple[TrainingGraph, int]


def step_of(schedule: PairSchedule, *, instant_copies: bool) -> tuple[Step, dict[str, float]]:
    """Return the instructions of a merged graph, and the seconds of its programs and copies. What
    the host holds stays there, which is nobody's question here.

    Args:
        schedule: Of the graph.
        instant_copies: Wait for every copy to the host when it is issued, so that its bytes are
            free, as Algorithm G takes them to be; otherwise at the end.
    """
    writer = _PairWriter(schedule, instant_copies)
    for node in schedule.merged():
        writer.add(writer.node(node))
    writer.add(writer.end())
    return writer.step, writer.seconds


class _PairWriter:
    def __init__(self, schedule: PairSchedule, instant_copies: bool):
        self._graph, self._now = schedule.graph, schedule.now
        self._instant = instant_copies
        self._device = Place("device", (0,))
        self._host = Place("host", (0,), Host("host"))
        self.step = Step((self._device, self._host))
        #: Of programs by name, of copies by label.
        self.seconds: dict[str, float] = {}
        self._here: dict[Key, int] = {}
        self._there: dict[Key, int] = {}
        self._leaving: list[Key] = []
        self.step.keep("static", self._device, "static", schedule.pair.static_bytes)
        graph = self._graph
        for v in graph.intermediates:
            value, now = graph.values[v], self._now
            name = f"{graph.name} {value.name}"
            if v in now.swaps:
                self._there[graph, v] = self.step.keep(name, self._host, "swapped", value.nbytes)
            elif v not in now.recomputed:
                self._here[graph, v] = self.step.keep(name, self._device, "maps", value.nbytes)

    def add(self, instructions: Iterator[Instruction]) -> None:
        self.step.instructions += instructions

    def end(self) -> Iterator[Instruction]:
        for key in list(self._leaving):
            yield from self._left(key)

    def node(self, node: Node) -> Iterator[Instruction]:
        graph, operation = node.graph, node.operation
        for v in node.to_prefetch:
            yield self._in((self._graph, v))
        for v, cost in node.to_recompute:
            label = f"{graph.name} again {graph.values[v].name}"
            again = Operation(label, tuple(sorted(cost.sources)), (v,), cost.seconds)
            yield self._run(graph, again, label, cost.nbytes)
        sizes = graph.sizes
        made = sum(sizes[v] for v in operation.writes) - sum(sizes[v] for v in operation.donated)
        label = f"{graph.name} {operation.name}"
        yield self._run(graph, operation, label, operation.temporaries_bytes + made)
        gone: list[int] = []
        for v in dict.fromkeys((*operation.reads, *operation.writes)):
            last = graph.readers[v][-1] if graph.readers[v] else node.rank
            if (graph, v) in self._here and last <= node.rank:
                gone.append(self._here.pop((graph, v)))
        gone += [self._here.pop((graph, v)) for v in node.to_delete]
        if gone:
            yield Free(tuple(gone))
        for v in node.to_offload:
            yield self._out((graph, v))
            if self._instant:
                yield from self._left(self._leaving.pop())

    def _run(self, graph: TrainingGraph, operation: Operation, label: str, transient: int) -> Run:
        self.step.programs[label] = Program("program", self._device, transient)
        self.seconds[label] = operation.seconds
        inputs = tuple(self._here[graph, v] for v in operation.reads)
        donated = tuple(self._here.pop((graph, v)) for v in operation.donated)
        outputs = tuple(self._new((graph, v), self._device) for v in operation.writes)
        self._here |= {(graph, v): slot for v, slot in zip(operation.writes, outputs, strict=True)}
        return Run(label, (inputs,), outputs, donated, label)

    def _new(self, key: Key, place: Place) -> int:
        value = key[0].values[key[1]]
        name = f"{key[0].name} {value.name} #{len(self.step.slots)}"
        return self.step.slot(name, place, "swapped" if place.host else "maps", value.nbytes)

    def _in(self, key: Key) -> Copy:
        value = key[0].values[key[1]]
        self._here[key] = self._new(key, self._device)
        label = f"{key[0].name} in {value.name}"
        self.seconds[label] = value.swap_in_seconds
        return Copy(self._there[key], self._here[key], value.nbytes, label)

    def _out(self, key: Key) -> Copy:
        value = key[0].values[key[1]]
        self._there[key] = self._new(key, self._host)
        self._leaving.append(key)
        label = f"{key[0].name} out {value.name}"
        self.seconds[label] = value.swap_out_seconds
        return Copy(self._here[key], self._there[key], value.nbytes, label)

    def _left(self, key: Key) -> Iterator[Instruction]:
        yield Wait(self._there[key])
        yield Free((self._here.pop(key),))
