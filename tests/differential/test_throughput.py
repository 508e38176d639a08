"""Least step time and the memory/time front against brute force and hand-made answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import (
    additive,
    every_step,
    known_cases,
    linear_cost,
    pipeline_problem,
    timed_problem,
)
from seeds import seeds

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from recommender import NEVER, SearchProblem, SearchResult, search
from recommender.capture.pareto import pareto
from recommender.capture.throughput import throughput
from recommender.capture.ticks import step_seconds


def assert_valid(problem: SearchProblem, result: SearchResult) -> None:
    """Layers and devices are covered once, in order, within the limit, by stages whose bytes and
    time the problem confirms."""
    stages = result.stages
    assert [stage.first for stage in stages] == [0] + [stage.stop for stage in stages[:-1]]
    assert stages[-1].stop == problem.num_layers
    assert [stage.devices[0] for stage in stages] == [0] + [
        stage.devices[-1] + 1 for stage in stages[:-1]
    ]
    assert stages[-1].devices[-1] + 1 == problem.cluster.num_devices
    seconds, updates = [], [0.0]
    for stage_id, stage in enumerate(stages):
        d = stage.choice.num_devices
        assert d in problem.degrees[stage.devices[0]]
        choice = problem.choices[d].index(stage.choice)
        assert (
            stage.peak_bytes
            == problem.bytes_per_choice(d, len(stages) - stage_id, stage.first, stage.stop)[choice]
        )
        seconds.append(problem.seconds[d][choice, problem.kinds[stage.first, stage.stop]])
        if problem.update_seconds is not None:
            updates.append(
                problem.update_seconds[d][choice, problem.kinds[stage.first, stage.stop]]
            )
    assert result.step_seconds == pytest.approx(
        sum(seconds) + (problem.num_microbatches - 1) * max(seconds) + max(updates), rel=1e-12
    )
    assert result.peak_bytes == max(result.peak_bytes_per_device)
    assert problem.memory_limit_bytes is None or result.peak_bytes <= problem.memory_limit_bytes


def limits(steps: list[tuple[float, int, int]]) -> list[int | None]:
    """No limit, limits that bind more and more, the least that fits, and one that nothing fits."""
    peaks = sorted({peak for _, peak, _ in steps})
    return (
        [None, *{peaks[len(peaks) * part // 4] for part in range(4)}, peaks[0], peaks[0] - 1]
        if peaks
        else [None]
    )


def front_of(steps: list[tuple[float, int, int]]) -> list[tuple[int, float]]:
    front: list[tuple[int, float]] = []
    for peak, seconds in sorted({(peak, seconds) for seconds, peak, _ in steps}):
        if not front or seconds < front[-1][1]:
            front.append((peak, seconds))
    return front


@pytest.mark.parametrize("seed", seeds(range(80)))
def test_throughput_equals_brute_force(seed):
    """Time, then peak, then number of stages, under limits that bind; without a plan, the reason of
    the search for least peak."""
    problem = timed_problem(seed)
    steps = list(every_step(problem))
    for limit in limits(steps):
        here = replace(problem, memory_limit_bytes=limit)
        result = throughput(here)
        best = min((step for step in steps if limit is None or step[1] <= limit), default=None)
        if best is None:
            assert result.status == "infeasible"
            assert result.why.code == (
                "memory-limit" if steps else search(possible_in_time(here)).why.code
            )
            assert result.why.least_peak_bytes == (
                min(peak for _, peak, _ in steps) if steps else None
            )
        else:
            assert_valid(here, result)
            assert (result.step_seconds, result.peak_bytes, len(result.stages)) == best
            assert (result.status, result.optimal, result.bound_fraction) == ("ok", True, 0.0)


def possible_in_time(problem: SearchProblem) -> SearchProblem:
    cost = {
        d: np.where(np.isinf(seconds)[:, None], NEVER, problem.cost[d])
        for d, seconds in problem.seconds.items()
    }
    return replace(problem, cost=cost)


@pytest.mark.parametrize("seed", seeds(range(80)))
def test_front_equals_brute_force(seed):
    problem = timed_problem(seed)
    steps = list(every_step(problem))
    for limit in (None, sorted(peak for _, peak, _ in steps)[len(steps) // 2] if steps else 0):
        here = replace(problem, memory_limit_bytes=limit)
        front = pareto(here, max_searches=1000, max_programmes=1000)
        expected = front_of([step for step in steps if limit is None or step[1] <= limit])
        assert [(point.peak_bytes, point.step_seconds) for point in front.points] == expected
        assert (front.complete, front.optimal) == (True, True)
        for point in front.points:
            assert_valid(here, point)
        assert (front.why is None) == bool(expected)
        if not expected:
            assert front.why.code == throughput(here).why.code


@pytest.mark.parametrize("seed", seeds(range(0, 160, 3)))
def test_sampled_front_holds_both_ends(seed):
    problem = timed_problem(seed)
    steps = list(every_step(problem))
    expected = front_of(steps)
    for max_searches in (2, 4, 9):
        front = pareto(problem, max_searches=max_searches, max_programmes=1000)
        points = [(point.peak_bytes, point.step_seconds) for point in front.points]
        assert all(
            seconds == next(s for p, s in reversed(expected) if p <= peak)
            for peak, seconds in points
        )
        assert points == front_of([(seconds, peak, 0) for peak, seconds in points])
        assert points[:1] + points[-1:] == expected[:1] + expected[-1:]
        assert front.num_searches <= max_searches
        assert not front.complete or points == expected


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-9, 1e6))
@settings(max_examples=60, deadline=None)
def test_throughput_of_fractions_of_seconds(seed, scale):
    """Times that no sum holds exactly, of every order of magnitude."""
    generator, problem = np.random.default_rng(seed), timed_problem(seed)
    problem = replace(
        problem,
        seconds={
            d: t * scale * generator.uniform(0.5, 1, t.shape) for d, t in problem.seconds.items()
        },
        update_seconds=None
        if seed % 2
        else {d: generator.uniform(0, scale, t.shape) for d, t in problem.seconds.items()},
    )
    result, best = throughput(problem), min(every_step(problem), default=None)
    if best is None:
        assert result.status == "infeasible"
    else:
        assert_valid(problem, result)
        assert result.step_seconds == pytest.approx(best[0], rel=1e-9, abs=1e-9 * scale)


@pytest.mark.parametrize("seed", seeds(range(0, 160, 2)))
@pytest.mark.parametrize(("gap_fraction", "max_programmes"), [(0.1, 1000), (0.0, 1), (0.0, 3)])
def test_stated_bound_holds(seed, gap_fraction, max_programmes):
    """A search that stops early says how far its plan can be from the best, and is not wrong about
    it."""
    problem = timed_problem(seed)
    best = min(every_step(problem), default=None)
    result = throughput(problem, gap_fraction=gap_fraction, max_programmes=max_programmes)
    if result.status == "infeasible":
        assert best is None
        return
    assert_valid(problem, result)
    assert best[0] <= result.step_seconds <= best[0] * (1 + result.bound_fraction) * (1 + 1e-12)
    assert result.optimal == (result.bound_fraction == 0)
    if max_programmes == 1000:
        assert result.bound_fraction <= gap_fraction


@pytest.mark.parametrize("seed", seeds(range(80)))
@pytest.mark.parametrize(("gap_fraction", "max_programmes"), [(0.2, 1000), (0.0, 1), (0.0, 3)])
def test_stated_bounds_of_a_front_hold(seed, gap_fraction, max_programmes):
    """Points that are not proven are real plans, none is worse than another, and each is as near to
    the best as it says."""
    problem = timed_problem(seed)
    steps = list(every_step(problem))
    front = pareto(
        problem, max_searches=1000, gap_fraction=gap_fraction, max_programmes=max_programmes
    )
    points = [(point.peak_bytes, point.step_seconds) for point in front.points]
    assert points == front_of([(seconds, peak, 0) for peak, seconds in points])
    assert bool(points) == bool(steps)
    for point in front.points:
        assert_valid(problem, point)
        best = min(seconds for seconds, peak, _ in steps if peak <= point.peak_bytes)
        assert best <= point.step_seconds <= best * (1 + point.bound_fraction) * (1 + 1e-12)
    assert front.optimal == all(point.optimal for point in front.points)
    assert not front.complete or points == front_of(steps)


def two_stage_problem(num_microbatches: int) -> SearchProblem:
    """Two layers: one stage on both devices takes 7 s, one on each device 4 s; the first of two
    keeps two micro-batches."""
    table = additive([10, 10], [10, 10])
    own = linear_cost(
        np.where(table < NEVER, 0, NEVER)[None],
        np.where(table < NEVER, table, 0)[None],
        np.array([1, 2]),
    )
    seconds = {1: np.full((1, 2, 3), 4.0), 2: np.full((1, 2, 3), 7.0)}
    choices = {1: (StageChoice(),), 2: (StageChoice(1, 2),)}
    return SearchProblem(
        Cluster((2,)),
        2,
        choices,
        {1: own, 2: own},
        seconds=seconds,
        num_microbatches=num_microbatches,
    )


def test_many_microbatches_make_pipelines_worth_their_bubble():
    """M = 1: 7 s against 4 + 4 s. M = 5: 7 + 4 x 7 against 8 + 4 x 4."""
    one, five = throughput(two_stage_problem(1)), throughput(two_stage_problem(5))
    assert (one.step_seconds, len(one.stages)) == (7.0, 1)
    assert (one.tie_break, one.tie_break_columns) == ("none", 0)
    assert (five.step_seconds, len(five.stages)) == (24.0, 2)
    assert five.step_seconds == step_seconds(two_stage_problem(5), five.stages)


def test_slowest_update_ends_the_step():
    """The pipeline's sum is least, but the update of its second stage takes 20 s."""
    problem = replace(
        two_stage_problem(5),
        update_seconds={1: np.full((1, 2, 3), 20.0), 2: np.full((1, 2, 3), 1.0)},
    )
    result = throughput(problem)
    assert (result.step_seconds, len(result.stages)) == (36.0, 1)


