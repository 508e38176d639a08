"""The searches of OSDP against enumeration, against an integer programme, and against each
other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from osdp_problems import FAMILIES, machine, paper_problem, random_problem, step_problem
from scipy.optimize import Bounds, LinearConstraint, milp

from capture.errors import PlanError
from capture.model.operators import Block, Operator, OperatorModel
from capture.papers.osdp.paper_cost import PaperCost
from capture.papers.osdp.transformer import transformer
from capture.plan.sharding import DP, ZDP
from capture.step.operator_cost import StepCost
from recommender.osdp import ShardingProblem, search

GIB = 2**30


def enumerated(problem: ShardingProblem) -> float:
    """Least seconds per example over all assignments of modes to operators and all batch sizes;
    infinite if nothing fits."""
    best = np.inf
    for batch_size in itertools.count(1):
        options = problem.options(batch_size)
        resident, transient, seconds = np.zeros(1), np.zeros(1), np.zeros(1)
        for kind, count in enumerate(options.counts):
            for _ in range(count):
                some = slice(0, len(options.modes[kind]))
                resident = np.add.outer(resident, options.resident_bytes[kind, some]).ravel()
                transient = np.maximum.outer(transient, options.transient_bytes[kind, some]).ravel()
                seconds = np.add.outer(seconds, options.seconds[kind, some]).ravel()
        fits = resident + transient <= problem.memory_limit_bytes
        if not fits.any() or batch_size == problem.max_batch_size:
            return min([best, *(seconds[fits] / batch_size)])
        best = min(best, seconds[fits].min() / batch_size)
    raise AssertionError


def integer_programme(problem: ShardingProblem, batch_size: int) -> float:
    """Least seconds at a batch size by HiGHS: counts of modes per kind of operators, indicators for
    what may be transient."""
    options = problem.options(batch_size)
    kinds, modes = options.seconds.shape
    finite = np.isfinite(options.seconds)
    size = kinds * modes

    def flat(values):
        return np.where(finite, values, 0).ravel()

    # x: operators per (kind, mode); y: whether any; z: the largest transient, in GiB like all bytes
    # here.
    one_each = np.zeros((kinds, 2 * size + 1))
    for kind in range(kinds):
        one_each[kind, kind * modes : (kind + 1) * modes] = 1
    counts = np.repeat(options.counts, modes)
    used = np.hstack([np.eye(size), -np.diag(counts.astype(float)), np.zeros((size, 1))])
    largest = np.hstack(
        [np.zeros((size, size)), np.diag(flat(options.transient_bytes) / GIB), -np.ones((size, 1))]
    )
    memory = np.concatenate([flat(options.resident_bytes) / GIB, np.zeros(size), [1.0]])
    found = milp(
        np.concatenate([flat(options.seconds), np.zeros(size + 1)]),
        constraints=[
            LinearConstraint(one_each, options.counts, options.counts),
            LinearConstraint(used, -np.inf, 0),
            LinearConstraint(largest, -np.inf, 0),
            LinearConstraint(memory, -np.inf, problem.memory_limit_bytes / GIB),
        ],
        bounds=Bounds(
            0, np.concatenate([np.where(finite.ravel(), counts, 0), np.ones(size), [np.inf]])
        ),
        integrality=np.concatenate([np.ones(2 * size), [0]]),
        options={"mip_rel_gap": 0.0},
    )
    return float(found.fun) if found.success else np.inf


def check_plan(problem: ShardingProblem, plan) -> None:
    """What the plan says of itself follows from the cost model."""
    operators = problem.cost.model.operators
    costs = [
        problem.cost.cost(operator, mode, plan.batch_size)
        for operator, mode in zip(operators, plan.modes, strict=True)
    ]
    assert plan.step_seconds == pytest.approx(sum(cost.seconds for cost in costs), rel=1e-12)
    assert plan.peak_bytes <= problem.memory_limit_bytes
    needed = sum(cost.resident_bytes for cost in costs) + max(
        cost.transient_bytes for cost in costs
    )
    assert needed <= plan.peak_bytes <= needed + len(costs) + 1  # rounded up, per operator
    num_devices = problem.cost.machine.num_devices
    assert plan.examples_per_second == pytest.approx(
        num_devices * plan.batch_size / plan.step_seconds
    )


@given(st.integers(0, 10**6))
def test_exact_and_depth_first_are_exhaustive_search(seed):
    problem = random_problem(seed)
    best = enumerated(problem)
    for algorithm in ("exact", "depth-first"):
        result = search(problem, algorithm)
        assert result.optimal and (result.status == "ok") == np.isfinite(best)
        if result.plan is None:
            assert (
                result.why.endswith("[memory-limit]")
                and problem.least_bytes > problem.memory_limit_bytes
            )
        else:
            check_plan(problem, result.plan)
            assert result.plan.seconds_per_example == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("cost", [PaperCost, StepCost])
@pytest.mark.parametrize("limit", [1e8, 4e8])
def test_sixteen_operators_of_a_transformer_are_exhaustive(cost, limit):
    model = transformer("small", [(4, 256), (3, 512)], seq_len=64, vocab_size=1000)
    assert model.num_operators == 16
    problem = ShardingProblem(cost(model, machine(limit)), max_batch_size=4)
    result = search(problem)
    check_plan(problem, result.plan)
    assert result.plan.seconds_per_example == pytest.approx(enumerated(problem), rel=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("gib", [7.2, 15.2])
def test_an_integer_programme_finds_no_better_plan_of_a_family(name, gib):
    """HiGHS, at the batch size of the answer and below."""
    for problem in (
        paper_problem(name, gib * GIB, (1, 4)),
        step_problem(name, gib * GIB, (1, 2, 4)),
        step_problem(name, gib * GIB, (1, 4), remat=True, overlap_fraction=0.3),
    ):
        result = search(problem)
        if result.plan is None:
            assert integer_programme(problem, 1) == np.inf
            continue
        check_plan(problem, result.plan)
        size = result.plan.batch_size
        oracle = {b: integer_programme(problem, b) / b for b in (size, size - 1) if b}
        assert (
            min(oracle.values())
            == pytest.approx(result.plan.seconds_per_example, rel=1e-9)
            == oracle[size]
        )


def test_each_pruning_saves_nodes_and_changes_no_answer():
    model = transformer("small", [(3, 256)], seq_len=64, vocab_size=1000)
    problem = ShardingProblem(PaperCost(model, machine(4e7)), max_batch_size=2)
    results = {
        (m, t): search(problem, "depth-first", prune_memory=m, prune_time=t)
        for m in (True, False)
        for t in (True, False)
    }
    assert len({result.plan.seconds_per_example for result in results.values()}) == 1
    nodes = {pruned: result.num_explored for pruned, result in results.items()}
    # Every prefix of eight operators with two modes.
    assert nodes[False, False] == problem.num_batch_sizes * (2**9 - 2)
    assert (
        nodes[True, True] < min(nodes[True, False], nodes[False, True])
        and max(nodes[True, False], nodes[False, True]) < nodes[False, False]
    )


def test_a_walk_that_is_stopped_proves_nothing():
    problem = paper_problem("N&D", 7.2 * GIB)
    stopped = search(problem, "depth-first", max_nodes=50)
    assert (
        not stopped.optimal
        and stopped.num_explored == 50
        and stopped.why.endswith("[search-stopped]")
    )


def test_a_smaller_batch_wins_where_its_saved_communication_is_worth_more():
    """One example per device leaves room for a replica of the large operator, two do not, and
    gathering it costs more than it gains."""
    large = Operator("large", "other", 8_000_000_000, 10**9, 0, 0, flops=10**9)
    model = OperatorModel("one", (Block((large,)),), state_bytes_per_parameter_byte=1)
    cheap = ShardingProblem(PaperCost(model, machine(9.5e9)), max_batch_size=2)
    # Half of 3 / 2 is less than 1.
    assert (cheap.num_batch_sizes, search(cheap).plan.batch_size) == (
        2,
        2,
    )
    gathers_slowly = ShardingProblem(PlantedSlow(cheap.cost), max_batch_size=2)
    plan = search(gathers_slowly).plan
    assert (plan.batch_size, plan.modes) == (1, (DP,))


class PlantedSlow:
    """The paper's costs, with ZDP five times as slow."""

    def __init__(self, cost):
        self._cost = cost
        self.model, self.machine, self.modes = cost.model, cost.machine, cost.modes

    def cost(self, operator, mode, batch_size):
        cost = self._cost.cost(operator, mode, batch_size)
        return replace(cost, seconds=cost.seconds * (5 if mode == ZDP else 1))


