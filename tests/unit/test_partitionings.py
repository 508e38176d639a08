"""The paper's profiling partitionings: every layer alone once, every layer added once, at the
promised number of runs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from capture.errors import ProfileError
from capture.papers.capture.partitionings import (
    Coverage,
    coverage,
    eq,
    pipeline_partitionings,
    stage_ranges,
)

SHAPES = [
    (num_layers, num_stages) for num_layers in range(4, 41) for num_stages in range(3, num_layers)
]
STORED = json.loads(
    (Path(__file__).parents[1] / "data" / "profiling_partitionings.json").read_text()
)

# Lines 1 to 4 of Description 1, line 5, the same on the next GPU, and the two repairs of its end.
GOLDEN_16_4 = """\
1 1 7 7
2 1 7 6
3 1 6 6
4 1 6 5
5 1 5 5
6 1 5 4
7 1 1 7
8 1 1 6
7 2 1 6
7 3 1 5
7 4 1 4
7 5 1 3
7 6 1 2
7 7 1 1
7 6 2 1"""


@pytest.mark.parametrize("num_stages", range(3, 40))
def test_every_statistic_of_every_layer_is_covered(num_stages):
    """L divisible by G or not."""
    for num_layers in range(num_stages + 1, 41):
        partitionings = pipeline_partitionings(num_layers, num_stages)
        assert coverage(partitionings, num_layers) == Coverage((), ()), (num_layers, num_stages)
        assert all(
            sum(p) == num_layers and len(p) == num_stages and min(p) >= 1 for p in partitionings
        ), (num_layers, num_stages)
        assert len(set(map(tuple, partitionings))) == len(partitionings), "a run is made twice"


def test_at_most_one_run_more_than_layers_where_the_papers_scheme_applies():
    """A base block of at least two layers; below that some L need one run per missing statistic."""
    applies = [
        (num_layers, num_stages)
        for num_layers, num_stages in SHAPES
        if (num_layers - 2) // (num_stages - 2) >= 2
    ]
    assert len(applies) > 300
    assert [shape for shape in applies if len(pipeline_partitionings(*shape)) > shape[0] + 1] == []


def test_never_more_runs_than_two_per_layer():
    assert all(len(pipeline_partitionings(*shape)) <= 2 * shape[0] - 1 for shape in SHAPES)


def test_partitionings_of_16_layers_on_4_stages():
    assert "\n".join(" ".join(map(str, p)) for p in pipeline_partitionings(16, 4)) == GOLDEN_16_4


@pytest.mark.parametrize(
    "case", STORED["mcap"], ids=lambda case: f"{case['layers']}-on-{case['gpus']}"
)
def test_coverage_finds_the_authors_own_partitionings_complete(case):
    """Those of mCAP, from the authors' released generator: another scheme, which the paper
    changed."""
    assert coverage(case["partitionings"], case["layers"]) == Coverage((), ())
    without_first = case["partitionings"][1:]
    assert coverage(without_first, case["layers"]).missing_isolated == (0, 1)


def test_the_scheme_as_printed_leaves_layers_out():
    """Reading C-a: with L / G layers per fixed GPU, the layers of the last two GPUs are never
    alone."""
    printed = [
        [*fixed, head, 1, *tail]
        for fixed in ([], [4], [4, 4])
        for head in range(1, 6)
        if (rest := 16 - sum(fixed) - head - 1)
        and (tail := eq(rest, 2 - len(fixed)) if len(fixed) < 2 else []) is not None
    ]
    assert coverage([p for p in printed if sum(p) == 16], 16).missing_isolated[-3:] == (13, 14, 15)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8])
def test_as_many_stages_as_layers_have_a_single_partitioning(num_layers):
    assert pipeline_partitionings(num_layers, num_layers) == [[1] * num_layers]


@pytest.mark.parametrize(
    ("num_layers", "num_stages"), [(2, 1), (3, 2), (4, 2), (9, 1), (3, 4), (5, 0)]
)
def test_where_no_partitioning_isolates_every_layer_is_refused(num_layers, num_stages):
    with pytest.raises(ProfileError) as error:
        pipeline_partitionings(num_layers, num_stages)
    assert str(error.value) == (
        f"num_layers={num_layers} on num_stages={num_stages}: no partitioning places every layer "
        "alone on a stage; profile with 3 to "
        "num_layers stages, or in the default mode, which measures layer windows directly. "
        "[profile-partitionings]"
    )


def test_three_layers_on_two_stages_cannot_be_isolated_by_any_partitioning():
    every = [[cut, 3 - cut] for cut in range(1, 3)]
    assert coverage(every, 3).missing_isolated == (1,)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(7, 3), (8, 4), (3, 3), (10, 1)])
def test_eq_shares_out_by_number(num_layers, num_stages):
    shares = eq(num_layers, num_stages)
    assert sum(shares) == num_layers and len(shares) == num_stages
    assert max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)


def test_coverage_against_its_definition():
    partitionings = [[1, 2, 1], [2, 1, 1]]
    assert stage_ranges(partitionings) == {(0, 1), (1, 3), (3, 4), (0, 2), (2, 3)}
    assert coverage(partitionings, 4) == Coverage(missing_isolated=(1,), missing_added=(2, 3))
    everything = [
        [b - a for a, b in zip((0, *cuts), (*cuts, 4), strict=True)]
        for n in range(4)
        for cuts in combinations(range(1, 4), n)
    ]
    assert coverage(everything, 4) == Coverage((), ())
