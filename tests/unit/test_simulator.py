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
from hypothesis import strategies as st

from capture.errors import ExecutionError
from capture.step.ledger import Peak
from capture.step.simulator import Buffer, Simulation, Work, simulate
from capture.step.trace_events import save_trace, trace_events

DEVICES = (0, 1, "host")


def buffer(name: str, nbytes: int, category: str = "activations", devices=(0,)) -> Buffer:
    return Buffer(name, devices, nbytes, category)


BUFFERS = st.builds(
    Buffer,
    st.just(""),
    st.sampled_from([(0,), (1,), (0, 1), ("host",)]),
    st.integers(0, 9),
    st.sampled_from("ab"),
)
PARTS = st.lists(
    st.tuples(st.sampled_from(["allocates", "temporaries", "produces"]), BUFFERS), max_size=3
)
SECONDS = st.sampled_from([0, 1, 2, 5, Fraction(1, 3)])


@st.composite
def works(draw) -> list[Work]:
    """Items on three streams; who frees a buffer waits for who made it."""
    work: list[Work] = []
    live: dict[str, int] = {}
    for i in range(draw(st.integers(0, 8))):
        parts = [(part, replace(b, name=f"{i}.{n}")) for n, (part, b) in enumerate(draw(PARTS))]
        made = {
            part: tuple(b for where, b in parts if where == part)
            for part in ("allocates", "temporaries", "produces")
        }
        freed = draw(st.sets(st.sampled_from(sorted(live)), max_size=2)) if live else set()
        after = {draw(st.integers(0, i - 1))} if i and draw(st.booleans()) else set()
        after |= {live.pop(name) for name in freed}
        streams = draw(st.sets(st.sampled_from("xyz"), max_size=2))
        work.append(
            Work(
                f"item {i}", tuple(streams), draw(SECONDS), tuple(after), **made, frees=tuple(freed)
            )
        )
        live |= {b.name: i for part, b in parts if part != "temporaries"}
    return work


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
    one_at_a_time = simulate(work, capacity_bytes={0: 19})
    assert one_at_a_time.starts == (0, 2, 4, 6, 8, 10)
    assert one_at_a_time.memory[0].peak.peak_bytes == 10


def test_nothing_takes_no_time():
    assert simulate([]) == Simulation((), (), (), {})
    assert simulate([]).seconds == 0


# ---- memory --------------------------------------------------------------------------------------


def live_between(simulation: Simulation, device, begin: float, end: float) -> int:
    """Bytes alive throughout an interval in which nothing begins or ends: sums over lifetimes, no
    order of events."""
    total, born = 0, {}
    for item, start, stop in zip(simulation.work, simulation.starts, simulation.ends, strict=True):
        born |= {b.name: (b, start) for b in item.allocates} | {
            b.name: (b, stop) for b in item.produces
        }
        total += sum(
            b.nbytes * (device in b.devices)
            for b in item.temporaries
            if start <= begin and end <= stop
        )
        for name in item.frees:
            b, since = born.pop(name)
            total += b.nbytes * (device in b.devices) * (since <= begin and end <= stop)
    return total + sum(
        b.nbytes * (device in b.devices) for b, since in born.values() if since <= begin
    )


@given(works())
def test_memory_is_the_sum_of_what_is_alive(work):
    simulation = simulate(work)
    instants = sorted({*simulation.starts, *simulation.ends})
    for device, use in simulation.memory.items():
        assert [seconds for seconds, _ in use.samples] == sorted(
            seconds for seconds, _ in use.samples
        )
        assert min(nbytes for _, nbytes in use.samples) >= 0
        for begin, end in pairwise([*instants, simulation.seconds + 1]):
            last = [nbytes for seconds, nbytes in use.samples if seconds <= begin][-1:] or [0]
            assert last == [live_between(simulation, device, begin, end)]
        freed = {name for item in work for name in item.frees}
        assert use.final_bytes == sum(
            b.nbytes
            for item in work
            for b in (*item.allocates, *item.produces)
            if device in b.devices and b.name not in freed
        )
        assert (
            use.peak.peak_bytes
            == max(nbytes for _, nbytes in use.samples)
            == sum(use.peak.parts.values())
        )
        assert (use.peak_seconds, use.peak.peak_bytes) in use.samples


