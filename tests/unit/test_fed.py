"""Estimates wait for the first micro-batch, which the devices of the first stage are fed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from search_kit import timed_problem
from synthetic_graphs import chain, tensor

from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.plan.choices import StageChoice
from recommender.capture.counted import fed_seconds, with_sends


@pytest.mark.parametrize("seed", range(0, 40, 5))
def test_only_first_stages_are_fed_and_every_stage_sends(seed):
    problem = timed_problem(seed)
    if problem.update_seconds is None:
        problem = replace(
            problem, update_seconds={d: np.zeros_like(each) for d, each in problem.seconds.items()}
        )
    draw = np.random.default_rng(seed).integers
    sent, fed = (
        {d: draw(0, 9, (len(of), problem.num_layers + 1)) for d, of in problem.choices.items()}
        for _ in range(2)
    )
    found = with_sends(problem, sent, fed)
    stages = np.triu_indices(problem.num_layers, 1, problem.num_layers + 1)
    first, stop = stages
    for d in problem.choices:
        was, now = (each.spread(each.seconds[d])[:, *stages] for each in (problem, found))
        np.testing.assert_array_equal(now, was + 2 * sent[d][:, stop])
        was, now = (each.spread(each.update_seconds[d])[:, *stages] for each in (problem, found))
        np.testing.assert_array_equal(now, was + fed[d][:, stop] * (first == 0))


def test_a_first_stage_is_fed_every_leaf_that_it_reads_once():
    graph = chain(3)
    leaves = (tensor("tokens", 10**6, batch_dim=0), tensor("labels", 10**5, batch_dim=0))
    layers = [
        replace(layer, batch=read)
        for layer, read in zip(graph.layers, ((0,), (0,), (1,)), strict=True)
    ]
    graph = replace(graph, layers=tuple(layers), batch=leaves)
    host = Target.load("h100").rates.host.to_device
    for replicas in (1, 2):
        tokens, labels = (host.seconds(leaf.shard_bytes(replicas)) for leaf in leaves)
        found = fed_seconds(graph, Cluster((2,), "h100"), StageChoice(replicas))
        assert found.tolist() == pytest.approx([0, tokens, tokens, tokens + labels])
