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
from capture.measured.size_errors import UNCALIBRATED_FRACTION
from capture.plan.choices import StageChoice
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.predictor import AdditivePredictor
from capture.predictor.additive import UNSEEN_TEMPORARIES_FRACTION, _shared_out
from capture.predictor.statistics import extend_windows, without_windows
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


@pytest.mark.parametrize(
    "choice", [ONE, StageChoice(2, 1), StageChoice(1, 4), StageChoice(2, 2)], ids=str
)
@pytest.mark.parametrize("num_neighbours", [1, 2, 3])
def test_planted_statistics_are_recovered_for_every_stage(choice, num_neighbours):
    """Only windows of 1 to N + 1 layers are measured; all other stages follow from M_i and M_a."""
    planted = Planted(7, seed=1)
    predictor = AdditivePredictor(planted.profile([choice], num_neighbours=num_neighbours))
    memory = predictor.memory(choice, 16)
    for first, stop in stages(7):
        residual, forward, backward, update, optimizer, *_ = planted.components(
            StageConfig(first, stop, choice, 16)
        ).tolist()
        graph, at = planted.graph, (first, stop)
        kept = sum(graph.values[v].shard_bytes(choice.data_parallel) for v in graph.crossing(first))
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
        assert memory.received[at] == sum(
            graph.values[v].shard_bytes(choice.data_parallel) for v in graph.crossing(first)
        )
        assert memory.gradients_in[at] == sum(
            graph.values[v].shard_bytes(choice.data_parallel) for v in graph.crossing(stop)
        )
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
    planted, choices = Planted(num_layers, seed, skips=skips, shared=shared), hybrid(4)
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
        ask = partial(
            predictor.peaks, config.choice, 16, schedule, num_microbatches, min(4, num_layers)
        )
        most, least = (
            ask(least=bound)[min(plan.num_stages - s, len(ask())) - 1, stage.first, stage.stop]
            for bound in (False, True)
        )
        assert least <= prediction.stages[s].peak_bytes <= most
        if not summarizes and all(len(readers) <= 2 for readers in shared):
            assert least == most
    assert prediction.peak_bytes == max(prediction.peak_bytes_per_device)


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
    peaks = predictor.peaks(ONE, 16, "1f1b", 8, 4)
    assert peaks.shape == (4, 4, 5)
    assert (np.diff(peaks[:, 1, 2]) > 0).all()
    assert predictor.peaks(ONE, 16, "gpipe", 8, 4).shape == (1, 4, 5)


