"""Descriptions of operators and devices, and what the two cost models say of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from osdp_problems import family, link, machine

from capture.errors import TargetError, WorkloadError
from capture.machine.cluster import Cluster, Machine
from capture.machine.link_fit import MeasuredCollective, fit_link
from capture.machine.rates import Sourced
from capture.model.operators import Block, Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.plan.sharding import DP, ZDP, Mode
from capture.step.operator_cost import StepCost

PRODUCT = Operator(
    "product",
    "matmul",
    8_000_000,
    activation_bytes=3000,
    input_bytes=1000,
    output_bytes=2000,
    workspace_bytes=50,
    flops=10**9,
)
MODEL = OperatorModel("one", (Block((PRODUCT,)),))
EIGHT = machine(8e9, alpha=1e-4)
STEP = 1e-4 + 1e6 / 4.5e9  # one step of a ring of eight with 8 MB
GAMMA = 3 * 10**9 / 11e12


def cost_of(model, mode, batch_size=2):
    cost = model.cost(PRODUCT, mode, batch_size)
    return cost.resident_bytes, cost.transient_bytes, cost.seconds


@pytest.mark.parametrize(
    ("mode", "remat", "states", "steps"),
    [(DP, False, 4.0, 14), (ZDP, False, 0.5, 21), (DP, True, 4.0, 14), (ZDP, True, 0.5, 28)],
)
def test_the_papers_equations(mode, remat, states, steps):
    held, passes = (1000, 4 / 3) if remat else (3000, 1)
    expected = (states * 8e6 + 2 * held + 50, 0, steps * STEP + 2 * GAMMA * passes)
    assert cost_of(PaperCost(MODEL, EIGHT, remat=remat), mode) == pytest.approx(expected)


def test_the_papers_slices_are_operators_of_their_own():
    found = cost_of(PaperCost(MODEL, EIGHT, (4,)), Mode(4, 1))
    slices = (3 * 14 + 21) * (1e-4 + 2.5e5 / 4.5e9)
    assert found == pytest.approx((8e6 * 4 * (3 / 4 + 1 / 32) + 6050, 0, slices + 2 * GAMMA))


def test_one_device_has_nothing_to_send_or_to_share():
    alone = PaperCost(MODEL, machine(8e9, per_node=1))
    assert cost_of(alone, DP) == cost_of(alone, ZDP) and cost_of(alone, DP)[2] == pytest.approx(
        2 * GAMMA
    )
    assert alone.modes(PRODUCT) == StepCost(MODEL, alone.machine).modes(PRODUCT) == (DP,)


def test_gathering_is_transient_and_falls_with_the_slices():
    model = StepCost(MODEL, EIGHT, (1, 4, 8))
    passing = 50 + 2 * (1000 + 2000)
    assert cost_of(model, DP)[1] == passing
    assert cost_of(model, ZDP)[1] == passing + 2 * 8_000_000
    assert cost_of(model, Mode(4, 4))[1] == passing + 2 * 2_000_000
    # Forwards: two results, before the gradient of the input.
    adding = cost_of(StepCost(MODEL, EIGHT, (1000,)), Mode(1000, 1000), 200)[1]
    assert adding == 50 + 8000 + 200 * 2 * 2000
    # The next one is gathered meanwhile.
    assert cost_of(replace(model, overlap_fraction=1.0), ZDP)[1] == passing + 3 * 8_000_000
    # Where the input's gradient takes the place of the input.
    rematerialised = cost_of(replace(model, remat=True), ZDP)[1]
    assert rematerialised == 50 + 2 * 8_000_000 + 2 * 2000


def test_gathers_of_fewer_bits_are_smaller_and_faster_and_replicated_operands_may_be_fused():
    model, half = StepCost(MODEL, EIGHT), replace(PRODUCT, gathered_fraction=0.5, fused_bytes=800)
    whole, less = model.cost(PRODUCT, ZDP, 2), model.cost(half, ZDP, 2)
    assert whole.transient_bytes - less.transient_bytes == 4_000_000  # the gradient is as before
    # Of 21 steps, the 14 of two gathers.
    assert whole.seconds - less.seconds == pytest.approx(14 * 5e5 / 4.5e9)
    assert (whole.resident_bytes, model.cost(PRODUCT, DP, 2).resident_bytes) == (
        less.resident_bytes,
        model.cost(half, DP, 2).resident_bytes + 2 * 800,
    )


def test_what_a_remat_region_computes_again_is_there_when_it_goes_backwards():
    """Beside all else; where operators are rematerialised, their own inputs say it."""
    again = replace(PRODUCT, again_bytes=700)
    for model in (StepCost(MODEL, EIGHT), StepCost(MODEL, EIGHT, remat=True)):
        for mode in (DP, ZDP):
            phases = (model.transients(one, mode, 2) for one in (PRODUCT, again))
            more = [after - before for before, after in zip(*phases, strict=True)]
            assert more == ([0, 0, 0] if model.remat else [0, 1400, 1400])


def test_memory_on_the_chip_holds_what_is_in_use_and_fits():
    def transient(on_chip, mode, batch_size):
        target = replace(EIGHT.target, on_chip_bytes=Sourced(on_chip, "test"))
        model = StepCost(MODEL, replace(EIGHT, target=target))
        return cost_of(model, mode, batch_size)[1]

    assert transient(1500, DP, 1) == 50 + 2000  # of the gradients, the input's fits
    assert transient(9_000_000, ZDP, 2) == 50 + 2 * 3000 + 16_000_000 - 9_000_000
    assert transient(20_000_000, ZDP, 2) == 0  # with what is kept in use, all of it, and no less


def test_slices_pay_latencies_and_additions():
    model = StepCost(MODEL, EIGHT, (1, 4))
    whole, split = cost_of(model, ZDP)[2], cost_of(model, Mode(4, 4))[2]
    assert split - whole == pytest.approx(21 * 3 * 1e-4 + 3 * 3 * 2 * 2000 / 5e11)
    # Two slices in ZDP mode one by one, the other two together.
    half = cost_of(model, Mode(4, 2))[2]
    expected = (
        14 * (1e-4 + 5e5 / 4.5e9)
        + 2 * 21 * (1e-4 + 2.5e5 / 4.5e9)
        + 2 * 3 * 2 * 2000 / 5e11
        + 2 * GAMMA
    )
    assert half == pytest.approx(expected)


def test_overlap_hides_a_fraction_of_the_lesser():
    none, some, ideal = (
        cost_of(StepCost(MODEL, EIGHT, overlap_fraction=f), ZDP, 5)[2] for f in (0, 0.25, 1)
    )
    assert none == pytest.approx(21 * STEP + 5 * GAMMA)
    assert some == pytest.approx(none - 0.25 * 5 * GAMMA) and ideal == pytest.approx(21 * STEP)


def test_remat_gathers_once_more_in_zdp_mode_only():
    for mode, gathers in ((DP, 0), (ZDP, 1)):
        plain, remat = (
            cost_of(StepCost(MODEL, EIGHT, remat=flag), mode)[2] for flag in (False, True)
        )
        assert remat - plain == pytest.approx(gathers * 7 * STEP + 2 * GAMMA / 3)


def test_two_nodes():
    """One ring through both nodes, by four adapters; shared inside a node, gathers never leave it,
    and gradients are reduced over the nodes."""
    two = machine(8e9, num_nodes=2, per_node=4)
    model = StepCost(MODEL, two)
    assert model.modes(PRODUCT) == (DP, ZDP, Mode(1, 1, 4))
    ring = 5 * 1e-4 + 2 * 2e-4 + 7e6 / 4.5e9
    inside, between = 3 * (1e-4 + 2e6 / 4.5e9), 2e-4 + 1e6 / 1.5e9
    assert cost_of(model, DP)[2] == pytest.approx(2 * ring + 2 * GAMMA)
    assert cost_of(model, ZDP)[2] == pytest.approx(3 * ring + 2 * GAMMA)
    assert cost_of(model, Mode(1, 1, 4))[2] == pytest.approx(3 * inside + 2 * between + 2 * GAMMA)
    assert cost_of(model, Mode(1, 1, 4))[0] == 8e6 + 6000
    ring = two.links.slowest_of_ring(2)
    assert (ring.bytes_per_second.value, ring.latency_seconds.value) == (4.5e9, 2e-4)
    slow = two.links.slowest_of_ring(1)  # of a node: 4 x 1.5 GB/s, more than inside
    assert slow == two.rates.intra_node
    sent = two.links.seconds("collective-permute", 1.5e9, 2, stride=4)
    assert sent == pytest.approx(1 + 2e-4)


def test_unknown_operators_are_not_split_and_those_without_parameters_have_nothing_to_shard():
    model = StepCost(MODEL, EIGHT, (0, 1, 2))
    assert model.modes(replace(PRODUCT, kind="other")) == (DP, ZDP)
    assert model.modes(replace(PRODUCT, parameter_bytes=0)) == (DP,)
    assert model.modes(PRODUCT) == (DP, ZDP, Mode(2, 1), Mode(2, 2))  # 0 and 1 slices are the same


@pytest.mark.parametrize(
    "model", [PaperCost(MODEL, EIGHT, (1, 4), True), StepCost(MODEL, EIGHT, (1, 4), True, 0.4)]
)
def test_costs_of_many_batch_sizes_are_those_of_each(model):
    for mode in model.modes(PRODUCT):
        together = model.cost(PRODUCT, mode, np.arange(1, 6))
        for i in range(5):
            alone = cost_of(model, mode, i + 1)
            assert alone == pytest.approx(
                [np.broadcast_to(column, 5)[i] for column in vars(together).values()]
            )


def test_measured_gamma_is_used_instead_of_flops():
    measured = replace(PRODUCT, gamma_seconds=0.5)
    assert PaperCost(MODEL, EIGHT).cost(measured, DP, 2).seconds == pytest.approx(14 * STEP + 1)


def test_equal_operators_are_counted_whatever_their_names():
    model = family("I&C")
    assert model.num_operators == 90 and sum(count for _, count in model.counts) == 90
    assert [count for _, count in model.counts] == [1, 24, 24, 16, 16, 4, 4, 1]
    named = OperatorModel("two", (Block((PRODUCT, replace(PRODUCT, name="other")), 3),))
    assert named.counts == ((0, 6),)


def test_descriptions_survive_json(tmp_path):
    model, path = family("W&S"), tmp_path / "description.json"
    path.write_text(json.dumps(model.to_json()))
    assert OperatorModel.load(path) == model


def test_a_wrong_description_is_refused_with_all_that_is_wrong():
    wrong = replace(PRODUCT, kind="pooling", flops=-1)
    with pytest.raises(WorkloadError) as caught:
        OperatorModel("wrong", (Block((wrong,), 0),), 0.5)
    assert caught.value.codes == (
        "operators-state",
        "operators-count",
        "operator-kind",
        "operator-size",
    )
    with pytest.raises(
        WorkloadError, match=r"has no operators; give one at least\. \[operators-none\]$"
    ):
        OperatorModel("empty", ())
    data = json.loads(json.dumps(MODEL.to_json()))
    del data["blocks"][0]["operators"][0]["input_bytes"]
    with pytest.raises(
        WorkloadError,
        match=r"blocks\[0\]\.operators\[0\]\.input_bytes is missing.*\[operators-corrupt\]$",
    ):
        OperatorModel.from_json(data)
    with pytest.raises(WorkloadError, match=r"schema_version=2; .*\[operators-schema\]$"):
        OperatorModel.from_json({**MODEL.to_json(), "schema_version": 2})
    with pytest.raises(WorkloadError, match=r"\[operators-file\]$"):
        OperatorModel.load("no/such/file.json")
    with pytest.raises(WorkloadError) as caught:
        StepCost(MODEL, EIGHT, (), overlap_fraction=1.5)
    assert caught.value.codes == ("osdp-overlap", "osdp-granularity")


def test_a_machine_has_times_and_equal_nodes():
    with pytest.raises(TargetError, match=r"target='cpu' has no rates.*\[devices-no-rates\]$"):
        Machine.of(Cluster((8,)))
    with pytest.raises(TargetError, match=r"nodes of several sizes.*\[devices-uneven\]$"):
        Machine.of(Cluster((4, 2), "h100"))


def test_device_information_of_earlier_versions_is_refused_with_what_to_do(tmp_path):
    """It was JSON with ``schema_version`` 1, as target files are."""
    path = tmp_path / "devices.json"
    number = {"value": 1, "source": "test"}
    path.write_text(
        json.dumps(
            {"schema_version": 1, "name": "mine", "num_nodes": 1, "devices_per_node": 8}
            | {"memory_limit_bytes": number, "flops_per_second": number}
        )
    )
    with pytest.raises(TargetError, match=r"Write a target file, .*\[target-devices\]$"):
        Machine.of(Cluster((8,), str(path)))


def test_the_machine_of_a_target():
    found = Machine.of(Cluster((4, 4), "a100-40g"), "bfloat16")
    assert (found.num_devices, found.devices_per_node) == (8, 4)
    assert 3e10 < found.memory_limit_bytes < 4e10
    assert found.flops_per_second == pytest.approx(312e12 * 0.869)
    part = found.group(4, stride=2)  # every other device
    assert part.cluster.nodes == (2, 2) and part.memory_limit_bytes == found.memory_limit_bytes


@pytest.mark.parametrize(
    ("target", "precision", "flops_per_second"),
    [
        ("h100", "default", 494.7e12 * 0.728),
        ("h100", "highest", 67e12 * 0.728),
        ("v100-32g", "default", 15.7e12 * 0.664),
        ("v5e", "default", 197e12),
        ("v5e", "highest", 197e12 / 6),
    ],
)
def test_float32_has_the_rate_that_products_compute_it_at(target, precision, flops_per_second):
    found = Machine.of(Cluster((4,), target), "float32", precision)
    assert found.flops_per_second == pytest.approx(flops_per_second)


def test_a_link_is_recovered_from_noisy_timings():
    planted, generator = link(3e-5, 6e9), np.random.default_rng(0)
    rows = [
        MeasuredCollective(
            kind, n, nbytes, (1 + 0.02 * generator.normal()) * steps * planted.seconds(nbytes / n)
        )
        for kind, factor in (("all-gather", 1), ("all-reduce", 2))
        for n in (2, 4, 8)
        for nbytes in (10**5, 10**6, 10**7, 10**8)
        for steps in [factor * (n - 1)]
    ]
    found = fit_link(rows, "planted")
    assert found.link.latency_seconds.value == pytest.approx(3e-5, rel=0.05)
    assert (
        found.link.bytes_per_second.value == pytest.approx(6e9, rel=0.05)
        and found.mean_error_fraction < 0.03
    )


def test_timings_that_say_nothing_are_refused():
    one = MeasuredCollective("all-gather", 4, 1000, 1e-3)
    with pytest.raises(TargetError, match=r"\[fit-too-few\]$"):
        fit_link([one, replace(one, seconds=2e-3)], "test")
    with pytest.raises(TargetError, match=r"\[fit-no-bandwidth\]$"):
        fit_link([one, replace(one, nbytes=10**6, seconds=0.9e-3)], "test")
    fast = fit_link(
        [replace(one, nbytes=10**6), replace(one, nbytes=10**7, seconds=11e-3)],
        "latency below what these sizes tell",
    )
    assert fast.link.latency_seconds.value == 0
