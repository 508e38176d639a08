"""Clusters: the two notations, the order of devices, and the degrees that a stage may take."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import CaptureError, ClusterError, Violation
from capture.machine.cluster import Cluster
from capture.plan.space import StageSpace

clusters = st.builds(
    Cluster,
    st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["cpu", "h100"]),
)


@given(clusters)
def test_the_text_of_a_cluster_is_read_back(cluster):
    assert Cluster.parse(str(cluster), cluster.target) == cluster


@pytest.mark.parametrize(
    ("text", "nodes", "written"),
    [
        ("4x8", (8, 8, 8, 8), "4x8"),
        ("3", (3,), "1x3"),
        ("4+2", (4, 2), "4+2"),
        ("2+2", (2, 2), "2x2"),
        ("2*8", (8, 8), "2x8"),
        (" 2 X 8 ", (8, 8), "2x8"),
        ("2×8", (8, 8), "2x8"),
        ("4 + 2", (4, 2), "4+2"),
    ],
)
def test_notations(text, nodes, written):
    assert Cluster.parse(text).nodes == nodes
    assert str(Cluster.parse(text)) == written


@pytest.mark.parametrize(
    ("text", "meant"),
    [(text, "") for text in ("", "x", "4x", "-1x2", "4+", "+4", "2x2+4", "four")]
    + [
        ("2x8x1", " Did you mean 2x8?"),
        ("4*4*2", " Did you mean 4x8?"),
        ("4, 2", " Did you mean 4+2?"),
    ],
)
def test_other_texts_are_refused_and_the_nearest_is_offered(text, meant):
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text)
    assert str(caught.value) == (
        f"cluster={text!r} is neither NxG (4x4: 4 nodes of 4 devices) nor a list of nodes "
        f"(4+2).{meant} [cluster-syntax]"
    )


@pytest.mark.parametrize(("text", "nodes"), [("0x4", ()), ("2x0", (0, 0)), ("4+0", (4, 0))])
def test_empty_nodes_are_refused(text, nodes):
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text)
    assert str(caught.value) == (
        f"nodes={nodes} needs at least one node of at least one device; write NxG or a list such "
        "as 4+2. [cluster-nodes]"
    )


@given(clusters)
def test_devices_are_counted_node_by_node(cluster):
    assert len(cluster.node_of_device) == cluster.num_devices == sum(cluster.nodes)
    assert list(cluster.node_of_device) == sorted(cluster.node_of_device)
    assert [cluster.node_of_device.count(node) for node in range(len(cluster.nodes))] == list(
        cluster.nodes
    )


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        ((6,), {}, [[1, 2, 4], [1, 2, 4], [1, 2, 4], [1, 2], [1, 2], [1]]),
        ((6,), {"any_divisor": True}, [[1, 2, 3, 6], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2], [1]]),
        ((2, 1), {}, [[1, 2], [1], [1]]),
        ((2, 2), {"whole_nodes": True}, [[1, 2, 4], [1], [1, 2], [1]]),
        ((2, 2, 2), {"whole_nodes": True}, [[1, 2, 4], [1], [1, 2, 4], [1], [1, 2], [1]]),
        ((1, 1, 1, 1), {"whole_nodes": True}, [[1, 2, 4], [1, 2], [1, 2], [1]]),
        ((2, 1, 1), {"whole_nodes": True}, [[1, 2], [1], [1, 2], [1]]),
    ],
)
def test_stage_degrees(nodes, options, expected):
    assert StageSpace(**options).degrees(Cluster(nodes)) == expected


@given(clusters, st.booleans(), st.booleans())
def test_a_stage_fits_into_its_node_or_fills_whole_equal_nodes(cluster, any_divisor, whole_nodes):
    degrees = StageSpace(whole_nodes, any_divisor).degrees(cluster)
    assert len(degrees) == cluster.num_devices
    for first, here in enumerate(degrees):
        assert here == sorted(set(here)) and here[0] == 1
        for degree in here:
            nodes = {cluster.node_of_device[d] for d in range(first, first + degree)}
            if len(nodes) > 1:
                assert whole_nodes and degree == sum(cluster.nodes[n] for n in nodes)
                assert len({cluster.nodes[n] for n in nodes}) == 1 and len(nodes).bit_count() == 1


def test_an_error_keeps_all_violations_and_its_type_when_pickled():
    error = ClusterError([Violation("one.", "a"), Violation("two.", "b")])
    copy = pickle.loads(pickle.dumps(error))
    assert (
        type(copy) is ClusterError
        and copy.codes == ("a", "b")
        and str(copy) == "one. [a]\ntwo. [b]"
    )


def test_check_raises_only_if_there_is_a_violation():
    CaptureError.check([])
    with pytest.raises(ClusterError, match=r"^one\. \[a\]$"):
        ClusterError.check(iter([Violation("one.", "a")]))
