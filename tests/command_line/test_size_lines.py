"""Lines through sizes that were profiled: where they bend, and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_profiles import Planted

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor

# ---- the line ------------------------------------------------------------------------------------


class Bending(Planted):
    """As planted, and half as much again above 16 examples."""

    def components(self, config: StageConfig) -> np.ndarray:
        found = super().components(config)
        found[:3] += found[:3] // 2 * (config.microbatch_size > 16)
        return found


def test_a_bend_does_not_reach_sizes_on_the_other_side_of_what_was_profiled():
    planted, choice = Bending(4, 3), StageChoice(2, 1)
    predictor = AdditivePredictor(planted.profile([choice], sizes=(8, 16, 32, 64)))
    for size in (12, 48, 96):  # between two below the bend, between two above it, and beyond
        table = predictor.table(choice, size)
        assert table[1:3, 1, 3] == pytest.approx(
            planted.components(StageConfig(1, 3, choice, size))[1:3], rel=1e-3
        )


class Hungriest(Planted):
    """Temporaries are those of the layer that needs most, which parameters decide for some layers
    and examples for others."""

    def components(self, config: StageConfig) -> np.ndarray:
        found, layers = super().components(config), slice(config.first, config.stop)
        of_examples = (
            self.per_example[1:3, 0, layers] * config.microbatch_size // config.choice.num_devices
        )
        found[1:3] = np.maximum(self.fixed[1:3, 0, layers], of_examples).max(axis=1)
        return found


@pytest.mark.parametrize(("size", "truth"), [(16, 2000), (64, 6400), (160, 16000), (4, 2000)])
def test_temporaries_of_a_stage_are_those_of_its_hungriest_layer_at_that_size(size, truth):
    """At the profiled sizes the weights of layer 2 decide, whose line is flat; at larger ones the
    examples of layer 0 do."""
    planted, choice = Hungriest(5, 1), StageChoice(2, 1)
    planted.fixed[1:3], planted.per_example[1:3] = 0, 0
    planted.fixed[1:3, 0, 2], planted.per_example[1:3, 0, 0] = 2000, 200
    table = AdditivePredictor(planted.profile([choice], num_neighbours=2)).table(choice, size)
    assert table[1:3, 0, 5].tolist() == pytest.approx([truth, truth])
    assert table[1:3, 1, 5].tolist() == pytest.approx([2000, 2000]), "layer 0 is not in it"


class Fusing(Planted):
    """Everything grows with the examples, and three layers together need a fifth less than the
    sum."""

    def components(self, config: StageConfig) -> np.ndarray:
        found = super().components(config)
        return found * 4 // 5 if config.num_layers > 2 else found


@pytest.mark.parametrize("size", [4, 64])
def test_windows_that_one_size_lacks_do_not_tilt_the_line(size):
    """At the smaller profiled size windows are shorter, and what their sum misses is no growth."""
    planted, choice = Fusing(4, 3), StageChoice()
    planted.fixed[:3], planted.per_example[:3] = 0, 160
    table = AdditivePredictor(planted.profile([choice], num_neighbours=2)).table(choice, size)
    assert table[1:3, 1, 4] == pytest.approx(
        planted.components(StageConfig(1, 4, choice, size))[1:3], rel=1e-3
    )


def test_what_belongs_to_parameters_does_not_change_with_the_micro_batch():
    planted = Planted(4, 3)
    for sizes in ((16,), (8, 16)):
        table = AdditivePredictor(planted.profile([StageChoice()], sizes=sizes)).table(
            StageChoice(), 2
        )
        assert (
            table[3:5, 1, 3].tolist()
            == planted.components(StageConfig(1, 3, StageChoice(), 16))[3:5].tolist()
        )