@given(works())
def test_where_no_item_takes_no_time_the_peak_is_what_lives_in_some_interval(work):
    """No event of an instant hides or adds anything: what starts when another ends has its room."""
    simulation = simulate([replace(item, seconds=max(item.seconds, 1)) for item in work])
    instants = sorted({*simulation.starts, *simulation.ends, simulation.seconds + 1})
    for device, use in simulation.memory.items():
        assert use.peak.peak_bytes == max(
            live_between(simulation, device, begin, end) for begin, end in pairwise(instants)
        )


@given(works())
def test_without_time_memory_follows_the_order_of_issue(work):
    work = [replace(item, seconds=0) for item in work]
    live, peaks = Counter(), Counter()
    sizes = {b.name: b for item in work for b in (*item.allocates, *item.produces)}
    for item in work:
        changes = [
            (1, item.allocates + item.temporaries),
            (-1, item.temporaries + tuple(sizes[name] for name in item.frees)),
            (1, item.produces),
        ]
        for sign, buffers in changes:
            for b in buffers:
                live.update(dict.fromkeys(b.devices, sign * b.nbytes))
            peaks |= live
    simulation = simulate(work)
    assert {device: use.peak.peak_bytes for device, use in simulation.memory.items()} == {
        d: peaks[d] for d in simulation.memory
    }


def peak_of(*work: Work) -> int:
    return simulate(work).memory[0].peak.peak_bytes


def test_the_order_of_one_instant():
    five = (buffer("", 5, "temporaries"),)
    first, second = (
        Work("first", ("s",), 1, temporaries=five),
        Work("second", ("s",), 1, temporaries=five),
    )
    assert peak_of(first, second) == 5, "what ends makes room for what starts"
    assert peak_of(replace(first, seconds=0), replace(second, seconds=0)) == 5, (
        "also where both happen at one instant"
    )
    assert peak_of(first, replace(second, seconds=0), first) == 5
    assert peak_of(first, replace(second, streams=("t",))) == 10
    held = Work("held", allocates=(buffer("held", 5),))
    free = Work("free", after=(0,), frees=("held",))
    assert peak_of(held, free, first) == 5
    assert peak_of(held, first, free) == 10, (
        "of two that begin at one instant, the one issued first does"
    )


def test_a_peak_names_its_first_item_its_instant_and_its_parts():
    work = [
        Work("weights", ("in",), 2, allocates=(buffer("w", 10, "parameters"),)),
        Work(
            "run",
            ("compute",),
            3,
            after=(0,),
            temporaries=(buffer("", 7, "temporaries"),),
            produces=(buffer("y", 4),),
            frees=("w",),
        ),
        Work("again", ("in",), 1, after=(1,), allocates=(buffer("w", 10, "parameters"),)),
    ]
    use = simulate(work).memory[0]
    assert (use.peak, use.peak_seconds) == (
        Peak(17, "run", {"parameters": 10, "temporaries": 7}),
        2,
    )
    assert use.samples == ((0, 10), (2, 17), (5, 0), (5, 4), (5, 14))
    assert use.final_bytes == 14


def test_memories_of_one_buffer():
    use = simulate(
        [Work("all", ("s",), 1, allocates=(buffer("b", 3, devices=(0, 1, "host")),))]
    ).memory
    assert {device: one.peak.peak_bytes for device, one in use.items()} == {0: 3, 1: 3, "host": 3}


# ---- limited memory ------------------------------------------------------------------------------


@given(works(), st.integers(0, 20))
def test_memory_stays_within_its_capacity_and_the_room_of_the_issue_order_suffices(work, more):
    in_order = simulate([replace(item, seconds=0) for item in work])
    capacity = {device: use.peak.peak_bytes + more for device, use in in_order.memory.items()}
    simulation = simulate(work, capacity_bytes=capacity)
    for device, use in simulation.memory.items():
        assert use.peak.peak_bytes <= capacity[device]
    assert simulation.seconds >= simulate(work).seconds
    for i, item in enumerate(work):
        assert all(simulation.ends[j] <= simulation.starts[i] for j in item.after)


