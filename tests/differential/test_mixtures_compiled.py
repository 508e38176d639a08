"""Mixtures of recomputation, predicted from windows of both kinds, against their own programs."""

from __future__ import annotations

import tracing_models as models

from capture.machine.cluster import Cluster
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.predictor import AdditivePredictor
from capture.predictor.formula import kept_bytes
from profiling_runs.calibrate import calibration_of
from profiling_runs.collect import profile
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify


def test_what_is_predicted_of_a_mixture_is_no_less_than_what_is_compiled():
    """What is kept to the byte; peaks at most a twelfth too high, and inside their interval."""
    asked = ProfileQuestion(
        models.repeated(4, marked=True),
        Cluster((1,)),
        3,
        choices=(StageChoice(remat="full:2"),),
        num_neighbours=1,
        calibration_plans=0,
    )
    measurements = open_measurements(asked)
    made = profile(asked, measurements=measurements)
    assert {choice.remat for choice in made.choices} == {"cheap", "full"}
    predictor = AdditivePredictor(made)
    for num_full in (1, 3):
        choice = StageChoice(remat=f"full:{num_full}")
        plan = made.plan(
            asked.cluster,
            [Stage(0, made.graph.num_layers, (0,), choice)],
            global_batch_size=12,
            num_microbatches=4,
            schedule="gpipe",
        )
        config = StageConfig.of(plan.stages[0], 3)
        (truth,) = verify(plan, measurements).peak_bytes_per_device
        cost = measurements.costs[config]
        (found,) = predictor.predict(plan).stages
        kept = predictor.memory(choice, 3).kept[config.first, config.stop]
        assert kept == kept_bytes(made.graph, config.first, config.stop, choice, cost)
        assert truth <= found.peak_bytes <= 13 / 12 * truth
        assert found.interval_bytes[0] <= truth <= found.interval_bytes[1]


def test_plans_that_calibrate_have_mixtures_where_stages_may():
    """Of both kinds together; of one there are none."""
    for remat, expected in ((("cheap", "full"), {"full:1", "full:2"}), (("cheap",), set())):
        asked = ProfileQuestion(models.repeated(4, marked=True), Cluster((2,)), 4, remat=remat)
        plans = calibration_of(asked, open_measurements(asked))
        drawn = {stage.choice.remat for plan in plans for stage in plan.stages}
        assert drawn == {*remat, *expected}
