"""The paper's predictor: its sums and lines, what its runs do not tell, merged layers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from refusals import code_of
from synthetic_profiles import Planted, make_plan

from capture.measured.profile import StageConfig
from capture.papers.capture.predictor import PaperPredictor
from capture.papers.capture.profile import (
    LayerStatistics,
    PaperStatistics,
    layer_statistics,
    merge_layers,
    paper_runs,
    profile_batches,
    run_paper_profile,
)
from capture.plan.choices import StageChoice
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.predictor import AdditivePredictor

# ---- the paper's predictor -----------------------------------------------------------------------


ONE = StageChoice()


def stages(num_layers: int):
    return [
        (first, stop) for first in range(num_layers) for stop in range(first + 1, num_layers + 1)
    ]


def statistics(values: dict, num_layers: int = 4) -> PaperStatistics:
    """Statistics whose M_i and M_a are given per (choice, number of micro-batches)."""
    table: dict = {}
    for (choice, m), (isolated, added) in values.items():
        table.setdefault(choice, {})[m] = LayerStatistics(
            np.full(num_layers, float(isolated)),
            np.array([np.nan, *[float(added)] * (num_layers - 1)]),
        )
    return PaperStatistics(table, 0, "gpipe", 16)


def test_the_papers_sum_of_m_a_and_its_straight_line():
    predictor = PaperPredictor(statistics({(ONE, 4): (100, 10), (ONE, 8): (150, 30)}))
    assert predictor.peaks(ONE, 8)[1, 4] == pytest.approx(150 + 2 * 30)
    assert predictor.peaks(ONE, 16)[0, 1] == pytest.approx(250)
    assert predictor.peaks(ONE, 16)[0, 4] == pytest.approx(130 + 3 * (240 - 130))
    assert np.isnan(predictor.peaks(ONE, 16)[2, :3]).all()


def test_the_papers_logarithm_over_the_degree_with_a_plus_b_over_k_as_option():
    both = {(StageChoice(2, 1), 8): (600, 0), (StageChoice(4, 1), 8): (400, 0), (ONE, 8): (1000, 0)}
    assert PaperPredictor(statistics(both)).peaks(StageChoice(8, 1), 8)[0, 1] == pytest.approx(200)
    # Reading C-h.
    assert PaperPredictor(statistics(both)).peaks(StageChoice(32, 1), 8)[0, 1] == pytest.approx(
        -200
    )
    assert PaperPredictor(statistics(both), fit="inverse").peaks(StageChoice(8, 1), 8)[
        0, 1
    ] == pytest.approx(300)


@pytest.mark.parametrize(
    "choice",
    [StageChoice(2, 2), StageChoice(1, 8), StageChoice(1, 4), StageChoice(1, 1, "full")],
    ids=str,
)
def test_what_the_papers_runs_do_not_tell_is_refused(choice):
    both = {(StageChoice(2, 1), 8): (600, 0), (StageChoice(4, 1), 8): (400, 0)}
    assert code_of(lambda: PaperPredictor(statistics(both)).peaks(choice, 8)) == "profile-choice"


def test_a_missing_statistic_leaves_the_stages_that_need_it_without_prediction():
    known = statistics({(ONE, 8): (100, 10)})
    known.statistics[ONE][8].added[2] = np.nan
    predictor = PaperPredictor(known)
    missing = np.isnan(predictor.peaks(ONE, 8))
    assert [stage for stage in stages(4) if missing[stage]] == [(0, 3), (0, 4), (1, 3), (1, 4)]
    peaks = predictor.predict(make_plan([3, 1], [ONE, ONE], num_microbatches=8))
    assert np.isnan(peaks[0]) and peaks[1] == pytest.approx(100)
    assert PaperStatistics.from_json(json.loads(json.dumps(known.to_json()))).statistics[ONE][
        8
    ].added[1:].tolist()[::2] == [10, 10]


def test_the_papers_prediction_does_not_see_the_schedule_of_the_plan():
    predictor = PaperPredictor(statistics({(ONE, 8): (100, 10)}))
    peaks = {
        name: predictor.predict(make_plan([2, 2], [ONE, ONE], schedule=name, num_microbatches=8))
        for name in PLAIN_SCHEDULES
    }
    assert peaks["gpipe"] == peaks["1f1b"]


def test_the_papers_runs_recover_planted_gpipe_peaks():
    """Where the backward pass is the peak everywhere, memory is additive and the whole method is
    exact."""
    planted = Planted(10, 4)
    planted.fixed[2, 0] += 10**7
    profile = planted.profile([ONE, StageChoice(2, 1), StageChoice(4, 1)], num_neighbours=10)
    runs = paper_runs(10, 4, 16)
    assert [run.choice for run in runs] == [
        ONE,
        StageChoice(2, 1),
        StageChoice(4, 1),
        StageChoice(1, 2),
        StageChoice(1, 4),
    ]
    found = run_paper_profile(
        runs,
        planted.graph,
        dict.fromkeys([(tp, 1) for tp in (1, 2, 4)], profile.param_bytes[1, 1]),
        "gpipe",
        16,
        planted.cost,
    )
    assert found.num_runs == sum(len(run.partitionings) for run in runs) * 2 and found.failed == ()
    predictor, truth = PaperPredictor(found), AdditivePredictor(profile)
    for layers in ([3, 7], [1, 4, 5], [10], [2, 2, 2, 4]):
        for choice in (ONE, StageChoice(2, 1), StageChoice(4, 1)):
            plan = make_plan(layers, [choice] * len(layers), schedule="gpipe", num_microbatches=16)
            assert predictor.predict(plan) == pytest.approx(
                truth.predict(plan).peak_bytes_per_device, rel=1e-5
            )


def test_a_failed_run_is_named_and_leaves_its_statistics_out():
    planted = Planted(6)
    lost = StageConfig(0, 2, ONE, 16)
    runs = [run for run in paper_runs(6, 4, 16) if run.choice == ONE]
    found = run_paper_profile(
        runs,
        planted.graph,
        {(1, 1): [4] * 6},
        "gpipe",
        16,
        lambda c: None if c == lost else planted.cost(c),
    )
    assert all(text.endswith(f"with {ONE}, stage 0") for text in found.failed) and found.failed
    assert (
        np.isnan(found.statistics[ONE][8].added[1])
        and not np.isnan(found.statistics[ONE][8].isolated).any()
    )


def test_runs_are_made_for_degrees_that_the_cluster_and_the_batch_have():
    def degrees(**options):
        return [
            (r.choice.data_parallel, r.choice.tensor_parallel) for r in paper_runs(8, **options)
        ]

    assert degrees(num_devices=2, microbatch_size=16) == [(1, 1), (2, 1), (1, 2)]
    assert degrees(num_devices=16, microbatch_size=2) == [(1, 1), (2, 1), (1, 2), (1, 4)]
    stages = [len(run.partitionings[0]) for run in paper_runs(32, 16, 16)]
    assert stages == [16, 8, 4, 8, 4]
    # Four stages would add no layer to another.
    assert {len(run.partitionings[0]) for run in paper_runs(4, 4, 16)} == {3}
    assert (
        profile_batches(16) == (4, 8) and profile_batches(2) == (1,) and profile_batches(1) == (1,)
    )


def test_m_a_of_one_neighbour_or_the_average_over_several():
    peaks = {(0, 1): 5, (1, 2): 6, (2, 3): 8, (0, 2): 9, (1, 3): 13, (0, 3): 20}
    assert layer_statistics(peaks, 3).isolated.tolist() == [5, 6, 8]
    assert layer_statistics(peaks, 3).added[1:].tolist() == [4, 7]
    assert layer_statistics(peaks, 3, average=True).added[1:].tolist() == [4, 9]


def test_the_merger_joins_the_neighbours_of_least_merged_memory():
    """Isolated 9 2 3 4, added - 1 1 5. Merged M_i: 10, 3, 8: layers 1 and 2 (M_i 3, M_a 2); then 11
    and 8: layer 3 with them."""
    found = LayerStatistics(np.array([9.0, 2, 3, 4]), np.array([np.nan, 1, 1, 5]))
    assert merge_layers(found, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert merge_layers(found, 3) == [(0, 1), (1, 3), (3, 4)]
    assert merge_layers(found, 2) == [(0, 1), (1, 4)]
    assert merge_layers(found, 1) == [(0, 4)]


def test_merged_statistics_are_those_of_the_sum():
    """Layers 1 and 2 merge to M_i = 5, M_a = 3 + 4; then layer 3 joins them for 15, where layer 0
    would take 10 + 7."""
    found = LayerStatistics(np.array([10.0, 1, 1, 10]), np.array([np.nan, 3, 4, 10]))
    assert merge_layers(found, 3) == [(0, 1), (1, 3), (3, 4)]
    assert merge_layers(found, 2) == [(0, 1), (1, 4)]


def test_merging_without_statistics_is_refused():
    found = LayerStatistics(np.array([1.0, 2]), np.array([np.nan, np.nan]))
    assert code_of(lambda: merge_layers(found, 1)) == "profile-missing"
