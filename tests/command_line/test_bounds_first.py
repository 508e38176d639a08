"""The search on bounds against the profile of all windows, and what it says when it may not
compile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import optax
import pytest

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.predictor import AdditivePredictor
from profiling_runs.bounds import bounds
from profiling_runs.collect import profile
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import PlanCompiler, verify
from recommender import PlanQuestion, recommend
from recommender.capture.bounds_first import Effort, bounds_first
from recommender.question import BOUNDS_FIRST
from tests.pipeline_models import mlp, tied
from tests.planned_model import BATCH, STORE, capture
from tests.user_models import tiny

QUESTION = PlanQuestion(Cluster((2,)), 16, 4)
WHOLE = Effort()


def chain():
    return tiny.model(layers=4)


class Model:
    """A model with what was measured of it.

    Attributes:
        measurements: In a store that the search and the profile share.
        between: Its bounds.
    """

    def __init__(self, workload):
        self.asked = ProfileQuestion(
            workload, QUESTION.cluster, 4, num_neighbours=1, calibration_plans=0
        )
        self.measurements = open_measurements(self.asked, store=Store())
        self.between = bounds(self.asked, self.measurements)

    def search(self, effort=WHOLE, **changes):
        compiled = PlanCompiler(self.between.least, lambda: self.measurements)
        between = self.between
        return bounds_first(
            between.least, between.most, replace(QUESTION, **changes), compiled.attempt, effort
        )


@pytest.fixture(scope="module")
def model():
    return Model(chain())


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(chain, marks=pytest.mark.slow),
        pytest.param(mlp, marks=pytest.mark.slow),
        pytest.param(lambda: tied(optax.adam(0.1)), marks=pytest.mark.slow),
    ],
    ids=["chain", "mlp", "tied"],
)
def test_the_plan_needs_no_more_than_that_of_the_full_profile(workload):
    model = Model(workload())
    found = model.search()
    assert (found.status, found.compiled, found.proof.optimal) == ("ok", True, True)
    of_profile = recommend(profile(model.asked, measurements=model.measurements), QUESTION)
    peaks = verify(of_profile.plan, model.measurements).peak_bytes_per_device
    assert found.peak_bytes <= max(peaks)
    assert max(verify(found.plan, model.measurements).peak_bytes_per_device) == found.peak_bytes


def test_the_trail_narrows_to_the_answer(model):
    trail = model.search().why.proven.trail
    assert not trail[0].compiled
    assert trail[-1].compiled
    assert trail[-1].least_bytes == trail[-1].most_bytes
    for before, after in pairwise(trail):
        assert before.least_bytes <= after.least_bytes
        assert before.num_compiled <= after.num_compiled


def test_too_little_memory_is_proven_without_compiling():
    model = Model(chain())
    least = model.search(Effort(compiles=0)).why.proven.trail[0].least_bytes
    known = len(model.measurements.backend.store)
    found = model.search(memory_limit_bytes=least - 1)
    assert found.status == "infeasible"
    assert found.why.code == "memory-limit"
    assert "proven with 0 compiled stages" in found.why.summary
    assert len(model.measurements.backend.store) == known


def test_without_compiling_the_bracket_is_the_answer():
    model = Model(chain())
    found = model.search(Effort(compiles=0))
    [bracket] = found.why.proven.trail
    assert not found.compiled
    assert "nothing was compiled" in found.why.summary
    assert bracket.least_bytes < bracket.most_bytes == found.peak_bytes


def test_an_answer_near_enough_ends_the_search(model):
    far = model.search(Effort(within_fraction=10.0)).why.proven
    assert len(far.trail) == 2
    assert 0 <= far.within_fraction <= 10


def test_a_lower_bound_is_that_of_the_largest_part(model):
    """Of stages longer than windows: no sum of what is not additive."""
    least = AdditivePredictor(model.between.least)
    choice = model.between.least.choices[0]
    memory = least.memory(choice, 4)
    measured = {
        (config.first, config.stop): cost.backward_bytes
        for config, cost in model.between.least.measurements.items()
        if config.choice == choice
    }
    num_layers = model.between.least.graph.num_layers
    assert memory.backward[0, num_layers] == max(measured.values())


def test_a_profile_is_not_searched_on_bounds(model):
    with pytest.raises(PlanError, match=r"leave out the profile\. \[plan-algorithm\]"):
        recommend(model.between.least, replace(QUESTION, algorithm=BOUNDS_FIRST))


def test_on_the_command_line(tmp_path):
    workload = f"{__file__.rpartition('/tests/')[0]}/tests/user_models/tiny.py:model"
    verb = ("plan", workload, *BATCH, *STORE, "--algorithm", BOUNDS_FIRST)
    found = capture(tmp_path, *verb)
    assert found.document["search"]["optimal"]
    assert found.document["why"]["proven"]["within_fraction"] == 0
    assert "the least peak is between" in found.err
    assert (tmp_path / "plan.json").exists()
    refused = capture(tmp_path, "plan", workload, *BATCH, *STORE, "--within", "5%", code=2)
    assert "--within=0.05 does not go with algorithm=None" in refused.err
    refused = capture(tmp_path, *verb, "--try-schedules", code=2)
    assert "--try-schedules=True does not go with algorithm='bounds-first'" in refused.err
