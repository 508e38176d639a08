"""The stage configs of the default profile: every window of a few neighbouring layers, at every
degree and two micro-batch sizes.

A window [l - n, l] measured beside [l - n, l - 1] gives M_a(l) with n neighbours; [l, l] is M_i(l).
Because each measurement is one compile and equal layers share it, all windows of 1 to N + 1 layers
cost little, and the predictor knows M_a for several neighbour counts (CAPTURE IV-B names a single
one as a cause of its errors).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.predictor.statistics import inner_starts

DEFAULT_NEIGHBOURS = 2
#: Longer windows, whose deviation from the sum of M_a corrects stages of many layers. The longest
#: is measured inside the model only: where the inner layers are equal, that is one window in the
#: place of three, and they take longest to compile.
ANCHOR_LENGTHS = (8, 16)


def window_configs(
    num_layers: int,
    choices: Iterable[StageChoice],
    microbatch_sizes: Sequence[int],
    num_neighbours: int = DEFAULT_NEIGHBOURS,
    *,
    splits_backward: bool = False,
) -> list[StageConfig]:
    """Return all windows of 1 to ``num_neighbours`` + 1 layers and, at the largest micro-batch
    size, the longer anchors.

    Smaller sizes only tell how a layer grows with the micro-batch: there, windows of up to
    ``num_neighbours`` layers do (two at least).

    Args:
        num_layers: L.
        choices: What stages may do with their devices.
        microbatch_sizes: Over all replicas; a choice that does not divide one is left out there.
        num_neighbours: Most neighbours n of M_a, at least 1.
        splits_backward: Whether what split backward passes need is of interest: of anchors at the
            first layer it does not follow, so if the only one is there, the layers behind it are
            one more.

    Example:
        >>> len(window_configs(4, [StageChoice()], [8], num_neighbours=1))
        7
    """
    longest = num_neighbours + 1
    anchors = [n for n in ANCHOR_LENGTHS if longest < n <= num_layers]
    configs = []
    for size in sorted(microbatch_sizes):
        is_largest = size == max(microbatch_sizes)
        lengths = (
            [*range(1, longest + 1), *anchors]
            if is_largest
            else range(1, max(2, num_neighbours) + 1)
        )
        starts = {
            n: inner_starts(n, num_layers)
            if n == max(ANCHOR_LENGTHS)
            else range(num_layers - n + 1)
            for n in lengths
        }
        ranges = [(first, first + n) for n in lengths for first in starts[n]]
        if splits_backward and is_largest and anchors == [num_layers]:
            ranges.append((1, num_layers))
        configs += [
            StageConfig(*layers, choice, size)
            for choice in choices
            if size % choice.data_parallel == 0
            for layers in ranges
        ]
    return configs


def profiled_microbatch_sizes(
    microbatch_size: int, choices: Iterable[StageChoice]
) -> tuple[int, ...]:
    """Return the target micro-batch size, and half of it where every choice can split half;
    ascending.

    Predictions at the target size then need no scaling, and two points fix the straight line of
    Description 2 for others.
    """
    half = microbatch_size // 2
    splits = (
        half >= 1
        and microbatch_size % 2 == 0
        and all(half % choice.data_parallel == 0 for choice in choices)
    )
    return (half, microbatch_size) if splits else (microbatch_size,)
