"""Exported plans in real Alpa: accepted or refused alike, resolved to what the plan says, and read
back as the same plan."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import alpa
import pytest
from harness import Compiled, compile_method, mesh
from steps import chain

from capture.alpa import plan_from_alpa, to_alpa
from capture.alpa.placement import alpa_placement
from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan

NUM_LAYERS, BATCH_SIZE = 6, 64


def random_plan(seed: int) -> Plan | None:
    """A plan that the library accepts, whatever Alpa says of it; None where the draw is none."""
    draw = random.Random(seed)
    nodes = draw.choice([(4,), (4, 4), (2, 2, 2), (3, 3), (4, 4, 4, 4), (8,)])
    cluster = Cluster(nodes)
    sizes: list[int] = []
    while sum(sizes) < cluster.num_devices and len(sizes) < NUM_LAYERS:
        sizes.append(draw.choice([1, 2, 3, 4, 6, 8, 16]))
    if sum(sizes) != cluster.num_devices or len(sizes) > NUM_LAYERS:
        return None
    cuts = sorted(draw.sample(range(1, NUM_LAYERS), len(sizes) - 1))
    first, device, stages = 0, 0, []
    remat, split = draw.choice(["none", "full"]), draw.random() < 0.5
    for size, stop in zip(sizes, [*cuts, NUM_LAYERS], strict=True):
        dp = draw.choice([d for d in range(1, size + 1) if size % d == 0])
        own = split if draw.random() < 0.8 else not split
        stages.append(
            Stage(
                first,
                stop,
                range(device, device + size),
                StageChoice(dp, size // dp, remat, own and dp > 1),
            )
        )
        first, device = stop, device + size
    try:
        return Plan(
            cluster,
            NUM_LAYERS,
            tuple(stages),
            BATCH_SIZE,
            draw.choice([1, 2, 4, 8]),
            draw.choice(["1f1b", "gpipe"]),
        )
    except PlanError:
        return None


def distinct(plans: list[Plan]) -> list[Plan]:
    return list({str(plan.to_json()): plan for plan in plans}.values())


PLANS = distinct([plan for seed in range(4000) if (plan := random_plan(seed)) is not None])


def refused(plan: Plan) -> tuple[str, ...]:
    try:
        to_alpa(plan)
    except PlanError as error:
        return error.codes
    return ()


GOOD = [plan for plan in PLANS if not refused(plan)]
#: Layers, shapes and degrees are what matters; compiling takes most of the time.
SAMPLE = GOOD[:: max(1, len(GOOD) // 24)]


def compiled(plan: Plan) -> Compiled:
    step, args = chain(NUM_LAYERS, BATCH_SIZE)
    hosts = mesh(len(plan.cluster.nodes), plan.cluster.nodes[0])
    return compile_method(step, args, to_alpa(plan).build(hosts))


def name(plan: Plan) -> str:
    return f"{plan.cluster}-{plan.schedule}-{'-'.join(f'{s.choice.data_parallel}x{s.choice.tensor_parallel}' for s in plan.stages)}"


@pytest.mark.parametrize("plan", SAMPLE, ids=name)
def test_an_exported_plan_is_what_alpa_resolves_it_to(plan):
    found, options = compiled(plan), to_alpa(plan)
    stage_option = found.stage_option
    assert stage_option.forward_stage_layer_ids == options.forward_stage_layer_ids
    assert [
        tuple(s) for s in stage_option.submesh_physical_shapes
    ] == options.submesh_physical_shapes
    assert [tuple(s) for s in stage_option.submesh_logical_shapes] == options.submesh_logical_shapes
    assert (
        stage_option.submesh_autosharding_option_dicts == options.submesh_autosharding_option_dicts
    )
    assert len(found.config.xla_stages) == 3 * plan.num_stages
    per_host = plan.cluster.nodes[0]
    where = [
        [host * per_host + device for host, device in found.devices_of_mesh(m)]
        for m in range(plan.num_stages)
    ]
    assert where == [list(devices) for devices in options.placement]
    assert sorted(device for devices in where for device in devices) == list(
        range(plan.cluster.num_devices)
    )


@pytest.mark.parametrize("plan", SAMPLE, ids=name)
def test_as_many_micro_batches_are_in_flight(plan):
    n = plan.num_stages
    live, peak = [0] * n, [0] * n
    schedule = compiled(plan).executable.schedule
    assert schedule.name == plan.schedule
    for tick in schedule.schedules:
        for m, task in enumerate(tick):
            if task is not None and task[1] < 2 * n:
                live[m] += 1 if task[1] < n else -1
                peak[m] = max(peak[m], live[m])
    ours = [max(count_in_flight(order)) for order in plan.schedule_table.orders]
    assert peak == ours


def count_in_flight(order) -> list[int]:
    counts, live = [], 0
    for task in order:
        live += 1 if task.kind == "forward" else -1
        counts.append(live)
    return counts


@pytest.mark.parametrize("plan", SAMPLE[::2], ids=name)
def test_alpas_own_plan_file_is_read_back_as_the_plan(plan):
    found = compiled(plan)
    written = pickle.dumps(found.executable.get_parallel_plan())
    placed = to_alpa(plan).placement
    again = plan_from_alpa(written, global_batch_size=BATCH_SIZE)
    assert [stage.devices for stage in again.stages] == placed
    for one, other in zip(again.stages, plan.stages, strict=True):
        assert ((one.first, one.stop), one.choice.data_parallel, one.choice.tensor_parallel) == (
            (other.first, other.stop),
            other.choice.data_parallel,
            other.choice.tensor_parallel,
        )
        assert (one.choice.remat, one.choice.shard_optimizer) == (
            other.choice.remat,
            other.choice.shard_optimizer,
        )
    assert (again.schedule, again.num_microbatches, again.cluster) == (
        plan.schedule,
        plan.num_microbatches,
        plan.cluster,
    )
    assert to_alpa(again) == to_alpa(plan)
    method = alpa.plan_to_method(pickle.loads(written))
    method.devices = mesh(len(plan.cluster.nodes), plan.cluster.nodes[0])
    assert compile_method(*chain(NUM_LAYERS, BATCH_SIZE), method).stage_option == found.stage_option


@pytest.mark.parametrize("plan", SAMPLE[:4], ids=name)
def test_the_file_returns_the_same_method(plan, tmp_path):
    (tmp_path / "method.py").write_text(to_alpa(plan).source("A test."))
    namespace: dict = {}
    exec(compile((tmp_path / "method.py").read_text(), "method.py", "exec"), namespace)
    method, expected = namespace["method"](), to_alpa(plan).build()
    for attribute in (
        "num_micro_batches",
        "pipeline_schedule",
        "stage_option",
        "layer_option",
        "as_option",
    ):
        one, other = getattr(method, attribute), getattr(expected, attribute)
        assert getattr(one, "__dict__", one) == getattr(other, "__dict__", other)


REFUSED = [plan for plan in PLANS if refused(plan)]


@pytest.mark.parametrize("plan", REFUSED[:: max(1, len(REFUSED) // 16)], ids=name)
def test_what_is_refused_here_alpa_refuses_too(plan):
    """Given the arguments that the plan would have, were it not refused."""
    per_host = plan.cluster.nodes[0]

    def shape(size: int) -> tuple[int, int]:
        return (1, size) if size <= per_host else (-(-size // per_host), per_host)

    option = alpa.ManualStageOption(
        [list(range(stage.first, stage.stop)) for stage in plan.stages],
        [shape(stage.num_devices) for stage in plan.stages],
        [(stage.choice.data_parallel, stage.choice.tensor_parallel) for stage in plan.stages],
        [{}] * plan.num_stages,
    )
    method = alpa.PipeshardParallel(
        devices=mesh(len(plan.cluster.nodes), per_host),
        num_micro_batches=plan.num_microbatches,
        layer_option=alpa.ManualLayerOption(),
        stage_option=option,
    )
    with pytest.raises(AssertionError):
        compile_method(*chain(NUM_LAYERS, BATCH_SIZE), method)


def test_what_alpa_does_not_notice_is_refused_here():
    """A micro-batch of 2 over 4 replicas, and a stage without layers."""
    with pytest.raises(PlanError, match=r"\[plan-batch\]"):
        Plan(Cluster((4,)), NUM_LAYERS, (Stage(0, 6, range(4), StageChoice(4)),), 8, 4)
    with pytest.raises(PlanError, match=r"\[plan-layers\]"):
        Plan(Cluster((2,)), NUM_LAYERS, (Stage(0, 6, [0]), Stage(6, 6, [1])), 8, 4)
    options = to_alpa(
        Plan(Cluster((4,)), NUM_LAYERS, (Stage(0, 6, range(4), StageChoice(4)),), 16, 4)
    )
    assert compile_method(
        *chain(NUM_LAYERS, 8), options.build(mesh(1, 4))
    ).stage_option.submesh_logical_shapes == [(4, 1)]


def test_layers_cut_automatically():
    plan = Plan(
        Cluster((2,)),
        4,
        (Stage(0, 2, [0]), Stage(2, 4, [1])),
        BATCH_SIZE,
        4,
        auto_layers=True,
    )
    found = compile_method(*chain(12, BATCH_SIZE, marked=False), to_alpa(plan).build(mesh(1, 2)))
    assert found.stage_option.forward_stage_layer_ids == [[0, 1], [2, 3]]
    assert plan_from_alpa(
        pickle.dumps(found.executable.get_parallel_plan()), global_batch_size=BATCH_SIZE
    ).auto_layers


def test_nothing_of_alpa_or_jax_is_imported_to_export():
    code = (
        "import sys; from capture.plan.stages import Plan, Stage; from "
        "capture.machine.cluster import Cluster; from capture.alpa import to_alpa\n"
        "to_alpa(Plan(Cluster((1,)), 1, (Stage(0, 1, [0]),), 1, 1)).source()\n"
        "sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib', 'alpa', 'ray') for name in "
        "sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            check=False,
        ).returncode
        == 0
    )


def test_placement_is_found_without_alpa():
    assert alpa_placement(Cluster((4, 4)), [4, 4]) == ((4, 5, 6, 7), (0, 1, 2, 3))
