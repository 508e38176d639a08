"""A training goes on under another plan as if nothing had happened, and a checkpoint of another
model is refused leaf by leaf."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from pipeline_models import mlp, pipeline, tied

from capture.errors import ExecutionError
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.checkpoint_models import PARTS, Models
from capture.runtime.hosts import saving
from capture.runtime.hosts.saved import MARKER, complete_steps
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.reference import max_relative_error
from capture.runtime.training import train as train_plan
from capture.tracing.keys import words

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.noisy_sgd(0.1, key=jax.random.key(3)), optax.trace(0.9)
)


def train(step: PipelinedStep, state, num_steps: int):
    batch = step.workload.batch(jax.random.key(1), 8)
    for _ in range(num_steps):
        state, metrics = step(state, batch, jax.random.key(state.num_steps))
    return state, metrics.loss


@pytest.fixture(scope="module")
def small() -> PipelinedStep:
    return pipeshard(mlp(), pipeline((2, 2), ((1, 1), (1, 1))))


def test_a_training_continues_under_another_plan(tmp_path):
    first = pipeshard(tied(OPTIMIZER), pipeline((1, 3), ((1, 1), (2, 1))))
    other = pipeshard(
        tied(OPTIMIZER),
        pipeline(
            (2, 1, 1),
            ((2, 1), (1, 2), (1, 1)),
            schedule="gpipe",
            remat="full",
            shard_optimizer=True,
        ),
    )
    state, _ = train(first, first.init(jax.random.key(0)), 2)
    assert checkpoint.save(first, state, tmp_path / "run") == tmp_path / "run" / "2"
    restored = checkpoint.restore(other, tmp_path / "run")
    assert restored.num_steps == 2
    assert max_relative_error(other.params(restored), first.params(state)) == 0
    expected, expected_loss = train(first, state, 1)
    continued, loss = train(other, restored, 1)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert max_relative_error(other.params(continued), first.params(expected)) < 1e-6
    keys = [
        jax.random.key_data(k)
        for k in map(
            _first_key, (other.optimizer_state(continued), first.optimizer_state(expected))
        )
    ]
    np.testing.assert_array_equal(*keys)


def _first_key(tree):
    return next(
        leaf
        for leaf in jax.tree.leaves(tree)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def test_old_checkpoints_go_and_the_latest_is_read(small, tmp_path):
    state = small.init(jax.random.key(0))
    for _ in range(3):
        state, _ = train(small, state, 1)
        checkpoint.save(small, state, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert checkpoint.restore(small, tmp_path).num_steps == 3
    assert checkpoint.restore(small, tmp_path, num_steps=2).num_steps == 2
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(small, tmp_path, num_steps=1)
    assert str(error.value) == (
        f"{str(tmp_path)!r} holds no checkpoint of step 1; complete ones: 2, 3. "
        "[checkpoint-missing]"
    )
    with pytest.raises(ExecutionError) as error:
        checkpoint.save(small, state, tmp_path)
    assert str(error.value) == (
        f"{str(tmp_path)!r} holds a checkpoint of step 3, and this state is at step 3; save it "
        "into another directory, or restore from "
        "this one first. [checkpoint-exists]"
    )


def test_an_interrupted_save_loses_nothing(small, tmp_path, monkeypatch):
    state, _ = train(small, small.init(jax.random.key(0)), 1)
    checkpoint.save(small, state, tmp_path, keep=1)
    kept = small.params(state)
    state, _ = train(small, state, 1)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # the arrays are written, the marker is not
        patch.setattr(saving.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(small, state, tmp_path, keep=1)
    restored = checkpoint.restore(small, tmp_path)
    assert restored.num_steps == 1
    assert max_relative_error(small.params(restored), kept) == 0
    (tmp_path / "9").mkdir()  # of several processes that were killed
    checkpoint.save(small, state, tmp_path, keep=1)
    assert checkpoint.restore(small, tmp_path).num_steps == 2


def test_a_training_saves_as_it_goes_and_passes_over_what_is_damaged(tmp_path):
    plan, model, said = pipeline((2,), ((1, 1),)), mlp(num_blocks=2), list[str]()
    saving = Training(num_steps=3, save=tmp_path, save_every=2)
    whole = train_plan(plan, model, saving)
    assert whole["saved"] == str(tmp_path / "3") and complete_steps(tmp_path) == [2, 3]
    with pytest.raises(ExecutionError) as error:
        train_plan(plan, model, saving)
    assert error.value.codes == ("checkpoint-exists",)
    shutil.rmtree(tmp_path / "3" / "state")
    (tmp_path / "4").mkdir()  # of a save that was killed
    again = replace(saving, restore=tmp_path, until=4)
    going_on = train_plan(plan, model, again, said.append)
    assert going_on["losses"][0] == whole["losses"][2]
    assert complete_steps(tmp_path) == [2, 4] and (tmp_path / "3.unreadable").is_dir()
    assert "step 4 in" in said[1] and "was not written to its end" in said[1]
    assert "step 3 in" in said[2] and said[2].endswith("going on from that of step 2")
    assert train_plan(plan, model, again)["losses"] == [], "it is at its end"


def test_what_one_process_of_an_earlier_version_wrote_is_read(tmp_path):
    """By Orbax's manager, with metadata in the place of the marker and no sums."""
    step = pipeshard(tied(OPTIMIZER), pipeline((1, 3), ((1, 1), (2, 1))))
    state, _ = train(step, step.init(jax.random.key(0)), 1)
    marker = json.loads((checkpoint.save(step, state, tmp_path / "new") / MARKER).read_text())
    assert list(marker["items"]) == ["state"] and marker["files"]
    metadata = {name: marker[name] for name in ("schema_version", "num_steps", *PARTS)}
    leaves = zip(PARTS, Models(step).leaves(state), strict=True)
    stored = {part: {path: np.asarray(words(x)) for path, x in own.items()} for part, own in leaves}
    old = (tmp_path / "old").resolve()
    with ocp.CheckpointManager(old, item_names=("state", "metadata")) as manager:
        parts = {"state": ocp.args.StandardSave(stored), "metadata": ocp.args.JsonSave(metadata)}
        manager.save(1, args=ocp.args.Composite(**parts))
        manager.wait_until_finished()
    assert not (old / "1" / MARKER).exists() and complete_steps(old) == [1]
    read, again = (checkpoint.restore(step, folder) for folder in (old, tmp_path / "new"))
    assert max_relative_error(step.params(read), step.params(state)) == 0
    for one, other in zip(*map(jax.tree.leaves, (read.slots, again.slots)), strict=True):
        np.testing.assert_array_equal(words(one), words(other))
    state, _ = train(step, read, 1)
    assert checkpoint.save(step, state, old) == old / "2" and complete_steps(old) == [1, 2]


