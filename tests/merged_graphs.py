"""Graphs of two sub-arrays for mu-TWO's algorithms: random ones, and that of the paper's Figure 2."""

from __future__ import annotations

import random

from capture.papers.mutwo.graph import GraphValue, Operation, Pair, Slice, TrainingGraph
from capture.papers.mutwo.readings import CORRECTED, Readings
from capture.papers.mutwo.schedule import PairSchedule, Prompt


def random_graph(draw: random.Random, name: str, most_bytes: int = 40) -> TrainingGraph:
    """A forward pass with skip connections, and a backward pass that reads what it made."""
    forward, backward = draw.randint(2, 6), draw.randint(2, 8)
    values: list[GraphValue] = []
    operations: list[Operation] = []

    def value(kind: str) -> int:
        nbytes = draw.randint(0, most_bytes)
        copies = draw.randint(0, 8) / 2, draw.randint(0, 8) / 2
        values.append(GraphValue(f"{kind}{len(values)}", nbytes, *copies))
        return len(values) - 1

    made: list[int] = []
    for rank in range(forward):
        reads = draw.sample(made, min(len(made), draw.randint(0, 3)))
        writes = [value("z") for _ in range(draw.randint(1, 2))]
        made += writes
        operations.append(_operation(draw, f"F{rank}", reads, writes))
    gradient: list[int] = []
    for rank in range(backward):
        maps = draw.sample(made, min(len(made), draw.randint(0, 3)))
        new = [value("g")]
        operations.append(_operation(draw, f"B{rank}", [*gradient, *maps], new))
        gradient = new if draw.random() < 0.8 else [*gradient, *new]
    return _donating(draw, TrainingGraph(name, tuple(values), tuple(operations), forward))


def _operation(draw: random.Random, name: str, reads, writes) -> Operation:
    return Operation(
        name, tuple(reads), tuple(writes), draw.randint(0, 8) / 2, draw.choice([0, draw.randint(0, 30)])
    )  # fmt: skip


def _donating(draw: random.Random, graph: TrainingGraph) -> TrainingGraph:
    """Some of the values that end in an operation are donated to it."""
    operations = []
    for rank, op in enumerate(graph.operations):
        ending = [v for v in op.reads if graph.readers[v][-1] == rank]
        donated = tuple(v for v in ending if draw.random() < 0.3)
        operations.append(
            Operation(op.name, op.reads, op.writes, op.seconds, op.temporaries_bytes, donated)
        )
    return TrainingGraph(graph.name, graph.values, tuple(operations), graph.num_forward)


def random_schedule(seed: int, readings: Readings = CORRECTED) -> PairSchedule:
    """A pair, with decisions that were drawn, not chosen."""
    draw = random.Random(seed)
    pair = Pair(random_graph(draw, "one"), random_graph(draw, "two"), draw.randint(0, 50))
    schedule = PairSchedule(pair, readings)
    graph, forward = pair.backward_of, pair.forward_of
    left = draw.sample(graph.intermediates, len(graph.intermediates))
    while left:
        v, choice = left.pop(), draw.choice(["retain", "swap", "recompute"])
        if choice == "recompute":
            schedule.recompute(v, left)
        elif choice == "swap":
            access = schedule.access(v)
            for _ in range(draw.randint(0, 2)):
                saved = schedule.save()
                if not schedule.add_forward(v, access, draw.randint(0, 4) / 2):
                    schedule.restore(saved)
            own = v in schedule.now.shares and draw.random() < 0.5
            prompt = Prompt(access, True) if own else Prompt(draw.randint(0, access))
            schedule.swap(v, prompt, 0.0, left)
        schedule.arrive_in_time()
    drawn = [draw.choice(["retain", "offload", "delete"]) for _ in forward.intermediates]
    hinted = list(zip(forward.intermediates, drawn, strict=True))
    schedule.hints = (
        frozenset(v for v, what in hinted if what == "offload"),
        frozenset(v for v, what in hinted if what == "delete"),
    )
    return schedule


def layers(
    name: str,
    map_bytes: int,
    *,
    swap_seconds: float = 2.0,
    slices: dict[int, Slice] | None = None,
    loss_bytes: int = 0,
) -> TrainingGraph:
    """Five layers as in Figure 2, of 1 s per operation: Z1 to Z5, then dZ5, dW5, dZ4, ..., dW1. dWk
    reads Z(k-1) and dZk; a gradient has 2 bytes.

    Args:
        name: Of the sub-array.
        map_bytes: Of each of Z1 to Z4.
        swap_seconds: Of each, in either direction.
        slices: Of what may be recomputed, by k - 1 of Zk.
        loss_bytes: Workspace of dZ5.
    """
    values = [GraphValue(f"Z{k}", map_bytes, swap_seconds, swap_seconds) for k in range(1, 5)]
    values += [GraphValue("Z5", 0), *(GraphValue(f"dZ{k}", 2) for k in range(5, 0, -1))]
    operations = [Operation(f"Z{k}", (k - 2,) if k > 1 else (), (k - 1,), 1.0) for k in range(1, 6)]
    for k in range(5, 0, -1):
        gradient = 10 - k
        before = (gradient - 1,) if k < 5 else ()
        operations.append(
            Operation(f"dZ{k}", before, (gradient,), 1.0, loss_bytes if k == 5 else 0)
        )
        reads = (gradient, k - 2) if k > 1 else (gradient,)
        operations.append(Operation(f"dW{k}", reads, (), 1.0))
    return TrainingGraph(name, tuple(values), tuple(operations), 5, slices or {})


def figure_six(slices: dict[int, Slice] | None = None) -> Pair:
    """Whose swaps are those of Figure 6, at a limit of 18 bytes."""
    return Pair(layers("one", 10, slices=slices, loss_bytes=8), layers("two", 2))


def shown(schedule: PairSchedule) -> str:
    """The merged graph on a line, with what is fetched and recomputed before its operations; those
    of the forward pass in brackets."""
    words = []
    for node in schedule.merged():
        values = schedule.graph.values
        words += [f"+{values[v].name}" for v in node.to_prefetch]
        words += [f"*{values[v].name}" for v, _ in node.to_recompute]
        name = node.operation.name
        words.append(f"({name})" if node.side == "forward" else name)
    return " ".join(words)
