"""Memory over simulated time: its sum, its peak, its limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from simulated_work import buffer, works

from capture.step.ledger import Peak
from capture.step.simulator import Simulation, Work, simulate

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
        assert use.samples[-1][1] == sum(
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
    assert use.peak == Peak(17, "run", {"parameters": 10, "temporaries": 7})
    assert use.samples == ((0, 10), (2, 17), (5, 0), (5, 4), (5, 14))


def test_memories_of_one_buffer():
    use = simulate(
        [Work("all", ("s",), 1, allocates=(buffer("b", 3, devices=(0, 1, "host")),))]
    ).memory
    assert {device: one.peak.peak_bytes for device, one in use.items()} == {0: 3, 1: 3, "host": 3}
