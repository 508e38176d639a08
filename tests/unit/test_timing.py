"""Times: the closed forms of collectives, the roofline of a program, and sums over layers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic_profiles import Planted, configs_of, hybrid, make_plan

from benchmarks.papers.osdp.pipeline import busiest_seconds
from capture.documents import read, write
from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import SplitCost
from capture.measured.work import Collective, Kernel, ProgramWork
from capture.plan.choices import StageChoice
from capture.predictor.step_time import has_times, predicted_timeline, time_summary
from capture.predictor.times import TimePredictor
from capture.step.times import TimeModel, pipeline_seconds

RATES = Target.load("a100-40g").rates
FAST, SLOW = RATES.intra_node, RATES.inter_node
MODEL = TimeModel(RATES, Layout(4))
NBYTES = 120_000_000


def alpha_beta(link, steps: int, nbytes: float) -> float:
    return steps * (link.latency_seconds.value + nbytes / link.bytes_per_second.value)


def ring(size: int, nodes: int, inside: int) -> float:
    """The seconds of one ring that leaves every node by ``inside`` adapters."""
    rate = min(FAST.bytes_per_second.value, inside * SLOW.bytes_per_second.value)
    near, far = FAST.latency_seconds.value, SLOW.latency_seconds.value
    return (size - 1 - nodes) * near + nodes * far + NBYTES * (size - 1) / size / rate


@pytest.mark.parametrize(
    ("kind", "group_size", "stride", "expected"),
    [
        ("all-reduce", 4, 1, alpha_beta(FAST, 6, NBYTES / 4)),
        ("all-gather", 4, 1, alpha_beta(FAST, 3, NBYTES / 4)),
        ("reduce-scatter", 2, 2, alpha_beta(FAST, 1, NBYTES / 2)),
        ("all-to-all", 4, 1, alpha_beta(FAST, 3, NBYTES / 4)),
        ("collective-permute", 2, 1, alpha_beta(FAST, 1, NBYTES)),
        ("collective-permute", 2, 4, alpha_beta(SLOW, 1, NBYTES)),
        ("all-reduce", 2, 4, alpha_beta(SLOW, 2, NBYTES / 2)),  # one member in each node
        ("all-reduce", 8, 1, 2 * ring(8, 2, 4)),  # four in each of two nodes
        ("all-reduce", 4, 2, 2 * ring(4, 2, 2)),  # two in each of two
        ("all-gather", 8, 1, ring(8, 2, 4)),
        ("reduce-scatter", 4, 2, ring(4, 2, 2)),
        ("all-to-all", 8, 1, alpha_beta(FAST, 3, NBYTES / 8) + alpha_beta(SLOW, 4, NBYTES / 8)),
        ("all-reduce", 1, 1, 0),
    ],
)
def test_collectives_have_their_closed_form(kind, group_size, stride, expected):
    assert MODEL.links.seconds(kind, NBYTES, group_size, stride) == pytest.approx(
        expected, rel=1e-12
    )
    sent = ProgramWork(0, "bfloat16", 0, 0, (Collective(kind, NBYTES, group_size, stride, 3),))
    assert MODEL.program_seconds(sent) == pytest.approx(3 * expected, rel=1e-12)


def test_a_part_of_another_collective_has_neither_its_latency_nor_a_slower_algorithm():
    """The bound of a sum that a compiler may add to another one: never above what that grows by."""
    model = TimeModel(Target.load("h100").rates, Layout(8))
    whole = Collective("all-reduce", NBYTES, 8, 1, 3)
    part = replace(whole, is_part=True)
    alone, added = model.collective_seconds(whole), model.collective_seconds(part)
    larger = model.collective_seconds(replace(whole, nbytes=2 * NBYTES))
    assert added == pytest.approx(3 * 9 / 8 * NBYTES / 308.57e9, rel=1e-4)
    assert alone > added <= larger - alone + 1e-15


@pytest.mark.parametrize(
    ("target", "dtype", "precision", "flops_per_second"),
    [
        ("h100", "float32", "default", 494.7e12 * 0.728),
        ("h100", "float32", "high", 494.7e12 * 0.728),
        ("h100", "float32", "highest", 67e12 * 0.728),
        ("h100", "tf32", "highest", 494.7e12 * 0.728),
        ("h100", "bfloat16", "default", 989.4e12 * 0.728),
        ("a100-40g", "float32", "default", 156e12 * 0.869),
        ("v100-32g", "float32", "default", 15.7e12 * 0.664),  # has no TF32
        ("v100-32g", "tf32", "highest", 15.7e12 * 0.664),
        ("v5e", "float32", "default", 197e12),  # bfloat16
        ("v5e", "float32", "high", 197e12 / 6),
        ("v5e", "float32", "highest", 197e12 / 6),
    ],
)
def test_products_have_the_rate_of_what_they_compute_in(target, dtype, precision, flops_per_second):
    model = TimeModel(Target.load(target).rates, Layout(8))
    assert model.program_seconds(ProgramWork(10**15, dtype, 0, 0, (), precision)) == pytest.approx(
        1e15 / flops_per_second
    )


def test_products_hide_their_own_bytes_and_no_others():
    flops, memory = (
        RATES.rate_of("bfloat16").value * RATES.compute_efficiency.value,
        RATES.bytes_per_second.value * RATES.memory_efficiency.value,
    )
    bound_by_flops = ProgramWork(10**13, "bfloat16", 10**9, 5 * 10**9)
    assert MODEL.program_seconds(bound_by_flops) == pytest.approx(
        10**13 / flops + 5 * 10**9 / memory
    )
    bound_by_memory = ProgramWork(10**9, "bfloat16", 10**10, 0)
    assert MODEL.program_seconds(bound_by_memory) == pytest.approx(10**10 / memory)
    reduced = replace(bound_by_memory, collectives=(Collective("all-reduce", NBYTES, 4, 1, 3),))
    assert MODEL.program_seconds(reduced) == pytest.approx(
        10**10 / memory + 3 * alpha_beta(FAST, 6, NBYTES / 4)
    )


def test_every_kernel_takes_the_longest_of_its_floor_its_products_and_its_bytes():
    """Totals of the same program would hide the bytes of one kernel behind the products of
    another, and see no launch."""
    floor, memory = RATES.kernel_seconds.value, RATES.reached_bytes_per_second
    flops = RATES.reached_flops_per_second("bfloat16")
    kernels = (
        Kernel(1000, count=27),  # small
        Kernel(1000, 100, "bfloat16", "default", count=5),
        Kernel(10**9, count=2),
        Kernel(10**6, 10**13, "bfloat16", "default", count=3),  # bound by its products
        Kernel(10**9, 10**6, "bfloat16", "default", count=4),  # by its bytes
    )
    work = ProgramWork(3 * 10**13, "bfloat16", 4 * 10**9, 2 * 10**9, kernels=kernels)
    expected = 32 * floor + 6 * 10**9 / memory + 3 * 10**13 / flops
    assert 1e-6 < floor < 1e-5
    assert MODEL.program_seconds(work) == pytest.approx(expected)
    by_totals = replace(work, kernels=None)
    assert MODEL.program_seconds(by_totals) == pytest.approx(
        3 * 10**13 / flops + 2 * 10**9 / memory
    )
    assert MODEL.program_seconds(replace(work, kernels=())) == 0


def test_a_product_has_the_rate_of_its_own_data_type():
    half = Kernel(0, 10**13, "bfloat16", "default", count=9)
    kernels = half, replace(half, dtype="float32", count=1)
    mixed = ProgramWork(0, "bfloat16", 0, 0, kernels=kernels)
    rates = [RATES.reached_flops_per_second(dtype) for dtype in ("bfloat16", "tf32")]
    assert MODEL.program_seconds(mixed) == pytest.approx(9e13 / rates[0] + 1e13 / rates[1])


def test_work_survives_json():
    work = ProgramWork(3, "float32", 4, 5, (Collective("all-gather", 6, 2, 1, 7),), "highest")
    document = json.loads(json.dumps(write(work)))
    assert "kernels" not in document  # as before they were counted
    assert read(document, ProgramWork) == work
    tiled = Kernel(4, 3, "float32", "highest", shape=(1, 2, 3))
    kernels = Kernel(4, 3, "float32", "highest"), tiled, Kernel(5, count=2), Kernel(0)
    for counted in (replace(work, kernels=kernels), replace(work, kernels=())):
        assert read(json.loads(json.dumps(write(counted))), ProgramWork) == counted


def timed(planted: Planted, profile: Profile) -> Profile:
    """The profile of an accelerator: layer l computes (l + 1) units per example and device."""

    def work(config: StageConfig, scale: int) -> ProgramWork:
        units = (
            sum(range(config.first + 1, config.stop + 1))
            * config.microbatch_size
            // config.choice.num_devices
        )
        return ProgramWork(scale * units * 10**9, "bfloat16", 0, 0)

    measurements = {
        config: replace(
            cost,
            forward_work=work(config, 1),
            backward_work=work(config, 2),
            update_work=ProgramWork(0, "float32", 0, 10**6),
        )
        for config, cost in profile.measurements.items()
    }
    return replace(
        profile, measurements=measurements, provenance={**profile.provenance, "target": "a100-40g"}
    )


def test_stage_times_are_the_sums_of_their_layers():
    planted = Planted(6)
    profile = timed(planted, planted.profile(hybrid(4)))
    plan = make_plan([4, 2], [StageChoice(2, 1), StageChoice(1, 2)])
    plan = plan.with_(cluster=Cluster(plan.cluster.nodes, "a100-40g"))
    times = TimePredictor(profile, Layout(4))
    unit = 10**9 / (RATES.rate_of("bfloat16").value * RATES.compute_efficiency.value)
    for found, config in zip(times.stage_times(plan), configs_of(plan), strict=True):
        units = (
            sum(range(config.first + 1, config.stop + 1))
            * config.microbatch_size
            / config.choice.num_devices
        )
        assert (found.forward_seconds, found.backward_seconds) == pytest.approx(
            (units * unit, 2 * units * unit)
        )
    table = times.table(StageChoice(1, 1), 12)  # a micro-batch size that was not profiled
    assert table.forward[0, 6] == pytest.approx(21 * 12 * unit)


def test_seconds_of_split_backward_passes_are_not_those_of_the_first_stage():
    """Elsewhere gradients of inputs and of weights take as long as the forward pass each; a stage of
    the first layer has no gradients of inputs."""
    planted = Planted(8)
    profile = timed(planted, planted.profile([StageChoice()], num_neighbours=2))

    def split(config: StageConfig, cost):
        forward, whole = cost.forward_work, cost.backward_work
        if config.first == 0:
            works = (0, cost.backward_bytes), (replace(whole, flops=0), whole)
        else:
            works = (1, 1), (forward, forward)
        (inputs, weights), (inputs_work, weights_work) = works
        return replace(
            cost,
            split=SplitCost(
                inputs, weights, 0, 0, inputs_work=inputs_work, weights_work=weights_work
            ),
        )

    measured = {config: split(config, cost) for config, cost in profile.measurements.items()}
    assert any((config.first, config.stop) == (0, 8) for config in measured), "an anchor"
    table = TimePredictor(replace(profile, measurements=measured), Layout(4)).table(
        StageChoice(), 16
    )
    for stop in range(2, 9):
        assert table.backward_inputs[0, stop] == 0
        assert table.backward_weights[0, stop] == pytest.approx(table.backward[0, stop])
        assert table.backward_inputs[1, stop] == pytest.approx(table.forward[1, stop])
        assert table.backward_weights[1, stop] == pytest.approx(table.forward[1, stop])


def test_a_step_takes_at_least_its_busiest_stage():
    planted = Planted(6)
    profile = timed(planted, planted.profile(hybrid(4)))
    plan = make_plan([4, 2], [StageChoice(2, 1), StageChoice(1, 2)], num_microbatches=8)
    plan = plan.with_(cluster=Cluster(plan.cluster.nodes, "a100-40g"))
    busiest = max(
        t.microbatch_seconds * 8 + t.update_seconds
        for t in TimePredictor(profile, Layout(4)).stage_times(plan)
    )
    timeline = predicted_timeline(plan, profile)
    summary = time_summary(timeline, plan, profile.graph_at(plan.microbatch_size))
    assert busiest <= summary.step_seconds < 1.5 * busiest
    assert summary.simulated and min(summary.bubble_fraction_per_stage) == pytest.approx(
        1 - busiest / summary.step_seconds
    )
    assert np.isfinite(summary.model_flops_per_second_per_device)


def test_virtual_cpu_devices_have_no_times():
    profile = Planted(6).profile(hybrid(2))
    assert not has_times(profile)
    with pytest.raises(
        ProfileError, match=r"target='cpu' says nothing about time.*\[profile-no-times\]$"
    ):
        TimePredictor(profile, Layout(4))


def test_the_two_closed_forms_of_a_pipeline():
    """They are one where the slowest stage has the longest update; otherwise the form that takes
    each maximum by itself says more."""
    times, microbatches = [3.0, 5.0, 2.0], 8

    def both(updates):
        busy = [microbatches * t + u for t, u in zip(times, updates, strict=True)]
        return busiest_seconds(busy, times), pipeline_seconds(times, updates, microbatches)

    assert both([1.0, 4.0, 2.0]) == (10 + 7 * 5 + 4, 10 + 7 * 5 + 4)
    assert both([9.0, 4.0, 2.0]) == (10 + 7 * 5 + 4, 10 + 7 * 5 + 9)
    assert both([30.0, 4.0, 2.0]) == (10 + 7 * 3 + 30, 10 + 7 * 5 + 30)
