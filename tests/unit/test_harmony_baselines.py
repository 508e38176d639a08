"""Baselines over virtual memory: the paper's volumes of weights exactly, managers by hand, and
reasons where they cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.machine.server import Server
from capture.measured.layer_passes import PassProfile
from capture.measured.layer_profile import LayerProfile
from capture.papers.harmony.baselines import (
    all_baselines,
    dp_swap,
    gp_swap,
    resident,
    two_bw_swap,
    zero_infinity,
)
from capture.papers.harmony.swapping import GpuMemory, run
from capture.papers.harmony.virtual_memory import GpuOperation
from capture.plan.task_graph import Configuration, Packs
from recommender.harmony.packing import of_length
from recommender.harmony.problem import PacksProblem
from recommender.harmony.search import search

PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"
SERVER = Server.load("gtx1080ti-x4")
FULL, WEIGHTS = 100, 7


def filled(weights: list[int]) -> LayerProfile:
    """Layers each pass of which, and each update, takes all of a memory of ``FULL`` bytes."""
    count = len(weights)
    forward = tuple(FULL for _ in weights)
    return LayerProfile(
        "filled",
        count,
        PassProfile((1,), ((1.0,) * count,), (forward,)),
        PassProfile((1,), ((3.0,) * count,), (forward,)),
        (0,) * count,
        tuple(weights),
        (0,) * count,
        tuple(FULL - 2 * w for w in weights),
        (1.0,) * count,
    )


def one_layer_setting(mode: str, devices: int, microbatches: int) -> PacksProblem:
    """A layer with weights between two without, per device; only one fits at a time."""
    server = SERVER.with_(num_devices=devices, usable_bytes=FULL)
    profile = filled([0, WEIGHTS, 0] * 2)
    count = microbatches * (devices if mode == "dp" else 1)
    return PacksProblem(profile, server, mode, count)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_weights_go_four_times_per_micro_batch_and_twice_for_the_update(microbatches):
    for devices in (1, 2):
        found = dp_swap(one_layer_setting("dp", devices, microbatches), remat=True)
        moved = found.volumes_bytes["W in"] + found.volumes_bytes["W out"]
        assert moved == (4 * microbatches + 2) * devices * 2 * WEIGHTS
    found = gp_swap(one_layer_setting("pp", 2, microbatches), remat=True)
    moved = found.volumes_bytes["W in"] + found.volumes_bytes["W out"]
    assert moved == (4 * microbatches + 2) * 2 * WEIGHTS


def test_what_did_not_change_need_not_go_back():
    asked = one_layer_setting("dp", 1, 4)
    lazy = dp_swap(asked, remat=True, always=False)
    # Weights change in the update alone.
    assert lazy.volumes_bytes["W out"] == 2 * WEIGHTS
    assert lazy.volumes_bytes["W in"] == dp_swap(asked, remat=True).volumes_bytes["W in"]


def test_the_manager_evicts_what_is_used_last():
    a, b, c = (("W", i, 0) for i in range(3))
    order = [GpuOperation(0, 1.0, (one,)) for one in (a, b, c, a, b)]
    found = run(order, {a: 4, b: 4, c: 4}, [(0, one) for one in (a, b, c)], GpuMemory(8, 4.0, 1.0))
    # In the second step a and b are there; for c, b goes, which is used after a; then c goes for b.
    assert found.volumes_bytes == {"W in": 8, "W out": 8}
    assert found.seconds == 5 * 1.0 + 2 + 2 and found.peak_bytes == [8]
    clean = run(
        order, {a: 4, b: 4, c: 4}, [(0, one) for one in (a, b, c)], GpuMemory(8, 4.0, 1.0, False)
    )
    assert clean.volumes_bytes == {"W in": 8} and clean.seconds == 7


def test_what_does_not_fit_by_itself_is_named():
    a = ("W", 5, 0)
    found = run(
        [GpuOperation(0, 1.0, (a,), workspace_bytes=5)], {a: 4}, [(0, a)], GpuMemory(8, 1.0, 1.0)
    )
    assert found.missing == (5, 9)
    asked = PacksProblem(
        LayerProfile.load(PROFILES / "gpt2_xl.json"), SERVER.with_(usable_bytes=10**9), "pp", 16
    )
    assert gp_swap(asked).seconds is None and "alone needs" in gp_swap(asked).reason


@pytest.fixture(scope="module")
def gpt2():
    asked = PacksProblem(LayerProfile.load(PROFILES / "gpt2_xl.json"), SERVER, "pp", 16)
    best = search(asked).best
    return asked, best, {row.name: row for row in all_baselines(asked, best.configuration)}


def test_takeaways_that_hold_on_the_shipped_profiles(gpt2):
    _, best, rows = gpt2
    seconds = {name: row.seconds for name, row in rows.items() if row.seconds}
    assert seconds["DP Swap"] == max(seconds.values())
    assert seconds["2BW Swap"] < seconds["GP Swap"]
    for name in ("GP Swap", "2BW Swap"):
        assert seconds[f"{name} (R)"] < seconds[name]
    # Of those that are synchronous, too, with a manager that knows the future.
    assert best.seconds < seconds["GP Swap (R)"]
    assert rows["DP Swap"].swap_bytes == max(row.swap_bytes for row in rows.values())
    assert rows["resident"].seconds is None and "GB" in rows["resident"].reason
    assert rows["activation offload"].seconds is None


def test_zero_infinity_gathers_for_every_micro_batch(gpt2):
    asked, best, rows = gpt2
    weights = sum(asked.profile.w_bytes) + sum(asked.profile.b_bytes)
    size = best.configuration.backward.microbatch_size
    count = -(-16 // 4 // size)
    assert rows["ZeRO-Infinity"].volumes_bytes["W in"] == 2 * count * weights
    small = PacksProblem(asked.profile, SERVER.with_(host_memory_bytes=30 * 10**9), "pp", 16)
    assert "the host needs" in zero_infinity(small, best.configuration).reason


def test_zero_infinity_fails_at_40_billion_on_750_gb():
    for billions, runs in ((10, True), (30, True), (40, False)):
        profile = LayerProfile.load(PROFILES / f"gpt2_{billions}b.json")
        asked = PacksProblem(profile, Server.load("gtx1080ti-x8"), "pp", 32)
        packs = of_length(profile.num_layers, 2)
        by_hand = Configuration(Packs(1, packs[:-1]), Packs(1, packs))
        assert (zero_infinity(asked, by_hand).seconds is not None) is runs


def test_a_model_that_fits_is_trained_resident():
    toy = LayerProfile.load(PROFILES / "toy6.json")
    roomy = PacksProblem(toy, SERVER.with_(usable_bytes=10**10), "dp", 40)
    assert resident(roomy).seconds is not None and resident(roomy).swap_bytes == 0
    assert "W in" not in two_bw_swap(roomy, remat=True).volumes_bytes
