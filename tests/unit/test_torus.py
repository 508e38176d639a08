"""What collectives take on slices of a torus: every axis against its messages, one by one, boxes of
several axes, the order of devices, and slices that the data-center network joins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import Network

from capture.machine.cluster import Cluster, Machine
from capture.machine.links import Layout, Links
from capture.machine.rates import AlphaBeta, Fabric, Link, Sourced, TorusLinks
from capture.machine.target import Target
from capture.machine.torus import GroupAxis, Torus, _box
from capture.measured.work import Collective
from capture.step.timeline import LinkTimes
from capture.step.times import TimeModel

HOP, RATE, NBYTES = 1e-6, 50e9, 96_000_000
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def torus(*shape: int, host: tuple[int, ...] = (), wraps_at: int = 4, chip: int = 1) -> Torus:
    host = host or (1,) * len(shape)
    links = TorusLinks(
        Sourced(HOP, "test"), Sourced(RATE, "test"), host, chip, wraps_at, True, "test"
    )
    return Torus(links, shape)


def along(axis: GroupAxis, pieces: int, both_ways: bool, nbytes: float, latency: float) -> float:
    """The seconds of all-gathers of all groups on an axis at once: on rings every part goes round
    as two halves, or whole by the shorter way; on lines both ways to the ends."""
    size, apart, is_ring = axis
    length = size * apart
    network = Network({(at, way): RATE for at in range(length) for way in (1, -1)})
    for first in range(length):
        own = first // apart
        if is_ring and both_ways:
            reaches = ((1, size // 2, 1.0), (-1, (size - 1) // 2, 1.0))
        elif is_ring:
            reaches = ((1, size - 1, 0.5), (-1, size - 1, 0.5))
        else:
            reaches = ((1, size - 1 - own, 1.0), (-1, own, 1.0))
        for way, reach, share in reaches:
            for _ in range(pieces):
                before: tuple[int, ...] = ()
                for hop in range(reach * apart):
                    link = ((first + way * hop) % length, way)
                    part = nbytes / size * share / pieces
                    before = (network.send(link, part, latency * HOP, before),)
    return network.seconds()


AXES = [(2, 1, False), (4, 1, False), (4, 1, True), (5, 1, True), (8, 1, True), (2, 2, True)]
AXES += [(4, 2, True), (2, 2, False), (4, 2, False)]


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("axis", [GroupAxis(*axis) for axis in AXES], ids=map(str, AXES))
def test_an_axis_has_the_seconds_of_its_messages(axis, both_ways):
    cost = axis.gather(AlphaBeta(HOP, 1 / RATE), both_ways)
    pieces, rel = (1, 1e-9) if axis.apart == 1 else (64, 0.04)
    messages = partial(along, axis, pieces, both_ways)
    assert cost.fixed_seconds == pytest.approx(messages(0, 1), rel=1e-9)
    assert cost.seconds_per_byte * NBYTES == pytest.approx(messages(NBYTES, 0), rel=rel)
    assert cost.seconds(NBYTES) >= messages(NBYTES, 1) * (1 - rel)


def exchanged(axis: GroupAxis, pieces: int, nbytes: float, latency: float) -> float:
    """The seconds of an all-to-all on an axis: every part by the shorter way, if there are two as
    short, a half by each."""
    size, is_ring = axis.size, axis.is_ring
    network = Network({(at, way): RATE for at in range(size) for way in (1, -1)})
    for _ in range(pieces):
        for distance in range(1, size):
            for first in range(size):
                for way in (1, -1):
                    if is_ring:
                        other = size - distance
                        share = 1.0 if distance < other else 0.5 if distance == other else 0.0
                    else:
                        share = float(0 <= first + way * distance < size)
                    before: tuple[int, ...] = ()
                    for hop in range(distance if share else 0):
                        link = ((first + way * hop) % size, way)
                        part = nbytes / size * share / pieces
                        before = (network.send(link, part, latency * HOP, before),)
    return network.seconds()


@pytest.mark.parametrize("size", [2, 4, 5, 8])
@pytest.mark.parametrize("is_ring", [False, True])
def test_an_all_to_all_on_an_axis_has_the_seconds_of_its_busiest_link(size, is_ring):
    axis = GroupAxis(size, 1, is_ring)
    cost = axis.exchange(AlphaBeta(HOP, 1 / RATE))
    assert cost.fixed_seconds == pytest.approx(exchanged(axis, 1, 0, 1))
    found = exchanged(axis, 48, NBYTES, 0)
    assert cost.seconds_per_byte * NBYTES == pytest.approx(found, rel=0.05)
    assert cost.seconds_per_byte * NBYTES <= found * (1 + 1e-9)


def all_at_once(shape: tuple[int, ...], nbytes: float, latency: float) -> float:
    """The seconds of an all-gather on a torus of rings, a part per axis, each part as two halves;
    the parts change axes together."""
    count, total = len(shape), 0.0
    held = [nbytes / count / math.prod(shape)] * count
    places = torus(*shape).coordinates
    for phase in range(count):
        network = Network(
            {
                (place, axis, way): RATE
                for place in places
                for axis in range(count)
                for way in (1, -1)
            }
        )
        for part in range(count):
            axis = (part + phase) % count
            for place in places:
                for way in (1, -1):
                    before: tuple[int, ...] = ()
                    at = place
                    for _ in range(shape[axis] - 1):
                        link = (at, axis, way)
                        before = (network.send(link, held[part] / 2, latency * HOP, before),)
                        moved = (at[axis + 1] + way) % shape[axis]
                        at = (*at[: axis + 1], moved, *at[axis + 2 :])
            held[part] *= shape[axis]
        total += network.seconds()
    return total


@pytest.mark.parametrize("shape", [(4, 4), (4, 8), (4, 4, 4), (4, 4, 8)])
def test_all_axes_of_a_torus_at_once(shape):
    found = torus(*shape).costs("all-gather", math.prod(shape), 1)["all axes at once, halves"]
    assert found.seconds_per_byte * NBYTES == pytest.approx(all_at_once(shape, NBYTES, 0), rel=1e-9)
    assert found.fixed_seconds >= all_at_once(shape, 0, 1) * (1 - 1e-9)
    if len(set(shape)) == 1:
        assert found.seconds(NBYTES) == pytest.approx(all_at_once(shape, NBYTES, 1), rel=1e-9)


def test_equal_axes_share_the_work():
    """As How to Scale Your Model, part 3, has it: bytes over the links of all axes."""
    for shape in ((16, 16), (4, 4, 4), (8, 8, 8)):
        size = math.prod(shape)
        costs = torus(*shape, wraps_at=4).costs("all-gather", size, 1).values()
        expected = (size - 1) / size / (2 * RATE * len(shape))
        assert min(c.seconds_per_byte for c in costs) == pytest.approx(expected, rel=1e-9)
        every = torus(*shape).costs("all-to-all", size, 1)["all axes at once"]
        assert every.seconds_per_byte == pytest.approx(shape[0] / 8 / RATE)


def test_axes_without_wraps_have_half_the_bandwidth():
    closed, line = torus(4, 4, 4), torus(4, 4, 2)
    assert closed.wraps == (False, True, True, True) and not any(line.wraps)
    ring, flat = (each.costs("all-gather", 4, 1) for each in (closed, line))
    per_byte = [min(c.seconds_per_byte for c in costs.values()) for costs in (ring, flat)]
    assert per_byte[1] == 2 * per_byte[0]


@pytest.mark.parametrize(
    ("target", "shape", "wraps"),
    [
        ("v5p", (4, 4, 4), (True, True, True)),
        ("v5p", (4, 4, 8), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),  # no whole cube
        ("v5e", (16, 16), (True, True)),
        ("v5e", (8, 16), (False, True)),
        ("v6e", (8, 8), (False, False)),
        ("tpu7x", (4, 4, 4), (True, True, True)),
    ],
)
def test_only_documented_axes_wrap(target, shape, wraps):
    found = Torus(Target.load(target).rates.fabric.torus, shape)
    assert found.wraps == (False, *wraps)


def test_devices_that_are_no_box_make_one_ring_of_all():
    slice_ = torus(4, 4)
    assert not slice_.is_block(0, 3 * 2) and slice_.is_block(4, 4)
    assert set(slice_.costs("all-gather", 8, 1)) > {"axis by axis, halves"}
    assert "one ring of all" not in torus(3, 2).costs("all-gather", 3, 1)  # each a row
    assert set(torus(4, 2).costs("all-gather", 3, 1)) == {"one ring of all"}  # but the first
    odd = torus(4, 4).costs("all-gather", 6, 1)
    assert set(odd) == {"one ring of all"}
    assert odd["one ring of all"].seconds_per_byte >= 5 / 6 / (2 * RATE)


def test_devices_at_unequal_distances_are_no_box():
    assert _box([(0,), (1,), (4,)]) is None and _box([(0,), (2,), (4,)]) == ((3, 2),)
    assert _box([(0, 0), (0, 1), (1, 0)]) is None


def test_messages_have_the_seconds_of_their_busiest_link():
    ring = torus(8, wraps_at=4)
    assert ring.message([(0, 3)]) == pytest.approx((3 * HOP, 1 / RATE))
    assert ring.message([(0, 6)]) == pytest.approx((2 * HOP, 1 / RATE))  # the other way round
    assert ring.message([(0, 2), (1, 3)]) == pytest.approx((2 * HOP, 2 / RATE))
    assert ring.message([(0, 2), (2, 4)]) == pytest.approx((2 * HOP, 1 / RATE))
    assert torus(4, 4).message([(0, 5)]) == pytest.approx((2 * HOP, 1 / RATE))
    whole = torus(4, 4).costs("collective-permute", 2, 4)["one message"]
    assert whole == pytest.approx((HOP, 1 / RATE))  # every row to the next


def joined(slices: Link, *shape: int) -> Links:
    rates = replace(Target.load("v5p").rates, fabric=Fabric(slices=slices))
    found = torus(*shape)
    return Links(rates, Layout(found.devices_per_host, found))


def test_slices_send_the_share_of_each_device():
    """Inside of every slice, then a ring of slices for what a device has a share of."""
    network = Link(Sourced(2e-5, "test"), Sourced(5e9, "test"))
    links = joined(network, 4, 4)
    one = links.costs("all-reduce", 16, 1)
    two = links.costs("all-reduce", 48, 1)
    for name, cost in one.items():
        expected = cost + AlphaBeta(4 * 2e-5, 4 / 3 / 16 / 5e9)
        assert two[f"{name}, then slices"] == pytest.approx(expected)
    apart = links.costs("all-gather", 3, 16)
    assert apart == {"ring": pytest.approx((2 * 2e-5, 2 / 3 / 5e9))}
    everything = links.costs("all-to-all", 32, 1)["axis by axis, then slices"]
    assert everything.seconds_per_byte == pytest.approx(
        links.costs("all-to-all", 16, 1)["axis by axis"].seconds_per_byte + 1 / 2 / 5e9
    )
    assert links.seconds("collective-permute", 5e9, 2, 16) == pytest.approx(1 + 2e-5)
    assert links.routed((0, 1, 2, 3), (16, 17, 18, 19)).seconds(5e9) == pytest.approx(1 + 2e-5)
    assert links.routed((0,), (1,)).seconds(RATE) == pytest.approx(1 + HOP)
    assert links.routed((16,), (17,)).seconds(RATE) == pytest.approx(1 + HOP)
    assert links.routed((0, 1), (4,)) == pytest.approx((2 * HOP, 2 / RATE))  # one below the other
    assert links.routed((0, 1), (4, 5)) == pytest.approx((HOP, 1 / RATE))
    assert links.send_seconds(RATE, True) == pytest.approx(1 + HOP)


@pytest.mark.parametrize("target", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_devices_stand_where_the_compiler_puts_them(target):
    """Chips, cores and hosts of every topology that the target names, as libtpu has them."""
    pytest.importorskip("libtpu")
    from capture.compiler.target_devices import devices_of

    found = Target.load(target)
    links = found.rates.fabric.torus
    for name in found.compiler["topologies"]:
        shape = tuple(map(int, name.partition(":")[2].split("x")))
        slice_ = Torus(links, shape)
        devices = devices_of(found, slice_.num_devices)
        assert len(devices) == slice_.num_devices
        for number, device in enumerate(devices):
            chip = tuple(device.coords)[: len(shape)]
            core = device.core_on_chip if links.devices_per_chip > 1 else 0
            assert slice_.coordinates[number] == (core, *chip)
            assert number // slice_.devices_per_host == device.process_index


def test_every_price_knows_the_torus():
    """Programs, sends between stages, and what searches ask: links of one layout."""
    cluster, rates = Cluster.parse("2x2x4", "v5p"), Target.load("v5p").rates
    link = rates.fabric.torus.bytes_per_second.value
    sends = LinkTimes(cluster, rates)
    assert sends.between(range(4), range(4, 8), link) == pytest.approx(1 + HOP)
    assert sends.between(range(8), range(8, 16), link) == pytest.approx(2 + 2 * HOP)  # one link
    of_nodes = LinkTimes(Cluster((4,) * 4, "v5p"), rates)
    plain = rates.inter_node.seconds(link)
    assert of_nodes.between(range(4), range(4, 8), link) == pytest.approx(plain)
    gathered = Collective("all-gather", 10**9, 16, 1)
    expected = Links(rates, cluster.layout).seconds("all-gather", 10**9, 16)
    assert TimeModel(rates, cluster.layout).collective_seconds(gathered) == expected
    assert Machine.of(cluster).links.seconds("all-gather", 10**9, 16) == expected
    without = Links(rates, Cluster((4,) * 4, "v5p").layout).seconds("all-gather", 10**9, 16)
    assert expected < without  # several axes at once


def test_chips_in_nodes_exchange_in_two_levels():
    """Where no slice is named: not over a network that joins all chips, which there is not."""
    rates = Target.load("v5e").rates
    found = Links(rates, Cluster((4,) * 64, "v5e").layout).seconds("all-to-all", 1e9, 256)
    assert found == pytest.approx((3 + 63) * 1e-6 + (3 / 4 + 63 / 64) * 1e9 / 100e9)


def test_more_devices_than_a_slice_has_are_those_of_several_slices():
    pytest.importorskip("libtpu")
    from capture.compiler.target_devices import devices_of

    cluster = Cluster.parse("2x(16x16)", "v5e")
    devices = devices_of(Target.load("v5e"), cluster.num_devices)
    assert len(devices) == cluster.num_devices == 512
    assert [device.slice_index for device in devices] == [0] * 256 + [1] * 256
    for number, device in enumerate(devices):
        assert cluster.torus.coordinates[number % 256][1:] == tuple(device.coords)[:2]


@given(
    st.sampled_from([(4, 4, 4), (2, 2, 4), (4, 4, 8), (2, 4, 4)]),
    st.sampled_from(KINDS),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_bytes_that_are_added_never_make_the_sum_cheaper_than_their_bound(
    shape, kind, size, stride, nbytes, added
):
    links = joined(Target.load("v5p").rates.fabric.slices, *shape)
    together = links.seconds(kind, nbytes + added, size, stride)
    least = links.least_added_seconds(kind, added, size, stride)
    assert links.seconds(kind, nbytes, size, stride) + least <= together * (1 + 1e-12)
