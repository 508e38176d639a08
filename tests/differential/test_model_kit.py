"""Models that are not in the zoo: predictions of random plans hold what their intervals say, and a
step is the one of a single device.

A sample of what ``benchmarks/model_kit.py`` does with many draws, on the same code; its results are
in benchmarks/results.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.kit_questions import (
    KIT,
    Predicted,
    Question,
    ask,
    errors_of_a_step,
    workload_of,
)
from benchmarks.model_kit import merged, pooled, summary
from benchmarks.shared_parameters import asked
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.model.graph import LayerGraph
from capture.model.workload import takes_key
from capture.predictor import AdditivePredictor
from capture.tracing import trace

#: Shrinking would profile a model anew for every try.
NO_SHRINKING = (Phase.explicit, Phase.generate)

#: Shared by the tests of this file: equal stages are compiled once.
STORE = Store()


@cache
def smallest(model: str) -> LayerGraph:
    arguments = {name: values[0] for name, values in KIT[model].items()}
    return trace(workload_of(model, **arguments).load(), 4).graph


@pytest.mark.parametrize("model", KIT)
def test_every_model_is_cut_into_layers(model):
    graph = smallest(model)
    assert 5 <= graph.num_layers <= 12 and graph.params and graph.batch
    assert graph.microbatch_size == 4 and all(value.nbytes for value in graph.values)


def test_the_kit_has_what_real_models_have():
    graphs = [smallest(model) for model in KIT]
    assert len(graphs) >= 30
    readers = Counter(
        num
        for graph in graphs
        for num in {
            sum(p in layer.params for layer in graph.layers) for p in range(len(graph.params))
        }
    )
    assert (
        readers[2] >= 3
        and readers[3] >= 2
        and sum(count for num, count in readers.items() if num > 3) >= 3
    )
    crossing = [
        Counter(v for cut in range(1, graph.num_layers) for v in graph.crossing(cut))
        for graph in graphs
    ]
    assert sum(max(cuts.values()) >= 4 for cuts in crossing) >= 5, "values that cross many cuts"
    kinds = {
        np.dtype(graph.values[v].dtype).kind
        for graph, cuts in zip(graphs, crossing, strict=True)
        for v in cuts
        if "key" not in graph.values[v].dtype
    }
    assert {"f", "i", "b"} <= kinds
    assert sum(any(not layer.params for layer in graph.layers) for graph in graphs) >= 2
    assert sum(takes_key(workload_of(model).load()) for model in KIT) >= 2
    sizes = [
        [sum(graph.params[p].nbytes for p in layer.params) for layer in graph.layers]
        for graph in graphs
    ]
    assert sum(max(layers) > 10 * sorted(layers)[len(layers) // 2] for layers in sizes) >= 3, (
        "one huge layer"
    )


def drawn(model: str, data: st.DataObject) -> Question:
    """On two devices without replicas, which is cheap to profile."""
    question = Question.draw(model, lambda values: data.draw(st.sampled_from(list(values))))
    return replace(
        question, cluster=Cluster((2,)), degrees=((1, 1),), shard_optimizer=False, microbatch_size=5
    )


@pytest.mark.slow
@settings(max_examples=1, phases=NO_SHRINKING)
@given(st.sampled_from(list(KIT)), st.data())
def test_no_prediction_is_below_the_truth_by_more_than_its_interval(model, data):
    question = drawn(model, data)
    found = ask(question, num_plans=4, calibration_plans=3, store=STORE)
    low = [row for row in found if row.beyond]
    assert not low, f"{question}: {len(low)} of {len(found)}, the first: {low[0]}"


@pytest.mark.slow
def test_no_device_is_below_its_interval_where_layers_share_parameters():
    """Four layers apart read one table. Without the buffer that gradients wait in, some devices
    are."""
    found = asked(5, 3, STORE)
    assert found["num_predictions"] > 20 and not found["beyond"]
    assert found["without_held"]["num_beyond"]


#: Of equal layers, whose update needs nothing beside what it changes: predicted to a tenth of a
#: percent.
PLAIN = Question(
    "dense:gated",
    workload_of("dense:gated", width=64, hidden=128, optimizer="sgd"),
    None,
    Cluster((2,)),
    ((1, 1),),
    "none",
    False,
    5,
    (2, 6),
    1,
)


class SaysLess(AdditivePredictor):
    """3 % less than it should."""

    def predict(self, plan):
        prediction = super().predict(plan)
        low = [
            replace(
                stage,
                peak_bytes=int(0.97 * stage.peak_bytes),
                interval_bytes=tuple(int(0.97 * end) for end in stage.interval_bytes),
            )
            for stage in prediction.stages
        ]
        return replace(prediction, stages=tuple(low))


@pytest.mark.slow
def test_a_predictor_that_says_3_percent_less_is_found_out():
    honest, low = (
        ask(PLAIN, num_plans=3, calibration_plans=3, store=STORE, predictor=p)
        for p in (AdditivePredictor, SaysLess)
    )
    assert any(row.fresh for row in honest)
    assert not any(row.beyond for row in honest)
    # Kinds of stages that calibration has not seen have intervals of more than 3 %.
    found = [row for row in low if row.beyond]
    assert found and all(row.cause for row in found)
    assert summary(low)["num_beyond"] == len(found)
    assert summary(low)["worst_low_fraction"] == pytest.approx(1 / 0.97 - 1, abs=0.005)


def test_predictions_are_summed_up_by_the_truth():
    """A lookup below the truth is as bad as a fresh prediction; coverage is of the fresh ones
    alone."""
    inside = Predicted(
        "0-1:1x1",
        0,
        "1f1b",
        4,
        True,
        False,
        100,
        95,
        105,
        104,
        0.9,
        "update",
        "update on stage 0",
        "update",
    )
    above, lookup = (
        replace(inside, truth=110),
        replace(inside, truth=120, fresh=False, cause="formula"),
    )
    assert (inside.error, inside.beyond, above.beyond, lookup.beyond) == (
        pytest.approx(0.04),
        0,
        0.05,
        0.15,
    )
    assert replace(inside, truth=80).beyond == 0
    found = summary([inside, above, lookup])
    assert (
        found["num_predictions"],
        found["num_fresh"],
        found["num_beyond"],
        found["num_fresh_beyond"],
    ) == (3, 2, 2, 1)
    assert (found["worst_low_fraction"], found["worst_beyond_fraction"]) == (
        pytest.approx(0.2),
        0.15,
    )
    assert (found["coverage_claimed_fraction"], found["coverage_seen_fraction"]) == (0.9, 0.5)
    assert found["causes_beyond"] == {"update": 1, "formula": 1}


def test_a_step_on_two_stages_is_that_of_one_device():
    """Booleans and integers pass between the stages; the recorded run does it with every model."""
    loss, gradients, params = errors_of_a_step("dense:masked")
    assert loss < 1e-5 and gradients < 1e-3 and params < 1e-2


def test_recorded_runs_are_joined_without_losing_what_was_low(tmp_path):
    """Of one seed the run with more plans holds the other; runs of other seeds, and the crashes and
    low ones of all, are added."""
    inside = Predicted(
        "0-1:1x1",
        0,
        "1f1b",
        4,
        True,
        False,
        100,
        95,
        105,
        104,
        0.9,
        "update",
        "update on stage 0",
        "update",
    )
    few, more, other = (
        [inside],
        [inside, replace(inside, truth=80)],
        [replace(inside, truth=110), replace(inside, truth=104, fresh=False)],
    )
    joined = summary([*more, *other])
    causes = joined.pop("causes_beyond")
    numbers = pooled([summary(more), summary(other)])
    assert numbers.pop("causes_beyond") == causes == {"update": 1}
    assert numbers == pytest.approx(joined)
    name = next(iter(KIT))
    for file, seed, rows in (("few", 3, few), ("more", 3, more), ("other", 4, other)):
        low = [{"question": {"model": name}, "rows": []}] if summary(rows)["num_beyond"] else []
        rest = {"seed": seed, "beyond": low, "crashes": [], "steps": {}}
        (tmp_path / file).write_text(json.dumps({**rest, "models": {name: summary(rows)}}))
    document = merged([tmp_path / file for file in ("other", "more", "few")])
    assert document["models"][name] == document["total"] == pooled([summary(other), summary(more)])
    assert len(document["beyond"]) == document["total"]["num_beyond"] == 1