def test_without_latency_the_answer_may_be_unproven_and_says_how_far_it_can_be_off():
    """Six unrelated widths and no latency: every mode saves memory at one price, and what is left
    is to fill the memory to the byte."""
    layers = [(20, 2688), (18, 1024), (17, 2432), (6, 2816), (9, 1728), (11, 1600)]
    model = transformer("unrelated", layers, seq_len=128, vocab_size=50257)
    problem = ShardingProblem(
        PaperCost(model, machine(model.parameter_bytes * 1.2 + 2e9, alpha=0.0)), max_batch_size=2
    )
    result = search(problem)
    check_plan(problem, result.plan)
    assert not result.optimal and 0 < result.bound_fraction < 1e-3
    with_latency = ShardingProblem(
        PaperCost(model, machine(model.parameter_bytes * 1.2 + 2e9, alpha=1e-6)), max_batch_size=2
    )
    assert search(with_latency).optimal


@pytest.mark.parametrize("name", FAMILIES)
def test_more_choice_is_never_worse(name):
    plans = [
        search(step_problem(name, 15.2 * GIB, granularities)).plan
        for granularities in ((1,), (1, 4), (1, 2, 4, 8))
    ]
    speeds = [plan.examples_per_second for plan in plans]
    assert speeds == sorted(speeds) and plans[-1].peak_bytes <= 15.2 * GIB


