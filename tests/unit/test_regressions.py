"""Regressions over degrees: exact on a + b/k, refused where they would guess."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_profiles import Planted, hybrid, make_plan

from capture.errors import ProfileError
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.additive import UNSEEN_TEMPORARIES_FRACTION
from capture.predictor.fit import fit_degree, fit_degrees, fit_line, inverse

# ---- the regressions -----------------------------------------------------------------------------


ONE = StageChoice()
STORED = json.loads((Path(__file__).parents[1] / "data" / "logfit_check.json").read_text())["rows"]


def test_inverse_misses_by_half_a_percent_and_the_logarithm_by_half():
    """Memory of real layers at 1, 2, 4 and 8 ways; fitted through 2 and 4 as the paper does,
    sampled at 8."""
    errors = {"log": [], "inverse": []}
    for row in STORED:
        memory = {int(k): v for k, v in row["memory_bytes"].items()}
        values = [np.array(memory[2]), np.array(memory[4])]
        log, inv = (float(fit_degree([2, 4], values, 8, f)) for f in (np.log, inverse))
        assert log == pytest.approx(row["log_fit_at_8"], rel=1e-9)
        assert inv == pytest.approx(row["reciprocal_fit_at_8"], rel=1e-9)
        errors["log"].append(log / memory[8] - 1)
        errors["inverse"].append(inv / memory[8] - 1)
    assert max(map(abs, errors["inverse"])) < 0.006
    transformer = next(
        i for i, row in enumerate(STORED) if row["layer"] == "ParallelTransformerLayer"
    )
    assert errors["log"][transformer] == pytest.approx(-0.509, abs=0.001)
    assert min(errors["log"]) < -0.7


def test_the_logarithm_turns_negative_at_16_ways_and_the_inverse_does_not():
    for row in STORED:
        values = [np.array(row["memory_bytes"][k]) for k in "24"]
        assert float(fit_degree([2, 4], values, 16, np.log)) == pytest.approx(
            row["log_fit_at_16"], rel=1e-6, abs=1
        )
        assert float(fit_degree([2, 4], values, 16, inverse)) > 0
    assert min(row["log_fit_at_16"] for row in STORED) < 0


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(3, 7))
def test_the_inverse_is_exact_on_a_plus_b_over_k(a, b, power):
    values = [np.array([a + b / k]) for k in (2, 4)]
    assert fit_degree([2, 4], values, 1 << power, inverse)[0] == pytest.approx(
        a + b / (1 << power), rel=1e-6, abs=1e-3
    )


def test_a_straight_line_keeps_what_is_missing_missing():
    tables = [np.array([np.nan, 10.0, 3.0]), np.array([np.nan, 20.0, np.nan])]
    assert fit_line([4, 8], tables, 16)[1] == pytest.approx(40)
    assert np.isnan(fit_line([4, 8], tables, 16)[[0, 2]]).all()
    assert fit_line([4], [np.array([10.0])], 8).tolist() == [20.0]


def test_degree_pairs_are_fitted_along_one_axis_or_over_both():
    def memory(dp, tp):
        return np.array([7 + 16 / dp + 32 / tp + 64 / (dp * tp)])

    known = {(dp, tp): memory(dp, tp) for dp, tp in [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)]}
    assert fit_degrees(known, (8, 1)) == pytest.approx(memory(8, 1))
    assert fit_degrees(known, (1, 16)) == pytest.approx(memory(1, 16))
    assert fit_degrees({**known, (2, 2): memory(2, 2)}, (4, 4)) == pytest.approx(memory(4, 4))
    assert fit_degrees({(2, 1): np.array([5.0])}, (8, 1)).tolist() == [5.0]


def test_a_single_device_is_not_on_the_curve_of_its_axis():
    """It has no buffer for the sum of gradients: 5 + 16 / k through 2 and 4 ways, whatever one
    device needs."""
    known = {
        (1, 1): np.array([1000.0]),
        (2, 1): np.array([13.0]),
        (4, 1): np.array([9.0]),
        (1, 2): np.array([50.0]),
    }
    assert fit_degrees(known, (8, 1)) == pytest.approx([7])


def test_a_degree_that_was_not_profiled_is_refused():
    profile = Planted(4).profile(hybrid(4))
    with pytest.raises(ProfileError) as error:
        AdditivePredictor(profile).predict(make_plan([4], [StageChoice(8, 1)]))
    assert str(error.value) == (
        "data_parallel=8 x tensor_parallel=1 with remat='none', shard_optimizer=False, "
        "shard_params=False, sequence_parallel=False was not profiled "
        "(profiled degrees: 1x1, 1x2, 1x4, 2x1, 2x2, 4x1); profile it, or allow extrapolation. "
        "[profile-choice]"
    )
    with pytest.raises(ProfileError) as error:
        AdditivePredictor(profile, allow_extrapolation=True).predict(
            make_plan([4], [StageChoice(1, 1, "full")])
        )
    assert str(error.value) == (
        "data_parallel=1 x tensor_parallel=1 with remat='full', shard_optimizer=False, "
        "shard_params=False, sequence_parallel=False was not profiled (no degrees were profiled "
        "so); profile it. "
        "[profile-choice]"
    )


def test_extrapolation_is_exact_on_a_plus_b_over_k_with_a_wider_interval():
    planted = Planted(4, 2)
    profile = planted.profile(hybrid(4), errors=[0.01] * 100)
    predictor = AdditivePredictor(profile, allow_extrapolation=True)
    choice = StageChoice(8, 1)
    truth = planted.components(StageConfig(1, 3, choice, 16))
    assert predictor.table(choice, 16)[1:, 1, 3] == pytest.approx(truth[1:], rel=1e-6)
    wide = predictor.predict(make_plan([4], [choice])).stages[0]
    narrow = predictor.predict(make_plan([4], [StageChoice(4, 1)])).stages[0]
    assert (wide.extrapolated, narrow.extrapolated) == (True, False)
    assert all(
        abs(x / narrow.peak_bytes - 1) < UNSEEN_TEMPORARIES_FRACTION for x in narrow.interval_bytes
    )
    low, high = (x / wide.peak_bytes for x in wide.interval_bytes)
    assert low < 0.83 and high > 1.18
    at_24 = predictor.predict(make_plan([4], [ONE], size=24)).stages[0]
    assert at_24.extrapolated and at_24.interval_bytes[0] < 0.83 * at_24.peak_bytes
