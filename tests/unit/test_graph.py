"""The layer graph: what crosses a cut, who owns a parameter, bytes, and the JSON form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.documents import read
from capture.errors import ProfileError
from capture.measured.stage_cost import StageCost
from capture.model.graph import LayerGraph, Tensor, content_hash, item_bytes
from capture.plan.choices import StageChoice
from capture.step.interface import (
    owned_and_borrowed,
    shared_onwards,
    stage_interface,
    stage_values,
)
from tests.synthetic_graphs import chain, layer_graphs


@given(layer_graphs())
def test_json_round_trip(graph):
    assert LayerGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


def test_an_unknown_schema_version_is_refused():
    with pytest.raises(ProfileError) as caught:
        LayerGraph.from_json({**chain(2).to_json(), "schema_version": 0})
    assert str(caught.value) == (
        "layer graph has schema_version=0; this version of capture reads 1. Profile the model "
        "again. [graph-schema]"
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *[
            ("float32", 4),
            ("bfloat16", 2),
            ("complex64", 8),
            ("int8", 1),
            ("bool", 1),
            ("int4", 1),
            ("uint2", 1),
            ("key<fry>", 8),
        ],
        *[
            ("float8_e4m3fn", 1),
            ("float8_e4m3b11fnuz", 1),
            ("float8_e5m2fnuz", 1),
            ("float4_e2m1fn", 1),
        ],
    ],
)
def test_bytes_per_element(dtype, expected):
    assert item_bytes(dtype) == expected


def test_a_tensor_is_split_only_where_that_is_even():
    split, odd, whole = (
        Tensor("a", (3, 8), "float32", 1),
        Tensor("b", (3, 8), "float32", 0),
        Tensor("c", (8,), "float32"),
    )
    assert [split.shard_bytes(k) for k in (1, 2, 8, 3)] == [96, 48, 12, 96]
    assert [odd.shard_bytes(k) for k in (1, 2, 3)] == [96, 96, 32]
    assert whole.shard_bytes(8) == 32
    assert Tensor("scalar", (), "float32").nbytes == 4


def test_a_skip_crosses_every_cut_in_between():
    graph = chain(4, skips=[(0, 3)])
    assert [graph.crossing(cut) for cut in range(5)] == [(), (0,), (0, 1), (0, 2), ()]


@given(layer_graphs(), st.data())
def test_crossing_is_what_is_made_before_and_read_after(graph, data):
    cut = data.draw(st.integers(0, graph.num_layers))
    made = {v for layer in graph.layers[:cut] for v in layer.outputs}
    read = {v for layer in graph.layers[cut:] for v in layer.inputs}
    assert graph.crossing(cut) == tuple(sorted(made & read))


@given(layer_graphs(), st.data())
def test_a_stage_is_given_all_it_needs_and_hands_on_all_it_should(graph, data):
    first = data.draw(st.integers(0, graph.num_layers - 1))
    stop = data.draw(st.integers(first + 1, graph.num_layers))
    used, outputs = stage_values(graph, first, stop)
    inside = graph.layers[first:stop]
    own = {v for layer in inside for v in layer.outputs}
    assert set(used) == {v for layer in inside for v in layer.inputs} - own
    later = {v for layer in graph.layers[stop:] for v in layer.inputs}
    assert set(outputs) == (
        own & later if stop < graph.num_layers else set(graph.layers[-1].outputs)
    )
    assert set(graph.crossing(stop)) == (set(outputs) if stop < graph.num_layers else set()) | (
        set(graph.crossing(first)) & later
    )


@given(layer_graphs(), st.data())
def test_every_parameter_is_owned_by_the_first_stage_that_reads_it(graph, data):
    cut = data.draw(st.integers(0, graph.num_layers))
    before, after = set(graph.stage_params(0, cut)), set(graph.stage_params(cut, graph.num_layers))
    owned, borrowed = owned_and_borrowed(graph, cut, graph.num_layers)
    assert set(owned) == after - before and set(borrowed) == after & before
    assert sorted(graph.stage_params(0, graph.num_layers)) == list(range(len(graph.params)))


def test_owner_and_number_of_parameters():
    graph = chain(4, shared=[(1, 3)])
    assert [graph.param_owner(p) for p in range(5)] == [0, 1, 2, 3, 1]
    assert graph.num_parameters == 1 + 2 + 3 + 4 + 5


def test_interface_of_a_stage_turns_positions_into_ids_and_shards_by_its_degree():
    graph = chain(4, skips=[(0, 2), (0, 3)], shared=[(0, 3)])
    cost = StageCost(
        10,
        20,
        30,
        40,
        50,
        kept_inputs=(1,),
        kept_outputs=(),
        kept_batch=(0,),
        summarize_bytes=60,
        summary_bytes=70,
    )
    last = stage_interface(graph, 2, 4, [5, 6], StageChoice(2), [100 + p for p in range(5)], cost)
    assert (last.devices, last.received, last.used, last.outputs, last.sent) == (
        (5, 6),
        (0, 1),
        (0, 1),
        (3,),
        (),
    )
    assert (last.kept_inputs, last.kept_outputs, last.kept_batch, last.batch) == (
        (1,),
        (),
        (0,),
        (0,),
    )
    assert (last.owned, last.borrowed, last.params_bytes) == ((2, 3), (4,), 102 + 103)
    assert last.param_bytes == {2: 102, 3: 103, 4: 104}
    assert last.value_bytes == {0: 8, 1: 16, 3: 4}, (
        "two replicas halve values 0 and 1 of 4 examples; the loss stays whole"
    )
    assert last.batch_bytes == {0: 24}
    assert last.transient_bytes == {"forward": 20, "backward": 30, "update": 40, "summarize": 60}
    assert (last.residual_bytes, last.optimizer_bytes, last.summary_bytes) == (10, 50, 70)


def test_cost_json_round_trip():
    cost = StageCost(1, 2, 3, 4, 5, (0, 2), (1,), (), 6, 7)
    assert read(json.loads(json.dumps(cost.to_json())), StageCost) == cost


def test_content_hash_does_not_depend_on_the_order_of_keys():
    assert (
        content_hash({"a": 1, "b": [2]})
        == content_hash({"b": [2], "a": 1})
        != content_hash({"a": 1, "b": [3]})
    )


def test_a_gradient_arrives_of_a_parameter_that_the_stage_updates_and_a_later_one_reads():
    """Parameter 5 is read by layers 0, 1 and 4, parameter 6 by 2 and 3."""
    graph = chain(5, shared=[(0, 1, 4), (2, 3)])
    found = {
        (first, stop): shared_onwards(graph, first, stop)
        for first, stop in [(0, 1), (0, 2), (0, 4), (0, 5), (1, 3), (2, 3), (2, 4), (3, 5)]
    }
    assert found == {
        (0, 1): (5,),
        (0, 2): (5,),
        (0, 4): (5,),
        (0, 5): (),
        (1, 3): (6,),
        (2, 3): (6,),
        (2, 4): (),
        (3, 5): (),
    }