def test_70b_on_64_devices():
    """80 layers of 8192 on eight nodes: the search ends with a proof, and shares slices within
    nodes or over all as each is worth."""
    model = transformer(
        "70B",
        [(80, 8192)],
        seq_len=2048,
        vocab_size=32000,
        item_bytes=2,
        state_bytes_per_parameter_byte=8,
    )
    assert 6.4e10 < model.parameter_bytes / 2 < 7.5e10
    problem = ShardingProblem(
        StepCost(model, machine(72e9, num_nodes=8), (1, 2, 4, 8, 16), remat=True)
    )
    result = search(problem)
    assert result.optimal and result.status == "ok" and result.num_batch_sizes == 7
    check_plan(problem, result.plan)


def test_nothing_fits_says_what_is_missing():
    result = search(step_problem("W&S", 2 * GIB))
    assert result.status == "infeasible" and result.plan is None
    assert "above memory_limit_bytes=2,147,483,648" in result.why and result.why.endswith(
        "[memory-limit]"
    )


def test_a_model_without_activations_needs_a_largest_batch():
    model = OperatorModel("states", (Block((Operator("w", "matmul", 100, 0, 0, 0),)),))
    with pytest.raises(PlanError, match=r"give max_batch_size\. \[osdp-unbounded\]$"):
        ShardingProblem(PaperCost(model, machine(1e9)))
    assert ShardingProblem(PaperCost(model, machine(1e9)), max_batch_size=3).num_batch_sizes == 3


def test_another_algorithm_is_refused():
    with pytest.raises(
        PlanError,
        match=r"algorithm='greedy' is unknown; choose one of exact, depth-first\. "
        r"\[search-algorithm\]$",
    ):
        search(paper_problem("W&S", 15 * GIB), "greedy")
