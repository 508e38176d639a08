"""What collectives take in nodes and between them: every algorithm against its messages, one by
one, and which algorithm is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import Network

from capture.machine.links import Layout, Links
from capture.machine.rates import AlphaBeta, Fabric, Link, Sourced
from capture.machine.target import Target, target_names

NEAR, FAR = 3e-6, 11e-6
INSIDE, ADAPTER = 300e9, 40e9
NBYTES = 48_000_000


def number(value: float) -> Sourced:
    return Sourced(value, "test")


def links(per_node: int, inside: float = INSIDE, adapter: float = ADAPTER, **fabric) -> Links:
    rates = replace(
        Target.load("h100").rates,
        intra_node=Link(number(NEAR), number(inside)),
        inter_node=Link(number(FAR), number(adapter)),
        fabric=Fabric(**fabric),
    )
    return Links(rates, Layout(per_node))


def agrees(
    cost: AlphaBeta, messages: Callable[[float, float], float], rel: float, nbytes: float = NBYTES
) -> None:
    """Check a cost against messages: its latency against messages without bytes, its bandwidth
    against those without latency. The sum of both is not below messages that have both.

    Args:
        messages: From bytes of the array, and a factor of all latencies, to seconds.
    """
    assert cost.fixed_seconds == pytest.approx(messages(0, 1), rel=1e-9)
    assert cost.seconds_per_byte * nbytes == pytest.approx(messages(nbytes, 0), rel=rel)
    assert cost.seconds(nbytes) >= messages(nbytes, 1) * (1 - rel)


def gathered(
    nodes: int, inside: int, adapters: int, pieces: int, nbytes: float, latency: float
) -> float:
    """The seconds of an all-gather round rings, one for each adapter of a node: the ring of adapter
    c enters a node at its device c and leaves it at the one before."""
    size = nodes * inside
    rates = {("in", d): INSIDE for d in range(size)} | {("out", d): ADAPTER for d in range(size)}
    network = Network(rates)
    part = nbytes / size / adapters / pieces
    for adapter in range(adapters):
        ring = [n * inside + (adapter + i) % inside for n in range(nodes) for i in range(inside)]
        for first in range(size):
            for _ in range(pieces):
                before: tuple[int, ...] = ()
                for hop in range(size - 1):
                    at = (first + hop) % size
                    leaves = nodes > 1 and at % inside == inside - 1
                    link, alpha = ("out", FAR) if leaves else ("in", NEAR)
                    before = (network.send((link, ring[at]), part, latency * alpha, before),)
    return network.seconds()


@pytest.mark.parametrize(("nodes", "inside"), [(1, 2), (1, 3), (1, 8), (2, 1), (3, 1), (5, 1)])
def test_a_ring_of_equal_links(nodes, inside):
    found, size = links(inside), nodes * inside
    cost = found.costs("all-gather", size)["ring"]
    agrees(cost, partial(gathered, nodes, inside, 1, 1), 1e-9)
    assert cost.seconds(NBYTES) == pytest.approx(gathered(nodes, inside, 1, 1, NBYTES, 1), rel=1e-9)
    assert found.costs("reduce-scatter", size)["ring"] == cost
    twice = found.costs("all-reduce", size)["ring"]
    assert twice == pytest.approx((2 * cost.fixed_seconds, 2 * cost.seconds_per_byte))


def test_devices_of_several_nodes_a_node_apart_form_the_ring_of_their_adapters():
    apart, alone = links(4).costs("all-gather", 5, 4), links(1).costs("all-gather", 5)
    assert apart == alone


@pytest.mark.parametrize(("nodes", "inside"), [(2, 2), (2, 4), (3, 2), (4, 3)])
def test_a_ring_leaves_nodes_by_all_their_adapters(nodes, inside):
    cost = links(inside).costs("all-gather", nodes * inside)["ring"]
    agrees(cost, partial(gathered, nodes, inside, inside, 32), 0.01)


def test_a_ring_is_as_slow_as_its_slowest_link():
    slow = links(4, inside=20e9).seconds("all-gather", NBYTES, 8)
    assert slow == pytest.approx(5 * NEAR + 2 * FAR + NBYTES * 7 / 8 / 20e9)


def test_devices_that_share_an_adapter_share_its_bandwidth():
    own, shared = links(4), links(4, devices_per_adapter=number(2))
    half = links(4, adapter=ADAPTER / 2)
    for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        for size, stride in ((8, 1), (2, 4), (4, 2)):
            if kind != "collective-permute" or stride > 1:
                asked = (kind, NBYTES, size, stride)
                assert shared.seconds(*asked) == half.seconds(*asked) > own.seconds(*asked)
    assert shared.seconds("all-gather", NBYTES, 4) == own.seconds("all-gather", NBYTES, 4)
    assert shared.slowest_of_ring(2).bytes_per_second.value == 2 * ADAPTER
    assert shared.send_seconds(NBYTES, True) == pytest.approx(FAR + NBYTES / ADAPTER)
    assert shared.send_seconds(NBYTES, False) == pytest.approx(NEAR + NBYTES / INSIDE)


def summed_in_switch(size: int, rate: float, alpha: float, nbytes: float, latency: float) -> float:
    """The seconds of an all-reduce in a switch: it adds up what all send of a part, for the owner
    of the part, and copies what the owner sends to all. A device sends a piece when the one 64
    before it has been added up, so that both ways are in use together."""
    network, sums = (
        Network({(way, d): rate for way in ("up", "down") for d in range(size)}),
        list[int](),
    )
    pieces, hop = 4096 // size if nbytes else 1, latency * alpha / 4
    part = nbytes / size / pieces
    for _ in range(pieces):
        for owner in range(size):
            before = sums[-64:-63]
            sent = [network.send(("up", d), part, hop, before) for d in range(size)]
            sums.append(network.send(("down", owner), part, hop, sent))
            back = network.send(("up", owner), part, hop, sums[-1:])
            for d in range(size):
                network.send(("down", d), part, hop, (back,))
    return network.seconds()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_switch_that_adds_up(size):
    sums = Link(number(20e-6), number(250e9))
    cost = links(8, switch_sums=sums).costs("all-reduce", size)["switch sums"]
    agrees(cost, partial(summed_in_switch, size, 250e9, 20e-6), 0.02, 16 * NBYTES)
    assert "switch sums" not in links(8, switch_sums=sums).costs("all-gather", size)
    assert "switch sums" not in links(8).costs("all-reduce", size)


def trees(efficiency: float) -> dict[str, Sourced]:
    return {"tree_seconds": number(NEAR), "tree_efficiency": number(efficiency)}


def children(nodes: int) -> dict[int, list[int]]:
    """A binary tree over nodes 0 ... 2^k - 1 with root 0, in which the odd ones are leaves."""
    found: dict[int, list[int]] = {node: [] for node in range(nodes)}
    found[0] = [nodes // 2]
    step = nodes // 4
    while step:
        for node in range(2 * step, nodes, 4 * step):
            found[node] += [node - step, node + step]
        step //= 2
    return found


def summed_in_trees(nodes: int, pieces: int, nbytes: float, latency: float) -> float:
    """The seconds of an all-reduce up and down two trees, each for half of the array; a node that
    has children in one tree has none in the other."""
    network, alpha = Network(dict.fromkeys(range(nodes), ADAPTER)), latency * FAR
    part = nbytes / 2 / pieces
    trees = [
        {
            mirror(node): [mirror(child) for child in below]
            for node, below in children(nodes).items()
        }
        for mirror in (lambda node: node, lambda node: nodes - 1 - node)
    ]
    for _ in range(pieces):
        for root, tree in zip((0, nodes - 1), trees, strict=True):

            def up(node: int, tree=tree) -> list[int]:
                return [network.send(child, part, alpha, up(child)) for child in tree[node]]

            def down(node: int, needs: list[int], tree=tree) -> None:
                for child in tree[node]:
                    down(child, [network.send(node, part, alpha, needs)])

            down(root, up(root))
    return network.seconds()


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_trees_of_nodes(nodes):
    cost = links(1, **trees(1.0)).costs("all-reduce", nodes)["tree"]
    agrees(cost, partial(summed_in_trees, nodes, 256), 0.06)
    slower = links(1, **trees(0.5)).costs("all-reduce", nodes)["tree"]
    assert slower.seconds_per_byte == 2 * cost.seconds_per_byte


def test_small_arrays_take_trees_and_large_ones_rings():
    with_trees = links(1, **trees(0.92))
    costs = with_trees.costs("all-reduce", 16)
    for nbytes, fastest in ((1000, "tree"), (10**9, "ring")):
        found = with_trees.seconds("all-reduce", nbytes, 16)
        assert (
            found
            == costs[fastest].seconds(nbytes)
            == min(c.seconds(nbytes) for c in costs.values())
        )
    assert set(with_trees.costs("all-gather", 16)) == {"ring"}


def test_switches_and_trees_in_a_pipeline():
    sums = Link(number(20e-6), number(250e9))
    cost = links(8, switch_sums=sums).costs("all-reduce", 32)["switch sums"]
    assert cost.fixed_seconds == pytest.approx(20e-6 + 2 * 2 * FAR)
    assert cost.seconds_per_byte == pytest.approx(max(9 / 8 / 250e9, 2 / (8 * ADAPTER)))
    assert "switch sums" not in links(8, switch_sums=sums).costs("all-reduce", 4, 8)


def exchanged(nodes: int, inside: int, nbytes: float, latency: float) -> float:
    """The seconds in which every device sends a part to every other one, one after the other."""
    size = nodes * inside
    rates = {("in", d): INSIDE for d in range(size)} | {("out", d): ADAPTER for d in range(size)}
    network = Network(rates)
    for sender in range(size):
        before: tuple[int, ...] = ()
        for distance in range(1, size):
            leaves = sender // inside != (sender + distance) % size // inside
            link, alpha = ("out", FAR) if leaves else ("in", NEAR)
            before = (network.send((link, sender), nbytes / size, latency * alpha, before),)
    return network.seconds()


@pytest.mark.parametrize(("nodes", "inside"), [(1, 4), (2, 1), (2, 4), (3, 2)])
def test_all_to_all(nodes, inside):
    cost = links(inside).costs("all-to-all", nodes * inside)["direct"]
    agrees(cost, partial(exchanged, nodes, inside), 1e-9)


def in_leaves(per_leaf: int, oversubscription: float) -> dict[str, Sourced]:
    names = ("nodes_per_leaf", "oversubscription")
    return dict(zip(names, map(number, (per_leaf, oversubscription)), strict=True))


def gathered_over_leaves(
    nodes: int, stride: int, leaf: dict[str, Sourced], nbytes: float, latency: float
) -> float:
    """The seconds of all-gathers of all groups of every ``stride``-th node at once, one device per
    node: bytes to another leaf also pass the link out of their own."""
    per_leaf, pieces, alpha = leaf["nodes_per_leaf"].value, 64, latency * FAR
    out = ADAPTER * per_leaf / leaf["oversubscription"].value
    rates = {("out", node): ADAPTER for node in range(nodes)}
    rates |= {("leaf", number): out for number in range(nodes // per_leaf)}
    network, size = Network(rates), nodes // stride
    for offset in range(stride):
        for first in range(size):
            for _ in range(pieces):
                before: tuple[int, ...] = ()
                for hop in range(size - 1):
                    at = offset + (first + hop) % size * stride
                    to = offset + (first + hop + 1) % size * stride
                    crosses = at // per_leaf != to // per_leaf
                    part = nbytes / size / pieces
                    before = (network.send(("out", at), part, 0 if crosses else alpha, before),)
                    if crosses:
                        before = (network.send(("leaf", at // per_leaf), part, alpha, before),)
    return network.seconds()


@pytest.mark.parametrize(
    ("nodes", "stride", "per_leaf", "oversubscription"),
    [(8, 1, 4, 2), (8, 1, 4, 8), (8, 2, 4, 4), (8, 4, 4, 4), (8, 4, 4, 2), (6, 1, 2, 3)],
)
def test_rings_over_leaves_of_a_fat_tree(nodes, stride, per_leaf, oversubscription):
    tree = in_leaves(per_leaf, oversubscription)
    cost = links(1, **tree).costs("all-gather", nodes // stride, stride)["ring"]
    agrees(cost, partial(gathered_over_leaves, nodes, stride, tree), 0.02)


def test_what_leaves_a_leaf_has_the_bandwidth_that_is_left():
    tree = links(1, **in_leaves(4, 3), **trees(1.0))
    plain = links(1, **trees(1.0))
    assert tree.seconds("all-gather", NBYTES, 8) == plain.seconds("all-gather", NBYTES, 8)
    part = NBYTES / 8 / ADAPTER
    assert tree.seconds("all-to-all", NBYTES, 8) == pytest.approx(7 * FAR + (3 + 4 * 3) * part)
    assert tree.seconds("all-to-all", NBYTES, 4) == plain.seconds("all-to-all", NBYTES, 4)
    far = FAR + 3 * NBYTES / ADAPTER
    assert tree.seconds("collective-permute", NBYTES, 2, 4) == pytest.approx(far)
    assert tree.send_seconds(NBYTES, True) == pytest.approx(far)
    summed = tree.costs("all-reduce", 8)["tree"], plain.costs("all-reduce", 8)["tree"]
    assert summed[0].seconds_per_byte == 3 * summed[1].seconds_per_byte


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@given(
    st.sampled_from([name for name in target_names() if Target.load(name).rates]),
    st.sampled_from(KINDS),
    st.sampled_from([2, 4, 8, 16, 64]),
    st.sampled_from([1, 2, 8]),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_bytes_that_are_added_never_make_the_sum_cheaper_than_their_bound(
    target, kind, size, stride, nbytes, added
):
    """A bound counts what a compiler may combine as added bytes; what it compiles, as one."""
    found = Links(Target.load(target).rates, Layout(8))
    together = found.seconds(kind, nbytes + added, size, stride)
    apart = found.seconds(kind, nbytes, size, stride)
    least = found.least_added_seconds(kind, added, size, stride)
    assert apart <= together * (1 + 1e-12)
    assert apart + least <= together * (1 + 1e-12)


def test_the_published_bandwidths_of_a_node_of_h100():
    """Bus bandwidths in GB/s of arrays of 16 GB: NVIDIA/nccl issue 1281 and nccl-tests issue 212."""
    found, nbytes = Links(Target.load("h100").rates, Layout(8)), 16e9
    for kind, passes, expected in (
        ("all-gather", 1, 350),
        ("reduce-scatter", 1, 360),
        ("all-reduce", 2, 480),
    ):
        rate = passes * nbytes * 7 / 8 / found.seconds(kind, nbytes, 8)
        assert rate / 1e9 == pytest.approx(expected, rel=0.002)
    assert found.seconds("all-gather", nbytes, 16) == pytest.approx(
        nbytes * 15 / 16 / 340e9, rel=1e-2
    )


def test_one_device_sends_nothing():
    assert {links(8).seconds(kind, NBYTES, 1) for kind in KINDS} == {0.0}
    assert {links(8).least_added_seconds(kind, NBYTES, 1) for kind in KINDS} == {0.0}
