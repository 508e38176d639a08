"""What calibration compares: bytes as they were measured, beside those that are predicted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from synthetic_profiles import Planted, configs_of, make_plan

from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from profiling_runs.calibrate import calibrate

ONE, TWO = StageChoice(), StageChoice(2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_errors_of_calibration_are_those_of_every_stage_as_it_was_measured(schedule):
    """The model needs other bytes than its profile says: by how much is known of every stage, since
    bytes of planted layers are sums. A stage that could not be measured has no error, nor has one
    that the profile holds."""
    profile, true = Planted(14, 0).profile([ONE, TWO]), Planted(14, 0)
    true.fixed += 400
    predicted, truth = (AdditivePredictor(p) for p in (profile, true.profile([ONE, TWO])))
    plans = [
        make_plan([3, 4, 3, 2, 2], [ONE, TWO, ONE, ONE, TWO], schedule=schedule),
        make_plan([4, 5, 5], [ONE] * 3, schedule=schedule),
    ]
    costs = {config: true.cost(config) for plan in plans for config in configs_of(plan)}
    unmeasured = configs_of(plans[0])[1]
    del costs[unmeasured]
    found = calibrate(profile, SimpleNamespace(key=lambda config: config, costs=costs), plans)
    expected = {}
    for plan in plans:
        stages = zip(
            configs_of(plan),
            truth.predict(plan).stages,
            predicted.predict(plan).stages,
            strict=True,
        )
        for config, right, wrong in stages:
            if config != unmeasured and config not in profile.measurements:
                expected[config] = right.peak_bytes / wrong.peak_bytes - 1
    assert len(expected) == 5 and min(expected.values()) > 0.01
    assert {one.config: one.error for one in found.errors} == pytest.approx(expected)
