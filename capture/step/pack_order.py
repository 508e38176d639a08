"""The order in which the passes of packs are issued: that of a plan, or, where nobody has timed
them, as if copies took no time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from capture.plan.task_graph import PackTask, TaskGraph

Begins = Mapping[tuple[int, int], float]
"""(task, micro-batch) -> when its pass begins; of an update, micro-batch 0."""

PassSeconds = Callable[[PackTask, int], float]
"""(task, examples) -> seconds of a pass, in any unit."""


def begins_without_copies(graph: TaskGraph, seconds: PassSeconds) -> Begins:
    """Return when each pass begins if copies take no time. A device takes its tasks in order; a
    micro-batch begins when the station before has made all of its examples."""
    begins: dict[tuple[int, int], float] = {}
    free: defaultdict[int, float] = defaultdict(float)  # by rank
    made: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)  # by lane: up to, when
    arrives: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for task in sorted(graph.tasks, key=lambda task: (task.station, task.id)):
        lane = task.rank if graph.mode == "dp" else 0
        if task.kind == "update":
            begins[task.id, 0] = free[task.rank]
            continue
        if (lane, task.station) not in arrives:
            arrives[lane, task.station], made[lane] = made[lane], []
        done = made[lane][-1][0] if made[lane] else 0
        for i, end in enumerate(accumulate(task.sizes, initial=done)):
            if not i:
                continue
            size = task.sizes[i - 1]
            ready = next((at for upto, at in arrives[lane, task.station] if upto >= end), 0.0)
            begins[task.id, i - 1] = max(ready, free[task.rank])
            free[task.rank] = begins[task.id, i - 1] + seconds(task, size)
            made[lane].append((end, free[task.rank]))
    for task in graph.tasks:  # without jit they come last
        if task.kind == "update" and not graph.switches.jit:
            begins[task.id, 0] = max(free.values())
    return as_the_first(graph, begins)


def passes_by(graph: TaskGraph, begins: Begins) -> list[tuple[PackTask, int]]:
    """Return all passes in the order of their beginnings: the task and the number of the pass."""
    every = [(task, i) for task in graph.tasks for i in range(max(1, len(task.sizes)))]
    return sorted(every, key=lambda p: (begins[p[0].id, p[1]], p[0].station, p[0].id, p[1]))


def begins_in(order: Sequence[int]) -> Begins:
    """Return beginnings, in no unit, of the passes of a plan's order."""
    passes: Counter[int] = Counter()
    begins: dict[tuple[int, int], float] = {}
    for at, task in enumerate(order):
        begins[task, passes[task]] = at
        passes[task] += 1
    return begins


def as_the_first(graph: TaskGraph, begins: Begins) -> Begins:
    """Give every data-parallel device the beginnings of the first, which has the most examples. One
    that runs ahead would hold the weights of the next pack beside those that wait for the sum."""
    if graph.mode != "dp":
        return begins
    first = {
        (task.kind, task.station, task.start): task.id for task in graph.tasks if task.rank == 0
    }
    return {
        (task.id, i): begins[first[task.kind, task.station, task.start], i]
        for task in graph.tasks
        for i in range(max(1, len(task.sizes)))
    }
