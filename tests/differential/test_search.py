"""Every search against brute force, hand-made answers, the paper's counts and the authors' released
answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import (
    SHAPES,
    additive,
    brute_force,
    count_plans,
    every_plan,
    every_sorted_vector,
    known_cases,
    linear_cost,
    pipeline_problem,
    random_problem,
)
from seeds import seeds

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.papers.capture.baselines import fixed_degree_plan
from capture.papers.capture.choices import hybrid_choices, paper_choices
from capture.papers.capture.cuts import equal_cuts
from capture.plan.choices import StageChoice
from capture.plan.sampling import random_plans
from capture.plan.space import StageSpace
from recommender import SearchProblem, SearchResult, search

STORED_CASES = json.loads((Path(__file__).parents[1] / "data" / "search_cases.json").read_text())


def assert_valid(problem: SearchProblem, result: SearchResult) -> None:
    """Layers and devices are covered once, in order, by stages whose bytes the problem confirms."""
    stages = result.stages
    assert [stage.first for stage in stages] == [0] + [stage.stop for stage in stages[:-1]]
    assert stages[-1].stop == problem.num_layers
    assert [stage.devices[0] for stage in stages] == [0] + [
        stage.devices[-1] + 1 for stage in stages[:-1]
    ]
    assert stages[-1].devices[-1] + 1 == problem.cluster.num_devices
    for stage_id, stage in enumerate(stages):
        d = stage.choice.num_devices
        assert d in problem.degrees[stage.devices[0]]
        cost = problem.bytes_per_choice(d, len(stages) - stage_id, stage.first, stage.stop)
        assert stage.peak_bytes == cost[problem.choices[d].index(stage.choice)]
    assert result.peak_bytes_per_device == tuple(
        stage.peak_bytes for stage in stages for _ in range(stage.choice.num_devices)
    )
    assert result.peak_bytes == max(result.peak_bytes_per_device)


@pytest.mark.parametrize("seed", seeds(range(320)))
def test_minmax_equals_brute_force(seed):
    problem = random_problem(seed)
    best, result = brute_force(problem), search(problem)
    assert result.sorted_peaks == best
    assert result.optimal
    if best:
        assert_valid(problem, result)
        assert (result.status, result.tie_break, result.tie_break_columns) == (
            "ok",
            "full",
            problem.cluster.num_devices,
        )
        untied = search(problem, tie_break="none")
        assert_valid(problem, untied)
        assert (untied.peak_bytes, untied.tie_break) == (best[0], "none")


def test_any_plan_of_least_peak_has_its_stages_where_they_fit():
    """Bytes that are others at every position: a stage taken for another position shows."""
    choices = {d: (StageChoice(d),) for d in (1, 2, 4)}
    for seed in range(40):
        generator = np.random.default_rng(seed)
        cost = {d: generator.integers(0, 1000, (1, 4, 8, 9)) for d in choices}
        problem = SearchProblem(Cluster((4, 4)), 8, choices, cost)
        assert search(problem, tie_break="none").peak_bytes == search(problem).peak_bytes


@pytest.mark.parametrize("seed", range(0, 320, 4))
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_partial_tie_break_decides_the_largest_devices(seed, columns):
    problem = random_problem(seed)
    result = search(problem, tie_break=columns)
    assert result.sorted_peaks[:columns] == brute_force(problem)[:columns]
    if result.status == "ok" and columns < problem.cluster.num_devices:
        assert (result.tie_break, result.tie_break_columns) == ("partial", columns)


def test_default_tie_break_is_bounded_above_64_devices():
    """Few states on plans of least peak are compared in full, many only as far as the budget
    goes."""
    few = pipeline_problem(np.arange(70 * 71).reshape(70, 71), 65)
    assert search(few).tie_break == "full"
    # Inside, 101 next layers are possible at each device.
    many = search(pipeline_problem(np.ones((220, 221), np.int64), 120))
    assert (many.tie_break, many.tie_break_columns, many.peak_bytes) == (
        "partial",
        (1 << 20) // (119 * 101 + 2),
        1,
    )


@pytest.mark.parametrize("seed", seeds(range(0, 320, 5)))
def test_enumeration_equals_brute_force_and_pruning_saves_work(seed):
    problem = random_problem(seed)
    pruned, full = search(problem, "enumerate"), search(problem, "enumerate", prune=False)
    assert pruned.sorted_peaks == full.sorted_peaks == brute_force(problem)
    assert pruned.num_explored <= full.num_explored
    if pruned.stages:
        assert_valid(problem, pruned)


@pytest.mark.parametrize("algorithm", ["minmax", "enumerate"])
@pytest.mark.parametrize("case", known_cases(), ids=lambda case: case.name)
def test_known_answers(case, algorithm):
    result = search(case.problem, algorithm)
    assert result.sorted_peaks == case.best
    assert result.status == ("ok" if case.best else "infeasible")


@pytest.mark.parametrize("algorithm", ["mcap", "mcap-bf"])
@pytest.mark.parametrize(
    "case",
    [case for case in known_cases() if 1 in case.problem.choices and 2 not in case.problem.choices],
    ids=str,
)
def test_known_pipeline_answers(case, algorithm):
    result = search(case.problem, algorithm)
    assert (result.sorted_peaks, result.algorithm) == (case.best, algorithm)


@pytest.mark.parametrize(
    ("positions", "num_rows"), [(63, 63), (64, 64), (65, 65), (90, 70), (130, 128), (130, 130)]
)
def test_positions_across_machine_words(positions, num_rows):
    """Deep pipelines use several 64-bit words of positions; on one-device stages every plan has the
    same depth."""
    generator = np.random.default_rng(positions + num_rows)
    num_layers = positions + 1
    empty = np.tri(num_layers, num_layers + 1, dtype=bool)
    static, kept = (np.where(empty, 0, generator.integers(0, 9, empty.shape)) for _ in range(2))
    static[empty] = 1 << 61
    cost = linear_cost(static[None], kept[None], np.arange(1, num_rows + 1))
    problem = SearchProblem(Cluster((1,) * positions), num_layers, paper_choices(1), {1: cost})
    # One layer more than stages: exactly one stage holds two layers.
    vectors = []
    for double in range(positions):
        cuts = [i + (i > double) for i in range(positions + 1)]
        vectors.append(
            sorted(
                (
                    int(problem.bytes_per_choice(1, positions - i, cuts[i], cuts[i + 1])[0])
                    for i in range(positions)
                ),
                reverse=True,
            )
        )
    assert list(search(problem, tie_break="full").sorted_peaks) == min(vectors)


@pytest.mark.parametrize(
    ("nodes", "num_layers", "count"),
    [
        ((4,), 8, 191),
        ((2, 2), 8, 147),
        ((4,), 16, 1147),
        ((4, 4), 12, 50886),
        ((4, 4), 16, 289547),
        ((4,) * 4, 16, 124958673),
    ],
)
def test_plan_counts(nodes, num_layers, count):
    cost = {
        d: np.zeros((len(c), 1, num_layers, num_layers + 1), np.int64)
        for d, c in paper_choices(4).items()
    }
    problem = SearchProblem(Cluster(nodes), num_layers, paper_choices(4), cost)
    assert count_plans(problem) == count
    if count < 1000:
        assert sum(1 for _ in every_sorted_vector(problem)) == count


def test_choices_of_the_paper():
    assert [sum(map(len, paper_choices(k).values())) for k in (1, 2, 4, 8)] == [1, 3, 5, 7]
    assert hybrid_choices(4)[4] == (StageChoice(4, 1), StageChoice(2, 2), StageChoice(1, 4))
    assert all(
        choice.num_devices == d for d, choices in hybrid_choices(16).items() for choice in choices
    )


@pytest.mark.parametrize(
    "case", STORED_CASES, ids=lambda case: f"{case['kind']}-{case['layers']}-{case['gpus']}"
)
@pytest.mark.parametrize("algorithm", ["mcap", "mcap-bf", "minmax", "enumerate"])
def test_released_answers(case, algorithm):
    """Peak, tie-break and per-device bytes of the mCAP authors' released search on the same
    statistics."""
    added = [0 if value is None else value for value in case["mem_added"]]
    problem = pipeline_problem(additive(case["mem_isolated"], added), case["gpus"])
    result = search(problem, algorithm)
    assert result.peak_bytes == case["best_peak"]
    assert result.sorted_peaks == tuple(sorted(case["lexicographic_prediction"], reverse=True))
    if case["n_ties"] == 1:
        assert [stage.stop - stage.first for stage in result.stages] == case["lexicographic_choice"]
        assert list(result.peak_bytes_per_device) == case["bf_prediction"]
    assert count_plans(problem) == case["n_partitionings"]


def test_exclusion_rules_differ():
    """[10, 10, 5, 5] against [10, 6, 6, 6]: one device at a time prefers the second, all equal ones
    at once the first."""
    cost = {
        1: np.full((1, 4, 4, 5), 99, np.int64),
        2: np.full((1, 4, 4, 5), 99, np.int64),
    }
    cost[2][0, 1, 0, 2], cost[2][0, 0, 2, 4] = 10, 5
    for j, first in ((4, 0), (3, 1), (2, 2), (1, 3)):
        cost[1][0, j - 1, first, first + 1] = 10 if first == 0 else 6
    problem = SearchProblem(Cluster((4,)), 4, {1: (StageChoice(),), 2: (StageChoice(2, 1),)}, cost)
    assert search(problem).peak_bytes_per_device == (10, 6, 6, 6)
    assert search(problem, "enumerate").peak_bytes_per_device == (10, 6, 6, 6)
    assert search(problem, "enumerate", exclude="equal").peak_bytes_per_device == (10, 10, 5, 5)
    untied = [search(problem, "enumerate", exclude="none", seed=seed) for seed in range(20)]
    assert {result.peak_bytes_per_device for result in untied} == {(10, 6, 6, 6), (10, 10, 5, 5)}
    assert {(result.tie_break, result.tie_break_columns) for result in untied} == {("none", 0)}


def test_full_ties_are_drawn_by_seed():
    problem = pipeline_problem(np.ones((4, 5), np.int64), 2)
    cuts = {search(problem, "enumerate", seed=seed).stages[0].stop for seed in range(30)}
    assert cuts == {1, 2, 3}
    assert search(problem, "enumerate").stages == search(problem, "enumerate").stages


def test_enumeration_that_stops_early_says_so():
    problem = random_problem(1)
    for most in (20, 21):
        stopped = search(problem, "enumerate", max_placements=most)
        assert not stopped.optimal
        assert (stopped.tie_break, stopped.num_explored) == ("none", most)
    nothing = search(problem, "enumerate", max_placements=0)
    assert (nothing.status, nothing.why.code, nothing.optimal) == (
        "infeasible",
        "search-stopped",
        False,
    )


@pytest.mark.parametrize("algorithm", ["minmax", "enumerate", "mcap", "mcap-bf"])
def test_memory_limit(algorithm):
    problem = pipeline_problem(additive([10] * 6, [10] * 6), 2)
    assert search(replace(problem, memory_limit_bytes=30), algorithm).status == "ok"
    result = search(replace(problem, memory_limit_bytes=29), algorithm)
    assert (result.status, result.peak_bytes, len(result.stages)) == ("infeasible", 30, 2)
    assert (result.why.code, result.why.least_peak_bytes, result.why.memory_limit_bytes) == (
        "memory-limit",
        30,
        29,
    )
    assert result.why.stage_id == 0
    assert result.why.summary == (
        "The lowest peak memory of any plan is 30 bytes, 1 above memory_limit_bytes=29: stage_id=0 "
        "(layers 0 to 2 on devices 0 to 0, "
        "data_parallel=1, tensor_parallel=1). Raise the limit to 30 bytes, or use more devices, "
        "more micro-batches of a smaller size, or "
        "rematerialisation. [memory-limit]"
    )


def test_reasons_for_no_plan():
    codes = {case.name: search(case.problem).why.code for case in known_cases() if not case.best}
    assert {search(case.problem).num_explored for case in known_cases() if not case.best} == {0}
    assert codes == {
        "fewer layers than stages": "too-few-layers",
        "nothing possible": "no-possible-stage",
        "a node of three, stages of two": "devices-unfillable",
    }
    assert search(pipeline_problem(additive([1] * 6, [1] * 6), 7)).why.summary == (
        "num_layers=6 cannot fill the 7 devices of cluster 7x1: at least 7 stages of one layer or "
        "more are needed. "
        "Cut the model into 7 layers or more, allow larger stages, or use fewer devices. "
        "[too-few-layers]"
    )


def test_positions_can_make_every_plan_impossible():
    """Each stage is possible somewhere, but never where the only plan needs it."""
    cost = np.ones((1, 2, 2, 3), np.int64)
    cost[0, 1, 0, 1] = 1 << 61
    problem = SearchProblem(Cluster((1, 1)), 2, paper_choices(1), {1: cost})
    assert search(problem).why.code == search(problem, "enumerate").why.code == "no-possible-stage"


def test_wrong_costs_are_all_reported():
    good = np.zeros((1, 1, 3, 4), np.int64)
    with pytest.raises(PlanError) as error:
        SearchProblem(Cluster((2,)), 3, paper_choices(2), {1: good.astype(float), 2: good})
    assert str(error.value) == (
        "cost[1] holds float64; round bytes up once to int64, so that equal costs stay equal. "
        "[search-cost]\n"
        "cost[2] has shape (1, 1, 3, 4); 2 choices and 3 layers need (2, K, 3, 4) with K >= 1. "
        "[search-cost]"
    )
    with pytest.raises(PlanError, match=r"\[search-algorithm\]"):
        search(pipeline_problem(good[0, 0], 1), "greedy")
    for tie_break in (0, "most"):
        with pytest.raises(PlanError, match=r"\[search-tie-break\]"):
            search(pipeline_problem(good[0, 0], 1), tie_break=tie_break)


@pytest.mark.parametrize("schedule", ["random", "uniform"])
def test_minmax_equals_enumeration_on_a_larger_problem(schedule):
    """16 layers, 4 + 4 devices, 289547 plans, 1F1B."""
    generator = np.random.default_rng(3)
    values = generator.integers(1, 99, (2, 16)) if schedule == "random" else np.full((2, 16), 40)
    table = additive(values[0].tolist(), (values[1] // 2).tolist())
    cost = {}
    for d, choices in paper_choices(4).items():
        static = np.stack(
            [
                np.where(table < 1 << 61, table // choice.tensor_parallel, table)
                for choice in choices
            ]
        )
        cost[d] = linear_cost(
            static, np.where(static < 1 << 61, static // (2 * d), 0), np.arange(1, 9)
        )
    problem = SearchProblem(Cluster((4, 4)), 16, paper_choices(4), cost)
    exact, paper = search(problem), search(problem, "enumerate")
    assert exact.sorted_peaks == paper.sorted_peaks
    assert paper.num_explored < 289547


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(20))
def test_equal_cuts_are_optimal(num_stages, seed):
    weights = np.random.default_rng(seed).integers(0, 6, 6).tolist()

    def badness(cuts):
        totals = [sum(weights[a:b]) for a, b in pairwise(cuts)]
        return max(totals), sum(total**2 for total in totals)

    best = min(badness([0, *inner, 6]) for inner in combinations(range(1, 6), num_stages - 1))
    cuts = equal_cuts(weights, num_stages)
    assert (cuts[0], cuts[-1], len(cuts), sorted(set(cuts))) == (0, 6, num_stages + 1, cuts)
    assert badness(cuts) == best


def test_fixed_degree_baseline():
    problem = random_problem(7)  # one node of four, seven layers
    choice = problem.choices[2][0]
    stages = fixed_degree_plan(problem.cluster, [1] * 7, choice)
    assert [(stage.devices[0], stage.choice) for stage in stages] == [(0, choice), (2, choice)]
    assert sorted(stage.stop - stage.first for stage in stages) == [3, 4]
    peaks = [
        problem.bytes_per_choice(2, 2 - stage_id, stage.first, stage.stop)[0]
        for stage_id, stage in enumerate(stages)
    ]
    assert max(peaks) >= search(problem).peak_bytes
    with pytest.raises(PlanError, match=r"\[baseline-degree\]"):
        fixed_degree_plan(Cluster((4, 2)), [1] * 8, StageChoice(4, 1))
    with pytest.raises(PlanError, match=r"\[baseline-stages\]"):
        fixed_degree_plan(Cluster((4,)), [1] * 3, StageChoice())


def test_random_plans_are_uniform_over_stage_counts():
    plans = list(islice(random_plans(Cluster((4, 2)), 9, paper_choices(4), seed=1), 3000))
    counts = Counter(map(len, plans))
    assert sorted(counts) == [2, 3, 4, 5, 6]
    # Chi-square, 4 degrees of freedom, p = 0.001.
    assert sum((count - 600) ** 2 / 600 for count in counts.values()) < 18.5
    two = Counter(
        (plan[0].stop, plan[0].choice, plan[1].choice) for plan in plans if len(plan) == 2
    )
    assert len(two) == 8 * 2 * 2
    assert max(two.values()) < 3 * 600 / 32
    assert list(islice(random_plans(Cluster((4, 2)), 9, paper_choices(4), seed=1), 3000)) == plans


def test_random_plans_draw_fillings_uniformly():
    plans = islice(random_plans(Cluster((4,)), 4, paper_choices(4), seed=2), 3000)
    fillings = Counter(
        tuple(stage.choice.num_devices for stage in plan) for plan in plans if len(plan) == 3
    )
    assert sorted(fillings) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert max(fillings.values()) - min(fillings.values()) < 100


@given(
    shape=st.sampled_from(SHAPES),
    num_layers=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_random_plans_are_valid(shape, num_layers, seed):
    nodes, _, whole_nodes, any_divisor = shape
    cluster, choices = (
        Cluster(nodes),
        hybrid_choices(8) | {3: (StageChoice(3, 1),), 6: (StageChoice(1, 6),)},
    )
    space = StageSpace(whole_nodes, any_divisor)
    degrees = space.degrees(cluster)
    cost = {
        d: np.zeros((len(choices[d]), 1, num_layers, num_layers + 1), np.int64) for d in choices
    }
    problem = SearchProblem(cluster, num_layers, choices, cost, space)
    if next(every_plan(problem), None) is None:
        with pytest.raises(PlanError, match=r"\[sampling-empty\]"):
            next(random_plans(cluster, num_layers, choices, seed, space))
        return
    for plan in islice(random_plans(cluster, num_layers, choices, seed, space), 3):
        assert [stage.first for stage in plan] == [0] + [stage.stop for stage in plan[:-1]]
        assert plan[-1].stop == num_layers
        assert all(stage.first < stage.stop for stage in plan)
        device = 0
        for stage in plan:
            assert stage.devices[0] == device
            assert stage.choice.num_devices in degrees[device]
            device += stage.choice.num_devices
        assert device == cluster.num_devices


def test_searching_never_loads_jax():
    code = (
        "import recommender, capture.papers.capture.baselines, sys; sys.exit('jax' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]
        ).returncode
        == 0
    )
