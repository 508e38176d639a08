"""Packs of layers that stream through devices train as one device does, hold what is booked, and
give the same bits however they are cut and placed."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipeline_models import _normals, mark, mlp, pipeline, tied
from processes import REPOSITORY, environment_apart, output_of

from capture.cli.main import main
from capture.cli.tiny_gpt import gpt
from capture.errors import CaptureError, ExecutionError
from capture.machine.server import Server
from capture.model.workload import Workload, WorkloadSpec
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Swaps, Switches
from capture.runtime import checkpoint
from capture.runtime.asked import Training
from capture.runtime.dispatch import BoundStep
from capture.runtime.frame import Frame
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.pipeline import pipeshard
from capture.runtime.reference import ReferenceStep, max_relative_error, rounding_floor
from capture.runtime.streamed import StreamedStep, streamed
from capture.runtime.training import train
from capture.step.ledger import Ledger
from capture.step.pack_times import volumes_bytes
from capture.step.program import Run, Step, replay

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


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


def exhaustive(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def sharing(plan: PacksPlan) -> PacksPlan:
    """The same, with swaps in shares."""
    return replace(plan, swaps=Swaps(sharded=True))


@pytest.mark.parametrize(
    ("workload", "plan"),
    [
        # Tied embedding, skip connection, dropout and a parameter that nobody reads.
        (tied, packs_plan((1, 2, 1), (2, 1), devices=2)),
        exhaustive(tied(dropout=False), packs_plan((1, 1, 2), (2,), (3, 2), 2, batch=7)),
        (mlp(num_blocks=2), packs_plan((1, 1), (1,), devices=2, mode="dp", batch=5)),
        exhaustive(tied, packs_plan((1, 2, 1), (2, 1), without=("offload", "grouping"))),
        slow(noisy, packs_plan((2, 2), (2,), (1, 2), 2, batch=5)),
        # Gradients that devices add, and those of a tied embedding, which the host keeps.
        slow(
            tied(optax.adam(1e-3), dropout=False),
            packs_plan((1, 2, 1), (2, 1), devices=3, mode="dp", without=("offload",)),
        ),
        exhaustive(tied(CLIPPED), packs_plan((1, 2, 1), (2, 1), devices=2)),
        # Shares that are filled up, of devices with unequal numbers of micro-batches.
        (mlp(num_blocks=2), sharing(packs_plan((1, 1), (1,), (2, 1), 3, "dp", 7))),
        slow(
            tied(CLIPPED, dropout=False),
            sharing(packs_plan((1, 2, 1), (2, 1), devices=2, mode="dp", without=("jit",))),
        ),
    ],
    ids=[
        *("tied", "sizes", "dp", "device", "noisy", "dp-device", "clipped"),
        *("shares", "clipped-shares"),
    ],
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


@pytest.mark.slow
def test_the_same_bits_however_they_are_cut():
    workload = mlp(optax.adamw(1e-3), num_blocks=3)
    plans = [
        packs_plan((1, 1, 1), (1, 1), batch=4),
        packs_plan((1, 2), (1,), (4, 2), 3, batch=4),
        packs_plan((2, 1), (2,), batch=4, without=("jit", "offload", "p2p", "prefetch")),
    ]
    assert len({bits(workload, plan) for plan in plans}) == 1


def test_devices_that_wait_alone_compute_the_same(monkeypatch):
    """No copy ever seems to have ended before the host has to wait for it."""
    workload = mlp(optax.adam(1e-3), num_blocks=2)
    plan = packs_plan((1, 1), (1,), devices=2, mode="dp", batch=6, without=("offload",))
    step, found, batch = streamed(workload, plan), list[Any](), workload.batch(jax.random.key(5), 6)

    def never(self: BoundStep, frame: Frame, number: int) -> bool | None:
        waits.append(number)
        return False if number in self._held else None

    for bound in (True, False):
        waits = list[int]()
        monkeypatch.setattr(BoundStep, "_over", never)
        step.bound_run_ahead, state = bound, step.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = step(state, batch)
        found.append([metrics.loss, *map(np.asarray, jax.tree.leaves(step.params(state)))])
        assert bound == (not waits)
    assert all(map(np.array_equal, *found))


@functools.cache
def switched(off: str = "") -> tuple[bytes, dict[str, int], Ledger, Step]:
    """What two steps of two devices compute, without a switch; what they move and hold."""
    workload = mlp(optax.adam(1e-3), num_blocks=3)
    plan = packs_plan((1, 1, 1), (1, 1), (1, 1), 2, batch=3, without=off.split())
    step = streamed(workload, plan)
    state, found = step.init(jax.random.key(0)), b""
    for i in range(2):
        state, metrics = step(state, workload.batch(jax.random.key(5 + i), 3))
        found += np.float64(metrics.loss).tobytes()
    found += b"".join(leaf.tobytes() for leaf in jax.tree.leaves(step.params(state)))
    return found, volumes_bytes(step.program), step.replay(), step.program


@pytest.mark.parametrize(
    "off",
    [
        "grouping",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("offload", "prefetch", "jit", "p2p")
        ),
    ],
)
def test_off_means_off_in_the_volumes_and_on_the_arrays(off):
    bits, volumes, ledger, step = switched(off)
    on_bits, on_volumes, on_ledger, _ = switched()
    assert bits == on_bits
    weights = ledger.peak_of("host").parts["parameters"]
    block, state, value = weights // 3, 2 * weights + 3 * 4, 3 * 16 * 4
    kept = {"activation out": value, "activation in": value}
    expected = {"weights in": 5 * block, "gradients out": weights, "batch in": 2 * value}
    assert on_volumes == expected | kept | {"p2p": 4 * value}
    changed = {
        # Three micro-batches fetch the weights each, and add to the gradients of those before.
        "grouping": {
            "weights in": 15 * block,
            "gradients out": 3 * weights,
            "gradients in": 2 * weights,
        },
        "prefetch": {},
        # The last pack comes twice, and so does its input.
        "jit": {
            "weights in": 6 * block,
            "activation out": 2 * value,
            "activation in": 2 * value,
        },
        "offload": {"state in": state, "state out": state, "weights out": weights},
        # What the second pack reads from the host is there for its backward pass, too.
        "p2p": {
            "activation out": 2 * value,
            "activation in": 3 * value,
            "gradient out": 2 * value,
            "gradient in": 2 * value,
        },
    }
    gone = {"offload": "gradients out", "p2p": "p2p"}.get(off)
    expected = {what: n for what, n in on_volumes.items() if what != gone} | changed[off]
    assert volumes == expected
    runs = [run for run in step.instructions if isinstance(run, Run)]
    kinds = [run.program.split()[0] for run in runs]
    on_host = [step.programs[run.program].place.host is not None for run in runs]
    assert any(on_host) == (off != "offload")
    if off == "jit":
        assert kinds[-3:] == ["update"] * 3
    if off == "prefetch":
        assert max(ledger.peak_bytes_per_device) < max(on_ledger.peak_bytes_per_device)


def test_gradients_of_others_are_there_before_a_device_fetches_them():
    plan = packs_plan((1, 2, 1), (3,), devices=3, batch=2, without=("offload",))
    step = streamed(tied(), plan)
    assert replay(step._uncompiled).peak_of("host").peak_bytes  # refuses what nobody waits for


def test_equal_packs_compile_once_and_the_host_keeps_three_times_the_weights():
    step = streamed(mlp(optax.adam(1e-3)), packs_plan((1, 1, 1, 1), (1, 1, 1)))
    host = step.replay().peak_of("host")
    # One of each kind for the middle packs; the first has no input, and the last no cotangent.
    assert (step.programs.num_compiled, len(step.program.programs)) == (9, 15)
    weights = host.parts["parameters"]
    assert host.parts["optimizer"] == 2 * weights + 4 * 4  # and a step count per pack
    assert host.parts["gradients"] <= weights // 4


def test_what_runs_on_the_host_of_absent_devices_is_compiled_for_a_processor():
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it would count what an update writes over twice")

    device, host = jax.devices()[1], jax.devices()[0]
    step = StreamedStep(mlp(optax.adam(1e-3)), packs_plan(), [device], refuse, host=host)
    runs = [run for run in step._uncompiled.instructions if isinstance(run, Run)]
    update = next(run for run in runs if run.program.startswith("update"))
    program = step.programs.executable(update.program)
    assert program.transient_bytes < step._uncompiled.slots[update.outputs[0]].nbytes
    assert {s.sharding.mesh.devices.item() for s in jax.tree.leaves(program.outputs)} == {host}


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
        (mlp, packs_plan((2, 1), (2,)), "plan-other-model"),
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


def unet(width: int = 8) -> Workload:
    """Three layers down, three up, each with the value of the one across."""

    def init(key):
        shape = (width, width)
        return [jax.random.normal(k, shape) / width**0.5 for k in jax.random.split(key, 6)]

    def loss(params, x):
        down = []
        for w in params[:3]:
            x = mark(jnp.tanh(x @ w))
            down.append(x)
        for w in params[3:]:
            x = mark(jnp.tanh(x @ w) + down.pop())
        return jnp.mean(x**2)

    def batch(key, n):
        return jax.random.normal(key, (n, width))

    return Workload(loss, init, batch, optax.adam(1e-3))


@pytest.mark.slow
def test_a_value_that_skips_packs_is_kept_once():
    step = compare(unet(), packs_plan((1,) * 7, (1,) * 6, batch=3))
    volumes, value = volumes_bytes(step.program), 3 * 8 * 4
    # Five are kept, and the sixth goes on to the pack of the loss; passes read 12 and 11.
    assert volumes["activation out"] == 6 * value
    assert volumes["activation in"] == 23 * value


def late() -> Workload:
    """Each layer reads a leaf of the batch of its own."""

    def loss(params, batch):
        x = jnp.zeros_like(batch["0"])
        for name, w in sorted(params.items()):
            x = mark(jnp.tanh((x + batch[name]) @ w))
        return jnp.mean((x + 1) ** 2)

    def batch(key, n):
        return {
            str(i): jax.random.normal(k, (n, 8)) for i, k in enumerate(jax.random.split(key, 3))
        }

    shapes = {str(i): (8, 8) for i in range(3)}
    return Workload(loss, lambda key: _normals(key, shapes), batch, optax.sgd(0.1))


def test_a_part_of_a_forward_pack_reads_its_own_leaves_of_the_batch():
    compare(late(), packs_plan((1, 1, 2), (2,), batch=3), num_steps=1)


def moe() -> Workload:
    """Three layers of experts whose loads are balanced over the examples of a micro-batch."""

    def init(key):
        return _normals(key, {"router": (3, 8, 4), "experts": (3, 4, 8, 8)})

    def loss(params, x):
        balance = jnp.zeros(())
        for router, experts in zip(params["router"], params["experts"], strict=True):
            weights = jax.nn.softmax(x @ router)
            chosen = jax.nn.one_hot(weights.argmax(-1), 4)
            balance += (chosen.mean(0) * weights.mean(0)).sum()
            x = mark(x + jnp.tanh(jnp.einsum("nk,nd,kde->ne", weights * chosen, x, experts)))
        return jnp.mean(x**2) + 0.1 * balance

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 8)), optax.sgd(0.1))


def demo() -> Workload:
    """SGD: Adam makes large steps of gradients that are rounding noise."""
    return replace(gpt(4), optimizer=optax.sgd(0.1))


@pytest.mark.parametrize(
    ("workload", "plan"),
    [
        exhaustive(demo, packs_plan((1, 2, 1), (2, 1), (4, 2), batch=7)),
        exhaustive(demo, packs_plan((2, 1, 1), (1, 2), (2, 3), 2, batch=7)),
        exhaustive(demo, packs_plan((1, 2, 1), (2, 1), (1, 1), 8, "dp", 9)),
        exhaustive(unet, packs_plan((2, 2, 3), (1, 2, 1), (3, 2), 3, batch=7)),
        exhaustive(unet, packs_plan((1,) * 7, (3, 3), (2, 2), 8, batch=5)),
        slow(unet, packs_plan((3, 1, 3), (2, 2), (1, 2), 2, "dp", 7, without=("prefetch",))),
        slow(moe, packs_plan((2, 1, 1), (1, 2), (2, 2), 2, batch=5)),
        exhaustive(moe, packs_plan((1, 1, 2), (2,), (2, 2), 8, "dp", 17)),
        slow(tied, packs_plan((1, 2, 1), (1, 1, 1), (2, 2), 3, batch=7)),
        exhaustive(lambda: tied(dropout=False), packs_plan((1, 2, 1), (2, 1), (2, 3), 8, batch=7)),
    ],
)
def test_models_of_all_kinds_as_one_device(workload, plan):
    compare(workload(), plan)


@pytest.mark.exhaustive
def test_the_same_bits_with_values_that_skip_and_on_any_number_of_devices():
    tests = REPOSITORY / "tests"
    env = environment_apart(tests, tests / "multi_device")
    assert output_of("streamed_bits", env=env).split() == ["1"]


@pytest.mark.slow
def test_a_training_that_was_saved_goes_on_bit_by_bit(tmp_path, capsys):
    plan = packs_plan((1, 2, 1), (2, 1), devices=2, batch=4)
    spec = WorkloadSpec.parse(f"{Path(__file__).parents[1] / 'pipeline_models.py'}:tied")
    replace(plan, workload=spec).save(tmp_path / "plan.json")

    def run(*more: str) -> list[float]:
        arguments = ["run", str(tmp_path / "plan.json"), "--trust", *more, "--json", "--quiet"]
        assert main(arguments) == 0
        return json.loads(capsys.readouterr().out)["losses"]

    whole = run("--steps", "3", "--save", str(tmp_path / "whole"))
    first = run("--steps", "2", "--save", str(tmp_path / "parts"))
    rest = run("--steps", "1", "--restore", str(tmp_path / "parts"), "--save", str(tmp_path / "b"))
    assert [*first, *rest] == whole
    step = streamed(tied(), plan)
    states = [checkpoint.restore(step, tmp_path / name) for name in ("whole", "b")]
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, two)