@given(works())
def test_room_for_everything_changes_nothing(work):
    everything = sum(
        b.nbytes for item in work for b in (*item.allocates, *item.temporaries, *item.produces)
    )
    assert simulate(work, capacity_bytes=dict.fromkeys(DEVICES, everything)) == simulate(work)


def test_an_item_waits_for_the_free_that_makes_room():
    work = [
        Work("a", ("x",), 2, allocates=(buffer("a", 6),), frees=("a",)),
        Work("b", ("y",), 4, allocates=(buffer("b", 3),), frees=("b",)),
        Work("c", ("z",), 1, allocates=(buffer("c", 5),)),
        Work("behind c", ("z",), 1),
        Work("elsewhere", ("w",), 1),
    ]
    assert simulate(work, capacity_bytes={0: 14}).starts == (0, 0, 0, 1, 0)
    assert simulate(work, capacity_bytes={0: 13}).starts == (0, 0, 2, 3, 0)
    assert simulate(work, capacity_bytes={0: 9}).starts == (0, 0, 2, 3, 0)
    assert simulate(work, capacity_bytes={1: 1}).starts == (0, 0, 0, 1, 0), (
        "the memory of another device"
    )
    assert simulate(work, capacity_bytes={0: 8}).starts == (0, 2, 2, 3, 0)


def test_an_item_issued_later_takes_only_room_that_no_earlier_one_needs():
    """The first loads at 5 s. A prefetch may come before it if both fit, and else waits until the
    first has gone."""
    work = [
        Work("delay", ("x",), 5),
        Work("first", ("x",), 1, allocates=(buffer("first", 6),), frees=("first",)),
        Work("prefetch", ("y",), 1, allocates=(buffer("prefetch", 5),)),
    ]
    assert simulate(work, capacity_bytes={0: 11}).starts == (0, 5, 0)
    assert simulate(work, capacity_bytes={0: 10}).starts == (0, 5, 6)
    brief = [*work[:2], replace(work[2], frees=("prefetch",))]
    assert simulate(brief, capacity_bytes={0: 10}).starts == (0, 5, 0), (
        "it has gone before the first comes"
    )
    scratch = [*work[:2], Work("scratch", ("y",), 7, temporaries=(buffer("", 5, "temporaries"),))]
    assert simulate(scratch, capacity_bytes={0: 10}).starts == (0, 5, 6), (
        "it would still be there when the first comes"
    )


def test_what_never_fits_is_refused():
    work = [
        Work(
            "weights",
            allocates=(buffer("w", 3_000, "parameters", (0, 1)), buffer("o", 5_000, "optimizer")),
        ),
        Work(
            "input",
            ("in",),
            1,
            allocates=(buffer("x", 1_000),),
            temporaries=(buffer("", 10, "temporaries"),),
        ),
        Work(
            "forward",
            ("compute",),
            2,
            after=(1,),
            temporaries=(buffer("", 2_000, "temporaries"),),
            frees=("x",),
        ),
    ]
    assert simulate(work, capacity_bytes={0: 11_000}).memory[0].peak.peak_bytes == 11_000
    with pytest.raises(ExecutionError) as caught:
        simulate(work, capacity_bytes={0: 10_500, 1: 3_000})
    assert str(caught.value) == (
        "item 2 (forward) takes 2 kB on device 0 beside optimizer 5 kB, parameters 3 kB, "
        "activations 1 kB, which no earlier item frees: "
        "capacity_bytes=10500 is too small by 500 bytes. [simulate-memory]"
    )
    with pytest.raises(
        ExecutionError, match=r"^item 0 \(weights\) takes 3 kB on device 1 beside nothing else, "
    ):
        simulate(work, capacity_bytes={1: 2_999})


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
    assert simulate([*work[:2], replace(work[2], after=(1,))]).memory[0].final_bytes == 0


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
