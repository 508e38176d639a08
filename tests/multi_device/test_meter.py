"""The meters agree with the replay byte for byte, and notice a buffer that outlives its last
use."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import mlp, pipeline, tied

import capture.runtime.process_memory
from capture.errors import ExecutionError
from capture.runtime.heap import measure_heap
from capture.runtime.meter import (
    LiveArrayMeter,
    allocator_peaks,
    buffers,
    measure_step,
)
from capture.runtime.pipeline import PipelinedStep, pipeshard
from capture.runtime.process_memory import HeapMeter, ResidentSetMeter
from capture.step.program import Run

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

CASES = {
    "one-device stages": lambda: (mlp(optax.adam(1e-3)), pipeline((1, 1, 1, 1), ((1, 1),) * 4)),
    "mixed degrees": lambda: (
        mlp(optax.adam(1e-3)),
        pipeline((2, 1, 1), ((1, 1), (2, 2), (2, 1)), shard_optimizer=True),
    ),
    "gpipe, dots": lambda: (
        mlp(),
        pipeline((2, 2), ((2, 1), (1, 2)), schedule="gpipe", remat="dots"),
    ),
    "1f1b, full": lambda: (
        mlp(optax.adafactor(1e-3)),
        pipeline((2, 2), ((1, 1), (2, 1)), remat="full"),
    ),
    "tied, skip, keys, clipped": lambda: (
        tied(CLIPPED),
        pipeline((1, 2, 1), ((2, 1), (1, 1), (2, 1))),
    ),
    "residuals shaped like gradients": lambda: (
        mlp(optax.adamw(1e-3)),
        pipeline((4,), ((1, 1),), global_batch_size=64),
    ),
    "residuals shaped like parts of gradients": lambda: (
        mlp(optax.adamw(1e-3)),
        pipeline((4,), ((1, 4),), global_batch_size=64),
    ),
    "keys in the optimizer": lambda: (
        mlp(optax.noisy_sgd(0.1, key=jax.random.key(3))),
        pipeline((3, 1), ((1, 1), (2, 1))),
    ),
}


#: Where other cases, or other files, have each of the parts.
EXHAUSTIVE = (
    *("one-device stages", "mixed degrees", "1f1b, full", "keys in the optimizer"),
    "residuals shaped like gradients",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ())
        for name in CASES
    ],
)
def test_measured_peaks_are_those_of_the_replay(name):
    workload, plan = CASES[name]()
    step = pipeshard(workload, plan)
    state, key = step.init(jax.random.key(0)), jax.random.key(2)
    batch = workload.batch(jax.random.key(1), plan.global_batch_size)
    bystander = jnp.ones(1000)  # not of the step
    for _ in range(2):
        measured = measure_step(step, state, batch, key, strict=True)
        state = measured.state
        assert measured.peak_bytes_per_device == step.replay().peak_bytes_per_device
    assert measured.meter == "live arrays + XLA buffer assignment of the running program (cpu)"
    assert measured.num_checks == len(step.program.instructions) + 1
    assert state.num_steps == 2
    del bystander


def test_between_steps_only_parameters_and_optimizer_state_live(small):
    batch, key = tied().batch(jax.random.key(1), 8), jax.random.key(2)
    jax.block_until_ready(batch)
    before = buffers(jax.live_arrays())
    state, metrics = small(small.init(jax.random.key(0)), batch, key)
    small.evaluate(state, batch, key)
    small.accumulate(state, batch, key)
    jax.block_until_ready(state)
    del metrics
    gc.collect()
    live = buffers(jax.live_arrays())
    params = tied().init(jax.random.key(0))
    # The last stage has a copy of the embedding; plain gradient descent has no state. What the loss
    # does not read stays where it was made.
    sizes = [array.nbytes for array in (*params.values(), params["embedding"])]
    assert sum(size for buffer, size in live.items() if buffer not in before) == sum(sizes)


@pytest.fixture(scope="module")
def small() -> PipelinedStep:
    return pipeshard(tied(), pipeline((2, 2), ((1, 1), (1, 1))))


def test_a_leaked_buffer_is_noticed(small):
    """The observer keeps what the first forward pass has sent."""
    meter, leaked = LiveArrayMeter.of(small, strict=True), []

    def observer(instruction, environment):
        if isinstance(instruction, Run) and instruction.label == "backward 0 on stage 0":
            residuals = next(
                n for n, slot in enumerate(small.program.slots) if slot.name == "residuals0.0@0"
            )
            leaked.extend(environment[residuals])
        meter(instruction, environment)

    with pytest.raises(ExecutionError) as error:
        small(
            small.init(jax.random.key(0)),
            tied().batch(jax.random.key(1), 8),
            jax.random.key(2),
            observer=observer,
        )
    assert error.value.codes == ("run-ledger-mismatch",)
    alive = sum(buffers(leaked).values())
    booked = meter._ledger.live_bytes[0]
    assert alive > 0
    assert str(error.value) == (
        f"before 'forward 1 on stage 1' device 0 holds {booked + alive} bytes of live arrays and the ledger "
        f"has booked {booked}; an array outlives "
        "its last use, or dies early: drop references to arrays of the step, or report a defect "
        "of the runtime. [run-ledger-mismatch]"
    )


def test_a_leak_raises_the_measured_peak(small):
    meter, leaked = LiveArrayMeter.of(small), []

    def observer(instruction, environment):
        meter(instruction, environment)
        if isinstance(instruction, Run) and instruction.label.startswith("forward 0"):
            leaked.append(jnp.zeros(100_000))

    _state, metrics = small(
        small.init(jax.random.key(0)),
        tied().batch(jax.random.key(1), 8),
        jax.random.key(2),
        observer=observer,
    )
    del metrics
    meter.finish()
    assert meter.num_checks == 0
    assert meter.peak_bytes_per_device[0] > 800_000 > small.replay().peak_bytes_per_device[0]


def test_shards_and_their_views_count_once():
    mesh = jax.make_mesh((4,), ("data",))
    array = jax.device_put(
        np.ones((8, 4), np.float32),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")),
    )
    views = [shard.data for shard in array.addressable_shards]
    assert sorted(buffers([array, *views]).values()) == [32] * 4
    array.delete()
    assert buffers([array]) == {}


def test_missing_meters_read_none(monkeypatch, small):
    assert allocator_peaks(jax.devices()[:2]) is None
    assert ResidentSetMeter().peak_bytes is None  # not started
    monkeypatch.setattr(capture.runtime.process_memory, "_malloc_reader", lambda: None)
    state, batch = small.init(jax.random.key(0)), tied().batch(jax.random.key(1), 8)
    state, _, heap = measure_heap(small, state, batch, jax.random.key(2))
    assert heap is None and state.num_steps == 1


def test_the_heap_meter_sees_what_is_gone_before_it_stops():
    meter = HeapMeter()
    meter.start()
    if meter.before_bytes is None:
        pytest.skip("this system's C library has no mallinfo2; glibc 2.33 and newer does")
    held = np.ones(50_000_000 // 8)
    meter()
    del held
    meter.stop()
    assert 49_000_000 < meter.peak_bytes - meter.before_bytes < 60_000_000


def test_resident_set_grows_with_what_is_touched():
    meter = ResidentSetMeter()
    meter.start()
    if meter.before_bytes is None:
        pytest.skip(
            "this system does not let VmHWM be reset; Linux with a writable /proc/self/clear_refs "
            "does"
        )
    np.ones(50_000_000 // 8)
    assert meter.peak_bytes is not None
    assert 45_000_000 < meter.peak_bytes - meter.before_bytes < 100_000_000
