"""What is predicted of stages that were not measured: sums of windows with their drift, and stages
of other degrees and places."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from refusals import code_of
from synthetic_profiles import Planted, configs_of, make_plan

from capture.errors import ProfileError
from capture.measured.profile import StageConfig
from capture.measured.size_errors import UNCALIBRATED_FRACTION
from capture.measured.stage_cost import SplitCost
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.additive import _shared_out
from capture.predictor.statistics import extend_windows, without_windows
from capture.profiler.windows import window_configs

ONE = StageChoice()


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


def test_what_the_first_layers_need_of_a_split_backward_pass_is_not_said_of_others():
    """Weights of inner stages need 400 bytes however long they are, and gradients of inputs grow by
    10 for every pair of layers; a stage of the first layer has its whole backward pass as that of
    the weights."""
    planted = Planted(8)

    def cost(config):
        whole, n = planted.cost(config), config.num_layers
        if config.first == 0:
            split = SplitCost(0, whole.backward_bytes, whole.residual_bytes, 0, (), (), (0,))
        else:
            split = SplitCost(100 * n + 10 * n * (n - 1) // 2, 400, 50 * n, 30 * n)
        return replace(whole, split=split)

    configs = window_configs(8, [ONE], [16], splits_backward=True)
    assert {(c.first, c.stop) for c in configs if c.num_layers > 3} == {(0, 8), (1, 8)}
    profile = planted.profile([ONE], sizes=[16])
    memory = AdditivePredictor(replace(profile, measurements={c: cost(c) for c in configs})).memory(
        ONE, 16
    )
    for stop in range(1, 9):
        assert memory.backward_inputs[0, stop] == 0
        assert memory.backward_weights[0, stop] == memory.backward[0, stop]
        assert memory.deferred[0, stop] == memory.kept[0, stop]
    for n in range(1, 8):
        assert memory.backward_weights[1, 1 + n] == 400
        assert memory.deferred[1, 1 + n] == 80 * n
    assert memory.backward_inputs[1, 8] == 700 + 210, "measured"
    # 570 by M_a, and half of the 100 that the longest window needs more.
    assert memory.backward_inputs[1, 6] == 620 >= 500 + 100


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
        for first, stop in combinations(range(4), 2):
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
    assert prediction.interval_coverage == 1
    for stage in prediction.stages:
        assert stage.verified and stage.interval_bytes == (stage.peak_bytes, stage.peak_bytes)
    half = replace(profile, verified={configs_of(plan)[0]: planted.cost(configs_of(plan)[0])})
    first, last = AdditivePredictor(half).predict(plan).stages
    assert first.interval_bytes == (first.peak_bytes, first.peak_bytes) != last.interval_bytes
    assert profile.calibration.num_stages == 120, "which support more than is claimed"
    assert AdditivePredictor(half).predict(plan).interval_coverage == 0.98


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
