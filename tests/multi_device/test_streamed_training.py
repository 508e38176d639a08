"""Packs of layers that stream through devices train as one device does, hold what is booked, and
give the same bits however they are cut and placed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import mark, mlp, pipeline, tied

from capture.errors import CaptureError, ExecutionError
from capture.machine.server import Server
from capture.model.workload import Workload
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Switches
from capture.runtime import checkpoint
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.pipeline import pipeshard
from capture.runtime.reference import ReferenceStep, max_relative_error, rounding_floor
from capture.runtime.streamed import StreamedStep, streamed
from capture.runtime.training import Training, train
from capture.step.streamed import volumes_bytes

CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3))
SERVER = Server.load("gtx1080ti-x4")


def packs_plan(
    backward=(2, 2), forward=(2,), sizes=(2, 2), devices=1, mode="pp", batch=8, without=()
) -> PacksPlan:
    """By layers per pack, and examples forward and backward."""
    configuration = Configuration(
        Packs.of_lengths(sizes[0], forward), Packs.of_lengths(sizes[1], backward)
    )
    server, switches = SERVER.with_(num_devices=devices), Switches.without(without)
    return PacksPlan(server, sum(backward), batch, mode, configuration, switches)


def compare(workload, plan, num_steps=3) -> StreamedStep:
    """Loss, gradients and parameters beside those of one device; in the last step the ledger beside
    live arrays of devices and host."""
    step = streamed(workload, plan)
    params = workload.init(jax.random.key(0))
    reference = ReferenceStep(workload, step.traced, step.microbatch_sizes)
    own, own_state = reference.init(params)
    floor = rounding_floor(step.traced.graph)
    state, meter = step.init_from(params), LiveArrayMeter.of(step, strict=True)
    for i in range(num_steps):
        batch = workload.batch(jax.random.key(10 + i), plan.minibatch_size)
        key = jax.random.key(100 + i)
        if i == 0:
            gradients = step.first_gradients(params, batch, key)
            _, expected = reference.loss_and_gradients(own, batch, key)
            assert max_relative_error(gradients, expected, floor) < 5e-6
        last = i == num_steps - 1
        jax.block_until_ready(state)
        state, metrics = step(state, batch, key, observer=meter if last else None)
        loss = metrics.loss
        del metrics  # its losses are live, and booked as released
        if last:
            meter.finish()
        own, own_state, expected_loss = reference(own, own_state, batch, key)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
    ledger = step.replay()
    assert meter.num_checks == len(step.program.instructions) + 1
    assert meter.peak_bytes_per_device == ledger.peak_bytes_per_device
    assert meter.peak_bytes_of("host") == ledger.peak_of("host").peak_bytes
    assert max_relative_error(step.params(state), own, floor) < 1e-5
    return step


def noisy() -> Workload:
    """Layers that JAX traces as other programs for one example, which it need not broadcast over; an
    optimizer whose state has a random key."""

    def init(key):
        return {"floor": jnp.zeros((3, 1, 8)), "w": jax.random.normal(key, (3, 8, 8)) / 3}

    def loss(params, x):
        for floor, w in zip(params["floor"], params["w"], strict=True):
            x = mark(jnp.where(x > 0, x, floor) @ w)
        return jnp.mean((x + 1) ** 2)

    optimizer = optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(1)), optax.sgd(0.1))
    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 8)), optimizer)


@pytest.mark.parametrize(
    ("workload", "plan"),
    [
        # Tied embedding, skip connection, dropout and a parameter that nobody reads.
        (tied, packs_plan((1, 2, 1), (2, 1), devices=2)),
        (tied(dropout=False), packs_plan((1, 1, 2), (2,), (3, 2), 2, batch=7)),
        (mlp(num_blocks=2), packs_plan((1, 1), (1,), devices=2, mode="dp", batch=5)),
        (tied, packs_plan((1, 2, 1), (2, 1), without=("offload", "grouping"))),
        (noisy, packs_plan((2, 2), (2,), (1, 2), 2, batch=5)),
        # Gradients that devices add, and those of a tied embedding, which the host keeps.
        (
            tied(optax.adam(1e-3), dropout=False),
            packs_plan((1, 2, 1), (2, 1), devices=3, mode="dp", without=("offload",)),
        ),
        (tied(CLIPPED), packs_plan((1, 2, 1), (2, 1), devices=2)),
    ],
    ids=["tied", "sizes", "dp", "device", "noisy", "dp-device", "clipped"],
)
def test_as_one_device(workload, plan):
    step = compare(workload() if callable(workload) else workload, plan)
    host = step.replay().peak_of("host").parts
    if step.updates_last:
        assert host["gradients"] >= host["parameters"]


def bits(workload, plan) -> bytes:
    step = streamed(workload, plan)
    state = step.init(jax.random.key(0))
    for i in range(2):
        state, _ = step(state, workload.batch(jax.random.key(5 + i), plan.minibatch_size))
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(step.params(state)))


def test_the_same_bits_however_they_are_cut():
    workload = mlp(optax.adamw(1e-3), num_blocks=3)
    plans = [
        packs_plan((1, 1, 1), (1, 1), batch=4),
        packs_plan((1, 2), (1,), (4, 2), 3, batch=4),
        packs_plan((2, 1), (2,), batch=4, without=("jit", "offload", "p2p", "prefetch")),
    ]
    assert len({bits(workload, plan) for plan in plans}) == 1


def test_equal_packs_compile_once_and_the_host_keeps_three_times_the_weights():
    step = streamed(mlp(optax.adam(1e-3)), packs_plan((1, 1, 1, 1), (1, 1, 1)))
    host = step.replay().peak_of("host")
    # One of each kind for the middle packs; the first has no input, and the last no cotangent.
    assert (step.programs.num_compiled, len(step.program.programs)) == (9, 15)
    weights = host.parts["parameters"]
    assert host.parts["optimizer"] == 2 * weights + 4 * 4  # and a step count per pack
    assert host.parts["gradients"] <= weights // 4


def test_a_state_comes_from_a_pipeline_and_goes_back(tmp_path):
    workload = mlp(optax.adam(1e-2), num_blocks=2)
    pipe = pipeshard(workload, pipeline((1, 1), ((1, 1),) * 2))
    packs = packs_plan((1, 1), (1,), devices=2)
    step = streamed(workload, packs)
    batch = workload.batch(jax.random.key(1), 8)
    expected, state = pipe.init(jax.random.key(0)), step.init(jax.random.key(0))
    for i in range(3):
        expected, _ = pipe(expected, batch)
        if i == 1:  # the second step is the other's
            other = pipe.restore(step.params(state), step.optimizer_state(state), state.num_steps)
            other, _ = pipe(other, batch)
            with pytest.raises(ExecutionError) as error:
                step(other, batch)
            assert error.value.codes == ("run-state",)
            state = step.restore(pipe.params(other), pipe.optimizer_state(other), other.num_steps)
        else:
            before = state
            state, _ = step(state, batch)
    assert state.num_steps == 3
    checkpoint.save(step, state, tmp_path)
    restored = checkpoint.restore(step, tmp_path)
    for name, arrays in state.slots.items():
        for one, two in zip(arrays, restored.slots[name], strict=True):
            assert two.sharding == one.sharding
            np.testing.assert_array_equal(one, two)
    with pytest.raises(ExecutionError) as error:
        step(before, batch)
    assert error.value.codes == ("run-state-consumed",)
    for one, two in zip(
        jax.tree.leaves(step.params(state)), jax.tree.leaves(pipe.params(expected)), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("workload", "plan", "code"),
    [
        (tied, packs_plan((1, 2, 1), (2, 1), (4, 2)), "packs-coupled"),
        (mlp, packs_plan((2, 1), (2,)), "plan-num-layers"),
        (mlp, packs_plan(devices=9), "run-devices"),
    ],
)
def test_what_cannot_run_is_said(workload, plan, code):
    with pytest.raises(CaptureError) as error:
        streamed(workload(), plan)
    assert error.value.codes == (code,)


def test_no_instruction_needs_more_than_the_devices_have():
    workload, plan = mlp(num_blocks=2), packs_plan((1, 1), (1,), batch=4)

    def peak(limit: int) -> int:
        machine = plan.machine.with_(usable_bytes=limit)
        step = streamed(workload, replace(plan, machine=machine))
        return max(step.replay().peak_bytes_per_device)

    most = peak(10**9)
    assert peak(most - 2000) <= most - 2000  # less is fetched before it is needed
    with pytest.raises(ExecutionError) as error:
        peak(10_000)
    assert error.value.codes == ("packs-device-memory",)
    with pytest.raises(ExecutionError) as error:
        server = plan.machine.with_(host_memory_bytes=10_000)
        streamed(workload, replace(plan, machine=server)).replay()
    assert error.value.codes == ("step-host-memory",)


def test_a_run_is_measured_beside_one_device():
    plan = packs_plan((1, 1), (1,), batch=5)  # the last micro-batch is smaller
    document = train(plan, mlp(num_blocks=2), Training(num_steps=2, check=True))
    assert document["max_relative_loss_error"] < 1e-6
    assert document["max_relative_gradient_error"] < 5e-6
    measured, host = document["measured_peak_bytes_per_device"], document["host"]
    assert document["ledger_checks"] and measured == document["replayed_peak_bytes_per_device"]
    assert host["measured_peak_bytes"] == host["replayed_peak_bytes"] > 0
    assert document["target"] == plan.machine.name and not document["is_target"]


def unet() -> Workload:
    """Three layers down, three up, each with the value of the one across."""

    def init(key):
        return jax.random.normal(key, (6, 8, 8)) / 3

    def loss(params, x):
        down = []
        for w in params[:3]:
            x = mark(jnp.tanh(x @ w))
            down.append(x)
        for w in params[3:]:
            x = mark(jnp.tanh(x @ w) + down.pop())
        return jnp.mean(x**2)

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 8)), optax.adam(1e-3))


def test_a_value_that_skips_packs_is_kept_once():
    step = compare(unet(), packs_plan((1,) * 7, (1,) * 6, batch=3))
    volumes, value = volumes_bytes(step.program), 3 * 8 * 4
    # Five are kept, and the sixth goes on to the pack of the loss; passes read 12 and 11.
    assert volumes["activation out"] == 6 * value
    assert volumes["activation in"] == 23 * value
