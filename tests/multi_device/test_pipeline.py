"""A planned step equals the single-device step: loss, gradients and updated parameters, and refuses
what does not belong to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import VOCAB, WIDTH, bare, mlp, pipeline, taught, tied

from capture.errors import ExecutionError, PlanError, WorkloadError
from capture.model.workload import WorkloadSpec
from capture.runtime.layout import shard_bytes
from capture.runtime.meter import LiveArrayMeter, measure_step
from capture.runtime.pipeline import PipelinedStep, pipeshard, trace_for_plan
from capture.runtime.reference import (
    ReferenceStep,
    max_relative_error,
    relative_errors,
    rounding_floor,
)
from capture.step.program import replay

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5


def compare(
    workload,
    plan,
    *,
    params=None,
    num_steps: int = 2,
    gradient_floor: float = 1e-6,
    params_tolerance: float = 1e-5,
) -> PipelinedStep:
    """Run the plan and the reference side by side."""
    step = pipeshard(workload, plan)
    params = workload.init(jax.random.key(0)) if params is None else params
    batch = workload.batch(jax.random.key(1), plan.global_batch_size)
    key = jax.random.key(2)
    reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
    expected_params, expected_state = reference.init(params)

    expected_loss, expected_gradients = reference.loss_and_gradients(expected_params, batch, key)
    state = step.init_from(params)
    gradients, metrics = step.accumulate(state, batch, key)
    assert metrics.loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
    meter = LiveArrayMeter(
        step.evaluation,
        step.devices,
        lambda run: step.executable(run).transient_bytes,
        strict=True,
    )
    evaluated = [float(loss) for loss in step.evaluate(state, batch, key, observer=meter).losses]
    assert evaluated == [float(loss) for loss in metrics.losses]
    meter.finish()
    assert meter.peak_bytes_per_device == replay(step.evaluation).peak_bytes_per_device
    assert max_relative_error(gradients, expected_gradients, gradient_floor) < GRADIENT_TOLERANCE
    for _ in range(num_steps):
        state, metrics = step(state, batch, key)
        expected_params, expected_state, expected_loss = reference(
            expected_params, expected_state, batch, key
        )
        assert metrics.loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE * 10)
    assert state.num_steps == num_steps
    assert max_relative_error(step.params(state), expected_params) < params_tolerance
    return step


@pytest.mark.parametrize(
    ("degrees", "schedule", "remat"),
    [
        (((1, 1), (2, 1), (1, 2), (2, 1)), "1f1b", "none"),
        (((2, 2), (1, 1), (2, 1)), "gpipe", "dots"),
        (((1, 2), (2, 2)), "1f1b", "full"),
        (((1, 1),), "gpipe", "none"),
    ],
)
def test_degrees_schedules_and_remat(degrees, schedule, remat):
    layers = {4: (1, 1, 1, 1), 3: (2, 1, 1), 2: (1, 3), 1: (4,)}[len(degrees)]
    plan = pipeline(layers, degrees, schedule=schedule, remat=remat)
    compare(mlp(), plan)


def test_fewer_microbatches_than_stages():
    compare(mlp(), pipeline((1, 1, 1, 1), ((1, 1),) * 4, num_microbatches=2))


def attention(params, x):
    """A head whose keys have a bias, which changes no softmax: its true gradient is zero."""
    q, k, v = (
        x @ params["q"],
        x @ params["k"] + params["key bias"],
        x @ params["v"] * params["scale"],
    )
    return jnp.mean(jnp.sin(jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v) ** 2)


def test_errors_of_gradients_see_small_leaves_that_are_wrong_and_no_noise():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(key, (WIDTH, WIDTH)) for name, key in zip("qkv", keys, strict=False)
    }
    params |= {"key bias": jnp.ones(WIDTH), "scale": 1e4 * jnp.ones(WIDTH)}
    x = jax.random.normal(keys[3], (8, 4, WIDTH))
    gradient = jax.jit(jax.grad(attention))
    exact, parts = gradient(params, x), [gradient(params, part) for part in (x[:4], x[4:])]
    halves = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    graph = trace_for_plan(mlp(), pipeline((4,), ((1, 1),))).graph
    floor = rounding_floor(graph)
    assert floor == np.finfo(np.float32).eps ** 0.5
    assert relative_errors(halves, exact, 0.0)["key bias"] > 0.01, (
        "nothing but noise, relative to itself"
    )
    assert max_relative_error(halves, exact, floor) < 1e-3
    sizes = {name: float(jnp.abs(leaf).max()) for name, leaf in exact.items()}
    assert sizes["scale"] < 1e-3 * max(sizes.values()), "a small leaf with a gradient"
    wrong = relative_errors({**halves, "scale": 1.1 * halves["scale"]}, exact, floor)
    assert max(wrong, key=wrong.get) == "scale" and wrong["scale"] > 0.01
    lost = relative_errors({**halves, "scale": jnp.nan * halves["scale"]}, exact, floor)
    assert lost["scale"] == float("inf")


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))],
    ids=["sgd", "clip"],
)
def test_layers_without_parameters(optimizer):
    """They have nothing to update, to summarise or to split, at any degree."""
    step = compare(bare(optimizer), pipeline((1, 1, 1, 1), ((2, 1), (1, 2), (1, 2), (2, 1))))
    assert [len(stage.owned) for stage in step.stages] == [0, 1, 0, 0]
    state = step.init(jax.random.key(0))
    measured = measure_step(
        step, state, bare().batch(jax.random.key(1), step.plan.global_batch_size), strict=True
    )
    assert list(measured.peak_bytes_per_device) == list(step.replay().peak_bytes_per_device)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stops", ["parameters", "output", "choice"])
def test_nothing_comes_back_to_a_teacher_whose_gradient_is_stopped(stops, schedule):
    """Wherever it is stopped, stages send back what the student needs alone."""
    plan = pipeline((1, 2), ((2, 1), (1, 2)), schedule=schedule)
    step = compare(taught(stops), plan)
    assert [len(stage.segment.cotangents) for stage in step.stages] == [1, 0]


def test_tied_embedding_dropout_and_a_skip_that_passes_through():
    plan = pipeline(
        (1, 1, 1, 1), ((1, 1), (2, 1), (1, 1), (2, 2)), shard_optimizer=True, shard_params=True
    )
    # The embedding is whole on one device, and in parts on four.
    step = compare(tied(optax.sgd(0.1)), plan)
    assert step.stages[3].borrowed == (step.traced.graph.stage_params(0, 1)[0],)
    state = step.init_from(params := tied().init(jax.random.key(0)))
    np.testing.assert_array_equal(step.params(state)["unread"], params["unread"])


def test_global_norm_travels_between_stages():
    """And the embedding's gradient counts once, though two stages hold a part of it."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    compare(tied(optimizer, dropout=False), pipeline((2, 2), ((2, 1), (1, 2))))


