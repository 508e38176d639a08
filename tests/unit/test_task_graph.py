"""Tasks of plans of packs: those of the released scheduler one by one, the wrap-around pipeline of
Figure 5, and how micro-batches of one size become those of another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.plan.task_graph import (
    Channel,
    Configuration,
    Packs,
    TaskGraph,
    completed_by,
    microbatches,
    shares,
)

TIMELINES = json.loads(
    (Path(__file__).parents[1] / "data" / "harmony" / "timelines_toy6.json").read_text()
)["timelines"]
MEDIA = {"DAT": "data", "SWP": "swap", "P2P": "p2p", "MSG": "message"}
KINDS = {"FWD": "forward", "BWD": "backward", "UPD": "update"}
MODES = {"vPP": "pp", "vDP": "dp"}


def packs(size: int, layers: list[list[int]]) -> Packs:
    return Packs(size, tuple((pack[0], pack[-1] + 1) for pack in layers))


def graph_of(recorded: dict) -> TaskGraph:
    configuration = Configuration(
        packs(recorded["u_f"], recorded["p_f"]), packs(recorded["u_b"], recorded["p_b"])
    )
    return TaskGraph.of(configuration, MODES[recorded["mode"]], recorded["N"], recorded["D"])


def channels(written: dict, tensors: Iterable[str]) -> dict[str, dict[int, Channel]]:
    """The recorded channels of some tensors, by layer."""
    return {
        tensor: {
            int(layer): Channel(MEDIA[medium], *where)
            for layer, (medium, *where) in written[tensor].items()
        }
        for tensor in tensors
    }


@pytest.mark.parametrize("number", range(len(TIMELINES)))
def test_tasks_and_channels_of_the_released_scheduler(number):
    recorded = TIMELINES[number]
    graph = graph_of(recorded)
    assert len(graph.tasks) == len(recorded["tasks"])
    for task, row in zip(graph.tasks, recorded["tasks"], strict=True):
        assert (task.id, task.kind, list(task.layers), list(task.sizes), task.rank) == (
            row["idx"],
            KINDS[row["type"]],
            list(range(row["layers"][0], row["layers"][-1] + 1)),
            row["ubatch_sizes"] or [],
            int(row["device"][4:]),
        )
        assert row["device"].startswith("CPU" if task.kind == "update" else "GPU")
        if task.kind == "update":
            continue
        first, last = task.first, task.stop - 1
        kept = dict(task.stashes)
        came = {"X": kept if task.source is None else {first: task.source}}
        went = {"X": kept} if task.kind == "forward" else {}
        if task.kind == "backward":
            came["dY"] = {} if task.gradient is None else {last: task.gradient}
        name, layer = ("Y", last) if task.kind == "forward" else ("dX", first)
        went[name] = {layer: task.sink} if task.sink else {}
        assert came == channels(row["in"], came) and went == channels(row["out"], went)


def test_figure_5_binds_backward_tasks_to_other_devices():
    one_each = Configuration(Packs.of_lengths(2, (1, 2, 1)), Packs.of_lengths(2, (1, 1, 1, 1, 2)))
    graph = TaskGraph.of(one_each, "pp", 2, 4)
    bound = [(task.kind, task.first, task.rank) for task in graph.tasks if task.kind != "update"]
    assert bound == [
        ("forward", 0, 0),
        ("forward", 1, 1),
        ("forward", 3, 0),
        ("backward", 4, 1),
        ("backward", 3, 0),
        ("backward", 2, 1),
        ("backward", 1, 0),
        ("backward", 0, 1),
    ]
    # Layer 2 is kept by the second task, which is cut there.
    assert graph.tasks[1].sub_packs == ((1, 2), (2, 3))


def test_one_device_passes_all_through_the_host():
    graph = graph_of({**TIMELINES[1], "N": 1})
    assert {task.rank for task in graph.tasks} == {0}
    media = {task.sink.medium for task in graph.tasks if task.sink}
    assert media == {"swap"} and graph.alone


def test_a_single_backward_pack_reads_the_batch():
    only = Configuration(Packs(4, ()), Packs(4, ((0, 6),)))
    (task, update) = TaskGraph.of(only, "pp", 4, 8).tasks
    assert task.source == Channel("data") and task.sink is None and task.criterion
    assert update.kind == "update"


def test_shares_and_remainders():
    assert shares(10, 4) == (3, 3, 2, 2)
    graph = TaskGraph.of(
        Configuration(Packs(2, ((0, 1),)), Packs(2, ((0, 1), (1, 2)))), "dp", 4, 10
    )
    assert [task.sizes for task in graph.tasks if task.kind == "forward"] == [
        (2, 1),
        (2, 1),
        (2,),
        (2,),
    ]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_micro_batches_become_others_in_order_and_once(share, one, other):
    sources, targets = microbatches(share, one), microbatches(share, other)
    completed = completed_by(sources, targets)
    assert [i for row in completed for i in row] == list(range(len(targets)))
    for j, row in enumerate(completed):
        for i in row:
            assert sum(sources[:j]) < sum(targets[: i + 1]) <= sum(sources[: j + 1])
