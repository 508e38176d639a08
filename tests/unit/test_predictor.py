"""Planted statistics come back, the formula equals the replay, and the regressions are exact on
what they model."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import code_of
from synthetic_profiles import Planted, configs_of, hybrid, make_plan

from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig, rescaled
from capture.model.graph import LayerGraph
from capture.plan.choices import StageChoice, with_sequence_parallel
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES, occupancy_by_position
from capture.predictor import AdditivePredictor
from capture.predictor.additive import UNSEEN_TEMPORARIES_FRACTION
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay

ONE = StageChoice()


LOSS_BYTES = 4


def stages(num_layers: int):
    return [
        (first, stop) for first in range(num_layers) for stop in range(first + 1, num_layers + 1)
    ]


# ---- planted statistics --------------------------------------------------------------------------


def split_values(planted: Planted) -> Planted:
    """With every other value cut along the sequence where stages do so."""
    dims = tuple(1 if v % 2 else None for v in range(len(planted.graph.values)))
    planted.graph = replace(planted.graph, value_dims={2: dims, 4: dims})
    return planted


def crossing_bytes(graph: LayerGraph, cut: int, choice: StageChoice) -> int:
    ways = choice.tensor_parallel if choice.sequence_parallel else 1
    return sum(
        graph.values[v].shard_bytes(choice.data_parallel) // (ways if v % 2 else 1)
        for v in graph.crossing(cut)
    )


@pytest.mark.parametrize(
    "choice",
    [
        ONE,
        StageChoice(2, 1),
        StageChoice(1, 4),
        StageChoice(2, 2),
        StageChoice(2, 2, "none", False, False, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_neighbours", [1, 2, 3])
def test_planted_statistics_are_recovered_for_every_stage(choice, num_neighbours):
    """Only windows of 1 to N + 1 layers are measured; all other stages follow from M_i and M_a."""
    planted = split_values(Planted(7, seed=1))
    predictor = AdditivePredictor(planted.profile([choice], num_neighbours=num_neighbours))
    memory = predictor.memory(choice, 16)
    for first, stop in stages(7):
        residual, forward, backward, update, optimizer, *_ = planted.components(
            StageConfig(first, stop, choice, 16)
        ).tolist()
        graph, at = planted.graph, (first, stop)
        kept = crossing_bytes(graph, first, choice)
        kept += graph.batch[0].shard_bytes(choice.data_parallel) if first == 0 else 0
        assert memory.kept[at] == residual + kept
        assert (
            memory.forward[at],
            memory.backward[at],
            memory.update[at],
            memory.optimizer[at],
        ) == (forward, backward, update, optimizer)
        assert memory.batch[at] == sum(
            graph.batch[b].shard_bytes(choice.data_parallel) for b in graph.stage_batch(first, stop)
        )
        assert memory.received[at] == crossing_bytes(graph, first, choice)
        assert memory.gradients_in[at] == crossing_bytes(graph, stop, choice)
        assert (
            memory.params[at]
            == memory.gradients[at]
            == sum(graph.params[p].nbytes for p in graph.stage_params(first, stop))
        )


@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES)
def test_the_peak_of_one_stage_is_the_closed_form(schedule):
    """GPipe keeps all M micro-batches, 1F1B one of a single stage."""
    planted, num_microbatches = Planted(5, seed=3), 6
    profile = planted.profile([ONE])
    predicted = AdditivePredictor(profile).predict(
        make_plan([5], [ONE], schedule=schedule, num_microbatches=num_microbatches)
    )
    residual, forward, backward, update, optimizer, *_ = planted.components(
        StageConfig(0, 5, ONE, 16)
    ).tolist()
    batch = planted.graph.batch[0].nbytes
    in_flight = {"gpipe": num_microbatches, "1f1b": 1}[schedule]
    state = 2 * sum(p.nbytes for p in planted.graph.params) + optimizer
    kept = residual + batch
    losses = LOSS_BYTES * num_microbatches
    expected = max(
        state + (in_flight - 1) * kept + batch + forward + losses - LOSS_BYTES,
        state + in_flight * kept + backward + losses,
        state + update + losses,
    )
    assert predicted.peak_bytes_per_device == (expected,)


@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(2, 7),
    schedule=st.sampled_from(list(PLAIN_SCHEDULES)),
    num_microbatches=st.integers(1, 7),
    skips=st.sampled_from([(), ((0, 1),), ((0, 2),), ((0, 3), (1, 5))]),
    shared=st.lists(st.sets(st.integers(0, 6), min_size=2), max_size=3),
    summarizes=st.booleans(),
)
def test_a_prediction_equals_the_replay_of_the_planted_stages(
    seed, num_layers, schedule, num_microbatches, skips, shared, summarizes
):
    """Byte for byte; and what the search is told bounds it from both sides, as closely as can be
    known without the other stages."""
    skips = [(a, b) for a, b in skips if b < num_layers]
    shared = [{layer % num_layers for layer in readers} for readers in shared]
    planted = split_values(Planted(num_layers, seed, skips=skips, shared=shared))
    choices = with_sequence_parallel(hybrid(4))
    if summarizes:
        planted.summarizes(seed)
    planted.fixed[3] *= 100 * (seed % 2)  # the update is the peak, or nothing
    # With skips the inputs of a stage are not additive, so every stage is measured.
    profile = planted.profile(choices, num_neighbours=num_layers if skips else 1)
    by_degree = {d: tuple(c for c in choices if c.num_devices == d) for d in (1, 2, 4)}
    drawn = next(random_plans(Cluster((4,)), num_layers, by_degree, seed))
    plan = make_plan(
        [s.stop - s.first for s in drawn],
        [s.choice for s in drawn],
        schedule=schedule,
        num_microbatches=num_microbatches,
    )
    costs = [planted.cost(config) for config in configs_of(plan)]
    truth = replay(
        build_step(
            plan_interfaces(plan, planted.graph, profile.param_bytes, costs), plan.schedule_table
        )
    )
    predictor = AdditivePredictor(profile)
    prediction = predictor.predict(plan)
    assert prediction.peak_bytes_per_device == truth.peak_bytes_per_device
    for s, (stage, config) in enumerate(zip(plan.stages, configs_of(plan), strict=True)):
        most_stages = min(4, num_layers)
        positions = occupancy_by_position(schedule, num_microbatches, most_stages)
        ask = partial(predictor.peaks, config.choice, 16, positions, most_stages)
        most, least = (
            ask(least=bound)[min(plan.num_stages - s, len(ask())) - 1, stage.first, stage.stop]
            for bound in (False, True)
        )
        assert least <= prediction.stages[s].peak_bytes <= most
        if not summarizes and all(len(readers) <= 2 for readers in shared):
            assert least == most
    assert prediction.peak_bytes == max(prediction.peak_bytes_per_device)
    # Of what rests on hosts all that a micro-batch keeps is predicted as one residual.
    ways = [("activations",), ("optimizer",), ("activations", "optimizer")][seed % 3]
    resting = plan.with_(stages=[replace(stage, offload=ways) for stage in plan.stages])
    interfaces = plan_interfaces(resting, planted.graph, profile.param_bytes, costs)
    ledger, found = replay(build_step(interfaces, plan.schedule_table)), predictor.predict(resting)
    assert all(sum(s.parts_bytes.values()) == s.peak_bytes for s in found.stages)
    for true, now, before in zip(
        ledger.peak_bytes_per_device,
        found.peak_bytes_per_device,
        prediction.peak_bytes_per_device,
        strict=True,
    ):
        assert true <= now <= before


@given(st.integers(0, 10**6), st.integers(9, 40))
def test_another_microbatch_size_is_exact_on_affine_memory(seed, size):
    """Description 2: a straight line through two sizes, inside and beyond them; of temporaries,
    that of the hungriest part of a stage."""
    planted, size = Planted(4, seed), 2 * size
    predictor = AdditivePredictor(planted.profile([StageChoice(2, 1)]))
    table = predictor.table(StageChoice(2, 1), size)
    graph = rescaled(planted.graph, size)
    for first, stop in stages(4):
        parts = [(a, b) for a, b in stages(4) if first <= a and b <= stop]
        of_parts = [
            planted.components(StageConfig(a, b, StageChoice(2, 1), size)) for a, b in parts
        ]
        residual, *others = planted.components(
            StageConfig(first, stop, StageChoice(2, 1), size)
        ).tolist()
        others[:2] = np.max(of_parts, axis=0)[1:3].tolist()
        kept = sum(graph.values[v].shard_bytes(2) for v in graph.crossing(first)) + (
            graph.batch[0].shard_bytes(2) if first == 0 else 0
        )
        assert table[:, first, stop] == pytest.approx([residual + kept, *others], rel=1e-9)


@given(
    st.integers(0, 10**6),
    st.sampled_from(list(PLAIN_SCHEDULES)),
    st.lists(st.integers(1, 30), min_size=2, max_size=2).map(sorted),
)
def test_the_peak_never_falls_when_a_microbatch_grows(seed, schedule, sizes):
    choices = [StageChoice(2, 1), StageChoice(1, 2), ONE]
    predictor = AdditivePredictor(Planted(6, seed).profile(choices))
    small, large = (
        predictor.predict(
            make_plan([2, 1, 3], choices, schedule=schedule, size=2 * size)
        ).peak_bytes_per_device
        for size in sizes
    )
    assert all(a <= b for a, b in zip(small, large, strict=True))


def test_under_1f1b_the_same_layers_need_less_further_back_and_under_gpipe_as_much():
    planted = Planted(4)
    planted.fixed[:5], planted.per_example[:5] = 1000, 64
    predictor = AdditivePredictor(planted.profile([ONE]))
    by_schedule = {
        name: predictor.predict(
            make_plan([1] * 4, [ONE] * 4, schedule=name, num_microbatches=8)
        ).stages
        for name in PLAIN_SCHEDULES
    }
    kept = [predictor.memory(ONE, 16).kept[layer, layer + 1] for layer in range(4)]
    in_flight = {
        name: [
            stage.parts_bytes["activations"] / one for stage, one in zip(found, kept, strict=True)
        ]
        for name, found in by_schedule.items()
    }
    assert in_flight == {"1f1b": [4, 3, 2, 1], "gpipe": [8, 8, 8, 8]}
    peaks = predictor.peaks(ONE, 16, occupancy_by_position("1f1b", 8, 4), 4)
    assert peaks.shape == (4, 4, 5)
    assert (np.diff(peaks[:, 1, 2]) > 0).all()
    assert predictor.peaks(ONE, 16, occupancy_by_position("gpipe", 8, 4), 4).shape == (1, 4, 5)


def test_the_search_counts_as_many_readers_of_a_shared_parameter_as_a_plan_may_have():
    """All four layers read it, and the end of the step is the peak: the first stage gets a gradient
    from every other."""
    planted = Planted(4, shared=[(0, 1, 2, 3)])
    planted.fixed[3] += 10**6
    predictor = AdditivePredictor(planted.profile([ONE], num_neighbours=4))
    for layers in ([1, 3], [1, 1, 2], [1, 1, 1, 1]):
        plan = make_plan(layers, [ONE] * len(layers), schedule="gpipe")
        all_in_flight = occupancy_by_position("gpipe", 4, len(layers))
        searched, least = (
            predictor.peaks(ONE, 16, all_in_flight, len(layers), **how)[0, 0, 1]
            for how in ({}, {"least": True})
        )
        assert searched == predictor.predict(plan).stages[0].peak_bytes
        assert searched - least == (len(layers) - 2) * planted.graph.params[4].nbytes


@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES)
def test_parts_sum_to_the_peak_and_layers_to_the_parts(schedule):
    choices = hybrid(4)
    predictor = AdditivePredictor(Planted(9, 5, skips=[(0, 8)]).profile(choices, num_neighbours=9))
    by_degree = {d: tuple(c for c in choices if c.num_devices == d) for d in (1, 2, 4)}
    for drawn in islice(random_plans(Cluster((4,)), 9, by_degree, 1), 30):
        plan = make_plan(
            [s.stop - s.first for s in drawn], [s.choice for s in drawn], schedule=schedule
        )
        for stage, predicted in zip(plan.stages, predictor.predict(plan).stages, strict=True):
            assert sum(predicted.parts_bytes.values()) == predicted.peak_bytes
            assert len(predicted.layers_bytes) == stage.stop - stage.first
            for category, total in predicted.parts_bytes.items():
                assert sum(layer.get(category, 0) for layer in predicted.layers_bytes) == total, (
                    category
                )
            assert all(nbytes > 0 for layer in predicted.layers_bytes for nbytes in layer.values())
            # What passes belongs to the border.
            assert not any("received activations" in layer for layer in predicted.layers_bytes[1:])
            assert not any("received gradients" in layer for layer in predicted.layers_bytes[:-1])


def test_a_negative_sum_is_no_memory_but_zero():
    """M_a may be negative (reading C-v), and the sum of many may be too."""
    planted = Planted(6)
    planted.fixed[2, 1], planted.per_example[2, 1] = -20_000, 0
    memory = AdditivePredictor(planted.profile([ONE])).memory(ONE, 16)
    assert memory.backward[0, 6] == 0
    assert memory.backward[0, 1] == planted.components(StageConfig(0, 1, ONE, 16))[2]


def test_on_a_gpu_a_stage_needs_no_less_than_a_measured_part_of_it():
    """Its passes go layer by layer: what hungry layers need does not shrink with others."""
    planted = Planted(6)
    planted.fixed[2, 1], planted.per_example[2, 1] = -20_000, 0
    profile = planted.profile([ONE])
    of_gpu = replace(profile, provenance={"versions": {"jax-cuda12-plugin": "0.10.2"}})
    memory = AdditivePredictor(of_gpu).memory(ONE, 16)
    first = planted.components(StageConfig(0, 1, ONE, 16))[2]
    assert memory.backward[0, 6] >= first > 0


# ---- a prediction --------------------------------------------------------------------------------


def test_devices_take_their_stages_bytes_in_node_major_order():
    planted = Planted(4, 8)
    predictor = AdditivePredictor(planted.profile(hybrid(2), errors=[0.01, 0.02]))
    plan = make_plan([1, 3], [ONE, StageChoice(1, 2)])
    swapped = replace(
        plan,
        stages=(replace(plan.stages[0], devices=(2,)), replace(plan.stages[1], devices=(0, 1))),
    )
    first, last = (stage.peak_bytes for stage in predictor.predict(plan).stages)
    assert predictor.predict(plan).peak_bytes_per_device == (first, last, last)
    prediction = predictor.predict(swapped)
    assert prediction.peak_bytes_per_device == (last, last, first)
    assert all(
        low <= peak <= high
        for peak, (low, high) in zip(
            prediction.peak_bytes_per_device, prediction.interval_bytes_per_device, strict=True
        )
    )
    document = json.loads(json.dumps(prediction.to_json()))
    assert document["source"] == {"backend": "planted", "target": "cpu", "predictor": "additive"}
    assert document["interval_coverage"] == pytest.approx(1 / 3)  # all that two errors support
    assert [stage["peak_bytes"] for stage in document["stages"]] == [first, last]


def test_temporaries_of_a_stage_that_was_not_compiled_may_be_more_than_their_sum():
    """The rest of its bytes is known better than that."""
    planted = Planted(6, 8)
    profile = planted.profile([ONE], errors=[0.0] * 20)
    # Windows have one or two layers.
    for layers, fraction in (
        ([6], UNSEEN_TEMPORARIES_FRACTION),
        ([2, 2, 2], 0.0),
    ):
        for stage in (
            AdditivePredictor(profile).predict(make_plan(layers, [ONE] * len(layers))).stages
        ):
            least = stage.peak_bytes + fraction * stage.parts_bytes["temporaries"]
            assert stage.interval_bytes[1] >= least and (
                fraction or stage.interval_bytes[1] < 1.05 * stage.peak_bytes
            )


def test_without_errors_the_interval_is_wide_and_no_coverage_is_claimed():
    planted = Planted(3)
    for errors in (None, ()):
        prediction = AdditivePredictor(planted.profile([ONE], errors=errors)).predict(
            make_plan([3], [ONE])
        )
        assert prediction.interval_coverage is None
        low, high = prediction.stages[0].interval_bytes
        assert low <= 0.75 * prediction.peak_bytes and high >= 1.25 * prediction.peak_bytes


def test_a_plan_of_another_model_is_refused():
    predictor = AdditivePredictor(Planted(4).profile([ONE]))
    assert code_of(lambda: predictor.predict(make_plan([5], [ONE]))) == "profile-other-model"
    assert (
        code_of(lambda: predictor.predict(make_plan([4], [ONE]).with_(model_hash="other")))
        == "profile-other-model"
    )
    with pytest.raises(ProfileError, match="num_layers=4, model_hash=hash16"):
        predictor.predict(make_plan([4], [ONE]).with_(model_hash="other"))
    assert predictor.predict(make_plan([4], [ONE]).with_(model_hash="hash16")).peak_bytes > 0