def test_another_model_or_optimizer(small, tmp_path):
    checkpoint.save(small, small.init(jax.random.key(0)), tmp_path)
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(pipeshard(mlp(num_blocks=3), pipeline((3,), ((1, 1),))), tmp_path)
    assert str(error.value) == (
        "the checkpoint has [3]['bias'] float32[64] and the model no [3]['bias']. "
        "[checkpoint-other-model]\n"
        "the checkpoint has [3]['down'] float32[64, 16] and the model no [3]['down']. "
        "[checkpoint-other-model]\n"
        "the checkpoint has [3]['up'] float32[16, 64] and the model no [3]['up']. "
        "[checkpoint-other-model]"
    )
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(
            pipeshard(mlp(optax.sgd(0.1, momentum=0.9)), pipeline((4,), ((1, 1),))), tmp_path
        )
    assert set(error.value.codes) == {"checkpoint-other-optimizer"}
    assert str(error.value.violations[0]) == (
        "the checkpoint has no [0].trace[0]['bias'] and the model's optimizer state "
        "[0].trace[0]['bias'] float32[64]. "
        "[checkpoint-other-optimizer]"
    )


def test_missing_and_newer_checkpoints(small, tmp_path):
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(small, tmp_path / "nowhere")
    assert str(error.value) == (
        f"checkpoint directory {str(tmp_path / 'nowhere')!r} does not exist. [checkpoint-missing]"
    )
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(small, tmp_path)
    assert str(error.value) == (
        f"{str(tmp_path)!r} holds no complete checkpoint; complete ones: none. [checkpoint-missing]"
    )
    path = checkpoint.save(small, small.init(jax.random.key(0)), tmp_path) / MARKER
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    with pytest.raises(ExecutionError) as error:
        checkpoint.restore(small, tmp_path)
    assert str(error.value) == (
        f"checkpoint {str(tmp_path / '0')!r} has schema_version=9; this version of capture reads "
        "1. The file is of a newer version: update capture. [checkpoint-schema]"
    )
