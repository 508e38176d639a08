"""Answers of Harmony's released scheduler on the shipped profiles: every point that it evaluated,
in order, its packs, packings, memory, idle time and estimate; and Table 1 of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import Switches
from recommender.harmony.bound import least_seconds
from recommender.harmony.problem import PacksProblem
from recommender.harmony.result import Point
from recommender.harmony.search import search

ROOT = Path(__file__).parents[2]
SERVER = Server.load("gtx1080ti-x4")
MODES = {"vPP": "pp", "vDP": "dp"}
RUNS = [
    (name, run)
    for name in ("toy6", "transformer15", "gpt2_xl", "bert_96")
    for run in json.loads((ROOT / f"tests/data/harmony/result_{name}.json").read_text())["runs"]
]
PROFILES: dict[str, LayerProfile] = {}


def profile(name: str) -> LayerProfile:
    if name not in PROFILES:
        PROFILES[name] = LayerProfile.load(ROOT / f"benchmarks/papers/harmony/profiles/{name}.json")
    return PROFILES[name]


def problem_of(name: str, run: dict) -> PacksProblem:
    return PacksProblem(
        profile(name),
        SERVER.with_(num_devices=run["N"], usable_bytes=int(run["memory_cap"])),
        MODES[run["mode"]],
        run["D"],
        tuple(run["packing_fwd"]),
        tuple(run["packing_bwd"]),
        Switches(prefetch=run["prefetch"]),
    )


def exact(point: Point) -> tuple:
    forward, backward = point.configuration.forward, point.configuration.backward
    return (
        forward.microbatch_size,
        list(forward.lengths),
        point.choice.forward_packing,
        backward.microbatch_size,
        list(backward.lengths),
        point.choice.backward_packing,
        point.task_bytes,
    )


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda i: f"{RUNS[i][0]}-{i}")
def test_every_point_that_was_evaluated(number):
    name, run = RUNS[number]
    problem = problem_of(name, run)
    found = search(problem, "paper")
    points = run.get("points", [])
    assert found.status == ("ok" if run["feasible"] else "infeasible")
    if run["feasible"]:
        assert problem.sizes("forward") == run["search_u_f"]
        assert problem.sizes("backward") == run["search_u_b"]
    keys = ("u_f", "p_f", "method_f", "u_b", "p_b", "method_b", "max_mem")
    assert [exact(point) for point in found.points] == [
        tuple(p[key] for key in keys) for p in points
    ]
    for ours, theirs in zip(found.points, points, strict=True):
        assert ours.seconds == pytest.approx(theirs["est_time"], rel=1e-12)
        assert ours.max_idle_fraction == pytest.approx(theirs["max_idle"], abs=1e-12)
        assert ours.mean_idle_fraction == pytest.approx(theirs["avg_idle"], abs=1e-12)
        assert least_seconds(problem, ours.configuration) <= ours.seconds
    bounded = search(problem, "bounded")
    assert bounded.best == found.best
    if run["feasible"]:
        best = run["best"]
        assert exact(found.best) == tuple(best[key] for key in keys)
        estimate = problem.estimate(found.best.configuration)
        assert estimate.rank_ends == pytest.approx(best["per_rank_end"], rel=1e-12)
        assert list(estimate.rank_bytes) == best["per_rank_memory"]
        computes = 1 - fmean(estimate.gap_fractions)
        assert computes == pytest.approx(best["compute_to_global"], rel=1e-12)


@pytest.mark.parametrize("algorithm", ["paper", "bounded"])
@pytest.mark.parametrize(
    ("name", "limit", "row", "seconds"),
    [
        ("bert_96", 9 * 10**9, (16, 24, 16, 25), 19.056),
        ("gpt2_xl", 9 * 10**9, (4, 10, 4, 17), 45.281),
        ("vgg416", 10 * 2**30, (8, 15, 8, 16), 11.783),
        ("resnet1026", 10 * 2**30, (32, 2, 32, 9), 5.204),
    ],
)
def test_table_1(name, limit, row, seconds, algorithm):
    server = SERVER.with_(usable_bytes=limit)
    found = search(
        PacksProblem(profile(name), server, "pp", 64, switches=Switches(prefetch=False)), algorithm
    ).best
    forward, backward = found.configuration.forward, found.configuration.backward
    assert row == (
        forward.microbatch_size,
        len(forward.packs),
        backward.microbatch_size,
        len(backward.packs),
    )
    assert round(found.seconds, 3) == seconds
