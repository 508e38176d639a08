"""The strategies that OSDP is compared with: when they apply, what they cost, and that OSDP is no
worse than those it contains."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from osdp_problems import family, machine

from benchmarks.papers.osdp.pipeline import Pipeline, layers_of, stages_of
from benchmarks.papers.osdp.strategies import STRATEGIES, OneMode
from benchmarks.papers.osdp.tensor_parallel import TensorParallelCost
from capture.model.operators import Block, Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.papers.osdp.transformer import transformer
from capture.plan.sharding import DP, ZDP
from capture.step.operator_cost import StepCost

GIB = 2**30
SMALL = transformer("small", [(8, 512)], seq_len=128, vocab_size=5000)


@pytest.mark.parametrize(("cost", "limit"), [(PaperCost, 2 * GIB), (StepCost, 0.25 * GIB)])
def test_osdp_is_no_worse_than_what_it_contains(cost, limit):
    found = {
        name: strategy(cost(SMALL, machine(limit, per_node=4), (1, 4)))
        for name, strategy in STRATEGIES.items()
    }
    speeds = {name: outcome.examples_per_second for name, outcome in found.items()}
    assert speeds["OSDP"] >= speeds["OSDP-base"] >= max(speeds["DP"], speeds["FSDP"]) > 0
    assert speeds["3D+OSDP"] >= speeds["3D"] >= max(speeds["DP"], speeds["TP"])
    assert (found["DP"].status == "oom") == (limit < GIB)
    assert all(mode == ZDP for mode in found["FSDP"].plan.modes)


def test_a_pipeline_needs_as_many_layers_as_devices():
    assert STRATEGIES["PP"](StepCost(family("W&S"), machine(64 * GIB))).status == "n/a"
    assert STRATEGIES["PP"](StepCost(SMALL, machine(64 * GIB))).status == "ok"
    assert STRATEGIES["PP"](StepCost(SMALL, machine(GIB / 64))).status == "oom"


def test_layers_and_stages():
    layers = layers_of(SMALL)
    # The embedding with the first, the head with the last.
    assert [len(layer) for layer in layers] == [
        3,
        *[2] * 6,
        3,
    ]
    weights = [sum(operator.flops for operator in layer) for layer in layers]
    for num_stages in (1, 3, 4, 8):
        stages = [stage.operators for stage in stages_of(SMALL, num_stages)]
        assert len(stages) == num_stages and sum(stages, ()) == SMALL.operators
        ways = ([0, *cuts, 8] for cuts in combinations(range(1, 8), num_stages - 1))
        least = min(
            max(sum(weights[first:stop]) for first, stop in pairwise(cuts)) for cuts in ways
        )
        assert max(sum(operator.flops for operator in stage) for stage in stages) == least
    flat = OperatorModel("flat", (Block((Operator("w", "matmul", 1, 1, 1, 1, flops=7),), 5),))
    assert [len(layer) for layer in layers_of(flat)] == [5]  # operators alone are no layers to part


def test_the_last_stages_are_not_left_short():
    """Ten equal layers in four stages: not 3, 3, 3 and 1, which has the same busiest stage."""
    block = Block((Operator("w", "matmul", 1, 1, 1, 1, flops=7),) * 2, 10)
    stages = stages_of(OperatorModel("ten", (block,)), 4)
    assert sorted(len(stage.operators) // 2 for stage in stages) == [2, 2, 3, 3]


def test_a_pipeline_without_communication_is_its_closed_form():
    """Equal stages of one layer each: M micro-batches, and p - 1 to fill; 1F1B keeps fewer of them
    than GPipe."""
    layer = Operator("w", "matmul", 1000, 10_000, 100, 100, flops=11 * 10**9)
    model = OperatorModel("equal", (Block((layer, replace(layer, name="v", output_bytes=99)), 4),))
    cluster = machine(GIB, per_node=4, alpha=0.0)
    costs = OneMode(StepCost(model, cluster.group(1)), DP)
    pipeline = Pipeline(costs, 4, cluster, "1f1b")
    seconds, sent = 2 * 3 * 11e9 / 11e12, 2 * 100 / 4.5e9
    assert pipeline.step_seconds(1, 8) == pytest.approx((8 + 3) * seconds + (8 + 2) * sent)
    tight = machine(2 * 4000 + 1300 + 6 * 20_000, per_node=4).memory_limit_bytes
    fits = {
        schedule: Pipeline(
            OneMode(StepCost(model, cluster.group(1).with_limit(tight)), DP), 4, cluster, schedule
        ).largest_microbatch(8)
        for schedule in ("gpipe", "1f1b")
    }
    assert fits == {"gpipe": 0, "1f1b": 1}


def test_tensor_parallel_parts():
    """Half of parameters, FLOPs and inner activations on each of two devices; two all-reduces of
    the stream, a third with remat."""
    product = Operator("w", "matmul", 8_000_000, 3000, 1000, 1000, flops=10**9)
    model = OperatorModel("one", (Block((product,)),))
    eight = machine(GIB)
    part = replace(product, parameter_bytes=4_000_000, activation_bytes=2000, flops=5 * 10**8)
    for remat, times in ((False, 2), (True, 3)):
        whole = StepCost(model, eight, remat=remat)
        costs = TensorParallelCost(whole, 2)
        assert costs.machine.num_devices == 4
        alone = StepCost(model, costs.machine, remat=remat).cost(part, ZDP, 5)
        found = costs.cost(product, ZDP, 5)
        assert (found.resident_bytes, found.transient_bytes) == (
            alone.resident_bytes,
            alone.transient_bytes,
        )
        assert found.seconds - alone.seconds == pytest.approx(
            times * eight.links.seconds("all-reduce", 5000, 2)
        )
