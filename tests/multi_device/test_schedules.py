"""Steps of schedules whose stages share devices or whose backward passes are split: equal to one
device, and what is booked is what is live before every instruction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import optax
import pytest
from pipeline_models import mlp, pipeline, tied

from capture.measured.profile import Profile, StageConfig
from capture.predictor import AdditivePredictor
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.split_backward import SplitStagePrograms
from capture.step.attribution import attribute
from profiling_runs.collect import profile, wanted_configs
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import verify, with_verified
from tests.multi_device.test_pipeline import compare

CLIP = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))


def check_ledger(step: PipelinedStep, workload) -> None:
    batch = workload.batch(jax.random.key(1), step.plan.global_batch_size)
    state, key = step.init(jax.random.key(0)), jax.random.key(2)
    measured = measure_step(step, state, batch, key, strict=True)
    assert measured.peak_bytes_per_device == step.replay().peak_bytes_per_device
    assert measured.num_checks > len(step.program.instructions)


@pytest.mark.parametrize(
    ("schedule", "layers", "degrees", "remats"),
    [
        ("interleaved", (1, 1, 1, 1), ((1, 1), (2, 1)), ("none", "cheap", "full", "dots")),
        pytest.param(
            "zb-h1", (2, 2), ((1, 1), (1, 2)), ("full", "none"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "dualpipev", (2, 2), ((1, 1),), ("dots", "full"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_step_equals_that_of_one_device_and_its_ledger(schedule, layers, degrees, remats):
    """Also where stages recompute differently, on the same devices or not."""
    plan = pipeline(layers, degrees, schedule=schedule)
    stages = (
        replace(stage, choice=replace(stage.choice, remat=remat))
        for stage, remat in zip(plan.stages, remats, strict=True)
    )
    check_ledger(compare(mlp(), plan.with_(stages=tuple(stages)), num_steps=0), mlp())


def test_shared_parameters_and_a_skip_between_stages_of_the_same_devices():
    """The embedding is owned and borrowed on one device in the shape of a V, and the skip passes
    through every stage."""
    workload = tied(CLIP, dropout=False)
    plan = pipeline((1, 1, 1, 1), ((1, 1), (2, 1)), schedule="zb-v")
    plan = plan.with_(
        stages=tuple(
            replace(stage, choice=replace(stage.choice, shard_optimizer=True, shard_params=True))
            if stage.choice.data_parallel > 1
            else stage
            for stage in plan.stages
        )
    )
    check_ledger(compare(workload, plan), workload)


# ---- the split -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def middle() -> SplitStagePrograms:
    plan = pipeline((1, 1, 1, 1), ((1, 1),) * 4, schedule="zb-h1")
    stage = pipeshard(mlp(), plan).stages[1]
    assert isinstance(stage, SplitStagePrograms)
    return stage


def test_no_product_runs_twice_and_those_of_weights_not_among_the_inputs(middle):
    """A block has two products: two of inputs, two of weights."""
    split = middle.split

    def products(wanted, given=()) -> int:
        equations = middle.split.flow.needed(wanted, given)
        return sum(equation.primitive.name == "dot_general" for equation in equations)

    given = {*split.deferred, *split.read}
    assert products(split.inputs) == 2
    assert products([*split.weights, *split.inputs]) == 4
    assert products(split.weights, given) == 2


def test_what_the_weights_read_is_held_and_only_what_the_first_program_made_is_handed_over(middle):
    """Of a block ``x + relu(x @ up + bias) @ down``: x, relu's result, the gradient that arrives,
    and that of relu's operand."""
    wide, cost = middle.split.deferred, middle.split_cost
    assert [v.aval.shape for v in wide] == [(2, 64)]
    assert cost.cotangents == (0,) and cost.kept_inputs == (0,)
    assert cost.deferred_bytes == 4 * 2 * 64
    # Relu's result; where it was above 0 dies with the first program.
    assert cost.residual_bytes == 4 * 2 * 64 < middle.cost.residual_bytes


# ---- measured ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_predicts_split_backward_passes_as_they_are_compiled_and_explained():
    """Of two stages that share a device; every byte of the peak has its layer."""
    workload = mlp(num_blocks=2)
    plan = pipeline((1, 1), ((1, 1),), schedule="zb-v")
    question = ProfileQuestion(
        workload,
        plan.cluster,
        plan.microbatch_size,
        choices=(plan.stages[0].choice,),
        calibration_plans=0,
        splits_backward=True,
    )
    measurements = open_measurements(question)
    kinds = Counter(
        job.part for job in measurements.jobs(wanted_configs(question, measurements), True)
    )
    assert kinds["split"] == kinds["stage"] > 0
    measured = profile(question, measurements=measurements)
    measured = Profile.from_json(measured.to_json())
    assert measured.splits_backward
    predicted = AdditivePredictor(measured).predict(plan)
    found = verify(plan, measurements)
    assert predicted.peak_bytes_per_device == found.peak_bytes_per_device
    assert found.num_compiled == 0, "the windows are the stages"

    configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
    buffers = measurements.buffers(configs, True)
    graph = measurements.backend.traced(plan.microbatch_size).graph
    for stage in attribute(found.program, found.stages, [(0, 1), (1, 2)], graph, buffers):
        assert sum(buffer.bytes for buffer in stage.buffers) == stage.peak.peak_bytes
        assert stage.attributed_fraction > 0.99
        assert set(stage.layers) == {0, 1}

    known = with_verified(measured, plan, measurements)
    assert all(stage.verified for stage in AdditivePredictor(known).predict(plan).stages)