def test_the_search_counts_as_many_readers_of_a_shared_parameter_as_a_plan_may_have():
    """All four layers read it, and the end of the step is the peak: the first stage gets a gradient
    from every other."""
    planted = Planted(4, shared=[(0, 1, 2, 3)])
    planted.fixed[3] += 10**6
    predictor = AdditivePredictor(planted.profile([ONE], num_neighbours=4))
    for layers in ([1, 3], [1, 1, 2], [1, 1, 1, 1]):
        plan = make_plan(layers, [ONE] * len(layers), schedule="gpipe")
        searched, least = (
            predictor.peaks(ONE, 16, "gpipe", 4, len(layers), **how)[0, 0, 1]
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


# ---- windows, anchors, drift ---------------------------------------------------------------------


def windows_of(value, lengths, num_layers):
    return {
        (a, a + n): np.array([float(value(n))]) for n in lengths for a in range(num_layers - n + 1)
    }


def test_anchors_correct_the_sum_and_the_drift_between_them_is_a_line():
    """X(n) = 10 n up to three layers, 2 n more at 8, and 40 more at 16."""
    grows = {8: 96, 16: 200}
    windows = windows_of(lambda n: grows.get(n, 10 * n), (1, 2, 3, 8, 16), 20)
    table, drift = extend_windows(windows, 20)
    assert [table[0, 0, n] for n in (1, 3, 8, 16, 20)] == [10, 30, 80, 160, 200]
    total = (table + drift)[0, 0]
    assert (total[8], total[16]) == (96, 200)
    assert total[3] == 30  # measured windows stay
    assert drift[0, 0, 5] == pytest.approx(16 * (5 - 3) / (8 - 3))
    assert drift[0, 0, 12] == pytest.approx((16 + 40) / 2)
    # Beyond the last, on with its slope.
    assert drift[0, 0, 20] == pytest.approx(40 + 4 * (40 - 16) / 8)
    assert drift[0, 7, 13] == pytest.approx(16 * 3 / 5)
    assert np.isnan(table[0, 5, :6]).all()


def test_a_stage_that_begins_too_late_for_an_anchor_takes_the_last_one_that_fits():
    windows = windows_of(lambda n: 10 * n, (1, 2), 10)
    windows |= {(a, a + 8): np.array([80.0 + a]) for a in range(3)}
    _, drift = extend_windows(windows, 10)
    assert (drift[0, 1, 9], drift[0, 2, 10]) == (1, 2)
    assert drift[0, 5, 10] == pytest.approx(2 * (5 - 2) / (8 - 2))


def test_an_anchor_inside_the_model_tells_how_the_drift_of_the_ends_grows():
    """Windows of 8 drift by 1 inside and by 5 at both ends; that of 12 is known inside, where it
    drifts by 3."""
    windows = windows_of(lambda n: 10 * n, (1, 2), 16)
    windows |= {(a, a + 8): np.array([85.0 if a in (0, 8) else 81.0]) for a in range(9)}
    windows |= {(a, a + 12): np.array([123.0]) for a in (1, 2, 3)}
    _, drift = extend_windows(windows, 16)
    assert [drift[0, 0, 8], drift[0, 1, 13], drift[0, 0, 12]] == [5, 3, 5 + (3 - 1)]
    assert drift[0, 0, 16] == pytest.approx(7 + 4 * (7 - 5) / 4)


def test_a_drift_is_borrowed_of_the_same_layers_and_of_others_only_where_it_adds():
    """Windows of 8 are measured inside a model of ten layers, and need 20 less than the sum, or 20
    more; stages at the ends have none."""
    ends = [0, *[1] * 8, 2]
    for surplus in (-20.0, 20.0):
        windows = windows_of(lambda n: 10 * n, (1, 2), 10)
        windows |= {(a, a + 8): np.array([80.0]) for a in (0, 1, 2)}
        windows |= {(a, a + 9): np.array([90.0 + surplus]) for a in (0, 1)}
        of_equal, of_ends = (extend_windows(windows, 10, keys)[1][0] for keys in (None, ends))
        assert of_equal[0, 9] == of_ends[0, 9] == of_ends[1, 10] == surplus, "measured is measured"
        assert of_equal[0, 10] == 2 * surplus and of_ends[0, 10] == surplus + max(surplus, 0), (
            "the last layer is another"
        )
        del windows[0, 9], windows[1, 10]
        windows |= {(1, 9): np.array([80.0 + surplus])}
        del windows[0, 8], windows[2, 10]
        of_equal, of_ends = (extend_windows(windows, 10, keys)[1][0] for keys in (None, ends))
        assert of_ends[1, 9] == of_equal[1, 9] == of_equal[0, 8] == of_equal[2, 10] == surplus
        assert of_ends[0, 8] == surplus and of_ends[2, 10] == max(surplus, 0)


def test_a_drift_takes_no_temporaries_below_those_of_a_measured_part():
    """The sum is too high because of the last two layers alone: stages that end before them need
    what their first eight layers were measured to need, and what is no temporary follows the
    line."""
    adds = [100_000] * 8 + [0] * 6 + [400_000] * 2
    profile = Planted(16).profile([ONE])
    needs = {
        config: 10**6 if config.num_layers == 16 else sum(adds[config.first : config.stop])
        for config in profile.measurements
    }
    costs = {
        config: replace(cost, backward_bytes=needs[config], update_bytes=needs[config])
        for config, cost in profile.measurements.items()
    }
    memory = AdditivePredictor(replace(profile, measurements=costs)).memory(ONE, 16)
    assert memory.backward[0, [8, 12, 14, 16]].tolist() == [800_000] * 3 + [10**6]
    assert memory.update[0, 12] == 800_000 - 600_000 // 2


def test_a_stage_that_was_measured_as_a_long_window_is_predicted_as_measured():
    """Long windows that need what no sum of M_a says, at the largest micro-batch size."""
    planted = Planted(12, seed=5)
    profile = planted.profile([ONE])
    drifted = {
        config: replace(cost, backward_bytes=cost.backward_bytes + 7777)
        for config, cost in profile.measurements.items()
    }
    long = {config: cost for config, cost in drifted.items() if config.num_layers == 8}
    assert {config.microbatch_size for config in long} == {16}
    predictor = AdditivePredictor(replace(profile, measurements={**profile.measurements, **long}))
    memory = predictor.memory(ONE, 16)
    for config, cost in long.items():
        assert memory.backward[config.first, config.stop] == cost.backward_bytes
    prediction = predictor.predict(make_plan([8, 4], [ONE, ONE], schedule="gpipe"))
    without = AdditivePredictor(profile).predict(make_plan([8, 4], [ONE, ONE], schedule="gpipe"))
    assert prediction.peak_bytes_per_device[0] == without.peak_bytes_per_device[0] + 7777


def test_a_window_that_was_not_measured_is_named():
    planted = Planted(5)
    profile = planted.profile([ONE])
    without = {
        config: cost
        for config, cost in profile.measurements.items()
        if (config.first, config.stop) != (2, 4)
    }
    with pytest.raises(ProfileError) as error:
        AdditivePredictor(replace(profile, measurements=without)).table(ONE, 16)
    assert str(error.value).startswith(
        "the profile lacks layers 2 to 3, data parallel 1, tensor parallel 1, micro-batch size"
    )
    assert error.value.codes == ("profile-missing",)


def test_of_windows_that_are_missing_the_shortest_is_named():
    windows = windows_of(lambda n: 10 * n, (1, 2), 6)
    del windows[0, 2], windows[3, 4]
    with pytest.raises(KeyError) as error:
        extend_windows(windows, 6)
    assert error.value.args == ((3, 4),)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (
            [(1, 3), (0, 3)],
            "M_a is not known of every layer (without layers 1 to 2); no stage is predicted or "
            "planned with it",
        ),
        (
            [(1, 9)],
            "windows of 8 layers are not complete (without layers 1 to 8); the sum of M_a is not "
            "corrected by them",
        ),
        (
            [(0, 3), (1, 9)],
            "M_a with 2 neighbours is not known of every layer (without layers 0 to 2); it is "
            "taken with 1",
        ),
    ],
)
def test_what_is_done_without_a_window_is_said(missing, said):
    assert (
        without_windows(missing, [(a, a + n) for n in (1, 2, 3, 8) for a in range(12 - n + 1)])
        == said
    )


