"""Plans of which some decisions are fixed: searches against all plans that decide alike, and what
is said where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from search_kit import every_plan
from synthetic_profiles import MICROBATCH_SIZE, Planted
from test_fastest_bounds import place

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice, with_sequence_parallel, with_sharded_params
from capture.plan.stage import Stage
from recommender import PlanQuestion, recommend
from recommender.capture.posed import plan_of, search_problem
from recommender.capture.recommendation import predict_plan
from recommender.fixed import DECISIONS, FixedPlan
from recommender.whole import WholeQuestion

ALL = ("stages", "degrees", "remat", "sharding", "sequence")
CHOICES = with_sequence_parallel(
    with_sharded_params(
        [
            StageChoice(dp, tp, remat)
            for dp, tp in ((1, 1), (2, 1), (1, 2))
            for remat in ("cheap", "full")
        ]
    )
)
QUESTION = PlanQuestion(Cluster((4,)), 8 * MICROBATCH_SIZE, 8)
FSDP = StageChoice(4, 1, "full", shard_optimizer=True, shard_params=True)


def decides(choice: StageChoice, name: str):
    """What a choice decides, where it does."""
    dp, tp = choice.data_parallel, choice.tensor_parallel
    return {
        "degrees": (dp, tp),
        "remat": choice.remat,
        "sharding": (choice.shard_optimizer, choice.shard_params) if dp > 1 else None,
        "sequence": choice.sequence_parallel if tp > 1 else None,
    }[name]


def agree(stage: Stage, other: Stage, decisions) -> bool:
    if "stages" in decisions and (
        (stage.first, stage.stop, stage.num_devices) != (other.first, other.stop, other.num_devices)
    ):
        return False
    both = (
        (decides(stage.choice, name), decides(other.choice, name))
        for name in decisions
        if name != "stages"
    )
    return all(None in pair or pair[0] == pair[1] for pair in both)


@pytest.mark.parametrize(("num_devices", "num_layers"), [(4, 2), (3, 3)])
def test_the_best_of_the_plans_that_decide_alike_is_found(num_devices, num_layers):
    profile = Planted(num_layers, 0).profile(CHOICES, num_neighbours=2)
    question = replace(QUESTION, cluster=Cluster((num_devices,)))
    problem = search_problem(profile, question)
    every = [
        (stages, predict_plan(profile, plan_of(profile, question, stages)).peak_bytes)
        for cuts in every_plan(problem)
        for choices in product(*(problem.choices[d] for *_, d in cuts))
        for stages in [place(cuts, choices)]
    ]
    random = np.random.default_rng(0)
    for count in range(len(ALL) + 1):
        for decisions in combinations(ALL, count):
            stages, _ = every[random.integers(len(every))]
            alike = [
                peak
                for others, peak in every
                if all(any(agree(o, s, decisions) for s in stages) for o in others)
            ]
            found = recommend(profile, replace(question, fixed=FixedPlan(tuple(stages), decisions)))
            assert found.plan is not None and found.plan.prediction.peak_bytes == min(alike)


def test_a_mixture_that_is_not_tried_is_kept():
    profile = Planted(8, 0).profile(CHOICES, num_neighbours=2)
    mixed = replace(CHOICES[0], remat="full:5")
    stages = tuple(Stage.at(d, 2 * d, 2 * d + 2, mixed) for d in range(4))
    fixed = FixedPlan(stages, ALL)
    found = recommend(profile, replace(QUESTION, fixed=fixed)).plan
    assert {stage.choice.remat for stage in found.stages} == {"full:5"}
    assert found.stages == stages


def whole(stages, decisions=ALL, cluster="1x4", **more) -> WholeQuestion:
    fixed = FixedPlan(tuple(stages), tuple(decisions))
    return WholeQuestion(Cluster.parse(cluster, "h100"), 16, fixed=fixed, **more)


def test_only_numbers_of_micro_batches_are_searched_that_the_plan_can_have():
    asked = whole([Stage.at(0, 0, 4, FSDP)])
    assert asked.microbatches == (1, 2, 4), "four replicas need four examples"
    assert asked.choices(4) == [FSDP]
    freed = asked.freed("sharding").choices(4)
    assert {(c.shard_optimizer, c.shard_params) for c in freed} == {
        (False, False),
        (True, False),
        (True, True),
    }
    assert {c.remat for c in asked.freed("remat").choices(4)} == {"none", "cheap", "dots", "full"}


@pytest.mark.parametrize(
    ("stages", "more", "said"),
    [
        (
            [Stage.at(0, 0, 4, FSDP)],
            {"cluster": "1x8"},
            "the stages take 4 of 8 devices; place stages again: --search stages,degrees.",
        ),
        (
            [Stage.at(0, 0, 2, FSDP), Stage.at(4, 2, 4, FSDP)],
            {},
            "1x4 has no 4 devices for stage 1; place stages again: --search stages,degrees.",
        ),
        (
            [Stage(0, 4, (3, 2, 1, 0), FSDP)],
            {},
            "devices of stage 0 are not those behind the ones of the stage before; place stages "
            "again: --search stages,degrees.",
        ),
        (
            [Stage.at(0, 0, 4, FSDP)],
            {"counts": (8,)},
            "8 micro-batches of 2 examples and what else is asked leave no stage with data "
            "parallel 4, tensor parallel 1, remat full, parameters split over replicas (layers "
            "0-3 of the plan that is fixed); search it again: --search degrees.",
        ),
        (
            [Stage.at(0, 0, 4, FSDP)],
            {"remat": "cheap"},
            "(layers 0-3 of the plan that is fixed); search it again: --search remat.",
        ),
        (
            [Stage.at(0, 0, 4, FSDP)],
            {"shard_params": False, "remat": "cheap"},
            "(layers 0-3 of the plan that is fixed); leave out --fix.",
        ),
    ],
)
def test_what_no_plan_has_is_refused_with_what_would_help(stages, more, said):
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        whole(stages, **more)
    assert set(error.value.codes) == {"plan-fix"}


def test_an_answer_says_what_is_fixed():
    assert DECISIONS[2:] == ALL
    profile = Planted(3, 0).profile(CHOICES, num_neighbours=2)
    stages = tuple(Stage.at(2 * s, s, s + 1 + s, CHOICES[2]) for s in range(2))
    fixed = FixedPlan(stages, ("stages", "remat"))
    found = recommend(profile, replace(QUESTION, fixed=fixed))
    assert "stages, remat as in the plan that is fixed" in found.why.summary
