"""Packs of layers that stream through devices train as one device does, and hold what is booked."""

from __future__ import annotations

import jax
import pytest
from pipeline_models import mlp, tied

from capture.machine.server import Server
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Switches
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.reference import ReferenceStep, max_relative_error, rounding_floor
from capture.runtime.streamed import streamed
from capture.tracing import trace

SERVER = Server.load("gtx1080ti-x4")


def packs_plan(
    backward, forward, *, u_b=2, u_f=2, devices=1, mode="pp", batch=8, without=()
) -> PacksPlan:
    configuration = Configuration(Packs.of_lengths(u_f, forward), Packs.of_lengths(u_b, backward))
    return PacksPlan(
        SERVER.with_(num_devices=devices),
        sum(backward),
        batch,
        mode,
        configuration,
        Switches.without(without),
    )


def compare(workload, plan, num_steps=3, reference_size=None, floor=None):
    """Loss, gradients and parameters beside those of one device; the ledger beside live arrays."""
    step = streamed(workload, plan)
    size = reference_size or plan.configuration.backward.microbatch_size
    params = workload.init(jax.random.key(0))
    reference = ReferenceStep(workload, trace(workload, size), plan.minibatch_size // size)
    own, own_state = reference.init(params)
    floor = rounding_floor(step.traced.graph) if floor is None else floor
    state = step.init_from(params)
    meter = LiveArrayMeter.of(step, strict=True)
    for i in range(num_steps):
        batch = workload.batch(jax.random.key(10 + i), plan.minibatch_size)
        key = jax.random.key(100 + i)
        _, expected = reference.loss_and_gradients(own, batch, key)
        if i == 0:
            state, metrics, gradients = step.with_gradients(state, batch, key)
            assert max_relative_error(gradients, expected, floor) < 5e-6
        elif i == 1:
            jax.block_until_ready(state)
            state, metrics = step(state, batch, key, observer=meter)
            loss = metrics.loss
            metrics.losses.clear()
            meter.finish()
        else:
            state, metrics = step(state, batch, key)
        own, own_state, expected_loss = reference(own, own_state, batch, key)
        loss = loss if i == 1 else metrics.loss
        assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert meter.num_checks == len(step.program.instructions) + 1
    ledger = step.replay()
    assert meter.peak_bytes_per_device == ledger.peak_bytes_per_device
    assert meter.peak_bytes_of("host") == ledger.peak_of("host").peak_bytes
    assert max_relative_error(step.params(state), own, floor) < 1e-5
    return step, state


def test_one():
    step, _ = compare(mlp(), packs_plan((2, 2), (2,)))


CASES = {
    "tied": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2)),
    "tied-dp": (tied, dict(backward=(2, 2), forward=(2,), devices=2, mode="dp")),
    "sizes": (mlp, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, u_f=4)),
    "uneven": (mlp, dict(backward=(2, 2), forward=(1, 1), devices=2, u_f=3, u_b=2)),
    "skip": (lambda: tied(dropout=False), dict(backward=(1, 1, 1, 1), forward=(2, 1), devices=2, u_f=4)),
    "nojit": (mlp, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("jit",))),
    "noprefetch": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("prefetch",))),
    "nooffload": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("offload",))),
    "nooffload-nojit": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("offload","jit"))),
    "nogrouping": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("grouping",))),
    "nogrouping-nooffload": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("grouping","offload"))),
    "nop2p": (tied, dict(backward=(1, 2, 1), forward=(2, 1), devices=2, without=("p2p",))),
    "one": (tied, dict(backward=(4,), forward=())),
    "dp3": (mlp, dict(backward=(2,2), forward=(2,), mode="dp", devices=3,batch=12, u_b=2,u_f=4)),
    "n8": (mlp, dict(backward=(2,2), forward=(2,), devices=8)),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    workload, given = CASES[name]
    compare(workload(), packs_plan(**given))
