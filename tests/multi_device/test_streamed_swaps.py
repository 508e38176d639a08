"""Packs whose parameters come as the casts that layers make of them train to the same bits, with
half the bytes on the way, and hold what is booked."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from user_models.mixed import WIDTH, model

from capture.errors import PlanError
from capture.machine.server import Server
from capture.plan.packs import PacksPlan
from capture.plan.task_graph import Configuration, Packs, Swaps, Switches
from capture.runtime.meter import LiveArrayMeter
from capture.runtime.streamed import streamed
from capture.step.ledger import Ledger
from capture.step.pack_times import volumes_bytes
from capture.tracing.leaf_uses import Cast

SERVER = Server.load("gtx1080ti-x4")
NUM_STEPS = 2


def packs_plan(sizes=(2, 2), devices=1, mode="pp", batch=4, without=()) -> PacksPlan:
    """Of the input and a block, a block, and the output."""
    configuration = Configuration(
        Packs(sizes[0], ((0, 2), (2, 3))), Packs(sizes[1], ((0, 2), (2, 3), (3, 4)))
    )
    server, switches = SERVER.with_(num_devices=devices), Switches.without(without)
    return PacksPlan(server, 4, batch, mode, configuration, switches)


def trained(workload, plan) -> tuple[bytes, dict[str, int], Ledger]:
    """Losses and parameters; in the last step the ledger beside live arrays."""
    step = streamed(workload, plan)
    state, meter = step.init(jax.random.key(0)), LiveArrayMeter.of(step, strict=True)
    found = b""
    for i in range(NUM_STEPS):
        batch = workload.batch(jax.random.key(5 + i), plan.minibatch_size)
        jax.block_until_ready(state)
        last = i == NUM_STEPS - 1
        state, metrics = step(state, batch, observer=meter if last else None)
        found += np.float64(metrics.loss).tobytes()
        del metrics  # its losses are live, and booked as released
    meter.finish()
    ledger = step.replay()
    assert meter.peak_bytes_per_device == ledger.peak_bytes_per_device
    assert meter.peak_bytes_of("host") == ledger.peak_of("host").peak_bytes
    found += b"".join(leaf.tobytes() for leaf in jax.tree.leaves(step.params(state)))
    return found, volumes_bytes(step.program), ledger


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "plan", "alone"),
    [
        (model(), packs_plan(), 0),
        # One micro-batch of a device, and two of the other.
        (model(), packs_plan((1, 1), 2, "dp", batch=3), 1),
        pytest.param(model(clipped=True), packs_plan((4, 4), 2), 1, marks=pytest.mark.exhaustive),
        pytest.param(
            model(), packs_plan(without=("grouping", "jit")), 0, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["sums", "alone", "clipped", "off"],
)
def test_casts_train_to_the_same_bits(workload, plan, alone):
    """``alone``: devices that make their gradients of one micro-batch."""
    bits, volumes, ledger = trained(workload, plan)
    cast_bits, cast_volumes, cast_ledger = trained(workload, replace(plan, swaps=Swaps("bfloat16")))
    assert cast_bits == bits
    square, row = WIDTH * WIDTH * 4, WIDTH * 4
    # All that comes but the scales of two blocks is half as much; of what goes back, so are the
    # gradients of what is read once.
    whole, scales = volumes["weights in"], cast_volumes["weights in"]
    assert scales * (3 * square + 4 * row) == whole * 2 * row
    expected = {
        "weights in": scales,
        "casts in": (whole - scales) // 2,
        "shared in": volumes["shared in"] // 2,
        "gradients out": volumes["gradients out"] - alone * 2 * (square + row) // 2,
    }
    assert cast_volumes == volumes | expected
    assert max(cast_ledger.peak_bytes_per_device) < max(ledger.peak_bytes_per_device)
    kept = [one.peak_of("host").parts["parameters"] for one in (ledger, cast_ledger)]
    assert kept[1] - kept[0] == (3 * square + 2 * row) // 2


def test_what_layers_read_through_a_cast_is_found():
    step = streamed(model(), replace(packs_plan(), swaps=Swaps("bfloat16")))
    once, shared = Cast("bfloat16", True), Cast("bfloat16", False)
    # Bias, scale and matrix of both blocks, and what the first and the last layer read.
    assert step.traced.casts == (once, None, once) * 2 + (shared,)
    with pytest.raises(PlanError) as error:
        streamed(model(), replace(packs_plan(), swaps=Swaps("float16")))
    assert error.value.codes == ("packs-stream",)


@pytest.mark.slow
def test_casts_in_shares_train_to_the_same_bits():
    """Of devices with a single micro-batch each, too, which add the gradients of parameters."""
    plan = replace(packs_plan((1, 1), 3, "dp", batch=3), swaps=Swaps(sharded=True))
    bits, volumes, _ = trained(model(), plan)
    cast_bits, cast_volumes, _ = trained(model(), replace(plan, swaps=Swaps("bfloat16", True)))
    assert cast_bits == bits

    def third(*dims: int) -> int:
        return -(-int(np.prod(dims)) // 3)

    square, row = 3 * third(WIDTH, WIDTH) * 4, 3 * third(WIDTH) * 4
    # The packs of blocks come twice, and the last one once, which has no weights of its own.
    assert volumes["weights in"] == 2 * (3 * square + 4 * row)
    assert volumes["shared in"] == square and cast_volumes["shared in"] == square // 2
    assert cast_volumes["weights in"] == 2 * 2 * row
    assert cast_volumes["casts in"] == 3 * square + 2 * row
    assert cast_volumes["gradients out"] == volumes["gradients out"] == 3 * square + 4 * row
