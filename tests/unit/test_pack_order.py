"""When the passes of packs begin where copies take no time, by hand."""

from __future__ import annotations

import pytest

from capture.plan.task_graph import Configuration, Packs, Switches, TaskGraph
from capture.step.pack_order import begins_without_copies

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