def test_more_neighbours_err_less_on_memory_that_is_not_additive():
    """Memory that adds up from the fourth layer on only."""

    def memory(n):
        return 100 * n - 30 * min(n, 3)

    windows = windows_of(memory, (1, 2, 3, 4), 8)
    errors = []
    for most in (2, 3, 4):
        table, _ = extend_windows({k: v for k, v in windows.items() if k[1] - k[0] <= most}, 8)
        errors.append(abs(table[0, 0, 8] - memory(8)))
    assert errors[0] > 0 and errors[2] == 0 and errors == sorted(errors, reverse=True)


# ---- other degrees, other stages, other layers ---------------------------------------------------


def test_parameters_at_a_degree_that_was_not_profiled():
    """What four devices split is split by eight, also what two held whole; what they hold whole
    stays whole; over replicas all are even."""
    planted = Planted(3)
    degrees = [ONE, StageChoice(1, 2), StageChoice(1, 4)]
    profile = replace(
        planted.profile([*degrees, StageChoice(2, 1, shard_params=True)]),
        param_bytes={
            (1, 1): (800, 400, 30),
            (2, 1): (400, 400, 30),
            (4, 1): (200, 100, 30),
            (1, 2): (5, 5, 5),
        },
    )
    predictor = AdditivePredictor(profile, allow_extrapolation=True)
    readers = [layer.params for layer in planted.graph.layers]
    for choice, expected in (
        (StageChoice(1, 8), (100, 50, 30)),
        (StageChoice(2, 8, shard_params=True), (50, 25, 15)),
        (StageChoice(1, 2), (400, 400, 30)),
    ):
        params = predictor.memory(choice, 16).params
        for first, stop in stages(3):
            read = {p for layer in readers[first:stop] for p in layer}
            assert params[first, stop] == sum(expected[p] for p in read), choice


def test_what_was_compiled_of_a_stage_is_known_of_the_same_program_elsewhere():
    """Layers 1 to 6 of 8 are equal: of stages of three of them what the passes need, of itself
    all."""
    planted = Planted(8)
    layers = tuple(replace(layer, key="block") for layer in planted.graph.layers)
    like = (planted.graph.values[1], planted.graph.params[0])
    planted.graph = replace(
        planted.graph,
        layers=(replace(layers[0], key="first"), *layers[1:-1], replace(layers[-1], key="last")),
        values=tuple(
            replace(v, shape=like[0].shape, dtype=like[0].dtype) if 0 <= i < 7 else v
            for i, v in enumerate(planted.graph.values)
        ),
        params=tuple(replace(p, shape=like[1].shape) for p in planted.graph.params),
    )
    profile, config = planted.profile([ONE]), StageConfig(2, 5, ONE, 16)
    cost = replace(planted.cost(config), backward_bytes=777_777, update_bytes=888_888)
    before = AdditivePredictor(profile).memory(ONE, 16)
    after = AdditivePredictor(replace(profile, verified={config: cost})).memory(ONE, 16)
    same = [(first, first + 3) for first in range(6) if after.backward[first, first + 3] == 777_777]
    assert same == [(1, 4), (2, 5), (3, 6), (4, 7)]
    assert after.update[2, 5] == 888_888 and after.update[1, 4] == before.update[1, 4]


