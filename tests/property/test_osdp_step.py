"""The step of a sharding plan: its replay against the closed form that searches ask, its seconds
against the search's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from osdp_problems import machine

from capture.machine.rates import Sourced
from capture.model.operators import Block, Operator, OperatorModel
from capture.plan.sharding import Mode
from capture.step.attribution import attribute_operators
from capture.step.operator_cost import StepCost
from capture.step.program import Feed, Free, Step, replay
from capture.step.sharded import (
    OperatorBytes,
    build_step,
    build_training,
    peak_bytes,
    step_seconds,
)
from capture.step.timeline import Seconds, simulate_step
from tests.step_judge import judge


def random_plan(seed: int) -> tuple[StepCost, list[Mode], int]:
    """Operators of uneven sizes in modes of their own: slices, groups of nodes, remat, prefetch,
    fewer bits, the model's own remat regions."""
    draw = random.Random(seed)
    operators = []
    for i in range(draw.randint(1, 8)):
        size = draw.randrange(9000)
        operand, tail, fused = (draw.choice([9, draw.randrange(5000)]) for _ in range(3))
        inside = operand + tail + draw.choice([0, draw.randrange(1000)])
        operator = Operator(
            str(i),
            draw.choice(["matmul", "embedding", "other"]),
            draw.choice([0, 8 * draw.randrange(1, 100), 8 * draw.randrange(1, 50_000)]),
            activation_bytes=inside,
            input_bytes=operand,
            output_bytes=size,
            workspace_bytes=draw.randrange(500),
            flops=draw.randrange(10**6),
            replicated_bytes=draw.choice([0, draw.randrange(999)]),
            tail_bytes=tail,
            crossing_bytes=draw.choice([None, draw.randrange(5000)]),
            gathered_fraction=draw.choice([1.0, 0.5]),
            fused_bytes=min(fused, inside - tail),
            backward_bytes=draw.choice([0, draw.randrange(6000)]),
            again_bytes=draw.choice([0, draw.randrange(4000)]),
        )
        operators += [operator] * draw.randint(1, 3)
    ratio = draw.choice([2.0, 4.0, 3.0001, 4 + 4 / 12_345])
    cost = StepCost(
        OperatorModel("random", (Block(tuple(operators)),), ratio),
        machine(1e9, *draw.choice([(1, 8), (2, 4)])),
        draw.choice([(1,), (1, 4), (2, 3)]),
        remat=draw.random() < 0.4,
        overlap_fraction=draw.choice([0.0, 0.0, 0.5]),
        partly=draw.random() < 0.5,
    )
    modes = [draw.choice(cost.modes(operator)) for operator in cost.model.operators]
    return cost, modes, draw.choice([1, 2, 7])


@pytest.mark.parametrize("seed", range(200))
def test_the_closed_form_of_the_peak_is_that_of_the_replay(seed):
    cost, modes, batch_size = random_plan(seed)
    step = build_step(cost, modes, batch_size)
    judge(step)
    ledger = replay(step)
    assert set(ledger.peak_bytes_per_device) == {peak_bytes(cost, modes, batch_size)}


@pytest.mark.parametrize("what", ["gathered", "prefetched", "tail"])
def test_a_slot_that_is_kept_is_seen(what):
    """The plans above tell a wrong step from the right one."""

    def kept(step: Step) -> Step:
        names = {i for i, slot in enumerate(step.slots) if slot.what == what}
        return replace(
            step,
            instructions=[
                Free(tuple(set(i.slots) - names)) if isinstance(i, Free) else i
                for i in step.instructions
            ],
        )

    plans = [random_plan(seed) for seed in range(20)]
    assert any(
        replay(kept(build_step(*plan))).peaks[0].peak_bytes != peak_bytes(*plan) for plan in plans
    )


def test_memory_on_the_chip_makes_the_closed_form_a_lower_bound():
    """It holds arrays while operators run; between them, the replay counts all."""
    for seed in range(40):
        cost, modes, batch_size = random_plan(seed)
        target = replace(cost.machine.target, on_chip_bytes=Sourced(4000, "test"))
        cost = replace(cost, machine=replace(cost.machine, target=target))
        most = replay(build_step(cost, modes, batch_size)).peaks[0].peak_bytes
        assert 0 <= most - peak_bytes(cost, modes, batch_size) <= 4000