def test_positions_count_against_the_limit():
    """The first of two stages keeps two micro-batches of 10 bytes; one stage keeps one of 20: the
    limit takes both or neither."""
    assert throughput(replace(two_stage_problem(5), memory_limit_bytes=20)).step_seconds == 24.0
    result = throughput(replace(two_stage_problem(5), memory_limit_bytes=19))
    assert (result.status, result.why.code, result.why.least_peak_bytes) == (
        "infeasible",
        "memory-limit",
        20,
    )
    assert (result.algorithm, len(result.stages), result.optimal) == ("throughput", 2, False)
    assert result.step_seconds == step_seconds(two_stage_problem(5), result.stages)


def test_of_plans_as_fast_the_one_of_least_peak_is_taken():
    """Both cuts of three layers take 2 and 4 s; the first has stages of 12 and 3 bytes, the second
    of 9 and 8."""
    table, seconds = np.full((3, 4), NEVER), np.full((1, 3, 4), np.inf)
    for first, stop, own, time in [(0, 1, 12, 2), (1, 3, 3, 4), (0, 2, 9, 4), (2, 3, 8, 2)]:
        table[first, stop], seconds[0, first, stop] = own, time
    result = throughput(
        replace(pipeline_problem(table, 2), seconds={1: seconds}, num_microbatches=3)
    )
    assert (result.step_seconds, result.peak_bytes, result.stages[0].stop) == (14.0, 9, 2)


