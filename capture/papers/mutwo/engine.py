"""What happens when a merged graph runs: Algorithm H, on a stream for programs and one for copies
in each direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from capture.papers.mutwo.graph import TrainingGraph
from capture.papers.mutwo.lineage import RecomputeCost
from capture.papers.mutwo.readings import Readings
from capture.papers.mutwo.schedule import Node

Stream = Literal["compute", "in", "out"]


@dataclass(frozen=True)
class Event:
    """A program or a copy that occupies a stream for some time.

    Attributes:
        stream: Programs, copies from the host, copies to it.
        label: Alike for the same thing in ``capture.step``.
        start, end: Seconds.
    """

    stream: Stream
    label: str
    start: float
    end: float


@dataclass
class Execution:
    """The events of merged graphs that run one after the other.

    Attributes:
        events: In the order of issue.
        stall_seconds: In which programs waited for copies in.
    """

    events: list[Event] = field(default_factory=list)
    stall_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def seconds_of(self, stream: Stream) -> float:
        return sum(event.end - event.start for event in self.events if event.stream == stream)

    @property
    def overlapped_in_seconds(self) -> float:
        """The seconds of copies in during which a program runs (M-ae)."""
        runs = [event for event in self.events if event.stream == "compute"]
        return sum(
            max(0.0, min(run.end, copy.end) - max(run.start, copy.start))
            for copy in self.events
            if copy.stream == "in"
            for run in runs
        )


Key = tuple[TrainingGraph, int]


class Engine:
    """The executor of Algorithm H. It issues nodes one by one; streams run what they get in order.

    Args:
        readings: Of it.
    """

    def __init__(self, readings: Readings):
        self._readings = readings
        self.execution = Execution()
        self._free_at: dict[Stream, float] = {"compute": 0.0, "in": 0.0, "out": 0.0}
        self._arrived: dict[Key, float] = {}
        self._left: dict[Key, float] = {}
        self._made: dict[Key, float] = {}

    def run(self, backward_of: TrainingGraph, nodes: Iterable[Node]) -> Execution:
        for node in nodes:
            self._node(backward_of, node)
        return self.execution

    def _node(self, backward_of: TrainingGraph, node: Node) -> None:
        graph, operation = node.graph, node.operation
        if node.side == "backward" or self._readings.prompts_anywhere:
            for v in node.to_prefetch:
                self._fetch(backward_of, v)
        for v, cost in node.to_recompute:
            self._recompute(graph, v, cost)
        arrivals = [self._arrived.get((graph, v), 0.0) for v in operation.reads]
        label = f"{graph.name} {operation.name}"
        end = self._enqueue("compute", label, operation.seconds, arrivals)
        self._made.update({(graph, v): end for v in operation.writes})
        for v in node.to_offload:
            ready = self._made[graph, v] if self._readings.offload_when_made else end
            value = graph.values[v]
            label = f"{graph.name} out {value.name}"
            self._left[graph, v] = self._enqueue("out", label, value.swap_out_seconds, [ready])

    def _fetch(self, graph: TrainingGraph, v: int) -> None:
        ready = [self._free_at["compute"]]
        if self._readings.copies_awaited:
            ready.append(self._left.get((graph, v), 0.0))
        value = graph.values[v]
        label = f"{graph.name} in {value.name}"
        self._arrived[graph, v] = self._enqueue("in", label, value.swap_in_seconds, ready)

    def _recompute(self, graph: TrainingGraph, v: int, cost: RecomputeCost) -> None:
        sources = cost.sources if self._readings.copies_awaited else ()
        arrivals = [self._arrived.get((graph, source), 0.0) for source in sources]
        label = f"{graph.name} again {graph.values[v].name}"
        self._enqueue("compute", label, cost.seconds, arrivals)

    def _enqueue(self, stream: Stream, label: str, seconds: float, after: Sequence[float]) -> float:
        free = self._free_at[stream]
        start = max([free, *after])
        if stream == "compute":
            self.execution.stall_seconds += start - free
        self._free_at[stream] = start + seconds
        self.execution.events.append(Event(stream, label, start, start + seconds))
        return start + seconds
