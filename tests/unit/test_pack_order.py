"""When the passes of packs begin where copies take no time, by hand; and orders that plans keep."""

from __future__ import annotations

import random

import pytest

from capture.plan.task_graph import Configuration, Packs, Switches, TaskGraph
from capture.step.pack_order import begins_in, begins_without_copies, passes_by

#: Backward packs of layers 0 and 1, three examples at once; forward two, so that the first
#: backward pass waits for the second forward pass.
CONFIGURATION = Configuration(Packs(2, ((0, 1),)), Packs(3, ((0, 1), (1, 2))))


@pytest.mark.parametrize(
    ("mode", "off", "expected"),
    [
        (
            "pp",
            (),
            {
                "forward 0 on 0": [0, 2, 4],
                "backward 1 on 1": [4, 13],  # at the fourth example; then its device is busy
                "update 1 on 1": [19],
                "backward 0 on 0": [13, 22],
                "update 0 on 0": [28],
            },
        ),
        (
            "pp",
            ("grouping", "jit"),
            {
                "forward 0 on 0": [0, 2, 4],
                "forward 1 on 1": [2, 4, 5],  # as soon as each is made
                "backward 1 on 0": [5, 14],
                "backward 0 on 1": [14, 23],
                "update 1 on 0": [29],  # behind all passes
                "update 0 on 1": [29],
            },
        ),
        (
            "dp",
            (),
            {
                "forward 0 on 0": [0, 2],
                "backward 1 on 0": [3],
                "update 1 on 0": [12],
                "backward 0 on 0": [12],
                "update 0 on 0": [21],
                "forward 0 on 1": [0],
                "backward 1 on 1": [3],  # as the first, which has more examples
                "update 1 on 1": [12],
                "backward 0 on 1": [12],
                "update 0 on 1": [21],
            },
        ),
    ],
    ids=["pipeline", "everything-off", "data-parallel"],
)
def test_a_pass_begins_when_its_device_is_free_and_its_examples_are_made(mode, off, expected):
    graph = TaskGraph.of(CONFIGURATION, mode, 2, 5, Switches.without(off))
    begins = begins_without_copies(
        graph,
        lambda task, size: size * (3 if task.kind == "backward" else 0.25 if task.first else 1),
    )
    found: dict[str, list[float]] = {}
    for task in graph.tasks:
        name = f"{task.kind} {task.first} on {task.rank}"
        passes = range(max(1, len(task.sizes)))
        found.setdefault(name, []).extend(begins.pop((task.id, i)) for i in passes)
    assert found == expected and not begins


def order_of(graph: TaskGraph, seed: int) -> list[int]:
    """Return an order of the passes of a step, with passes of random durations."""
    draw = random.Random(seed)
    begins = begins_without_copies(graph, lambda task, size: draw.random())
    return [task.id for task, _ in passes_by(graph, begins)]


@pytest.mark.parametrize("off", [(), ("grouping",), ("jit",), ("p2p", "grouping", "jit")])
@pytest.mark.parametrize("seed", range(5))
def test_an_order_is_kept_and_a_wrong_one_is_named(off, seed):
    graph = TaskGraph.of(CONFIGURATION, "pp", 2, 6, Switches.without(off))
    order = order_of(graph, seed)
    assert graph.wrong_order(order) == ""
    assert [task.id for task, _ in passes_by(graph, begins_in(order))] == order
    due = f"passes are not the {len(order)} of the plan's tasks"
    for wrong in (order[1:], [*order, order[-1]], [*order[:-1], order[0]]):
        assert due in graph.wrong_order(wrong)
    assert graph.wrong_order([*order[:-1], 99]) == "there is no task 99"
    updates = [task.id for task in graph.tasks if task.kind == "update"]
    rest = [task for task in order if task not in updates]
    assert "before what it reads" in graph.wrong_order([*updates, *rest])
    assert "before what it reads" in graph.wrong_order(order[::-1])
    # The last pass of the first pack of all, behind everything.
    first = graph.tasks[0]
    late = [task for task in order if task != first.id]
    assert "before what it reads" in graph.wrong_order([*late, *[first.id] * len(first.sizes)])


def test_devices_of_data_parallelism_have_no_order_of_their_own():
    graph = TaskGraph.of(CONFIGURATION, "dp", 2, 6)
    assert "mode dp" in graph.wrong_order(order_of(graph, 0))
