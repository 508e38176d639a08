"""The library's replay of a step in Alpa's runtime, against the instruction lists that real Alpa
makes: byte for byte, per mesh."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from facts import interfaces
from full_size import compare
from harness import compile_method, mesh, replay
from steps import chain
from test_plans import BATCH_SIZE, GOOD, NUM_LAYERS, name

from capture.alpa import to_alpa
from capture.alpa.memory import alpa_replay
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan

MODELS = Path(__file__).resolve().parents[2] / "models"

#: A single micro-batch is accumulated into nothing.
ACCUMULATING = [plan for plan in GOOD if plan.num_microbatches > 1]


def check(plan, **options):
    step, args = chain(NUM_LAYERS, BATCH_SIZE, **options)
    compiled = compile_method(
        step, args, to_alpa(plan).build(mesh(len(plan.cluster.nodes), plan.cluster.nodes[0]))
    )
    expected = [max(nbytes for _, nbytes in timeline) for timeline in replay(compiled)]
    assert [peak.peak_bytes for peak in alpa_replay(plan, interfaces(compiled)).stages] == expected


@pytest.mark.parametrize("plan", ACCUMULATING[1 :: max(1, len(ACCUMULATING) // 24)], ids=name)
def test_live_bytes_are_those_of_alpas_instructions(plan):
    check(plan)


#: Stages that replicas share, and no casts of weights that are kept.
SPLITTING = [
    plan
    for plan in ACCUMULATING
    if plan.stages[0].choice.remat == "full"
    and any(
        stage.choice.shard_optimizer and stage.choice.data_parallel > 1 for stage in plan.stages
    )
]


@pytest.mark.parametrize("plan", SPLITTING[:: max(1, len(SPLITTING) // 12)], ids=name)
def test_a_master_copy_changes_live_bytes_as_it_does_in_alpas_instructions(plan):
    """Alpa compiles both: the model in float32, and the one with 16-bit parameters and a float32
    copy of them in the state."""
    method = to_alpa(plan).build(mesh(len(plan.cluster.nodes), plan.cluster.nodes[0]))
    # Every degree divides it: the harness splits no state that it cannot split evenly.
    model = {
        "width": 48,
        "dtype": jnp.float16,
    }
    whole, narrow = (
        compile_method(*chain(NUM_LAYERS, BATCH_SIZE, **model, master_copy=on), method)
        for on in (False, True)
    )
    before, after = (
        [max(nbytes for _, nbytes in timeline) for timeline in replay(compiled)]
        for compiled in (whole, narrow)
    )
    found = [alpa_replay(plan, interfaces(whole), master_copy=on).stages for on in (False, True)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [
        new.peak_bytes - old.peak_bytes for old, new in zip(*found, strict=True)
    ]
    split = [
        stage.choice.shard_optimizer and stage.choice.data_parallel > 1 for stage in plan.stages
    ]
    assert [new < old for old, new in zip(before, after, strict=True)] == split


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("skip_to", [(2,), (1, 3, 5), (5,)])
def test_tensors_go_past_the_stages_that_do_not_read_them(skip_to, schedule):
    stages = [
        Stage(0, 1, [0, 1], StageChoice(2, 1)),
        Stage(1, 2, [2], StageChoice(1, 1)),
        Stage(2, 5, [3], StageChoice(1, 1)),
        Stage(5, 6, range(4, 8), StageChoice(2, 2)),
    ]
    check(
        Plan(Cluster((4, 4)), NUM_LAYERS, tuple(stages), BATCH_SIZE, 8, schedule), skip_to=skip_to
    )


def zoo(family: str, **arguments) -> WorkloadSpec:
    return WorkloadSpec(str(MODELS / f"{family}.py"), family, arguments)


def paper_plan(workload, stops, degrees, num_microbatches, global_batch, schedule, remat) -> Plan:
    """Of four nodes with four devices each."""
    first, device, stages = 0, 0, []
    for stop, (dp, tp) in zip(stops, degrees, strict=True):
        stages.append(
            Stage(first, stop, range(device, device + dp * tp), StageChoice(dp, tp, remat, dp > 1))
        )
        first, device = stop, device + dp * tp
    return Plan(
        Cluster((4,) * 4),
        first,
        tuple(stages),
        global_batch,
        num_microbatches,
        schedule,
        workload=workload,
    )


@pytest.mark.parametrize(("remat", "schedule"), [("full", "1f1b"), ("none", "gpipe")])
def test_a_scalar_goes_past_the_stages_that_do_not_read_it(remat, schedule, as_worker):
    """The load-balancing loss is made by every second block; its gradient is sent back before the
    next one arrives."""
    plan = paper_plan(zoo("moe", size="tiny"), range(1, 5), [(4, 1)] * 4, 4, 32, schedule, remat)
    stages = compare(plan)["stages"]
    assert [stage["replay_bytes"] for stage in stages] == [stage["peak_bytes"] for stage in stages]


#: The paper's batch and micro-batches; the transformers have 8 of their blocks. Whole models:
#: benchmarks/alpa_replay.py.
FULL_SIZE = [
    paper_plan(
        zoo("gpt", size="2.6B", dtype="float16", num_layers=8),
        (3, 5, 6, 8),
        [(2, 4), (2, 2), (1, 2), (2, 1)],
        64,
        1024,
        "1f1b",
        "full",
    ),
    paper_plan(
        zoo("moe", size="2.4B", dtype="float16", num_layers=8),
        range(1, 9),
        [(2, 1)] * 8,
        32,
        1024,
        "1f1b",
        "none",
    ),
    paper_plan(
        zoo("wide_resnet", size="1B"),
        (7, 12, 16),
        [(4, 1), (2, 2), (8, 1)],
        24,
        768,
        "gpipe",
        "none",
    ),
]


@pytest.mark.parametrize("plan", FULL_SIZE, ids=lambda plan: plan.workload.function)
def test_live_bytes_at_the_papers_size(plan, as_worker):
    stages = compare(plan)["stages"]
    assert [stage["replay_bytes"] for stage in stages] == [stage["peak_bytes"] for stage in stages]
    assert min(stage["peak_bytes"] for stage in stages) > 2**29
