"""Data parallelism over virtual memory, run: trains as one device does, below its limit, and moves
what the estimator says."""

from __future__ import annotations

from collections import Counter

import jax
import optax
import pytest
from pipeline_models import mlp, tied

from capture.errors import ExecutionError, PlanError
from capture.machine.server import Server
from capture.papers.harmony.swapped_run import SwappedStep, swapped
from capture.papers.harmony.swapped_step import SwappedBuilder
from capture.papers.harmony.swapping import GpuMemory, run
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.reference import ReferenceStep
from capture.step.pack_times import volumes_bytes

SERVER = Server.load("gtx1080ti-x4")
WORKLOAD = mlp(optax.adam(1e-3), num_blocks=3)
NAMES = {"W": "weights", "K": "state", "dW": "gradients", "X": "activation", "dX": "gradient"}


def volumes(step: SwappedStep) -> dict[str, int]:
    """By tensor of the estimator; the batch is the input of the first layer."""
    found: Counter[str] = Counter(volumes_bytes(step.program))
    for way in ("in", "out"):
        found[f"activation {way}"] += found.pop(f"batch {way}", 0)
    tensors = {name: tensor for tensor, name in NAMES.items()}
    return {
        f"{tensors[name.rsplit(' ', 1)[0]]} {name.rsplit(' ', 1)[1]}": nbytes
        for name, nbytes in found.items()
        if nbytes
    }


def built(step: SwappedStep) -> SwappedBuilder:
    return SwappedBuilder(step.plan.tasks(), step._sizes, step.plan.machine)


def estimated(step: SwappedStep) -> dict[str, int]:
    builder = built(step)
    limit, count = builder.managed_bytes, len(step.devices)
    initial = [(0, tensor) for tensor in builder.initial]
    found = run(builder.operations, builder.nbytes, initial, GpuMemory(limit, 1.0, 1.0), alone=True)
    return {name: count * nbytes for name, nbytes in found.volumes_bytes.items() if nbytes}


def test_as_one_device_and_as_estimated():
    devices = 2
    least = swapped(WORKLOAD, SERVER.with_(num_devices=devices), 4, 1)
    builder = built(least)
    needs = max(operation.need(builder.nbytes) for operation in builder.operations)
    server = SERVER.with_(num_devices=devices, usable_bytes=needs + 1000)
    step = swapped(WORKLOAD, server, 4, 1, fast_compile=True)
    params = WORKLOAD.init(jax.random.key(0))
    reference = ReferenceStep(WORKLOAD, step.traced, step.microbatch_sizes)
    own, own_state = reference.init(params)
    state, meter = step.init_from(params), LiveArrayMeter.of(step, strict=True)
    for i in range(2):
        batch = WORKLOAD.batch(jax.random.key(10 + i), 4)
        jax.block_until_ready(state)
        state, metrics = step(state, batch, observer=meter if i else None)
        found = metrics.loss
        del metrics  # its losses are live, and booked as released
        if i:
            meter.finish()
        own, own_state, loss = reference(own, own_state, batch)
        assert found == pytest.approx(loss, rel=1e-6)
    peaks = step.replay().peak_bytes_per_device
    assert meter.peak_bytes_per_device == peaks
    assert max(peaks) <= server.usable_bytes.value
    moved = volumes(step)
    assert moved == estimated(step)
    weights = sum(tensor.nbytes for tensor in step.traced.graph.params)
    assert moved["W in"] > devices * weights  # some came twice


def test_what_a_manager_cannot_take():
    with pytest.raises(PlanError) as error:
        swapped(WORKLOAD, SERVER.with_(num_devices=2), 5, 2)
    assert error.value.codes == ("swap-batch",)
    with pytest.raises(PlanError) as error:
        swapped(tied(dropout=False), SERVER.with_(num_devices=1), 4, 2)
    assert error.value.codes == ("swap-shared",)
    small = SERVER.with_(num_devices=1, usable_bytes=1000)
    with pytest.raises(ExecutionError) as error:
        swapped(WORKLOAD, small, 2, 2).replay()
    assert error.value.codes == ("packs-device-memory",)
