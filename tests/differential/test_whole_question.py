"""The whole question on a small model: floors of parts against their exact bounds, and the space."""

import itertools

import pytest

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.plan.choices import StageChoice
from profiling_runs.bounds import ModelBounds
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from recommender.capture.least_step import LeastStep
from recommender.capture.posed import search_problem
from recommender.whole import WholeQuestion
from tests import pipeline_models

WHOLE = WholeQuestion(Cluster((2, 2), "h100"), 16, memory_limit_bytes=10**9)


@pytest.fixture(scope="module")
def known():
    asked = ProfileQuestion(pipeline_models.tied(), WHOLE.cluster, 16, choices=(StageChoice(),))
    measurements = open_measurements(asked, store=Store())
    examples = {
        16 // m // choice.data_parallel
        for m in WHOLE.microbatches
        for choice in WHOLE.choices(16 // m)
    }
    return ModelBounds(measurements, examples, WHOLE.cluster.num_devices)


def test_no_floor_is_above_the_bound_of_its_part(known):
    """Whatever the limit: what is left out of the floor takes no time."""
    tight = 0
    for m in WHOLE.microbatches:
        question, choices = WHOLE.question(m), WHOLE.choices(16 // m)
        problem = search_problem(known.at(choices, 16 // m).least, question, with_times=True)
        step = LeastStep(problem)
        peaks = sorted(
            {int(peak) for d in problem.used_degrees for peak in problem.floor(d)[0, 1:]}
        )
        for limit in (10**9, *peaks[:: max(1, len(peaks) // 4)]):
            exact, _ = step.within(limit)
            floor, expected = known.seconds(choices, 16 // m, WHOLE.cluster, limit)
            assert 0 < m * floor <= exact * (1 + 1e-9), (m, limit)
            assert expected > 0
            tight += m * floor > exact / 2
    assert tight, "some floors say something"


def test_the_space_is_everything_and_options_narrow_it():
    assert WHOLE.microbatches == (1, 2, 4, 8, 16)
    choices = set(WHOLE.choices(4))
    assert {c.num_devices for c in choices} == {1, 2, 4}, "stages take both nodes, too"
    assert max(c.tensor_parallel for c in choices) == 2, "sums do not leave the node"
    zero = {(c.shard_optimizer, c.shard_params) for c in choices if c.data_parallel > 1}
    assert zero == {(False, False), (True, False), (True, True)}
    assert {c.remat for c in choices} == {"none", "cheap", "dots", "full"}
    assert any(c.sequence_parallel for c in choices)
    narrow = WholeQuestion(
        WHOLE.cluster, 16, counts=(4,), remat="full", shard_optimizer=True, shard_params=False,
        sequence_parallel=False, whole_nodes=False,
    )  # fmt: skip
    assert narrow.microbatches == (4,)
    for c, other in itertools.pairwise(sorted(narrow.choices(4))):
        assert c.remat == other.remat == "full" and not c.shard_params and not c.sequence_parallel
        assert c.shard_optimizer == (c.data_parallel > 1) and c.num_devices <= 2


def test_an_empty_space_is_said_at_once():
    with pytest.raises(PlanError) as error:
        WholeQuestion(WHOLE.cluster, 16, counts=(3,))
    assert error.value.codes == ("plan-batch",)
    with pytest.raises(PlanError):
        WholeQuestion(WHOLE.cluster, 0)
