"""A plan for speed does not become faster as its memory limit falls: what is counted, transfers
among it, no closed form over single stages says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from synthetic_profiles import MICROBATCH_SIZE, Planted, hybrid

from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.work import ProgramWork
from recommender.capture.recommendation import recommend
from recommender.question import PlanQuestion

NUM_LIMITS = 8


def with_wide_values(seed: int) -> Profile:
    """Uneven layers between which as much is sent as they take to compute."""
    draw, planted = np.random.default_rng(seed), Planted(8, seed=seed)
    flops = draw.integers(1, 10, 8) * 10**8

    def work(config: StageConfig, passes: int) -> ProgramWork:
        choice, total = config.choice, int(flops[config.first : config.stop].sum())
        waste = 1 + 0.15 * (choice.tensor_parallel - 1)
        return ProgramWork(int(total * passes / choice.num_devices * waste), "bfloat16", 0, 0)

    profile = planted.profile(hybrid(4))
    costs = {
        config: replace(
            cost,
            forward_work=work(config, 1),
            backward_work=work(config, 2),
            update_work=ProgramWork(0, "bfloat16", 0, 0),
        )
        for config, cost in profile.measurements.items()
    }
    values = profile.graph.values
    widths = draw.integers(1, 200, len(values)) * 100
    graph = replace(
        profile.graph,
        values=tuple(
            replace(value, shape=(value.shape[0], int(width))) if value.batch_dim == 0 else value
            for value, width in zip(values, widths, strict=True)
        ),
    )
    provenance = {**profile.provenance, "target": "a100-40g"}
    return replace(profile, graph=graph, measurements=costs, provenance=provenance)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seconds_never_fall_as_the_limit_does(seed):
    profile = with_wide_values(seed)
    asked = PlanQuestion(Cluster((2, 2), "a100-40g"), 8 * MICROBATCH_SIZE, 8)
    least = recommend(profile, replace(asked, objective="memory")).peak_bytes
    asked = replace(asked, objective="throughput")
    most = recommend(profile, asked).peak_bytes
    limits = [least + (most - least) * i // NUM_LIMITS for i in range(NUM_LIMITS + 1)]
    seconds = [
        recommend(profile, replace(asked, memory_limit_bytes=limit)).proof.step_seconds
        for limit in [*limits, 2 * most]
    ]
    assert all(tight >= loose for tight, loose in pairwise(seconds))
