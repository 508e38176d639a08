"""The step of a sharding plan: its replay against the closed form that searches ask, its seconds
against the search's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from osdp_problems import machine

from capture.machine.target import Sourced
from capture.model.operators import Block, Operator, OperatorModel
from capture.plan.sharding import Mode
from capture.step import sharded
from capture.step.operator_cost import StepCost
from capture.step.program import replay
from capture.step.sharded import build_step, peak_bytes, step_seconds


def random_plan(seed: int) -> tuple[StepCost, list[Mode], int]:
    """Operators of uneven sizes in modes of their own: slices, groups of nodes, remat, prefetch,
    fewer bits, the model's own remat regions."""
    draw = random.Random(seed)
    operators = []
    for i in range(draw.randint(1, 8)):
        size, operand, tail, fused = (draw.randrange(5000) for _ in range(4))
        inside = operand + tail + draw.randrange(1000)
        if draw.random() < 0.3:
            fused = 0
        operator = Operator(
            str(i),
            draw.choice(["matmul", "embedding", "other"]),
            draw.choice([0, 8 * draw.randrange(1, 50_000)]),
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
            backward_bytes=draw.randrange(6000),
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
    ledger = replay(build_step(cost, modes, batch_size))
    assert set(ledger.peak_bytes_per_device) == {peak_bytes(cost, modes, batch_size)}