def test_front_trades_memory_for_time():
    """Three cuts of three layers over two devices: (9 bytes, 14 s), (12, 12), and one that is worse
    in both."""
    table, seconds = np.full((3, 4), NEVER), np.full((1, 3, 4), np.inf)
    for first, stop, own, time in [(0, 1, 9, 2), (1, 3, 8, 4), (0, 2, 12, 3), (2, 3, 3, 3)]:
        table[first, stop], seconds[0, first, stop] = own, time
    problem = replace(pipeline_problem(table, 2), seconds={1: seconds}, num_microbatches=3)
    front = pareto(problem)
    assert [
        (point.peak_bytes, point.step_seconds, point.stages[0].stop) for point in front.points
    ] == [(9, 14.0, 1), (12, 12.0, 2)]
    assert front.complete
    only = pareto(replace(problem, memory_limit_bytes=11))
    assert [(point.peak_bytes, point.step_seconds) for point in only.points] == [(9, 14.0)]
    none = pareto(replace(problem, memory_limit_bytes=8))
    assert (none.points, none.why.code, none.why.least_peak_bytes) == ((), "memory-limit", 9)


@pytest.mark.parametrize(
    "case", [case for case in known_cases() if not case.best], ids=lambda case: case.name
)
def test_no_plan_for_the_reasons_of_the_least_peak(case):
    problem = case.problem
    shapes = {
        d: (len(choices), problem.num_layers, problem.num_layers + 1)
        for d, choices in problem.choices.items()
    }
    timed = replace(problem, seconds={d: np.ones(shape) for d, shape in shapes.items()})
    assert throughput(timed).why == pareto(timed).why == search(problem).why


def test_wrong_times_are_all_reported():
    problem = pipeline_problem(additive([1] * 3, [1] * 3), 2)
    with pytest.raises(PlanError) as error:
        replace(
            problem,
            seconds={1: np.full((1, 3, 4), np.nan)},
            update_seconds={1: np.ones((1, 3, 3))},
            num_microbatches=0,
        )
    assert str(error.value) == (
        "num_microbatches=0 is no number of micro-batches; give 1 or more. [search-microbatches]\n"
        "seconds[1] holds a negative number or none at all; a time is 0 or more, and infinite "
        "where impossible. [search-seconds]\n"
        "update_seconds[1] is float64 of shape (1, 3, 3); 1 choices and 3 layers need float64 of "
        "shape (1, 3, 4). [search-seconds]"
    )
    with pytest.raises(
        PlanError, match=r"seconds has no entry for stages on 1 devices.*\[search-seconds\]"
    ):
        replace(problem, seconds={})
    with pytest.raises(PlanError, match=r"no times of stages.*\[search-seconds\]"):
        throughput(problem)
