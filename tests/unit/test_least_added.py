"""What a layer adds to a stage, where derivatives keep more of the layer alone."""

from types import SimpleNamespace

import pytest

from capture.profiler.facts import LayerFacts

#: Of windows of three layers, the first two of which are alike.
ALIKE = {(0, 1): (0, 1), (1, 2): (0, 1), (2, 3): (2, 3), (0, 2): (0, 2), (1, 3): (1, 3)}


@pytest.mark.parametrize(
    ("needs_pairs", "sizes", "added"),
    [
        # Alone each of the two has 10; the second one adds 3 to the last layer.
        (True, {(0, 1): 10, (2, 3): 8, (0, 2): 20, (1, 3): 11}, 3),
        (True, {(0, 1): 10, (2, 3): 8, (0, 2): 20, (1, 3): 19}, 10),  # alone it has no more
        (True, {(0, 1): 10, (2, 3): 8, (0, 2): 20, (1, 3): 7}, 0),
        (False, {(0, 1): 10}, 10),
    ],
)
def test_a_layer_adds_no_more_than_to_the_layer_behind_it(needs_pairs, sizes, added):
    facts = object.__new__(LayerFacts)
    facts.__dict__ |= {
        "windows": ALIKE,
        "graph": SimpleNamespace(num_layers=3),
        "needs_pairs": needs_pairs,
    }
    assert facts.least_added((0, 1), lambda window: sizes[ALIKE[window]]) == added
