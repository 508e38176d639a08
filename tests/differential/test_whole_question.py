"""The whole question on a small model: floors of parts against their exact bounds, and the space."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.links import Layout
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.model.workload import Workload, WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES, occupancy_by_position
from capture.predictor import AdditivePredictor
from capture.predictor.alike import empty_stages
from capture.predictor.times import TimePredictor
from profiling_runs.bounds import ModelBounds
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from recommender.capture.least_step import LeastStep
from recommender.capture.posed import search_problem
from recommender.whole import WholeQuestion
from tests import zoo_models
from tests.pipeline_models import mark

WHOLE = WholeQuestion(Cluster((2, 2), "h100"), 16, memory_limit_bytes=10**10)


def wide() -> Workload:
    """Layers whose products take longer than their launches; nothing of it is computed."""
    shapes = [(2048, 8192), (8192, 2048)] * 2

    def loss(params, x):
        for weights in params:
            x = mark(jnp.tanh(x @ weights))
        return jnp.mean(x**2)

    return Workload(
        loss,
        lambda key: [jnp.zeros(shape) for shape in shapes],
        lambda key, n: jnp.zeros((n, 1024, 2048)),
        optax.sgd(0.1),
    )


@pytest.fixture(scope="module")
def known():
    asked = ProfileQuestion(wide(), WHOLE.cluster, 16, choices=(StageChoice(),))
    measurements = open_measurements(asked, store=Store())
    examples = {
        16 // m // choice.data_parallel
        for m in WHOLE.microbatches
        for choice in WHOLE.choices(16 // m)
    }
    return ModelBounds(measurements, examples, WHOLE.cluster.num_devices)


@pytest.mark.parametrize("remat", ["none", "cheap", "full"])
def test_no_floor_is_above_the_bound_of_its_part(known, remat):
    """Whatever the limit: what is left out of the floor takes no time. Of mixtures the bounds of
    bytes are looser than the floor's."""
    whole, tight = replace(WHOLE, remat=remat), 0
    for m in whole.microbatches:
        question, choices = whole.question(m), whole.choices(16 // m)
        problem = search_problem(known.at(choices, 16 // m).least, question, with_times=True)
        step = LeastStep(problem)
        peaks = sorted(
            {
                int(peak)
                for d in problem.used_degrees
                for peak in problem.spread(problem.cost[d])[:, :, 0, 1:].min(axis=(0, 1))
            }
        )
        for limit in (10**10, *peaks[:: max(1, len(peaks) // 4)]):
            exact, _ = step.within(limit)
            floor, expected = known.seconds(choices, 16 // m, whole.cluster, limit)
            assert 0 < m * floor <= exact * (1 + 1e-9), (m, limit)
            assert expected > 0
            tight += m * floor > exact / 2
    assert tight, "some floors say something"


def test_the_floor_of_stages_on_as_many_devices_is_that_of_their_choices(known):
    whole, size = replace(WHOLE, remat="cheap"), 4
    question, choices = whole.question(4), whole.choices(size)
    problem = search_problem(known.at(choices, size).least, question, with_times=True)
    floors = []
    for d in (1, 2, 4):
        exact, _ = LeastStep(replace(problem, choices={d: problem.choices[d]})).within(10**10)
        floor, expected = known.seconds(choices, size, whole.cluster, 10**10, d)
        assert exact / 2 < 4 * floor <= exact * (1 + 1e-9) and floor < expected
        floors.append(floor)
    every, _ = known.seconds(choices, size, whole.cluster, 10**10)
    assert every <= min(floors) * (1 + 1e-9)
    assert known.seconds(choices, size, whole.cluster, 10**10, 8) == (np.inf, np.inf)


@pytest.mark.parametrize("size", [16, 2])
def test_choices_are_posed_as_each_is_predicted(known, size):
    """Mixtures of the same two together, stages that are alike once; with a compiled stage, too."""
    question = WHOLE.question(16 // size)
    bounds = known.at(WHOLE.choices(size), size)
    inside, num_mixtures = ~empty_stages(5), 0
    for profile, least in itertools.product((bounds.least, bounds.most), (False, True)):
        full = next(c for c in profile.choices if c.remat == "full" and c.data_parallel == 2)
        stage = StageConfig(1, 3, full, size)
        other = replace(stage, choice=replace(full, remat="none"))
        some = replace(profile, verified={stage: profile.measurements[other]})
        plain = search_problem(profile, question, with_times=True, least=least)
        assert plain.kinds.max() < inside.sum(), "some are alike"
        again = search_problem(some, question, with_times=True, least=least, like=plain)
        for of, problem in ((profile, plain), (some, again)):
            predictor, times = AdditivePredictor(of), TimePredictor(of, Layout(2), least)
            asked = size, occupancy_by_position("1f1b", 16 // size, 4), 4
            for d, n, choice in (
                (d, n, each) for d, of_d in problem.choices.items() for n, each in enumerate(of_d)
            ):
                num_mixtures += len(choice.measured) > 1
                rows = predictor.peaks(choice, *asked, least=least)
                assert (problem.spread(problem.cost[d][n]) == rows)[:, inside].all(), choice
                table = times.table(choice, size)
                seconds, update = problem.seconds[d][n], problem.update_seconds[d][n]
                both = table.forward + table.backward
                assert (problem.spread(seconds) == both)[inside].all(), choice
                assert (problem.spread(update) == table.update)[inside].all(), choice
    assert num_mixtures


def test_bounds_of_split_passes_have_the_rest_as_it_is(known):
    between = known.at(WHOLE.choices(4), 4)
    assert not between.least.splits_backward and between.split is between.split
    for name in ("least", "most"):
        plain, split = getattr(between, name), getattr(between.split, name)
        assert split.splits_backward and split.measurements.keys() == plain.measurements.keys()
        for config, cost in split.measurements.items():
            assert replace(cost, split=None) == plain.measurements[config]
            known_bytes = cost.split.inputs_bytes, cost.split.weights_bytes
            most = cost.backward_bytes * (config.first > 0), cost.backward_bytes
            assert known_bytes == ((0, 0) if name == "least" else most)
        assert len({*map(id, split.measurements.values())}) < len(split.measurements)


def test_neighbours_that_share_a_kernel_launch_it_once():
    """Launches are most of the seconds of a tiny model, and no part of its floor."""
    whole = WholeQuestion(Cluster((4,), "h100"), 64, counts=(32,), remat="none")
    asked = ProfileQuestion(zoo_models.small("vit"), whole.cluster, 2, choices=(StageChoice(),))
    measurements = open_measurements(asked, store=Store())
    bounds, choices = ModelBounds(measurements, (1, 2), 4), whole.choices(2)
    problem = search_problem(bounds.at(choices, 2).least, whole.question(), with_times=True)
    exact, _ = LeastStep(problem).within(10**12)
    assert 32 * bounds.seconds(choices, 2, whole.cluster, 10**12)[0] <= exact


def test_sizes_that_a_model_does_not_take_are_left_out():
    asked: list[int] = []

    def takes(size):
        asked.append(size)
        return size % 4 == 0

    assert WHOLE.of_sizes(takes).microbatches == (1, 2, 4)
    assert asked == [1, 2, 4], "the smallest that it takes tells of its multiples"
    said = WholeQuestion(WHOLE.cluster, 16, counts=(16,))
    assert said.of_sizes(takes) is said, "what was asked for is refused where it is traced"
    assert WHOLE.of_sizes(lambda size: False) is WHOLE


def test_facts_are_traced_at_sizes_that_the_model_takes():
    """One example on a device is half of a group of experts."""
    spec = WorkloadSpec.parse("models/moe.py:moe?size=tiny&num_layers=2&group_tokens=128")
    asked = ProfileQuestion(spec, WHOLE.cluster, 8, choices=(StageChoice(),))
    measurements = open_measurements(asked, store=Store())
    bounds = ModelBounds(measurements, (1, 8), 4)
    found = bounds.at([StageChoice(1, 1, "cheap"), StageChoice(8, 1, "cheap")], 8).least
    assert all(cost.residual_bytes for cost in found.measurements.values())


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


def test_replicas_that_may_not_split_the_optimizer_state_split_no_parameters():
    """ZeRO 3 splits it, too; where both are named, nothing but ZeRO 3 does."""
    whole = replace(WHOLE, shard_optimizer=False)
    assert not any(each.shard_optimizer or each.shard_params for each in whole.choices(16))
    named = replace(whole, shard_params=True).choices(16)
    assert {(each.shard_optimizer, each.shard_params) for each in named} == {
        (False, False),
        (True, True),
    }


def test_all_schedules_are_searched_unless_one_is_named():
    assert WHOLE.schedules[0] == "1f1b" and {*SCHEDULES} - {*WHOLE.schedules} == {"gpipe"}
    assert WHOLE.question(4, "zb-v").schedule == "zb-v" and WHOLE.question(4).schedule == "1f1b"
    assert not any("zb-v" in what for what, _ in WHOLE.left_out())
    for objective in ("memory", "pareto"):
        assert replace(WHOLE, objective=objective).schedules == WHOLE.schedules
    assert replace(WHOLE, schedule="1f1b").schedules == ("1f1b",)


def test_an_empty_space_is_said_at_once():
    with pytest.raises(PlanError) as error:
        WholeQuestion(WHOLE.cluster, 16, counts=(3,))
    assert error.value.codes == ("plan-batch",)
    with pytest.raises(PlanError):
        WholeQuestion(WHOLE.cluster, 0)
