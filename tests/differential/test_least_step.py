"""The bound of a step: against all plans of small problems, and never above a simulated step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property.test_timeline import pipelines, seconds, timeline
from search_kit import every_plan, timed_problem

from capture.step.times import pipeline_seconds
from recommender.capture.least_step import LeastStep
from recommender.capture.problem import NEVER, SearchProblem


def bound(times: list[float], first_update: float, num_microbatches: int) -> float:
    """By its definition."""
    working = [sum(times[:s]) + num_microbatches * t for s, t in enumerate(times)]
    return max(working) + first_update


def every_bound(problem: SearchProblem) -> list[tuple[int, float]]:
    """Bytes and bound of every possible plan with every combination of choices."""
    found = []
    for plan in every_plan(problem):
        ways = []
        for i, (first, stop, d) in enumerate(plan):
            own = problem.bytes_per_choice(d, len(plan) - i, first, stop)
            times = problem.seconds[d][:, problem.kinds[first, stop]]
            updates = problem.update_seconds
            once = (
                np.zeros_like(times)
                if updates is None
                else updates[d][:, problem.kinds[first, stop]]
            )
            each = zip(own.tolist(), times.tolist(), once.tolist(), strict=True)
            ways.append([way for way in each if way[0] < NEVER and np.isfinite(way[1])])
        for chosen in product(*ways):
            own, times, once = zip(*chosen, strict=True)
            found.append((max(own), bound(list(times), once[0], problem.num_microbatches)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_a_problem_is_below_the_bound_and_one_is_at_it(seed):
    problem = timed_problem(seed)
    every = every_bound(problem)
    peaks = sorted(peak for peak, _ in every)
    limits = [None, *(peaks[len(peaks) // part] for part in (2, 10) if peaks)]
    for limit in limits:
        fitting = [each for each in every if limit is None or each[0] <= limit]
        least, low = LeastStep(problem).within(limit)
        assert least == min((step for _, step in fitting), default=inf)
        if fitting:
            assert least == min(step for peak, step in every if peak <= low)
        corners = LeastStep(replace(problem, memory_limit_bytes=limit)).corners()
        assert bool(corners) == bool(fitting)
        for peak, step in fitting:
            assert any(peak >= p and step >= s for p, s in corners)


@given(pipelines(), st.lists(seconds, min_size=5, max_size=5))
def test_no_simulated_step_is_below_the_bound(pipeline, updates):
    name, num_microbatches, forward, backward, links = pipeline
    updates, times = (
        updates[: len(forward)],
        [f + b for f, b in zip(forward, backward, strict=True)],
    )
    for sent in ((), links):
        step = timeline(name, num_microbatches, forward, backward, updates, sent).step_seconds
        assert step >= bound(times, updates[0], num_microbatches)
    if len(times) == 1:
        assert step == num_microbatches * times[0] + updates[0]


def test_the_closed_form_is_no_bound():
    """A long first stage hides the ones behind it; and a long update runs beside the way back."""
    for forward, backward, updates in (([10, 1], [10, 1], [0, 0]), ([1, 1], [1, 9], [0, 9])):
        step = timeline("1f1b", 4, forward, backward, updates).step_seconds
        times = [sum(both) for both in zip(forward, backward, strict=True)]
        assert bound(times, updates[0], 4) <= step < pipeline_seconds(times, updates, 4)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_plans_come_one_by_one_those_of_the_least_bound_first(seed):
    problem = timed_problem(seed)
    every = every_bound(problem)
    seconds = sorted(step for _, step in every)
    limit = sorted(peak for peak, _ in every)[len(every) // 2] if every else 0
    below = seconds[len(seconds) // 3] if every else inf
    found = []
    for least, stages in LeastStep(problem).plans(limit, below):
        at = [(s.num_devices, problem.choices[s.num_devices].index(s.choice), s) for s in stages]
        times = [float(problem.seconds[d][c, problem.kinds[s.first, s.stop]]) for d, c, s in at]
        d, c, first = at[0]
        updates = problem.update_seconds
        once = 0.0 if updates is None else updates[d][c, problem.kinds[0, first.stop]]
        assert least == bound(times, once, problem.num_microbatches)
        found.append((max(s.peak_bytes for s in stages), least))
    assert [step for _, step in found] == sorted(step for _, step in found)
    fitting = [each for each in every if each[0] <= limit and each[1] < below]
    assert sorted(found) == sorted(fitting)
