"""Searches over tables that hold stages which are alike once, beside tables of every stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_kit import hybrid_choices

from capture.machine.cluster import Cluster
from capture.predictor.alike import Kinds, empty_stages
from recommender import NEVER, SearchProblem
from recommender.capture.least_step import LeastStep
from recommender.capture.minmax import minmax
from recommender.capture.pareto import pareto
from recommender.capture.problem import together
from recommender.capture.throughput import throughput


def problems(seed: int) -> tuple[SearchProblem, SearchProblem]:
    """With every kind of stage once, and with every stage: the inner layers are equal."""
    generator = np.random.default_rng(seed)
    num_layers, cluster = int(generator.integers(4, 8)), Cluster((2, 2))
    first, stop = np.ogrid[:num_layers, : num_layers + 1]
    kinds = Kinds(4 * (stop - first) + 2 * (first == 0) + (stop == num_layers))
    num_kinds, num_rows = len(kinds.first), int(generator.integers(1, 5))
    assert num_kinds < kinds.of.size / 1.5
    choices = hybrid_choices(cluster.num_devices)
    cost, seconds, updates = {}, {}, {}
    for d, here in choices.items():
        cost[d] = generator.integers(0, 30, (len(here), num_rows, num_kinds))
        cost[d][..., 0] = NEVER
        seconds[d] = generator.integers(0, 20, (len(here), num_kinds)).astype(float)
        updates[d] = generator.integers(0, 5, (len(here), num_kinds)).astype(float)
    once = SearchProblem(
        cluster,
        num_layers,
        choices,
        cost,
        seconds=seconds,
        update_seconds=updates,
        num_microbatches=int(generator.integers(1, 6)),
        alike=kinds.of,
    )
    every = SearchProblem(
        cluster,
        num_layers,
        choices,
        {d: once.spread(table) for d, table in cost.items()},
        seconds={d: once.spread(table) for d, table in seconds.items()},
        update_seconds={d: once.spread(table) for d, table in updates.items()},
        num_microbatches=once.num_microbatches,
    )
    return once, every


@pytest.mark.parametrize("seed", range(40))
def test_stages_that_are_alike_change_no_answer(seed):
    once, every = problems(seed)
    limit = minmax(every).peak_bytes + 3
    for ask in (minmax, throughput, lambda each: pareto(each).points):
        assert _told(ask(once)) == _told(ask(every))
    for within in (None, limit):
        assert LeastStep(once).plan(within) == LeastStep(every).plan(within)
        limited = [replace(each, memory_limit_bytes=within) for each in (once, every)]
        assert _told(throughput(limited[0])) == _told(throughput(limited[1]))
    plans = [list(LeastStep(each).plans(limit, 100.0)) for each in (once, every)]
    assert plans[0] == plans[1]


def _told(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(each.stages, each.step_seconds, each.bound_fraction) for each in results]


def test_problems_that_differ_elsewhere_are_put_together():
    (one, _), (other, _) = problems(1), problems(1)
    kinds = Kinds(np.arange(one.kinds.size).reshape(one.kinds.shape) % 3)
    split = other.split(Kinds(other.kinds, kinds.of))
    one, split = together(one, split)
    assert (one.kinds == split.kinds).all()
    for d in one.used_degrees:
        assert (one.cost[d] == split.cost[d]).all() and (one.seconds[d] == split.seconds[d]).all()


def test_stages_that_differ_in_one_table_get_numbers_of_their_own():
    tables = np.random.default_rng(0).integers(0, 2, (5, 4, 5))
    kinds = Kinds(np.zeros((4, 5)))
    assert kinds.of.max() == 1
    for table in tables:
        kinds.look(table)
    assert (kinds.once(tables)[:, kinds.of] == tables)[:, ~empty_stages(4)].all()
    assert (kinds.of[empty_stages(4)] == 0).all() and kinds.of[~empty_stages(4)].min() == 1
    before, renumbered = kinds.of, kinds.once(tables)
    kinds.look(np.arange(20).reshape(4, 5))
    moved = kinds.renumber(renumbered, before)
    assert (moved == kinds.once(tables))[:, 1:].all() and moved.shape[-1] == 11
