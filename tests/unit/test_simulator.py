"""The simulator against longest paths and against sums of what is alive, its order of one instant,
limited memory, and the trace."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from simulated_work import buffer, works

from capture.errors import ExecutionError
from capture.step.simulator import Simulation, Work, simulate
from capture.step.trace_events import save_trace, trace_events

# ---- times ---------------------------------------------------------------------------------------


def longest_path(work: list[Work]) -> float:
    """Over the graph in which an item waits for its dependencies and for every earlier item of its
    streams: by relaxation."""
    edges = [
        (j, i)
        for i, item in enumerate(work)
        for j in range(i)
        if j in item.after or set(work[j].streams) & set(item.streams)
    ]
    ends = [item.seconds for item in work]
    for _ in work:
        for j, i in edges:
            ends[i] = max(ends[i], ends[j] + work[i].seconds)
    return max(ends, default=0)


@given(works())
def test_nothing_starts_too_early_or_too_late(work):
    simulation = simulate(work)
    assert simulation.seconds == longest_path(work)
    assert all(
        end - start == item.seconds
        for item, start, end in zip(work, simulation.starts, simulation.ends, strict=True)
    )
    for i, item in enumerate(work):
        assert all(simulation.ends[j] <= simulation.starts[i] for j in item.after)
    for stream in "xyz":
        ids = [i for i, item in enumerate(work) if stream in item.streams]
        assert all(simulation.ends[i] <= simulation.starts[j] for i, j in pairwise(ids)), (
            "a stream does two things at a time"
        )
        assert (
            simulation.busy_seconds.get(stream, 0)
            == sum(work[i].seconds for i in ids)
            <= simulation.seconds
        )


def test_exact_seconds_stay_exact():
    third = Fraction(1, 3)
    assert (
        simulate(
            [
                Work("a", ("s",), third),
                Work("b", ("s",), third),
                Work("c", ("t",), third, after=(1,)),
            ]
        ).seconds
        == 1
    )


def test_an_item_occupies_all_of_its_streams():
    simulation = simulate(
        [
            Work("a", ("x",), 3),
            Work("both", ("x", "y"), 2),
            Work("b", ("y",), 1),
            Work("none"),
            Work("c", ("z",), 1),
        ]
    )
    assert simulation.starts == (0, 3, 5, 0, 0)
    assert simulation.busy_seconds == {"x": 5, "y": 3, "z": 1}


def test_transfers_in_both_directions_overlap_with_each_other_and_with_compute():
    """Two packs of weights stream through a device, as systems do that keep them in host memory."""
    weights = [buffer(f"weights {i}", 10, "parameters") for i in range(2)]
    work = [
        Work("in 0", ("host to device",), 2, allocates=(weights[0],)),
        Work("compute 0", ("device",), 2, after=(0,)),
        Work("out 0", ("device to host",), 2, after=(1,), frees=("weights 0",)),
        Work("in 1", ("host to device",), 2, allocates=(weights[1],)),
        Work("compute 1", ("device",), 2, after=(3,)),
        Work("out 1", ("device to host",), 2, after=(4,), frees=("weights 1",)),
    ]
    simulation = simulate(work)
    assert simulation.starts == (0, 2, 4, 2, 4, 6)
    assert simulation.memory[0].samples == ((0, 10), (2, 20), (6, 10), (8, 0))


def test_nothing_takes_no_time():
    assert simulate([]) == Simulation((), (), (), {})
    assert simulate([]).seconds == 0


# ---- what is refused -----------------------------------------------------------------------------


def test_every_broken_rule_is_named():
    with pytest.raises(ExecutionError) as caught:
        simulate(
            [
                Work("early", after=(0, 1), seconds=-1, allocates=(buffer("b", 1),)),
                Work(
                    "twice",
                    seconds=float("nan"),
                    allocates=(buffer("b", 1),),
                    frees=("b", "b", "c"),
                ),
            ]
        )
    assert str(caught.value).splitlines() == [
        "item 0 (early) waits for the items [0, 1]; give ids of earlier items only, 0 <= id < 0. "
        "[simulate-order]",
        "item 0 (early) takes seconds=-1; give 0 or more. [simulate-seconds]",
        "item 1 (twice) takes seconds=nan; give 0 or more. [simulate-seconds]",
        "item 1 (twice) allocates buffer 'b', which item 0 did and nothing freed. "
        "[simulate-buffer]",
        "item 1 (twice) frees buffer 'b', which no earlier item allocated, or one freed already. "
        "[simulate-buffer]",
        "item 1 (twice) frees buffer 'c', which no earlier item allocated, or one freed already. "
        "[simulate-buffer]",
    ]


def test_a_free_that_does_not_wait_for_its_buffer_is_refused():
    work = [
        Work("delay", ("x",), 2),
        Work("make", ("x",), 1, allocates=(buffer("b", 1),)),
        Work("free", ("y",), 1, frees=("b",)),
    ]
    with pytest.raises(ExecutionError) as caught:
        simulate(work)
    assert str(caught.value) == (
        "item 2 (free) frees buffer 'b' at 1 s, before item 1 (make) allocates it; let it wait "
        "for that item (after). [simulate-buffer]"
    )
    assert simulate([*work[:2], replace(work[2], after=(1,))]).memory[0].samples[-1][1] == 0


# ---- the trace -----------------------------------------------------------------------------------


@given(works())
def test_a_trace_shows_every_item_and_every_change_of_memory(work):
    simulation = simulate(work)
    events = trace_events(simulation)
    assert json.loads(json.dumps(events, allow_nan=False)) == events
    shown = Counter(event["ph"] for event in events)
    assert shown["X"] == sum(len(item.streams) for item in work)
    assert shown["C"] == sum(len(use.samples) for use in simulation.memory.values())
    assert set(shown) <= {"X", "C", "M"}
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = Counter(
        (threads[e["tid"]], e["args"]["item"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"
    )
    assert spans == Counter(
        (stream, i, float(start) * 1e6, float(item.seconds) * 1e6)
        for i, (item, start) in enumerate(zip(work, simulation.starts, strict=True))
        for stream in item.streams
    )
    for device, use in simulation.memory.items():
        name = f"memory of {device}" if device == "host" else f"memory of device {device}"
        assert [e["args"]["bytes"] for e in events if e["name"] == name] == [
            nbytes for _, nbytes in use.samples
        ]


def test_a_trace_file(tmp_path):
    work = [
        Work("load", ("link", "compute"), 1.5, allocates=(buffer("b", 3),), kind="transfer"),
        Work("run", ("compute",), 2),
    ]
    path = tmp_path / "trace.json"
    save_trace(simulate(work), path, {"compute": "device 0", 0: "device 0"})
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    assert document["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "streams"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 1}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "link"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "device 0"}},
        {"ph": "M", "name": "process_sort_index", "pid": 2, "tid": 0, "args": {"sort_index": 2}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 2, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 2, "tid": 2, "args": {"sort_index": 2}},
        {
            "ph": "X",
            "name": "load",
            "cat": "transfer",
            "pid": 1,
            "tid": 1,
            "ts": 0.0,
            "dur": 1.5e6,
            "args": {"item": 0},
        },
        {
            "ph": "X",
            "name": "load",
            "cat": "transfer",
            "pid": 2,
            "tid": 2,
            "ts": 0.0,
            "dur": 1.5e6,
            "args": {"item": 0},
        },
        {"ph": "C", "name": "memory of device 0", "pid": 2, "ts": 0.0, "args": {"bytes": 3}},
        {
            "ph": "X",
            "name": "run",
            "cat": "work",
            "pid": 2,
            "tid": 2,
            "ts": 1.5e6,
            "dur": 2e6,
            "args": {"item": 1},
        },
    ]
