"""Which stage configs are measured, and that each different one is measured once."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from pipeline_models import mlp, pipeline, tied

from capture.errors import ProfileError, TargetError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.store import Store
from capture.model.workload import Workload
from capture.plan.choices import StageChoice
from capture.plan.space import StageSpace
from capture.predictor import AdditivePredictor
from capture.predictor.same_stages import stage_signature
from capture.profiler.compile import CompileBackend
from capture.profiler.windows import profiled_microbatch_sizes, window_configs
from capture.runtime.pipeline import pipeshard
from profiling_runs import profile
from profiling_runs.calibrate import CALIBRATION_SEED
from profiling_runs.jobs import Job, Queue
from profiling_runs.pools.worker import measure_job
from profiling_runs.question import ProfileQuestion
from recommender import PlanQuestion, recommend

ONE, TWO, SPLIT = StageChoice(), StageChoice(2, 1), StageChoice(1, 2)


# ---- what to measure -----------------------------------------------------------------------------


def test_windows_are_all_runs_of_one_to_n_plus_one_layers_and_shorter_at_smaller_sizes():
    configs = window_configs(5, [ONE, TWO], [2, 4], num_neighbours=2)
    assert len(configs) == len(set(configs)) == (5 + 4 + 3 + 5 + 4) * 2
    for size, lengths in ((4, (1, 2, 3)), (2, (1, 2))):
        found = {(c.first, c.stop) for c in configs if c.microbatch_size == size}
        assert found == {(a, a + n) for n in lengths for a in range(5 - n + 1)}


def test_long_windows_are_measured_at_the_largest_size_alone():
    lengths = {
        size: {
            c.num_layers for c in window_configs(20, [ONE], [8, 16]) if c.microbatch_size == size
        }
        for size in (8, 16)
    }
    assert lengths == {8: {1, 2}, 16: {1, 2, 3, 8, 16}}
    assert {c.num_layers for c in window_configs(9, [ONE], [4])} == {1, 2, 3, 8}
    # Without both ends.
    assert [c.first for c in window_configs(20, [ONE], [16]) if c.num_layers == 16] == [
        1,
        2,
        3,
    ]
    assert [c.first for c in window_configs(17, [ONE], [16]) if c.num_layers == 16] == [0, 1]


def test_a_choice_that_does_not_split_a_size_is_left_out_there():
    configs = window_configs(2, [ONE, StageChoice(4, 1)], [2, 4])
    assert {c.microbatch_size for c in configs if c.choice.data_parallel == 4} == {4}


def test_fewer_layers_than_neighbours_are_no_problem():
    assert [(c.first, c.stop) for c in window_configs(1, [ONE], [4])] == [(0, 1)]


def test_half_the_microbatch_is_profiled_where_every_choice_splits_it():
    assert profiled_microbatch_sizes(16, [ONE, StageChoice(8, 1)]) == (8, 16)
    assert profiled_microbatch_sizes(16, [ONE, StageChoice(16, 1)]) == (16,)
    assert profiled_microbatch_sizes(1, [ONE]) == (1,)
    assert profiled_microbatch_sizes(9, [ONE]) == (9,)


def test_choices_are_those_that_a_stage_of_the_cluster_may_have():
    def pairs(cluster, microbatch_size, **options):
        choices = StageSpace(**options).choices(cluster, microbatch_size)
        return [(c.data_parallel, c.tensor_parallel) for c in choices]

    assert pairs(Cluster((4, 2)), 8) == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert pairs(Cluster((4,)), 2) == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
    assert pairs(Cluster((1, 1)), 8) == [(1, 1)]
    assert pairs(Cluster((1, 1)), 8, whole_nodes=True) == [(1, 1), (2, 1), (1, 2)]
    assert pairs(Cluster((3,)), 3, any_divisor=True) == [(1, 1), (3, 1), (1, 3)]


# ---- measuring -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> CompileBackend:
    return CompileBackend(mlp(num_blocks=5))


def test_equal_stages_share_a_measurement_and_different_ones_do_not(backend):
    inner, other = StageConfig(1, 3, ONE, 4), StageConfig(2, 4, ONE, 4)
    assert backend.key(inner) == backend.key(other)
    different = [
        inner,
        StageConfig(0, 2, ONE, 4),  # feeds on the batch
        StageConfig(3, 5, ONE, 4),  # ends in the loss
        StageConfig(1, 4, ONE, 4),
        StageConfig(1, 3, ONE, 8),
        StageConfig(1, 3, TWO, 4),
        StageConfig(1, 3, SPLIT, 4),
        StageConfig(1, 3, StageChoice(1, 1, "full"), 4),
        StageConfig(1, 3, StageChoice(2, 1, "none", True), 4),
    ]
    assert len({backend.key(config) for config in [*different, other]}) == len(different)
    assert CompileBackend(mlp(num_blocks=5)).key(inner) == backend.key(inner)


def test_flags_and_versions_are_part_of_the_key(backend, monkeypatch):
    config = StageConfig(1, 2, ONE, 4)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    assert CompileBackend(mlp(num_blocks=5)).key(config) != backend.key(config)


def test_casts_of_weights_and_masks_are_made_again_and_not_kept_for_every_microbatch():
    """Two layers of a wide cast weight and a masked product: what is kept is of the size of the
    examples."""
    width = 64

    def loss(params, x):
        for i, weight in enumerate(params):
            half = weight.astype(jnp.bfloat16)  # read again by the backward pass
            masked = jnp.where(jnp.tril(jnp.ones((width, width), bool)), weight * weight, 0)
            x = jnp.tanh(x.astype(jnp.bfloat16) @ half).astype(jnp.float32) @ masked
            x = checkpoint_name(x, "layer_boundary") if not i else x
        return jnp.mean(x**2)

    def init(key):
        return list(jax.random.normal(key, (2, width, width)))

    backend = CompileBackend(
        Workload(loss, init, lambda key, n: jax.random.normal(key, (n, width)), optax.sgd(0.1))
    )
    one, two = (backend.measure(StageConfig(0, 2, ONE, size)).residual_bytes for size in (1, 2))
    assert 0 < two == 2 * one < 2 * width * width


def test_a_measurement_is_made_once(backend, monkeypatch):
    config = StageConfig(1, 2, ONE, 4)
    cost = backend.measure(config)
    assert cost.backward_bytes > 0 and cost.residual_bytes > 0

    def refuse(config):
        raise AssertionError("compiled again")

    monkeypatch.setattr(backend, "programs", refuse)
    assert backend.measure(StageConfig(2, 3, ONE, 4)) == cost
    with pytest.raises(AssertionError, match="compiled again"):
        backend.measure(StageConfig(0, 1, ONE, 4))


def test_too_few_devices_and_compiler_errors_are_reported(backend, monkeypatch):
    with pytest.raises(TargetError) as error:
        backend.measure(StageConfig(1, 2, StageChoice(1, 16), 16))
    assert error.value.codes == ("target-devices",)
    too_wide, broken = StageConfig(1, 2, StageChoice(1, 16), 16), StageConfig(3, 5, ONE, 4)

    def fail(config):
        raise RuntimeError("out of registers")

    first = measure_job(backend, Job("a", too_wide))
    monkeypatch.setattr(backend, "programs", fail)
    second = measure_job(backend, Job("b", broken))
    assert first.value is None and first.error.endswith("[target-devices]")
    assert second.value is None and second.error.endswith(
        "for target='cpu': out of registers [target-refused]"
    )


def test_the_end_of_a_step_is_shared_by_replicas_and_micro_batches(backend):
    inner = backend.update_key(StageConfig(1, 3, ONE, 4))
    same = [
        StageConfig(0, 2, ONE, 4),
        StageConfig(1, 3, TWO, 4),
        StageConfig(1, 3, StageChoice(2, 1, "full"), 8),
    ]
    other = [
        StageConfig(1, 4, ONE, 4),
        StageConfig(1, 3, SPLIT, 4),
        StageConfig(1, 3, StageChoice(2, 1, "none", True), 4),
    ]
    assert {backend.update_key(config) for config in same} == {inner}
    assert len({inner, *map(backend.update_key, other)}) == 1 + len(other)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))],
)
@pytest.mark.parametrize("choice", [StageChoice(2, 1), StageChoice(2, 2), StageChoice(4, 1)])
def test_replicas_end_a_step_as_one_device_does(optimizer, choice):
    backend = CompileBackend(replace(mlp(num_blocks=5), optimizer=optimizer))
    config = StageConfig(1, 3, choice, 4)
    backend.traced(4)
    assert backend.measure_update(config) == backend.programs(config).update_cost


@given(groups=st.lists(st.integers(0, 3), max_size=12), num_workers=st.integers(1, 3))
def test_workers_stay_with_a_group_and_leave_no_job(groups, num_workers):
    waiting = Queue(
        [Job(str(i), StageConfig(0, 1, ONE, 2**group)) for i, group in enumerate(groups)]
    )
    left = Counter(job.group for jobs in waiting._groups.values() for job in jobs)
    at: list[Any] = [None] * num_workers
    for turn in range(len(groups)):
        worker = turn % num_workers
        job = waiting.take(at[worker])
        assert job.group == at[worker] or not left[at[worker]]
        left[job.group] -= 1
        at[worker] = job.group
    assert waiting.take(None) is None and not any(left.values())


# ---- the profile of a model ----------------------------------------------------------------------


def test_a_profile_in_this_process_measures_and_calibrates_by_another_seed():
    store, seen = Store(), []
    result = profile(
        ProfileQuestion(
            mlp(num_blocks=4),
            Cluster((1, 1)),
            microbatch_size=2,
            num_neighbours=1,
            calibration_plans=2,
            remat=("none",),
        ),
        store=store,
        progress=lambda what, done, total: seen.append((what, done, total)),
    )
    assert (
        result.choices == (ONE,) and result.microbatch_sizes == (1, 2) and result.workload is None
    )
    assert len(result.measurements) == (4 + 3) * 2 and result.failures == ()
    assert result.model_hashes[2] == result.graph.model_hash != result.model_hashes[1]
    assert result.calibration.seed == CALIBRATION_SEED and 0 < len(result.calibration.errors) <= 8
    assert 0 < len(result.calibration.size_errors) <= 4 and all(
        e.octaves == 1 for e in result.calibration.size_errors
    )
    totals = {what: total for what, _, total in seen}
    assert list(totals) == ["optimizer updates", "layer windows", "calibration", "other sizes"]
    assert all((what, done, total) in seen for what, total in totals.items() for done in (0, total))
    rows = len(store)
    # The end of a step of 1 to 4 equal layers.
    assert rows == sum(totals.values()) and totals["optimizer updates"] <= 4
    again = profile(
        ProfileQuestion(
            mlp(num_blocks=4),
            Cluster((1, 1)),
            microbatch_size=2,
            num_neighbours=1,
            calibration_plans=2,
            remat=("none",),
        ),
        store=store,
    )
    assert (
        len(store) == rows
        and again.measurements == result.measurements
        and again.calibration == result.calibration
    )


@pytest.mark.parametrize("task", [mlp(num_blocks=6), tied(dropout=False)], ids=["mlp", "tied"])
@pytest.mark.parametrize(
    "choice",
    [ONE, StageChoice(1, 2), StageChoice(2, 1), StageChoice(1, 2, sequence_parallel=True)],
    ids=str,
)
def test_stages_are_taken_for_the_same_program_just_if_they_are(task, choice):
    """What the layer graph says against the keys of the programs themselves."""
    backend = CompileBackend(task)
    sharding = backend.sharding(4)
    graph, sizes = sharding.graph([choice]), sharding.param_bytes(choice.param_split)
    stages = [(first, stop) for stop in range(1, graph.num_layers + 1) for first in range(stop)]
    signatures = [stage_signature(graph, *stage, sizes, choice.value_split) for stage in stages]
    keys = [backend.key(StageConfig(*stage, choice, 4)) for stage in stages]
    assert all(
        (a == b) == (x == y)
        for a, x in zip(signatures, keys, strict=True)
        for b, y in zip(signatures, keys, strict=True)
    )
    assert len(set(keys)) < len(keys) or graph.num_layers < 6


@pytest.mark.slow
def test_what_calibration_compiled_is_known_of_equal_stages_too():
    """Inner blocks are equal; the ends are not, and what the optimizer needs is not taken from
    elsewhere."""
    found = profile(
        ProfileQuestion(
            mlp(optax.adam(1e-3), num_blocks=6),
            Cluster((1, 1)),
            microbatch_size=4,
            num_neighbours=1,
            calibration_plans=4,
            remat=("none",),
        )
    )
    assert found.verified and not set(found.verified) & set(found.measurements)
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    compiled = StageConfig(1, 4, ONE, 4)
    cost = replace(
        next(iter(found.verified.values())),
        backward_bytes=10**7,
        update_bytes=10**8,
        kept_inputs=(0,),
        kept_outputs=(),
        kept_batch=(),
    )
    planted = AdditivePredictor(replace(found, verified={compiled: cost})).memory(ONE, 4)
    without = AdditivePredictor(replace(found, verified={})).memory(ONE, 4)
    for stage in [(1, 4), (2, 5)]:
        assert planted.backward[stage] == 10**7 != without.backward[stage]
    assert planted.update[1, 4] == 10**8 and planted.update[2, 5] == without.update[2, 5]
    for stage in [(0, 3), (3, 6), (1, 3), (2, 4)]:
        assert planted.backward[stage] == without.backward[stage]


def test_a_shared_parameter_is_predicted_as_the_runtime_needs_it():
    """The embedding is by far the largest tensor: its gradient comes back to the first stage, which
    then updates it."""
    task = tied(optax.sgd(0.1), dropout=False)
    found = profile(
        ProfileQuestion(
            task,
            Cluster((1, 1)),
            microbatch_size=2,
            num_neighbours=3,
            calibration_plans=0,
            remat=("none",),
        )
    )
    for cut in (1, 3):
        plan = pipeline([cut, found.graph.num_layers - cut], [(1, 1), (1, 1)])
        predicted = AdditivePredictor(found).predict(plan)
        compiled = pipeshard(task, plan).replay()
        assert predicted.peak_bytes_per_device == compiled.peak_bytes_per_device
        assert (
            "received gradients" in predicted.stages[0].parts_bytes
            or predicted.stages[0].instant != "update"
        )


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)], ids=["sgd", "momentum"]
)
def test_clearing_gradients_costs_no_copy_of_them(optimizer):
    """Of six blocks the update needs next to nothing: parameters, state and gradients are
    overwritten where they are."""
    backend = CompileBackend(mlp(optimizer, num_blocks=6))
    parameters = sum(backend.sharding(4).param_bytes((1, 1)))
    assert backend.measure_update(StageConfig(0, 6, ONE, 4)).update_bytes < 0.05 * parameters


def test_a_stage_that_the_profile_holds_calibrates_nothing():
    """Of two layers, every stage is a window: looking it up again says nothing of how far
    predictions are off."""
    result = profile(
        ProfileQuestion(
            mlp(num_blocks=2),
            Cluster((1,)),
            microbatch_size=1,
            num_neighbours=1,
            calibration_plans=2,
        )
    )
    assert result.failures == () and result.calibration is not None
    assert result.calibration.errors == () and result.calibration.coverage() is None


@pytest.mark.slow
def test_stages_may_split_parameters_and_activations_and_a_plan_is_never_the_worse_for_it():
    """By prediction and by replay of the compiled plans; and the profile survives its document."""
    task, cluster = mlp(optax.adam(1e-3), num_blocks=2), Cluster((2,))
    question = {"global_batch_size": 8, "num_microbatches": 2, "schedule": "1f1b"}
    found = profile(
        ProfileQuestion(
            task,
            cluster,
            microbatch_size=4,
            num_neighbours=1,
            calibration_plans=0,
            shard_params=True,
            sequence_parallel=True,
            remat=("none",),
        )
    )
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    kept = {c.choice: cost.residual_bytes for c, cost in found.measurements.items() if c.first == 0}
    assert kept[StageChoice(1, 2, sequence_parallel=True)] < kept[StageChoice(1, 2)]

    def only(allowed):
        chosen = {c: cost for c, cost in found.measurements.items() if allowed(c.choice)}
        return recommend(replace(found, measurements=chosen), PlanQuestion(cluster, **question))

    split, free, bound = (
        only(lambda choice: True),
        only(lambda choice: not choice.sequence_parallel),
        only(lambda choice: not (choice.sequence_parallel or choice.shard_params)),
    )
    assert split.plan is not None and free.plan is not None and bound.plan is not None
    assert [stage.choice.sequence_parallel for stage in split.plan.stages] == [True]
    assert [stage.choice.shard_params for stage in free.plan.stages] == [True]
    replayed = [
        max(pipeshard(task, plan).replay().peak_bytes_per_device)
        for plan in (split.plan, free.plan, bound.plan)
    ]
    assert replayed[0] < replayed[1] < replayed[2]
    for answer, peak in ((split, replayed[0]), (free, replayed[1])):
        assert answer.peak_bytes == pytest.approx(peak, rel=0.1)
    assert split.peak_bytes < free.peak_bytes < bound.peak_bytes


def test_what_fails_is_named_and_the_rest_is_kept(monkeypatch):
    programs_of = CompileBackend.programs

    def fail_on_pairs(self, config):
        if config.num_layers == 2:
            raise RuntimeError("no")
        return programs_of(self, config)

    monkeypatch.setattr(CompileBackend, "programs", fail_on_pairs)
    result = profile(
        ProfileQuestion(
            mlp(num_blocks=2),
            Cluster((1,)),
            microbatch_size=1,
            num_neighbours=1,
            calibration_plans=0,
            remat=("none",),
        )
    )
    pair = "layers 0 to 1, data parallel 1, tensor parallel 1, micro-batch size 1"
    assert result.failures == (
        f"{pair}: the model cannot be compiled for target='cpu': no [target-refused]",
    )
    with pytest.raises(ProfileError) as error:
        recommend(result, PlanQuestion(Cluster((1,)), global_batch_size=1, num_microbatches=1))
    assert str(error.value) == (
        f"the profile lacks {pair}, which predictions are built from:\nfailed: {pair}: the model "
        "cannot be compiled for target='cpu': no "
        "[profile-missing]"
    )
    assert {(c.first, c.stop) for c in result.measurements} == {(0, 1), (1, 2)}
    assert result.calibration is None


def test_what_fails_alike_is_named_once(monkeypatch):
    """For all choices and stages together, also in what predictions do without."""

    def fail_on_the_last(self, config):
        raise RuntimeError("no" if config.stop == 2 else "never")

    monkeypatch.setattr(CompileBackend, "programs", fail_on_the_last)
    result = profile(
        ProfileQuestion(
            mlp(num_blocks=2),
            Cluster((2,)),
            microbatch_size=4,
            num_neighbours=1,
            calibration_plans=0,
            remat=("none",),
        )
    )
    said = "the model cannot be compiled for target='cpu'"
    degrees = "data parallel 1, 2, tensor parallel 1, 2; micro-batch sizes 2, 4"
    assert result.failures == (
        f"12 stages (all with layer 1; {degrees}): {said}: no [target-refused]",
        f"6 stages (all with layer 0; {degrees}): {said}: never [target-refused]",
    )
    assert len(result.warnings) == 1
    with pytest.raises(ProfileError) as error:
        recommend(result, PlanQuestion(Cluster((2,)), global_batch_size=8, num_microbatches=2))
    assert (
        error.value.codes == ("profile-failed",)
        and "all with layer 1" in str(error.value)
        and "refused" not in str(error.value)
    )


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        TargetError, match=r"^backend='abacus' is unknown; .*compile:TARGET.* \[target-unknown\]$"
    ):
        profile(ProfileQuestion(mlp(), Cluster((1,)), microbatch_size=4, backend="abacus"))