def test_sharded_optimizer_state():
    plan = pipeline((2, 2), ((2, 1), (2, 2)), shard_optimizer=True)
    step = compare(mlp(optax.adam(1e-2, eps=1e-4)), plan, params_tolerance=1e-4)
    whole = pipeshard(mlp(optax.adam(1e-2, eps=1e-4)), pipeline((2, 2), ((2, 1), (2, 2))))
    assert step.stages[0].cost.optimizer_bytes < 0.55 * whole.stages[0].cost.optimizer_bytes


def test_sharded_parameters():
    """Held in parts, gathered by the programs that read them, and their gradients are scattered; a
    replica holds half of everything."""
    layout, optimizer = ((2, 2), ((2, 1), (2, 2))), optax.adam(1e-2, eps=1e-4)
    plan = pipeline(*layout, remat="full", shard_optimizer=True, shard_params=True)
    step = compare(mlp(optimizer), plan, params_tolerance=1e-4)
    replicated = pipeshard(mlp(optimizer), pipeline(*layout, remat="full", shard_optimizer=True))
    held, whole = (
        {
            (s.program.places.index(slot.place), slot.category): slot.nbytes
            for slot in map(s.program.slots.__getitem__, s.program.persistent.values())
        }
        for s in (step, replicated)
    )
    state = step.init(jax.random.key(0))
    for s in (0, 1):
        arrays = [
            sum(map(shard_bytes, state.slots[f"{name}@{s}"])) for name in ("params", "optimizer")
        ]
        assert arrays == [held[s, category] for category in ("parameters", "optimizer")]
        # The bias of a stage with tensor parallelism has no dimension left to split.
        assert held[s, "parameters"] == whole[s, "parameters"] / 2 + (128 if s else 0)
    pins = [str(s.stages[0]._saved.traced).count("sharding_constraint") for s in (step, replicated)]
    assert pins == [1, 0], "what passes between the two layers keeps its sharding"
    text = step.stages[0].backward.call.as_text()
    assert "all-gather" in text and "all-gather" not in replicated.stages[0].backward.call.as_text()


