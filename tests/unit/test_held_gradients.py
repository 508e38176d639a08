"""What gradients of parameters that several layers of a stage read wait in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from synthetic_graphs import chain
from synthetic_profiles import Planted, make_plan

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.held_gradients import added_bytes, held_gradients

ONE, LARGE = StageChoice(), 1_000_000


def by_hand(graph, sizes, first, stop, added=None):
    """Parameter by parameter, layer by layer."""
    total = 0
    for p, nbytes in enumerate(sizes):
        readers = [r for r in graph.param_readers(p) if first <= r < stop]
        if len(readers) > 1:
            known = 0 if added is None else sum(min(max(added[r], 0), nbytes) for r in readers[1:])
            total += max(0, nbytes - known)
    return total


@pytest.mark.parametrize("shared", [[(0, 5)], [(1, 2), (0, 3, 7)], [(2, 3, 4, 5), (0, 7), (1, 6)]])
def test_one_buffer_waits_however_many_layers_read(shared):
    graph, draw = chain(8, shared=shared), np.random.default_rng(3)
    sizes = draw.integers(1, 1000, len(graph.params)).tolist()
    added = draw.integers(-300, 1200, 8).astype(float)
    for known in (None, added):
        held = held_gradients(graph, sizes, known)
        for first in range(8):
            for stop in range(first + 1, 9):
                assert held[first, stop] == by_hand(graph, sizes, first, stop, known)


def test_what_a_layer_adds_is_that_of_its_longest_window():
    windows = {(0, 1): 5, (1, 2): 6, (2, 3): 7, (0, 2): 9, (1, 3): 20, (0, 3): 24}
    arrays = {window: np.array([0.0, value]) for window, value in windows.items()}
    assert added_bytes(arrays, 3, 1).tolist() == [0, 4, 15]
    del arrays[0, 3]
    assert added_bytes(arrays, 3, 1).tolist() == [0, 4, 14]


class Sharing(Planted):
    """Backward passes hold a gradient of every parameter that several layers of the stage read."""

    def __init__(self, num_layers, shared, **options):
        super().__init__(num_layers, shared=shared, **options)
        params = tuple(
            replace(p, shape=(LARGE // 4,)) if len(self.graph.param_readers(i)) > 1 else p
            for i, p in enumerate(self.graph.params)
        )
        self.graph = replace(self.graph, params=params)

    def cost(self, config):
        cost = super().cost(config)
        sizes = [p.nbytes for p in self.graph.params]
        more = by_hand(self.graph, sizes, config.first, config.stop)
        return replace(cost, backward_bytes=cost.backward_bytes + more)


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("shared", [[(0, 5)], [(0, 4, 6)], [(1, 2)], [(1, 2), (0, 6)]])
def test_the_buffer_is_predicted_once_near_and_far(shared, target):
    """Beside small layers every stage needs what it needs, to a few bytes of small ones."""
    planted = Sharing(7, shared, largest=100)
    profile = planted.profile([ONE], num_neighbours=2)
    profile = replace(profile, provenance={**profile.provenance, "target": target})
    memory = AdditivePredictor(profile).memory(ONE, 16)
    for first in range(7):
        for stop in range(first + 1, 8):
            truth = planted.cost(StageConfig(first, stop, ONE, 16)).backward_bytes
            assert memory.backward[first, stop] == pytest.approx(truth, abs=0.02 * LARGE)
    for size in (4, 32):  # which were not profiled: the buffer neither grows nor shrinks
        backward = AdditivePredictor(profile).memory(ONE, size).backward
        truth = planted.cost(StageConfig(0, 7, ONE, size)).backward_bytes
        assert 0.98 * truth <= backward[0, 7] <= truth + 0.1 * LARGE


def test_a_long_window_that_holds_fewer_says_nothing_of_shorter_stages():
    """Both tables are read twice within eight layers, where one buffer is enough; six layers read
    one of them twice, and need it."""
    planted = Sharing(9, [(0, 5), (2, 7)], largest=100)
    profile = planted.profile([ONE], num_neighbours=2)
    measurements = {
        config: replace(cost, backward_bytes=cost.backward_bytes - LARGE)
        if (config.first, config.num_layers) == (0, 8)
        else cost
        for config, cost in profile.measurements.items()
    }
    found = AdditivePredictor(replace(profile, measurements=measurements)).memory(ONE, 16)
    assert found.backward[0, 6] >= 0.99 * planted.cost(StageConfig(0, 6, ONE, 16)).backward_bytes
    assert found.backward[0, 8] < 1.1 * LARGE, "measured"


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("holds", [True, False], ids=["holds", "free"])
def test_what_was_measured_stays(target, holds):
    """Windows of two readers, whether or not their gradients wait there."""
    planted = Sharing(7, [(1, 2), (0, 6)], largest=100)
    if not holds:
        planted.cost = partial(Planted.cost, planted)
    profile = planted.profile([ONE], num_neighbours=2)
    profile = replace(profile, provenance={**profile.provenance, "target": target})
    backward = AdditivePredictor(profile).memory(ONE, 16).backward
    for config, cost in profile.measurements.items():
        if config.microbatch_size == 16:
            assert backward[config.first, config.stop] == cost.backward_bytes


def test_on_an_accelerator_what_layers_add_does_not_stand_for_it():
    """The last reader adds as much as a gradient, and it may be anything."""
    planted = Sharing(7, [(0, 5)], largest=100)
    planted.fixed[2, 1, 5] = LARGE
    profile = planted.profile([ONE], num_neighbours=2)
    gpu = replace(profile, provenance={**profile.provenance, "target": "h100"})
    on_cpu, on_gpu = (AdditivePredictor(p).memory(ONE, 16).backward[0, 7] for p in (profile, gpu))
    assert on_gpu - on_cpu == pytest.approx(LARGE, abs=0.01 * LARGE)


def test_an_interval_holds_what_may_wait_beside_what_a_layer_adds():
    planted = Sharing(7, [(0, 5)], largest=100)
    planted.fixed[2, 1, 5] = LARGE
    profile = planted.profile([ONE], num_neighbours=2, errors=[0.0] * 8)
    plan = make_plan([7], [ONE])
    for found in AdditivePredictor(profile).predict(plan).stages:
        truth = found.peak_bytes + LARGE
        assert found.interval_bytes[1] >= truth - 0.02 * LARGE


def test_nothing_waits_in_lower_bounds():
    profile = Sharing(7, [(0, 5)]).profile([ONE], num_neighbours=2)
    bounds = replace(profile, provenance={**profile.provenance, "bounds": "least"})
    predictor = AdditivePredictor(bounds)
    assert predictor.memory(ONE, 16).backward[0, 7] < LARGE
    assert predictor.unsure_bytes(StageConfig(0, 7, ONE, 16)) == 0
