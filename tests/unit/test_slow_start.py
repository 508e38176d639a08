"""The largest size that fits, found as TCP does: every size is found, in few trials, and none is
tried twice."""

from __future__ import annotations

import math

import pytest

from profiling_runs.slow_start import SlowStart, slow_start


def found(largest: int, most: int | None = None, stride: int = 1) -> SlowStart:
    search, fits = slow_start(most, stride), None
    while True:
        try:
            size = next(search) if fits is None else search.send(fits)
        except StopIteration as end:
            return end.value
        fits = size <= largest


def test_doubled_halved_and_added_to():
    assert found(11) == SlowStart(11, (1, 2, 4, 8, 16, 9, 10, 11, 12))
    assert found(0) == SlowStart(0, (1,))
    # What failed ends the additions too.
    assert found(3).trials == (1, 2, 4, 3)


@pytest.mark.parametrize("largest", range(1, 201))
def test_the_exact_size_is_found(largest):
    result = found(largest)
    doublings = int(math.log2(largest))
    assert result.largest == largest and len({*result.trials}) == len(result.trials)
    added = min(largest + 1, 2 ** (doublings + 1) - 1) - 2**doublings
    assert len(result.trials) == doublings + 2 + added


def test_no_larger_size_than_is_of_interest():
    assert found(100, most=48) == SlowStart(48, (1, 2, 4, 8, 16, 32, 48))
    assert found(40, most=48).trials[-3:] == (39, 40, 41)
    assert found(100, most=1) == SlowStart(1, (1,))


def test_a_stride_finds_less_in_fewer_trials():
    assert found(30, most=64, stride=4) == SlowStart(28, (1, 2, 4, 8, 16, 32, 20, 24, 28))
