"""Searches of arrays whose models are several programs, on made-up graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.mutwo_costs import ArrayCosts
from benchmarks.mutwo_graphs import chain, host_link, random_graph
from capture.papers.mutwo.baselines import _largest_subsets
from recommender.mutwo.bound import bound_seconds
from recommender.mutwo.enumerate import enumerate_choices
from recommender.mutwo.problem import ArrayProblem
from recommender.mutwo.search import beside_baselines, search
from recommender.mutwo.ways import MOST_MIXED, RULES, ways, ways_of_each


class Own(ArrayCosts):
    """That knows the programs of its own sub-arrays alone, as a profile does."""

    def facts(self, sub_array, call):
        assert sub_array in self.graphs.values()
        return super().facts(sub_array, call)


def of_task(costs: ArrayCosts, task: str) -> Own:
    """With names of their own."""
    return Own({n: replace(one, task=task, _known={}) for n, one in costs.graphs.items()})


def problem_of(seed: int, bytes_per_second: float = 8e9, part: float = 0.4) -> ArrayProblem:
    """Two models of a random graph, and between them one of another, with a limit of so much of
    what lies between least and most of all ways."""
    other = of_task(random_graph(seed + 40, 5), "other")
    link = host_link(bytes_per_second, duplex=seed % 2 > 0)
    first = of_task(random_graph(seed, 4), "first")
    free = ArrayProblem(first, 3, link, 10**12, others=(other,), tasks=(0, 1, 0))
    spaces = [free.space(way) for way in free.ways]
    least = min(space.least(space.swapped).peak_bytes for space in spaces)
    most = max(space.weigh(space.retained).peak_bytes for space in spaces)
    return replace(free, limit_bytes=round(least + part * (most - least)))


def test_a_sub_array_is_of_one_program_under_every_rule():
    each = [[0, 2, 4, 6], [1, 5], [3]]
    for rule in RULES:
        found = ways_of_each(each, rule)
        assert len(found) == len(set(found))
        for way in found:
            assert sorted(m for group in way.partition for m in group) == list(range(7))
            assert all(any(set(group) <= set(own) for own in each) for group in way.partition)
            owners = [n for group in way.partition for n, own in enumerate(each) if group[0] in own]
            assert owners == sorted(owners)  # sub-arrays of a program stay together
        assert {way.order for way in found} == {"multiplexed", "in turn"}
        named = {way.name for way in found}
        assert {"multiplexed 4 and 2 and 1", "in turn 4 and 2 and 1", "none fused"} <= named
    assert ways_of_each([[0, 1, 2]]) == ways(3)
    many = [list(range(8 * n, 8 * n + 8)) for n in range(5)]
    assert len(ways_of_each(many)) <= 2 * MOST_MIXED


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_is_best_of_every_way_and_choice(seed):
    problem = problem_of(seed)
    result = search(problem)
    spaces = [problem.space(way) for way in problem.ways]
    best = min(enumerate_choices(space)[1] for space in spaces)
    assert best.fits and best.seconds <= result.best.weighed.seconds <= 1.005 * best.seconds
    assert result.bound_seconds <= best.seconds
    assert all(bound_seconds(space) <= enumerate_choices(space)[1].seconds for space in spaces)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_weighed_is_what_is_written_and_no_baseline_is_faster(seed):
    """Each program with its own seconds and bytes; baselines fuse what is one program."""
    problem = problem_of(seed)
    result = beside_baselines(problem, search(problem))
    for one in result.candidates:
        if one.fits:
            assert one.evaluation.seconds == one.weighed.seconds
            assert one.evaluation.timeline.program_order.peak_of(0).peak_bytes == (
                one.weighed.peak_bytes
            )
            calls = one.evaluation.steps.body.programs
            assert {name.split()[-1].lstrip("0123456789") for name in calls} == {"first", "other"}
    found = {one.name: one for one in result.baselines}
    assert found["sequential jit"].sizes == (1, 1, 1) and found["one vmap"].sizes == (2, 1)
    for one in found.values():
        assert one.in_rounds or one.step_seconds >= result.best.weighed.seconds
        assert one.fits == (one.step_seconds < float("inf"))
    theirs = search(problem, "corrected")
    assert not theirs.best.fits or theirs.best.weighed.seconds >= result.best.weighed.seconds


def test_the_largest_subsets_are_found_for_each_program():
    """Four small models fit together, and of the large ones two."""
    sizes = (1, 2, 3, 4)
    small, large = chain(2, sizes), of_task(chain(6, sizes), "large")
    free = ArrayProblem(small, 8, host_link(8e9), 10**12, others=(large,), tasks=(0, 1) * 4)
    two = free.sub_array(free.kind((1, 3)))
    limit = sum(b.nbytes for b in two.bundles) + 1_000_000
    found = _largest_subsets(replace(free, limit_bytes=limit))
    assert found.sizes == (4, 2, 2) and found.fits and found.in_rounds