def test_a_plan_of_compiled_stages_is_certain():
    planted = Planted(15, 8)
    profile, plan = planted.profile([ONE], errors=[0.02] * 120), make_plan([8, 7], [ONE, ONE])
    certain = replace(profile, verified={c: planted.cost(c) for c in configs_of(plan)})
    prediction = AdditivePredictor(certain).predict(plan)
    assert prediction.coverage == 1
    for stage in prediction.stages:
        assert stage.verified and stage.interval_bytes == (stage.peak_bytes, stage.peak_bytes)
    half = replace(profile, verified={configs_of(plan)[0]: planted.cost(configs_of(plan)[0])})
    first, last = AdditivePredictor(half).predict(plan).stages
    assert first.interval_bytes == (first.peak_bytes, first.peak_bytes) != last.interval_bytes
    assert profile.calibration.num_stages == 120, "which support more than is claimed"
    assert AdditivePredictor(half).predict(plan).coverage == 0.98


def test_a_schedule_that_splits_backward_passes_needs_a_profile_of_them():
    predictor = AdditivePredictor(Planted(4).profile([ONE]))
    plan = make_plan([2, 2], [ONE, ONE], schedule="zb-h1")
    assert code_of(lambda: predictor.predict(plan)) == "profile-split"


def test_how_peaks_depend_on_cuts_behind_a_stage():
    """Two readers are on one cut or on none; three may be in one stage behind or in two."""
    for readers, depends in (((0, 3), False), ((0, 1, 3), True)):
        profile = Planted(4, shared=[readers]).profile([ONE])
        assert AdditivePredictor(profile).depends_on_cuts_behind(ONE, 16) == depends


def test_an_interval_is_wider_by_sizes_or_by_degrees_that_were_not_profiled():
    profile = Planted(4, 8).profile([ONE, StageChoice(1, 2)], errors=[0.0] * 60)
    predictor = AdditivePredictor(profile, allow_extrapolation=True)
    calibration, beyond = profile.calibration, UNCALIBRATED_FRACTION
    for choice, size, width in ((ONE, 32, beyond), (StageChoice(1, 4), 16, 0.17)):
        (stage,) = predictor.predict(make_plan([4], [choice], size=size)).stages
        low, _ = calibration.interval(StageConfig(0, 4, choice, size), 4)
        assert stage.extrapolated
        assert stage.interval_bytes[0] == pytest.approx(stage.peak_bytes * (low - width), rel=1e-3)


def test_the_interval_is_wider_at_the_size_that_has_no_long_windows():
    """What was seen of stages at the larger size says little of sums without anchors."""
    profile = Planted(12, 8).profile([ONE], errors=[0.0] * 60)
    assert StageConfig(0, 8, ONE, 16) in profile.measurements
    assert StageConfig(0, 8, ONE, 8) not in profile.measurements
    predictor, seen = AdditivePredictor(profile), profile.calibration
    for layers, size, beyond in (
        ([12], 16, 0.0),
        ([12], 8, UNCALIBRATED_FRACTION),
        ([2] * 6, 8, 0.0),
    ):
        stage = predictor.predict(make_plan(layers, [ONE] * len(layers), size=size)).stages[0]
        low, _ = seen.interval(StageConfig(0, layers[0], ONE, size), 12)
        width = 1 - stage.interval_bytes[0] / stage.peak_bytes
        assert width == pytest.approx(1 - low + beyond, abs=1e-3)


def test_every_layer_has_the_bytes_that_it_adds():
    planted = Planted(5, 8)
    predictor = AdditivePredictor(planted.profile([ONE]))
    stage = predictor.predict(make_plan([5], [ONE])).stages[0]
    params = [
        sum(planted.graph.params[p].nbytes for p in layer.params) for layer in planted.graph.layers
    ]
    assert [layer.get("parameters", 0) for layer in stage.layers_bytes] == params
    assert [layer.get("optimizer", 0) for layer in stage.layers_bytes] == [
        planted.components(StageConfig(0, i + 1, ONE, 16))[4]
        - (planted.components(StageConfig(0, i, ONE, 16))[4] if i else 0)
        for i in range(5)
    ]


@pytest.mark.parametrize(
    ("weights", "shares"), [([1, 1, 2], [25, 25, 50]), ([0, 0], [100, 0]), ([0, 1], [0, 100])]
)
def test_bytes_are_shared_out_whole(weights, shares):
    """Where nothing is known of the layers, the first has all."""
    assert _shared_out(100, weights) == shares


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
        assert prediction.coverage is None
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