def timed_plan(seed: int) -> tuple[StepCost, list[Mode], int]:
    """With batches at which some operators compute longer than they send, and some do not."""
    cost, modes, batch_size = random_plan(seed)
    return cost, modes, batch_size * random.Random(seed).choice([1, 10**4, 10**6])


@pytest.mark.parametrize("seed", range(60))
def test_seconds_of_the_simulation_are_the_searchs(seed):
    cost, modes, batch_size = timed_plan(seed)
    step, seconds = build_step(cost, modes, batch_size), step_seconds(cost, modes, batch_size)
    simulated = simulate_step(step, Seconds(seconds, lambda *_: 0.0))
    pairs = list(zip(cost.model.operators, modes, strict=True))
    expected = [cost.cost(*pair, batch_size).seconds for pair in pairs]
    assert simulated.step_seconds == pytest.approx(sum(expected), rel=1e-12)
    assert simulated.peak_bytes_per_device == simulated.program_order.peak_bytes_per_device
    assert min(seconds.values()) >= 0


def test_a_step_of_which_more_is_hidden_takes_less_time():
    """The plans above tell hidden collectives from exposed ones: where most is sent, and where most
    is computed."""
    found = []
    for seed in range(60):
        cost, modes, batch_size = timed_plan(seed)
        times = [
            sum(step_seconds(replace(cost, overlap_fraction=f), modes, batch_size).values())
            for f in (0.0, 0.5, 1.0)
        ]
        assert times[0] - times[1] == pytest.approx(times[1] - times[2])
        found.append(times[0] / times[2])
    assert max(found) > 1.4 and min(found) >= 1


def test_every_byte_of_the_peak_has_an_operator():
    for seed in range(40):
        plan = random_plan(seed)
        found = attribute_operators(build_step(*plan))
        assert sum(buffer.bytes for buffer in found.buffers) == peak_bytes(*plan)
        assert found.attributed_fraction == 1
        running = [buffer.layer for buffer in found.buffers if buffer.category == "temporaries"]
        gathered = {b.layer for b in found.buffers if b.category == "gathered parameters"}
        assert gathered <= set(running), "others have forgotten theirs"


@pytest.mark.parametrize("seed", range(20))
def test_what_every_operator_takes_of_a_device(seed):
    """Of the slices that are sharded, one part of each on a device of the group; beside them only
    what is asked for: no prefetch where nothing is hidden, no tail where all is computed again."""
    cost, modes, batch_size = random_plan(seed)
    step = build_step(cost, modes, batch_size)
    for i, (operator, mode) in enumerate(zip(cost.model.operators, modes, strict=True)):
        sharded = mode.num_sharded / mode.num_slices
        ways = mode.group_size or cost.machine.num_devices
        share = operator.parameter_bytes * (1 - sharded + sharded / ways)
        taken = OperatorBytes.of(cost, operator, mode, batch_size)
        assert -1e-6 < taken.parameters - operator.replicated_bytes - share < 1
        assert step.programs[f"reduce@{i}"].transient_bytes == 0
        assert not (cost.remat and taken.tail)
    prefetched = any(slot.what == "prefetched" for slot in step.slots)
    assert prefetched == (cost.overlap_fraction > 0 and any(mode.num_sharded for mode in modes))


@given(st.lists(st.integers(0, 10**9), min_size=5, max_size=5), *[st.integers(1, 4)] * 3)
def test_a_step_as_it_is_executed_needs_what_it_reads_and_what_its_program_needs(
    sizes, num_devices, num_params, num_leaves
):
    *nbytes, transient = sizes
    step = build_training(num_devices, num_params, num_leaves, nbytes, transient)
    judge(step)
    ledger, (params, state, batch, loss) = replay(step), nbytes
    peak = params + state + batch + max(transient, loss)
    assert ledger.peak_bytes_per_device == (peak,) * num_devices
    assert {ledger.live_bytes[device] for device in range(num_devices)} == {params + state}
    (fed,), (run,) = step.all_of(Feed), step.runs
    assert fed.batch == tuple(range(num_leaves)) and fed.microbatch == 0
    assert run.donated == tuple(step.persistent.values()) == run.outputs[:2]
    assert step.reported == [run.outputs[2]]
