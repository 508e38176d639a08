"""The step by which a sharding plan is executed: its replay, the compiler's number and the live
arrays are one number; its state goes on under other plans, of other kinds too."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from pipeline_models import mlp as marked_mlp
from pipeline_models import pipeline
from sharded_models import WORKLOADS, sharded_by, two_nodes

from capture.compiler.executable import Compiler
from capture.errors import ExecutionError, WorkloadError
from capture.machine.cluster import Cluster
from capture.plan.sharding import DP, ZDP, Mode
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.meter import measure_step
from capture.runtime.pipeline import pipeshard
from capture.runtime.reference import max_relative_error
from capture.runtime.sharded import Sharded
from capture.runtime.sharded.step import ShardedStep
from capture.runtime.training import train
from capture.step.program import Feed, Free, Run, Step
from tests.step_judge import judge

WORKLOADS["marked"] = lambda: marked_mlp(optax.adamw(1e-3))
PARTS = {
    "mlp": (DP, ZDP, Mode(4, 2)),
    "scan": (ZDP,),
    "convolutions": (ZDP, DP),
    "moe": (ZDP, Mode(2, 2)),
    "marked": (Mode(2, 1), DP, ZDP),
}


def step_of(name: str, *modes: Mode, **options) -> ShardedStep:
    """A step that is compiled fast, of operators in these modes in turn."""
    return ShardedStep(sharded_by(name, *modes, **options), Compiler(fast_compile=True))


def trained(step: ShardedStep, state, num_steps: int = 1):
    """The state after some steps, and the last loss."""
    for n in range(num_steps):
        batch = step.workload.batch(jax.random.key(n), *step.microbatch_sizes)
        state, metrics = step(state, batch)
    return state, metrics.loss


def equal(one, other) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))
    )


@pytest.mark.parametrize("name", PARTS)
def test_live_arrays_are_what_is_booked_and_the_peak_is_the_compilers(name):
    step = step_of(name, *PARTS[name])
    judge(step.program)
    assert [type(each) for each in step.program.instructions] == [Feed, Run, Free, Free]
    state = step.init(jax.random.key(0))
    batch = step.workload.batch(jax.random.key(1), *step.microbatch_sizes)
    first = step.workload.loss_fn(step.params(state), batch)
    measured = measure_step(step, state, batch, strict=True)
    assert measured.loss == pytest.approx(float(first), rel=2e-3)
    ledger = step.replay()
    assert measured.live_peak_bytes_per_device == ledger.peak_bytes_per_device
    parts, program = dict(ledger.peaks[0].parts), step.executable(step.program.runs[0])
    assert parts.pop("temporaries") == program.transient_bytes
    beside = sum(parts.values()) - program.call.memory_analysis().argument_size_in_bytes
    assert beside == (272 if name == "moe" else 0)  # Adafactor's placeholders, which nobody reads
    assert measured.num_checks == len(step.program.instructions) + 1


def test_an_array_that_outlives_the_step_is_seen(monkeypatch):
    step = step_of("mlp", ZDP)
    kept, split = [], ShardedStep.bind

    def leaking(self, program: Step):
        bound = split(self, program)
        inner = bound._actions[1]

        def action(frame):
            inner(frame)
            kept.append(frame.slots[program.persistent["optimizer"]][1] + 1)

        bound._actions[1] = action
        return bound

    monkeypatch.setattr(ShardedStep, "bind", leaking)
    state = step.init(jax.random.key(0))
    batch = step.workload.batch(jax.random.key(1), *step.microbatch_sizes)
    with pytest.raises(ExecutionError, match="run-ledger-mismatch"):
        measure_step(step, state, batch, strict=True)
    assert kept


def test_a_step_goes_on_under_another_plan_of_its_model(tmp_path):
    """Rows that were sharded are replicated, and the other way round; so is the state of the
    optimizer. What is saved is the whole model's, whatever the plan."""
    for name, one, other in (
        ("mlp", (Mode(4, 2), DP), (ZDP, Mode(2, 1))),
        ("scan", (ZDP,), (DP,)),
        ("mlp", (ZDP,), (Mode(4, 4),)),
    ):
        first, second = step_of(name, *one), step_of(name, *other)
        state, _ = trained(first, first.init(jax.random.key(0)), 2)
        folder = tmp_path / f"{name}{len(one)}"
        checkpoint.save(first, state, folder)
        restored = checkpoint.restore(second, folder)
        assert restored.num_steps == 2
        assert equal(second.params(restored), first.params(state))
        assert equal(second.optimizer_state(restored), first.optimizer_state(state))
        (a, loss), (b, again) = trained(first, state), trained(second, restored)
        assert loss == pytest.approx(again, rel=1e-5)
        assert max_relative_error(second.params(b), first.params(a)) < 1e-4


def test_state_of_other_shapes_than_its_parameter_is_replicated_and_comes_back():
    """Rows and columns of Adafactor."""
    sharded = sharded_by("chain", ZDP)
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    workload, traced = replace(sharded.workload, optimizer=optimizer), sharded.traced
    whole = Sharded(workload, sharded.plan, sharded.mesh, traced)
    step = ShardedStep(whole, Compiler(fast_compile=True))
    state, _ = trained(step, step.init(jax.random.key(0)))
    rows = [x for x in state.slots["optimizer"] if x.shape == (64,)]
    assert len(rows) == 6 and all(x.sharding.is_fully_replicated for x in rows)
    back = step.restore(step.params(state), step.optimizer_state(state), 1)
    assert all(map(equal, back.slots.values(), state.slots.values()))


def test_a_training_goes_on_in_a_pipeline_and_comes_back(tmp_path):
    sharded = step_of("marked", *PARTS["marked"])
    stages = pipeshard(sharded.workload, pipeline((2, 2), ((1, 1), (2, 1))))
    state, _ = trained(sharded, sharded.init(jax.random.key(0)), 2)
    checkpoint.save(sharded, state, tmp_path / "one")
    piped = checkpoint.restore(stages, tmp_path / "one")
    assert equal(stages.params(piped), sharded.params(state))
    assert equal(stages.optimizer_state(piped), sharded.optimizer_state(state))
    checkpoint.save(stages, piped, tmp_path / "two")
    back = checkpoint.restore(sharded, tmp_path / "two")
    assert all(map(equal, back.slots.values(), state.slots.values()))


def test_what_could_not_be_saved_is_refused_before_it_is_trained(tmp_path):
    """The state of an optimizer that asks for a whole leaf, of which a scan stacks the layers."""
    sharded = sharded_by("scan", DP)
    workload = replace(sharded.workload, optimizer=optax.adafactor(1e-3))
    plan, said = replace(sharded.plan, cluster=Cluster((8,), "cpu")), list[str]()
    with pytest.raises(WorkloadError, match="optimizer-stacked"):
        train(plan, workload, Training(num_steps=1, save=tmp_path / "never"), said.append)
    assert said == ["compiling the step"]


def test_gradients_are_those_of_one_device_on_two_nodes():
    step = step_of("mlp", Mode(1, 1, 4), DP, mesh=two_nodes())
    params = step.workload.init(jax.random.key(0))
    batch = step.workload.batch(jax.random.key(1), *step.microbatch_sizes)
    expected = jax.grad(step.workload.loss_fn)(params, batch)
    assert max_relative_error(step.first_gradients(params, batch), expected) < 1e-4


def test_a_batch_of_another_size_is_refused():
    step = step_of("mlp", ZDP)
    state = step.init(jax.random.key(0))
    with pytest.raises(ExecutionError, match="run-batch"):
        step(state, step.workload.batch(jax.random.key(1), 3))
