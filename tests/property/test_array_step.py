"""Steps of arrays: a limit is kept at any link speed, and what is fetched early has its room."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from array_kit import MACHINE, Kit
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mutwo_graphs import host_link, random_graph
from capture.plan.array import Decision
from capture.step.issue import Clock, Listener
from capture.step.multiplexed import array_seconds, build_array, issue, lifetimes, peak_of
from capture.step.multiplexed import orders as order_of
from capture.step.program import Copy, Feed, Free
from capture.step.sub_array import movable, recomputable
from capture.step.timeline import Seconds, simulate_step
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.ways import Way, placed
from tests.step_judge import judge


def slowed(seconds: Seconds, slower: float) -> Seconds:
    """Return the times of a step whose copies take so many times as long."""
    return replace(seconds, transfer=lambda *given: slower * seconds.transfer(*given))


@st.composite
def decided(draw, layers, shared_bytes=0, shared_batch=False):
    """Sub-arrays of chains, some of them longer, with choices drawn for each bundle."""
    found = []
    for models in draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (2, 1, 1)])):
        longer = draw(st.sampled_from([0, 0, 1, 3]))
        kit = Kit(layers + longer, shared_bytes=shared_bytes, shared_batch=shared_batch)
        chain = kit.sub_array(models)
        again = recomputable(chain)
        decisions = []
        for number in movable(chain):
            choices = ["retain", "swap", "recompute"][: 3 if number in again else 2]
            choice = draw(st.sampled_from(choices))
            if choice != "retain":
                ahead, behind = draw(st.integers(0, 4)), draw(st.sampled_from([None, 0, 1, 3]))
                decisions.append(Decision(chain.bundles[number].name, choice, ahead, behind))
        found.append(lifetimes(chain, decisions))
    return found


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 4), st.floats(0, 1), st.sampled_from([0.1, 1.0, 10.0]))
def test_a_limit_is_kept_in_program_order_and_over_time(data, layers, between, slower):
    arrays, order = (
        data.draw(decided(layers)),
        data.draw(st.sampled_from(["multiplexed", "in turn"])),
    )
    kit = Kit(layers)
    free = peak_of(build_array(arrays, order, kit).replay(), 0)[0]
    least = peak_of(build_array(arrays, order, kit, 1).replay(), 0)[0]
    limit = round(least + between * max(0, free - least))
    steps = build_array(arrays, order, kit, limit)
    judge(steps.body)
    assert peak_of(steps.replay(), 0)[0] <= max(least, limit)
    for built, ledger in zip(steps.all, steps.replay(), strict=True):
        seconds = slowed(array_seconds(built, MACHINE.rates.host), slower)
        peak = ledger.peak_of(0).peak_bytes
        timeline = simulate_step(built, seconds, feeds_ahead=0)
        assert timeline.memory_of(0).peak.peak_bytes <= peak


MANY = pytest.param(range(12, 200), marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("seeds", [range(12), MANY], ids=["some", "many"])
def test_links_of_another_speed_than_planned_keep_the_peak_of_the_ledger(seeds):
    """Random graphs, ways and choices, planned for a link and a limit; copies that take 0.1 to 10
    times as long: no more is ever there than the ledger says."""
    for seed in seeds:
        draw = random.Random(seed)
        rate, duplex = 1e9 * 30 ** draw.random(), draw.random() < 0.7
        link = host_link(rate, latency=draw.choice([0.0, 1e-5]), duplex=duplex)
        sizes = draw.choice([(1, 1), (2, 1), (1, 1, 1), (2, 2, 1), (2,)])
        way = Way(placed(sizes), draw.choice(["multiplexed", "in turn"][len(sizes) == 1 :]))
        costs = random_graph(seed, 4 + seed % 5)
        free = ArrayProblem(costs, sum(sizes), link, 10**12, by_bundle=True)
        space = free.space(way)
        chosen = tuple(map(draw.choice, space.options))
        least, most = (space.least(one).peak_bytes for one in (chosen, space.retained))
        limit = round(least + draw.random() * max(0, most - least))
        planned = space.evaluate(chosen, limit)
        for built, ledger in zip(planned.steps.all, planned.ledgers, strict=True):
            peak = ledger.peak_of(0).peak_bytes
            for slower in (0.1, 0.1 * 100 ** draw.random(), 10.0):
                seconds = slowed(array_seconds(built, link), slower)
                timeline = simulate_step(built, seconds, feeds_ahead=0)
                assert timeline.memory_of(0).peak.peak_bytes <= peak, (seed, slower)


@pytest.mark.parametrize(
    ("layers", "body"),
    [((2, 2), "B0 F1 B0 F1 B1 F0 B1 F0"), ((4, 2), "B0 F1 B0 B0 F1 B0 F0 B1 F0 F0 B1 F0")],
)
def test_one_pass_is_spread_evenly_over_the_other(layers, body):
    """Backward first; of programs of equal length one of each in turn."""
    arrays = [lifetimes(Kit(count).sub_array(1), []) for count in layers]
    nodes = order_of(arrays, "multiplexed")[0].nodes
    found = " ".join(f"{'FB'[segment >= layers[a]]}{a}" for a, segment, _ in nodes)
    assert found == body


def test_two_bodies_in_a_row_are_one_training():
    """What a body leaves is what the next one begins with, whatever is swapped."""
    chain = Kit(3).sub_array(2)
    swapped = [Decision(chain.bundles[n].name, "swap") for n in movable(chain)]
    array = lifetimes(chain, swapped)
    steps = build_array([array, array], "multiplexed", Kit(3), 1)
    state = {name for name, n in steps.body.persistent.items() if _is_state(steps.body, n)}
    carried = set(steps.body.persistent) - state
    assert carried and set(steps.prologue.made) == carried
    assert set(steps.epilogue.persistent) == carried | state
    end = steps.replay()[1].live_bytes
    before = [steps.body.slots[n] for n in steps.body.persistent.values()]
    assert end[0] == sum(slot.nbytes for slot in before if slot.place.host is None)
    assert end["host"] == sum(slot.nbytes for slot in before if slot.place.host)


def _is_state(built, slot) -> bool:
    return built.slots[slot].category in ("parameters", "optimizer state")


def test_what_is_fetched_ahead_is_issued_before_what_runs_in_between():
    chain = Kit(3).sub_array(1)
    names = [chain.bundles[n].name for n in movable(chain)]
    # Two segments ahead, it would have no room beside the first backward pass.
    for ahead, before in ((0, 0), (1, 1), (2, 1)):
        array = lifetimes(chain, [Decision(names[0], "swap", ahead)])
        retained = peak_of(build_array([lifetimes(chain, [])], "in turn", Kit(3)).replay(), 0)[0]
        step = build_array([array], "in turn", Kit(3), retained - 150).body
        labels = [getattr(each, "label", "") for each in step.instructions]
        fetch = next(
            i
            for i, each in enumerate(step.instructions)
            if isinstance(each, Copy) and step.slots[each.source].place.host
        )
        assert sum("backward" in label for label in labels[fetch:]) == before + 1


class Leaving(Listener):
    """Knows which copies to the host have not been waited for, and how many there were at most when
    one was.

    Attributes:
        out: In the order in which they were issued.
    """

    def __init__(self):
        self.out, self.most = [], 0

    def swap_out(self, a, number):
        self.out.append((a, number))

    def stays(self, a, number):
        self.out.remove((a, number))

    def left(self, a, number):
        assert self.out[0] == (a, number), "the oldest has ended first"
        self.most = max(self.most, len(self.out))
        self.out.pop(0)


@pytest.mark.parametrize("turns", ["in turn", "multiplexed"])
def test_room_is_made_by_the_oldest_copy(turns):
    """A later one has not ended when that has, and the device would stand still for it."""
    chain = Kit(4).sub_array(1)
    array = lifetimes(chain, [Decision(chain.bundles[n].name, "swap") for n in movable(chain)])
    free, least = (
        peak_of(build_array([array] * 2, turns, Kit(4), n).replay(), 0)[0] for n in (None, 1)
    )
    heard = [Leaving() for _ in range(least, free, 100)]
    for n, each in enumerate(heard):
        issue(order_of([array] * 2, turns)[0], Kit(4), each, least + 100 * n)
        assert not each.out
    assert max(each.most for each in heard) > 1


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(2, 4),
    st.floats(0, 1),
    st.sampled_from([1.0, 100.0, 3000.0]),
    st.booleans(),
)
def test_the_clock_and_the_counted_bytes_are_those_of_the_instructions(
    data, layers, between, slower, duplex
):
    """What a search asks thousands of times is what the step says that is written."""
    shared_bytes = data.draw(st.sampled_from([0, 70]))
    shared_batch = data.draw(st.booleans())
    arrays = data.draw(decided(layers, shared_bytes, shared_batch))
    turns = data.draw(st.sampled_from(["multiplexed", "in turn"]))
    kit, host = Kit(layers), MACHINE.rates.host
    free = peak_of(build_array(arrays, turns, kit).replay(), 0)[0]
    least = peak_of(build_array(arrays, turns, kit, 1).replay(), 0)[0]
    limit = round(least + between * max(0, free - least))
    clock = Clock(
        arrays,
        lambda n: slower * host.to_device.seconds(n),
        lambda n: slower * host.to_host.seconds(n),
        duplex,
    )
    issued = issue(order_of(arrays, turns)[0], kit, clock, limit)
    known = [
        replace(life, behind={n: k for (b, n), k in issued.behind.items() if b == a})
        for a, life in enumerate(arrays)
    ]
    body = build_array(known, turns, kit, limit).body
    host = replace(MACHINE.rates.host, duplex=duplex)
    seconds = slowed(array_seconds(body, host), slower)
    timeline = simulate_step(body, seconds, feeds_ahead=0)
    assert clock.seconds == timeline.step_seconds
    ledger = timeline.program_order
    assert issued.peak_bytes == ledger.peak_of(0).peak_bytes
    assert issued.host_peak_bytes == ledger.peak_of("host").peak_bytes
    # Once for all sub-arrays.
    assert ledger.peak_of(0).parts.get("shared", 0) == shared_bytes


@pytest.mark.parametrize(("order", "held"), [("in turn", [1]), ("multiplexed", [1, 2, 1])])
def test_a_batch_of_all_sub_arrays_is_on_the_device_once(order, held):
    """Of three sub-arrays; multiplexed, that of the next update is there beside it for a while."""
    arrays = [lifetimes(Kit(3, shared_batch=True).sub_array(n), []) for n in (2, 1, 1)]
    steps = build_array(arrays, order, Kit(3))
    (size,) = {b.nbytes for life in arrays for b in life.sub_array.bundles if b.feed}
    for built, most in zip(steps.all, held, strict=True):
        assert max(_batch_bytes(built)) == most * size
        feeds = [each for each in built.instructions if isinstance(each, Feed)]
        assert len(feeds) == (built is not steps.epilogue)
    left = {name for name in steps.body.persistent if "batch" in name}
    assert left == ({"0: batch 0"} if order == "multiplexed" else set())


def _batch_bytes(step):
    """After every instruction, the live bytes of batches."""
    slots = {n: step.slots[n] for n in step.persistent.values()}
    for each in step.instructions:
        if isinstance(each, Feed):
            slots[each.slot] = step.slots[each.slot]
        if isinstance(each, Free):
            for number in each.slots:
                slots.pop(number, None)
        yield sum(slot.nbytes for slot in slots.values() if slot.category == "batch")
