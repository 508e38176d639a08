"""The loop of all kinds of trainings: data of the user's own, and where they end."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import islice

import jax
import numpy as np
import pytest
from array_models import array_plan, batches_of, tiny_gpt
from pipeline_models import mlp

from capture import Cluster, Plan, Stage, StageChoice
from capture.errors import CaptureError, ExecutionError
from capture.runtime.asked import Training
from capture.runtime.hosts.saved import complete_steps
from capture.runtime.training import train


def stages_plan() -> Plan:
    """Two stages on two devices."""
    stages = (Stage(0, 2, (0,), StageChoice()), Stage(2, 3, (1,), StageChoice()))
    return Plan(
        cluster=Cluster((2,)), num_layers=3, stages=stages, global_batch_size=8, num_microbatches=2
    )


def batches(seed: int):
    workload = mlp(num_blocks=3)
    return (workload.batch(jax.random.fold_in(jax.random.key(seed), n), 8) for n in range(100))


def trained(data, num_steps=4, **asked):
    return train(
        stages_plan(), mlp(num_blocks=3), Training(num_steps, fast_compile=True, **asked), data=data
    )


def test_any_iterator_is_data_and_is_read_one_batch_ahead_at_most():
    read, threads = [], set()

    def reader():
        for n, batch in enumerate(batches(7)):
            read.append(n)
            threads.add(threading.current_thread())
            yield jax.tree.map(np.asarray, batch)

    steps = []
    found = train(
        stages_plan(),
        mlp(num_blocks=3),
        Training(6, fast_compile=True),
        data=reader(),
        on_step=lambda record: steps.append((record.step, len(read), record.metered)),
    )
    assert [metered for *_, metered in steps] == [True, False, False, False, False, True]
    assert [step for step, *_ in steps] == list(range(1, 7))
    assert all(step <= taken <= step + 1 for step, taken, _ in steps) and len(read) == 6
    assert len(threads) > 1, "some are drawn beside a step"
    checked = trained(list(batches(7)), 6, check=True)
    assert checked["losses"] == found["losses"]
    assert checked["losses"] == pytest.approx(checked["reference_losses"], rel=1e-6)
    assert trained(None, 6)["losses"] != found["losses"]


@pytest.mark.parametrize("often", [None, 1, 2])
def test_data_that_end_end_the_training_and_its_last_state_is_saved(tmp_path, often):
    lines = []
    found = train(
        stages_plan(),
        mlp(num_blocks=3),
        Training(5, fast_compile=True, save=tmp_path, save_every=often),
        lines.append,
        data=islice(batches(7), 3),
    )
    assert len(found["losses"]) == found["num_steps"] == complete_steps(tmp_path)[-1] == 3
    assert lines[-1] == "the data have ended after step 3, of 5 that were asked for"
    for check in (False, True):
        with pytest.raises(ExecutionError) as error:
            trained(iter(()), check=check)
        assert error.value.codes == ("run-data",)


def test_an_error_of_the_data_is_the_users():
    def reader():
        yield from islice(batches(7), 2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trained(reader())


@pytest.mark.parametrize(("begin", "read", "kept"), [(0, 2, [2]), (0, 0, []), (1, 2, [1, 2])])
def test_an_error_of_the_data_loses_no_step(tmp_path, begin, read, kept):
    """Whether a batch is drawn beside a step or before it; and what is saved goes on alike."""

    def reader():
        yield from islice(batches(7), begin, read)
        raise OSError("the disk is gone")

    lines, going_on = [], Training(4, fast_compile=True, save=tmp_path)
    if begin:
        trained(islice(batches(7), begin), begin, save=tmp_path)
        going_on = replace(going_on, num_steps=4 - begin, restore=tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        train(stages_plan(), mlp(num_blocks=3), going_on, lines.append, data=reader())
    assert complete_steps(tmp_path) == kept
    if read:
        assert (
            lines[-1] == f"an error of the data after step {read}; state -> {tmp_path / str(read)}"
        )
        rest = trained(islice(batches(7), read, 4), 4 - read, restore=tmp_path)
        assert rest["losses"] == trained(batches(7))["losses"][read:]


@pytest.mark.parametrize("order", ["multiplexed", "in turn"])
def test_an_array_reads_batches_of_its_models(tmp_path, order):
    plan, workload = array_plan(order=order), tiny_gpt(2)
    given = batches_of(workload, 5)
    path = tmp_path / "metrics.jsonl"
    asked = Training(5, fast_compile=True, metrics=path)
    found = train(plan, workload, asked, data=iter(given[:3]))
    whole = train(plan, workload, Training(3, check=True, fast_compile=True), data=given)
    assert found["losses"] == whole["losses"] and found["num_steps"] == 3
    assert whole["max_relative_loss_error"] < 1e-6
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == found["losses"]
    with pytest.raises(CaptureError) as error:
        train(plan, workload, Training(2, fast_compile=True), data=iter([given[0][:1]]))
    assert error.value.codes == ("array-count",)
