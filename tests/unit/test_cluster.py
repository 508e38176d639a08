"""Clusters: the two notations, the order of devices, and the degrees that a stage may take."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.documents import read, write
from capture.errors import CaptureError, ClusterError, Violation
from capture.machine.cluster import Cluster
from capture.plan.files import ClusterRow
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
        ("2x(4)", ""),
        ("2x(4x4", ""),
        ("2x4x4x4x4", " Did you mean 2x256?"),
    ],
)
def test_other_texts_are_refused_and_the_nearest_is_offered(text, meant):
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text)
    assert str(caught.value) == (
        f"cluster={text!r} is neither NxG (4x4: 4 nodes of 4 devices), nor a list of nodes (4+2), "
        f"nor slices of a torus (4x4x4 or 2x(16x16)).{meant} [cluster-syntax]"
    )


SHAPES = {
    "v5p": ((2, 2, 1), (2, 2, 2), (4, 4, 4), (4, 4, 8), (4, 4, 12)),
    "tpu7x": ((2, 2, 1), (4, 4, 4)),
    "v5e": ((2, 2), (4, 8), (16, 16)),
}
slices = st.sampled_from(list(SHAPES)).flatmap(
    lambda target: st.builds(
        Cluster.of_slices, st.integers(1, 4), st.sampled_from(SHAPES[target]), st.just(target)
    )
)


@given(slices)
def test_the_text_of_slices_is_read_back(cluster):
    assert Cluster.parse(str(cluster), cluster.target) == cluster
    chips = math.prod(cluster.slice_shape) * cluster.num_slices
    assert cluster.num_devices == chips * (2 if cluster.target == "tpu7x" else 1)
    assert {*cluster.nodes} == {8 if cluster.target == "tpu7x" else 4}
    row = ClusterRow.of(cluster)
    assert read(write(row), ClusterRow).cluster == cluster
    assert "slice_shape" not in write(ClusterRow.of(Cluster((8, 8), "v5p")))


@pytest.mark.parametrize(
    ("text", "target", "written", "hosts"),
    [
        ("4x4x4", "v5p", "4x4x4", 16),
        ("1x(4x4x4)", "v5p", "4x4x4", 16),
        (" 2 X ( 4x4*8 ) ", "tpu7x", "2x(4x4x8)", 64),
        ("1x(16x16)", "v6e", "1x(16x16)", 64),
        ("2x(4x8)", "v5e", "2x(4x8)", 16),
    ],
)
def test_notations_of_slices(text, target, written, hosts):
    found = Cluster.parse(text, target)
    assert (str(found), len(found.nodes)) == (written, hosts)
    assert found.layout.torus.shape == found.slice_shape
    assert Cluster.parse("4x4", "v5p").layout.torus is None  # nodes, as ever


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (
            "2x(4x4x4)",
            "h100",
            "cluster 2x(4x4x4) is of slices of a torus that target='h100' does not have; give NxG: N "
            "nodes of G devices.",
        ),
        (
            "2x(4x4x4)",
            "cpu",
            "cluster 2x(4x4x4) is of slices of a torus that target='cpu' does not have; give NxG: N "
            "nodes of G devices.",
        ),
        (
            "4x4x4",
            "v5e",
            "cluster 1x(4x4x4) is of slices of a torus that target='v5e' does not have; give one slice "
            "or more, of 2 axes that are multiples of a host's 2x2 chips.",
        ),
        (
            "3x4x4",
            "v5p",
            "cluster 1x(3x4x4) is of slices of a torus that target='v5p' does not have; give one slice "
            "or more, of 3 axes that are multiples of a host's 2x2x1 chips.",
        ),
        (
            "1x(0x4)",
            "v6e",
            "cluster 1x(0x4) is of slices of a torus that target='v6e' does not have; give one slice "
            "or more, of 2 axes that are multiples of a host's 2x2 chips.",
        ),
        (
            "0x(4x4x4)",
            "v5p",
            "cluster 0x(4x4x4) is of slices of a torus that target='v5p' does not have; give one slice "
            "or more, of 3 axes that are multiples of a host's 2x2x1 chips.",
        ),
    ],
)
def test_slices_that_there_are_not_are_refused(text, target, message):
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text, target)
    assert str(caught.value) == f"{message} [cluster-slices]"


def test_nodes_that_are_not_the_hosts_of_slices_are_refused():
    with pytest.raises(ClusterError) as caught:
        _ = Cluster((4, 4, 4), "v5p", (2, 2, 2)).layout
    assert str(caught.value) == (
        "nodes=(4, 4, 4) are not the 2 hosts of 4 devices that each slice 2x2x2 of v5p has; give "
        "the nodes of whole slices. [cluster-slices]"
    )


def test_stages_on_a_torus_are_boxes():
    cube, space = Cluster.parse("4x4x4", "v5p"), StageSpace(whole_nodes=True)
    degrees = space.degrees(cube)
    assert degrees[0] == [1, 2, 4, 8, 16, 32, 64]
    assert degrees[1] == [1] and degrees[2] == [1, 2]  # devices 1 and 2 of a host are no neighbours
    assert degrees[4] == [1, 2, 4]  # no box begins at the second host, along the first axis
    assert degrees[8] == [1, 2, 4, 8] and degrees[16] == [1, 2, 4, 8, 16]
    flat = space.degrees(Cluster((4,) * 16, "v5p"))
    assert flat[4] == [1, 2, 4, 8, 16, 32] and flat[1] == [1, 2]
    slices = space.degrees(Cluster.parse("4x(2x2x1)", "v5p"))
    assert slices[0] == [1, 2, 4, 8, 16] and slices[4] == [1, 2, 4, 8]
    for first, here in enumerate(degrees):
        assert all(cube.is_block(first, d) for d in here)


def test_a_cluster_of_fewer_nodes():
    found = [str(each) for each in Cluster.parse("2x(4x4x4)", "v5p").first_nodes()]
    assert found == ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "2x(4x4x4)"]
    found = [str(each) for each in Cluster.parse("1x(8x16)", "v5e").first_nodes()]
    assert found == ["1x(2x2)", "1x(2x4)", "1x(4x4)", "1x(4x8)", "1x(8x8)", "1x(8x16)"]
    assert [each.nodes for each in Cluster((4, 2)).first_nodes()] == [(4,), (4, 2)]
    assert str(Cluster((4, 2, 4)).without({1})) == "2x4"
    assert str(Cluster.parse("3x(2x2x2)", "v5p").without({3})) == "2x(2x2x2)"  # its slice goes
    with pytest.raises(ClusterError) as caught:
        Cluster.parse("2x2x2", "v5p").without({0})
    assert caught.value.codes == ("cluster-nodes",)


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