def test_weight_decay_masked_by_path():
    def decays(params):
        return [{name: name != "bias" for name in block} for block in params]

    compare(
        mlp(optax.adamw(1e-2, weight_decay=1.0, eps=1e-4, mask=decays)),
        pipeline((3, 1), ((1, 1), (2, 1))),
        params_tolerance=1e-4,
    )


@pytest.mark.slow
def test_adafactor():
    compare(
        mlp(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
        pipeline((2, 2), ((2, 1), (1, 2))),
        params_tolerance=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "layers", "gradient_floor"),
    [
        pytest.param(
            "models/moe.py:moe?size=tiny&num_layers=2",
            (1, 1),
            1e-6,
            marks=pytest.mark.slow,
        ),
        # The next normalisation takes out a shift by the first one, whose bias gets rounding noise:
        # 5e-8, the largest is 0.9.
        pytest.param(
            "models/wide_resnet.py:wide_resnet?size=tiny",
            (2, 2),
            0.1,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_model_zoo(name, layers, gradient_floor):
    """Statistics over the batch and the capacity of experts are those of a micro-batch, as in the
    reference."""
    workload = WorkloadSpec.parse(name).load()
    random = np.random.default_rng(0)

    def weights(leaf):  # compiling the model's own init takes longer than all else here
        if leaf.ndim < 2:
            return np.ones(leaf.shape, leaf.dtype)
        return (random.normal(size=leaf.shape) * np.prod(leaf.shape[:-1]) ** -0.5).astype(
            leaf.dtype
        )

    params = jax.tree.map(weights, jax.eval_shape(workload.init, jax.random.key(0)))
    compare(
        workload,
        pipeline(layers, ((1, 1), (2, 1))),
        params=params,
        num_steps=0,
        gradient_floor=gradient_floor,
    )


def test_layers_cut_automatically():
    plan = pipeline((1, 1), ((1, 1), (2, 1))).with_(auto_layers=True)
    compare(mlp(num_blocks=3), plan)


def test_the_batch_may_be_refilled_while_the_step_runs():
    workload, plan = mlp(), pipeline((2, 2), ((1, 1), (1, 1)))
    step = pipeshard(workload, plan)
    batch = np.array(workload.batch(jax.random.key(1), 8))
    _, expected = step(step.init(jax.random.key(0)), batch)
    expected_loss, refilled = expected.loss, batch.copy()
    _, metrics = step(step.init(jax.random.key(0)), refilled)
    refilled[:] = np.nan
    assert metrics.loss == expected_loss


def test_numpy_batches_of_64_bits_are_taken_as_jax_would():
    workload, plan = tied(dropout=False), pipeline((2, 2), ((1, 1), (1, 1)))
    step = pipeshard(workload, plan)
    batch = workload.batch(jax.random.key(1), 8)
    _, expected = step(step.init(jax.random.key(0)), batch)
    _, metrics = step(
        step.init(jax.random.key(0)), jax.tree.map(lambda leaf: np.asarray(leaf, np.int64), batch)
    )
    assert metrics.loss == expected.loss


def test_the_callers_parameters_survive():
    workload, plan = mlp(), pipeline((4,), ((1, 1),))
    step, params = pipeshard(workload, plan), workload.init(jax.random.key(0))
    before = jax.tree.map(np.array, params)
    step(step.init_from(params), workload.batch(jax.random.key(1), 8))
    assert max_relative_error(params, before) == 0


# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> PipelinedStep:
    return pipeshard(tied(), pipeline((2, 2), ((1, 1), (1, 1))))


def message(error: pytest.ExceptionInfo) -> str:
    return str(error.value)


def test_too_few_devices():
    plan = pipeline((2, 2), ((4, 1), (4, 2)), global_batch_size=16)
    with pytest.raises(ExecutionError) as error:
        pipeshard(mlp(), plan)
    assert message(error) == (
        "the plan uses 12 devices and this process has 8 (cpu); for virtual CPU devices call "
        "capture.environment.prepare(num_devices=12) before JAX loads (capture run does). "
        "[run-devices]"
    )


def test_another_models_plan():
    plan = pipeline((2, 2), ((1, 1), (1, 1)))
    theirs = plan.with_(model_hash=trace_for_plan(tied(), plan).graph.model_hash)
    own = trace_for_plan(mlp(), plan).graph.model_hash
    with pytest.raises(PlanError) as error:
        pipeshard(mlp(), theirs)
    made_for = f"the plan was made for a model with num_layers=4 and model_hash={theirs.model_hash}"
    advice = (
        ": another model, or its shapes or the version of JAX changed. Give the plan's own "
        "workload, or plan this one. [plan-other-model]"
    )
    assert message(error) == f"{made_for}, and this model has model_hash={own}{advice}"
    with pytest.raises(PlanError) as error:
        pipeshard(mlp(num_blocks=3), theirs)
    assert message(error) == f"{made_for}, and this model has num_layers=3{advice}"
    with pytest.raises(PlanError) as error:
        pipeshard(mlp(num_blocks=1), theirs.with_(auto_layers=True))
    assert "has too few products for so many layers" in message(error)


def test_another_batch(small):
    state, key = small.init(jax.random.key(0)), jax.random.key(1)
    with pytest.raises(ExecutionError) as error:
        small(
            state,
            {"tokens": np.zeros((6, 4), np.int32), "labels": np.zeros((8, 4), np.float32)},
            key,
        )
    assert message(error) == (
        "labels has shape (8, 4) float32; the plan was made for (8, 4) int32 (4 micro-batches). "
        "[run-batch]\n"
        "tokens has shape (6, 4) int32; the plan was made for (8, 4) int32 (4 micro-batches). "
        "[run-batch]"
    )
    with pytest.raises(ExecutionError) as error:
        small(state, {"tokens": np.zeros((8, 4), np.int32)}, key)
    assert message(error).startswith("the batch has another structure than the plan's: ")
    assert error.value.codes == ("run-batch",)


def test_a_state_serves_once(small):
    state, batch, key = (
        small.init(jax.random.key(0)),
        tied().batch(jax.random.key(1), 8),
        jax.random.key(2),
    )
    small(state, batch, key)
    with pytest.raises(ExecutionError) as error:
        small(state, batch, key)
    assert message(error) == (
        "the state was already taken over by a step, which donates its arrays; go on with the "
        "state that the step returned. "
        "[run-state-consumed]"
    )


def test_the_state_of_another_plan(small):
    other = pipeshard(tied(), pipeline((4,), ((1, 1),)))
    state = other.init(jax.random.key(0))
    with pytest.raises(ExecutionError) as error:
        small(state, tied().batch(jax.random.key(1), 8), jax.random.key(2))
    assert error.value.codes == ("run-state",)
    carried = small.restore(other.params(state), other.optimizer_state(state), state.num_steps)
    assert max_relative_error(small.params(carried), other.params(state)) == 0


def test_other_parameters(small):
    params = tied().init(jax.random.key(0)) | {"a": jnp.zeros((WIDTH, 3))}
    with pytest.raises(ExecutionError) as error:
        small.init_from(params)
    assert message(error) == (
        "leaf 0 of the parameters has shape (16, 3) float32; the model has (16, 16) float32. "
        "[run-params]"
    )
    with pytest.raises(ExecutionError) as error:
        small.init_from({"a": jnp.zeros((VOCAB, WIDTH))})
    assert (
        message(error)
        == "the parameters have 1 leaves and the model's 5; give those of this model. [run-params]"
    )


def test_an_optimizer_that_needs_all_gradients_at_once():
    """It keeps the whole update back, in every stage, if a gradient of any stage is not finite."""
    with pytest.raises(WorkloadError) as error:
        step = pipeshard(
            mlp(optax.apply_if_finite(optax.sgd(0.1), 3)), pipeline((2, 2), ((1, 1), (1, 1)))
        )
        assert step.program
    assert error.value.codes == ("optimizer-cross-stage",)
