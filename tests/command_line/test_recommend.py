"""From a profile to a plan: the search's answer is the best of all plans as the predictor sees
them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, islice, product

import numpy as np
import pytest
from report_plans import planted_profile
from search_kit import brute_force, every_plan
from synthetic_profiles import Planted, hybrid

from capture.documents import write
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile
from capture.papers.alpa.autostage import LABEL
from capture.papers.capture.choices import hybrid_choices
from capture.papers.capture.predictor import PaperPredictor
from capture.papers.capture.profile import (
    PaperStatistics,
    layer_statistics,
    merge_layers,
    paper_runs,
    run_paper_profile,
)
from capture.plan.choices import StageChoice
from capture.plan.sampling import random_plans
from capture.plan.schedule import PLAIN_SCHEDULES
from capture.plan.space import StageSpace
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from recommender import PlanQuestion, baseline_plan, recommend
from recommender.capture.posed import search_problem
from recommender.capture.search import ALGORITHMS
from recommender.plan_report import PlanReport
from recommender.question import (
    AUTOSTAGE,
    BOUNDS_FIRST,
    MODES,
    OBJECTIVES,
    SEARCH_NAMES,
    SEARCHES,
    search_names,
    search_of,
)

BATCH = {"global_batch_size": 128, "num_microbatches": 8}


def a_profile(num_layers: int = 6, max_devices: int = 4, seed: int = 0, **options) -> Profile:
    return Planted(num_layers, seed).profile(hybrid(max_devices), **options)


def with_paper(num_layers: int = 8, schedule: str = "gpipe", num_devices: int = 4) -> Profile:
    planted = Planted(num_layers, 5)
    profile = planted.profile(hybrid(num_devices))
    param_bytes = dict.fromkeys([(tp, 1) for tp in (1, 2, 4)], profile.param_bytes[1, 1])
    runs = run_paper_profile(
        paper_runs(num_layers, num_devices, 16),
        planted.graph,
        param_bytes,
        schedule,
        8,
        planted.cost,
    )
    return replace(profile, paper=runs.to_json())


def codes_of(call) -> tuple[str, ...]:
    with pytest.raises(CaptureError) as error:
        call()
    return error.value.codes


@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_the_recommendation_is_the_best_of_all_plans(seed, schedule):
    """The sorted per-device peaks are the least of every plan, by brute force and by the paper's
    enumeration."""
    profile, cluster = a_profile(seed=seed), (Cluster((4,)), Cluster((2, 2)))[seed % 2]
    result = recommend(profile, PlanQuestion(cluster, **BATCH, schedule=schedule))
    best = brute_force(search_problem(profile, PlanQuestion(cluster, **BATCH, schedule=schedule)))
    assert result.proof.sorted_peaks == best
    assert (
        recommend(
            profile, PlanQuestion(cluster, **BATCH, schedule=schedule, algorithm="enumerate")
        ).proof.sorted_peaks
        == best
    )
    assert tuple(sorted(result.prediction.peak_bytes_per_device, reverse=True)) == best


@pytest.mark.parametrize(
    "cluster",
    [Cluster((4, 2)), Cluster((4,) * 4), Cluster((2,)), Cluster((8,)), Cluster((1, 1))],
    ids=str,
)
@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES)
def test_no_random_plan_is_predicted_to_need_less(cluster, schedule):
    """Six devices as 4 + 2, sixteen, and fewer than were profiled."""
    profile = a_profile(18, 8, 2)
    result = recommend(profile, PlanQuestion(cluster, **BATCH, schedule=schedule))
    plan = result.plan
    assert result.status == "ok" and plan.cluster == cluster
    assert sorted(d for stage in plan.stages for d in stage.devices) == list(
        range(cluster.num_devices)
    )
    predictor = AdditivePredictor(profile)
    draws = random_plans(cluster, 18, hybrid_choices(8), 3)
    for drawn in islice(draws, 100):
        other = profile.plan(cluster, drawn, **BATCH, schedule=schedule)
        mine, theirs = (
            tuple(sorted(predictor.predict(p).peak_bytes_per_device, reverse=True))
            for p in (plan, other)
        )
        assert mine <= theirs


@pytest.mark.parametrize(
    "shared", [[{0, 4}], [{0, 2, 4}], [{0, 1, 3, 4}, {1, 4}], [{0, 1, 2, 3, 4}]], ids=str
)
@pytest.mark.parametrize("seed", range(4))
def test_what_shared_parameters_exchange_is_seen_by_the_search(seed, shared):
    """By brute force over whole plans: with two readers each the best is found; with more, nothing
    is called best that is not."""
    planted, cluster = Planted(5, seed, largest=200, shared=shared), Cluster((4,))
    if seed % 2:
        planted.summarizes(seed)
    generator = np.random.default_rng(seed)
    large = tuple(
        replace(p, shape=(int(generator.integers(1, 2000)),)) for p in planted.graph.params
    )
    planted.graph = replace(planted.graph, params=large)
    profile = planted.profile(hybrid(2))
    result = recommend(profile, PlanQuestion(cluster, **BATCH))
    predictor, peaks = AdditivePredictor(profile), []
    problem = search_problem(profile, PlanQuestion(cluster, **BATCH, schedule="1f1b"))
    for cuts in every_plan(problem):
        for chosen in product(*(problem.choices[d] for _, _, d in cuts)):
            starts = accumulate((d for _, _, d in cuts), initial=0)
            drawn = [
                Stage.at(at, first, stop, choice)
                for (first, stop, _), at, choice in zip(cuts, starts, chosen, strict=False)
            ]
            prediction = predictor.predict(profile.plan(cluster, drawn, **BATCH, schedule="1f1b"))
            peaks.append(tuple(sorted(prediction.peak_bytes_per_device, reverse=True)))
    found = tuple(sorted(result.prediction.peak_bytes_per_device, reverse=True))
    if result.proof.optimal:
        assert found[0] == min(peaks)[0]
    if result.proof.tie_break == "full":
        assert found == min(peaks)
    if not seed % 2 and all(len(readers) == 2 for readers in shared):
        assert result.proof.optimal and found == min(peaks)
    assert found[0] <= 1.15 * min(peaks)[0]


@pytest.mark.parametrize("schedule", PLAIN_SCHEDULES)
def test_the_prediction_in_the_plan_is_the_searchs_peak(schedule):
    result = recommend(
        a_profile(errors=[0.01]), PlanQuestion(Cluster((4,)), **BATCH, schedule=schedule)
    )
    assert result.prediction.peak_bytes_per_device == result.proof.peak_bytes_per_device
    assert result.plan.prediction == result.prediction
    assert result.plan.schedule == schedule and result.plan.model_hash == "hash16"
    assert Plan.from_json(json.loads(json.dumps(result.plan.to_json()))) == result.plan


def written(answer):
    return json.loads(json.dumps(write(PlanReport.of("stages", answer))))


def test_the_document_has_what_scripts_rely_on():
    document = written(recommend(a_profile(), PlanQuestion(Cluster((4,)), **BATCH)))
    assert document["status"] == "ok"
    assert {"layers", "num_devices", "data_parallel", "tensor_parallel"} <= set(
        document["plan"]["stages"][0]
    )
    assert len(document["plan"]["prediction"]["peak_bytes_per_device"]) == 4
    assert (
        document["search"]["algorithm"] == "minmax"
        and document["search"]["optimal"] is True
        and document["search"]["seconds"] > 0
    )
    assert document["why"]["summary"].startswith("1 stage; the peak is ")
    assert (
        document["why"]["bottleneck_category"]
        in document["plan"]["prediction"]["stages"][document["why"]["bottleneck_stage"]][
            "parts_bytes"
        ]
    )


# ---- limits and spaces ---------------------------------------------------------------------------


def test_a_memory_limit_that_nothing_fits_is_a_result_with_a_reason():
    profile, cluster = a_profile(), Cluster((4,))
    free = recommend(profile, PlanQuestion(cluster, **BATCH))
    least = free.proof.peak_bytes
    assert (
        recommend(profile, PlanQuestion(cluster, **BATCH, memory_limit_bytes=least)).status == "ok"
    )
    result = recommend(profile, PlanQuestion(cluster, **BATCH, memory_limit_bytes=least - 1))
    assert result.status == "infeasible"
    assert result.plan == free.plan  # the least-peak plan, to look at
    why = result.why
    assert (why.code, why.least_peak_bytes, why.memory_limit_bytes) == (
        "memory-limit",
        least,
        least - 1,
    )
    assert result.proof.stages[why.stage_id].peak_bytes == least
    assert why.summary.startswith(
        f"The lowest peak memory of any plan is {least:,} bytes, 1 above "
        f"memory_limit_bytes={least - 1:,}: stage_id="
    )


def test_too_few_layers_for_the_devices_is_a_result_without_a_plan():
    result = recommend(a_profile(3, 1), PlanQuestion(Cluster((1,) * 8), **BATCH))
    assert (result.status, result.plan, result.prediction) == ("infeasible", None, None)
    assert result.why.code == "too-few-layers"
    assert written(result)["plan"] is None


def test_whole_nodes_and_any_divisor_widen_the_space():
    space = StageSpace(whole_nodes=True, any_divisor=True)
    choices = space.choices(Cluster((3, 3)), 48)
    planted = Planted(6, 1)
    profile = planted.profile([*choices, StageChoice(2, 1), StageChoice(1, 2)], sizes=(24, 48))
    batch = {"global_batch_size": 48 * 8, "num_microbatches": 8}
    narrow = recommend(profile, PlanQuestion(Cluster((3, 3)), **batch)).proof
    wide = recommend(profile, PlanQuestion(Cluster((3, 3)), **batch, space=space)).proof
    assert {s.choice.num_devices for s in narrow.stages} <= {1, 2}
    assert wide.sorted_peaks <= narrow.sorted_peaks
    problem = search_problem(
        profile, PlanQuestion(Cluster((3, 3)), **batch, schedule="1f1b", space=space)
    )
    assert wide.sorted_peaks == brute_force(problem)
    assert {d for here in problem.degrees for d in here} == {1, 3, 6}


def test_the_paper_mode_searches_data_or_tensor_parallelism_by_the_papers_numbers():
    profile, cluster = with_paper(), Cluster((4,))
    result = recommend(profile, PlanQuestion(cluster, **BATCH, schedule="gpipe", mode="paper"))
    assert all(
        1 in (stage.choice.data_parallel, stage.choice.tensor_parallel)
        for stage in result.plan.stages
    )
    predictor = PaperPredictor(PaperStatistics.from_json(profile.paper))
    assert result.proof.peak_bytes_per_device == tuple(
        np.ceil(predictor.predict(result.plan)).astype(int)
    )
    assert result.proof.sorted_peaks == brute_force(
        search_problem(profile, PlanQuestion(cluster, **BATCH, schedule="gpipe", mode="paper"))
    )


@pytest.mark.parametrize("mode", ["default", "paper"])
@pytest.mark.parametrize(("num_merged", "num_devices"), [(2, 2), (4, 3), (4, 4), (7, 4)])
def test_merged_layers_are_never_cut(num_merged, num_devices, mode):
    profile, cluster = with_paper(), Cluster((1,) * num_devices)  # as many stages as devices
    problem = search_problem(profile, PlanQuestion(cluster, **BATCH, schedule="gpipe", mode=mode))
    windows = [(first, first + n) for n in (1, 2) for first in range(8 - n + 1)]
    merged = merge_layers(
        layer_statistics({w: int(problem.bytes_per_choice(1, 1, *w)[0]) for w in windows}, 8),
        num_merged,
    )
    assert len(merged) == num_merged
    cuts = {first for first, _ in merged}
    allowed = [
        tuple(
            sorted(
                (int(problem.bytes_per_choice(1, 1, first, stop)[0]) for first, stop, _ in plan),
                reverse=True,
            )
        )
        for plan in every_plan(problem)
        if {first for first, _, _ in plan} <= cuts
    ]
    result = recommend(
        profile,
        PlanQuestion(cluster, **BATCH, schedule="gpipe", mode=mode, merge_layers=num_merged),
    )
    assert {stage.first for stage in result.plan.stages} <= cuts
    assert result.proof.sorted_peaks == min(allowed)
    free = recommend(profile, PlanQuestion(cluster, **BATCH, schedule="gpipe", mode=mode))
    assert free.proof.sorted_peaks <= result.proof.sorted_peaks
    assert (
        recommend(
            profile, PlanQuestion(cluster, **BATCH, schedule="gpipe", mode=mode, merge_layers=8)
        ).plan
        == free.plan
    )


def test_a_choice_that_does_not_split_the_microbatch_is_not_used():
    profile = a_profile()
    problem = search_problem(
        profile,
        PlanQuestion(Cluster((4,)), global_batch_size=16, num_microbatches=8, schedule="1f1b"),
    )
    assert {choice.data_parallel for choices in problem.choices.values() for choice in choices} == {
        1,
        2,
    }
    assert (
        recommend(
            profile, PlanQuestion(Cluster((4,)), global_batch_size=16, num_microbatches=8)
        ).plan.microbatch_size
        == 2
    )


# ---- what is refused -----------------------------------------------------------------------------


def test_all_broken_rules_are_named_at_once():
    profile, cluster = a_profile(2, 1), Cluster((1,))
    batch = {"global_batch_size": 10, "num_microbatches": 4}
    assert codes_of(
        lambda: recommend(profile, PlanQuestion(cluster, **batch, schedule="zigzag", mode="fast"))
    ) == (
        "plan-batch",
        "plan-schedule",
        "recommend-mode",
    )
    with pytest.raises(CaptureError) as error:
        recommend(profile, PlanQuestion(cluster, **batch))
    assert (
        str(error.value)
        == "global_batch_size=10 is not divisible by num_microbatches=4; 8 would be. [plan-batch]"
    )


def test_what_the_profile_lacks_is_named():
    profile, cluster = a_profile(4, 2), Cluster((2,))
    assert codes_of(lambda: recommend(profile, PlanQuestion(cluster, **BATCH, mode="paper"))) == (
        "profile-paper",
    )
    assert codes_of(
        lambda: recommend(profile, PlanQuestion(cluster, **BATCH, algorithm="guess"))
    ) == ("search-algorithm",)
    fours = Planted(4).profile([StageChoice(4, 1)])
    assert codes_of(lambda: recommend(fours, PlanQuestion(cluster, **BATCH))) == (
        "profile-degrees",
    )


def test_an_algorithm_answers_its_own_objectives_alone():
    """No algorithm is left out silently: every pair is in the table, or refused with the names of
    those that answer."""
    profile, cluster = with_paper(), Cluster((4,))
    for objective in (*OBJECTIVES, None):
        for mode in MODES:
            for algorithm in SEARCH_NAMES:
                if any(
                    (m, name) == (mode, algorithm) and objective in (None, of)
                    for of, m, name in SEARCHES
                ):
                    continue
                asked = {"objective": objective, "mode": mode, "algorithm": algorithm}
                codes = codes_of(
                    lambda asked=asked: recommend(profile, PlanQuestion(cluster, **BATCH, **asked))
                )
                assert codes == (
                    ("recommend-objective",)
                    if objective and not search_names(objective, mode)
                    else ("plan-algorithm",)
                )
    with pytest.raises(CaptureError) as error:
        recommend(profile, PlanQuestion(cluster, **BATCH, objective="throughput", algorithm="mcap"))
    assert str(error.value) == (
        "algorithm='mcap' does not search for objective='throughput' in mode='default'; choose "
        "bounds-first or throughput or autostage. [plan-algorithm]"
    )
    options = {"algorithm": "autostage", "merge_layers": 2, "space": StageSpace(any_divisor=True)}
    assert codes_of(lambda: recommend(profile, PlanQuestion(cluster, **BATCH, **options))) == (
        "plan-algorithm",
        "plan-algorithm",
    )
    assert search_of("memory", "paper", None) == ("memory", "paper", "minmax")


def test_every_search_of_the_table_is_there_and_no_other():
    assert {name for *_, name in SEARCHES} == {*ALGORITHMS, AUTOSTAGE, BOUNDS_FIRST}


def test_all_that_is_wrong_with_a_question_is_said_at_once():
    codes = codes_of(
        lambda: PlanQuestion(Cluster((2,)), 7, 2, schedule="zigzag", mode="other", algorithm="mcap")
    )
    assert codes == ("plan-batch", "plan-schedule", "recommend-mode")


def test_the_algorithm_that_is_named_is_the_one_that_answers():
    profile, cluster = a_profile(4, 2), Cluster((2,))
    for algorithm in ("minmax", "enumerate", "mcap", "mcap-bf"):
        assert (
            recommend(profile, PlanQuestion(cluster, **BATCH, algorithm=algorithm)).proof.algorithm
            == algorithm
        )
    timed, nodes = planted_profile(8, max_devices=2), Cluster((2, 2))
    for options, name in (
        ({"objective": "throughput"}, "throughput"),
        ({"objective": "pareto", "algorithm": "throughput"}, "throughput"),
        ({"objective": "throughput", "algorithm": "autostage"}, f"autostaging ({LABEL})"),
        ({"algorithm": "autostage"}, f"autostaging ({LABEL})"),
    ):
        assert (
            recommend(
                timed, PlanQuestion(Cluster(nodes.nodes, timed.target), **BATCH, **options)
            ).proof.algorithm
            == name
        )


def test_every_plan_that_may_be_written_has_its_prediction():
    """So that ``run`` can show it beside what it measures."""
    timed = planted_profile(8, max_devices=2)
    cluster = Cluster((2, 2), timed.target)
    plans = [
        recommend(timed, PlanQuestion(cluster, **BATCH, **of)).plan
        for of in ({"objective": "pareto"}, {"algorithm": "autostage"})
    ]
    plans += [
        recommend(
            with_paper(), PlanQuestion(Cluster((4,)), **BATCH, schedule="gpipe", mode=mode)
        ).plan
        for mode in MODES
    ]
    executed = replace(with_paper(), measurements={})  # runs alone
    plans += [
        recommend(
            executed, PlanQuestion(Cluster((4,)), **BATCH, schedule="gpipe", mode="paper")
        ).plan
    ]
    plans += [baseline_plan(timed, PlanQuestion(cluster, **BATCH, schedule="1f1b"))]
    for plan in plans:
        assert len(plan.prediction.peak_bytes_per_device) == plan.cluster.num_devices == 4


# ---- baselines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weigh", ["flops", "params", "layers"])
def test_the_baseline_shares_layers_out_evenly_and_never_beats_the_search(weigh):
    profile, cluster = a_profile(8), Cluster((4,))
    plan = baseline_plan(profile, PlanQuestion(cluster, **BATCH, schedule="1f1b"), weigh=weigh)
    assert plan.num_stages == 4 and {stage.num_devices for stage in plan.stages} == {1}
    if weigh != "params":
        assert [stage.stop - stage.first for stage in plan.stages] == [2, 2, 2, 2]
    needs = max(AdditivePredictor(profile).predict(plan).peak_bytes_per_device)
    assert recommend(profile, PlanQuestion(cluster, **BATCH)).proof.peak_bytes <= needs


def test_with_too_few_layers_the_baseline_takes_a_larger_degree():
    plan = baseline_plan(a_profile(3), PlanQuestion(Cluster((4, 4)), **BATCH, schedule="gpipe"))
    assert [stage.num_devices for stage in plan.stages] == [4, 4]
    assert codes_of(
        lambda: baseline_plan(
            a_profile(1, 1), PlanQuestion(Cluster((2,)), **BATCH, schedule="gpipe")
        )
    ) == ("baseline-degree",)
