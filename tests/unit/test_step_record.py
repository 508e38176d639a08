"""The records of finished steps: what a step has done, by its layer graph, and where it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from synthetic_graphs import chain

from capture.machine.target import Target
from capture.model.graph import Tensor
from capture.model.workload import Workload
from capture.plan.step_work import StepWork
from capture.runtime.step_record import Records, StepRecord
from capture.tracing import trace


def graph(**changes):
    """Return a chain of layers with some FLOPs, of ids of sequences of 16."""
    given = chain(2)
    layers = tuple(replace(layer, flops=10**12) for layer in given.layers)
    size = given.microbatch_size
    batch = (Tensor("ids", (size, 16), "int32", 0), Tensor("label", (size,), "int32", 0))
    return replace(given, **{"layers": layers, "batch": batch} | changes)


def uncast(of, examples):
    """Return a model with the layers of a graph, which reads its parameters as they are, and its
    examples in a step."""
    return of, (None,) * len(of.params), examples


def test_work_is_that_of_all_models_and_devices():
    """Three passes of FLOPs over the rate of what passes between the layers, and not of the
    parameters; a graph of any micro-batch size counts for the examples of the step."""
    rates, of = Target.load("h100").rates, graph()
    values = tuple(replace(value, dtype="bfloat16") for value in of.values)
    of = replace(of, values=values)
    size = of.microbatch_size
    work = StepWork.of([uncast(of, 2 * size), uncast(of, size)], 4, rates)
    assert (work.examples, work.tokens) == (3 * size, 3 * size * 16)
    rate = rates.flops_per_second["bfloat16"].value
    assert work.least_seconds == pytest.approx(3 * 3 * 2 * 10**12 / rate / 4)
    record = StepRecord.of(work, 7, 0.5, 2 * work.least_seconds, 10**9)
    assert record.model_flops_utilization == pytest.approx(0.5)
    assert record.examples_per_second == pytest.approx(work.examples / record.seconds)
    assert str(record).startswith("step 7: loss 0.500000, ") and "tokens/s, MFU 50.0%" in str(
        record
    )
    assert str(record).endswith(", peak 1 GB")
    metered = StepRecord.of(work, 7, 0.5, 1.0, None, metered=True)
    assert metered.metered and str(metered).endswith(" (measured meanwhile)")


@pytest.mark.parametrize("cast", [True, False])
def test_a_single_layer_computes_in_what_it_reads_its_largest_parameter_in(cast):
    """The loss, which is all that it hands on, is summed in float32 whatever the products are."""
    dtype = "float32" if cast else "bfloat16"

    def init(key):
        return {"w": jnp.zeros((256, 256), dtype), "scale": jnp.ones(())}

    def loss_fn(params, x):
        made = x.astype("bfloat16") @ params["w"].astype("bfloat16")
        return jnp.mean(made.astype("float32") ** 2) * params["scale"]

    workload = Workload(loss_fn, init, lambda key, n: jnp.ones((n, 256)), optax.sgd(0.1))
    traced, rates = trace(workload, 4, num_layers=1), Target.load("h100").rates
    (layer,) = traced.graph.layers
    products = 2 * 4 * 256 * 256
    assert products <= layer.flops < 1.01 * products
    work = StepWork.of([(traced.graph, traced.casts, 8)], 1, rates)
    rate = rates.flops_per_second["bfloat16"].value
    assert work.least_seconds == pytest.approx(3 * 2 * layer.flops / rate)


def test_a_single_layer_without_parameters_has_work():
    of = replace(graph(), layers=graph().layers[:1], params=())
    assert StepWork.of([uncast(of, 4)], 1, Target.load("h100").rates).least_seconds


def test_what_is_not_known_is_not_said():
    size = graph().microbatch_size
    batch = (Tensor("x", (size, 16), "float32", 0), Tensor("label", (size,), "int32", 0))
    work = StepWork.of([uncast(graph(batch=batch), 8)], 1, None)
    record = StepRecord.of(work, 1, [0.5, 0.25], 2.0, None)
    assert record == StepRecord(1, [0.5, 0.25], 2.0, 4.0)
    assert str(record) == "step 1: losses 0.500000 0.250000, 2 s, 4 examples/s"


def test_every_record_is_in_the_file_and_some_are_reported(tmp_path):
    lines, given, path = [], [], tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    records = Records(lines.append, 3, path, given.append)
    for step in range(1, 6):
        records.add(StepRecord(step, 1.0 / step, 0.1, 10.0), is_last=step == 5)
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 5"]
    assert given == records.told and len(given) == 5
    _, *written = map(json.loads, path.read_text().splitlines())
    assert [StepRecord(**row) for row in written] == given


def test_a_loss_that_is_no_number_is_null_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = Records(lambda line: None, 1, path, lambda record: None)
    records.add(StepRecord(1, [float("nan"), 1.0], 0.1, 10.0), is_last=True)
    assert '"loss": [null, 1.0]' in path.read_text()
