"""Verified recommendations: compiled stages are looked up, and the search is repeated until the
best plan is one of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from report_plans import planted_profile, with_work
from synthetic_profiles import Planted, configs_of, hybrid, make_plan

from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageCost
from capture.plan.choices import StageChoice
from capture.plan.prediction import Verified
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import predicted_timeline
from capture.step.interface import plan_interfaces
from capture.step.pipeline import build_step
from capture.step.program import replay
from recommender import PlanQuestion, recommend
from recommender.capture.knowledge import recommend_verified

BATCH = {"global_batch_size": 128, "num_microbatches": 8}
CLUSTER = Cluster((1, 1, 1, 1))
# Bytes: the losses of a step, which the predictor's formula leaves out.
LOSSES = 4 * BATCH["num_microbatches"]


class Compiler:
    """A compiler whose stages are off from the sum of their layers, each by its own factor."""

    def __init__(self, planted: Planted, profile: Profile, spread: float):
        self.planted, self.profile, self.spread = planted, profile, spread
        self.compiled: list[Plan] = []

    def cost(self, config: StageConfig) -> StageCost:
        cost = self.planted.cost(config)
        choice = config.choice
        seed = [config.first, config.stop, choice.data_parallel, choice.tensor_parallel]
        factor = 1 + self.spread * np.random.default_rng(seed).uniform(-1, 1)
        return replace(
            cost,
            backward_bytes=int(cost.backward_bytes * factor),
            residual_bytes=int(cost.residual_bytes * factor),
        )

    def peaks(self, plan: Plan) -> list[int]:
        interfaces = plan_interfaces(
            plan,
            self.profile.graph_at(plan.microbatch_size),
            self.profile.param_bytes,
            list(map(self.cost, configs_of(plan))),
        )
        return list(replay(build_step(interfaces, plan.schedule_table)).peak_bytes_per_device)

    def __call__(self, plan: Plan, profile: Profile):
        self.compiled.append(plan)
        verified = {config: self.cost(config) for config in configs_of(plan)}
        return Verified(tuple(self.peaks(plan))), replace(
            profile, verified={**profile.verified, **verified}
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_shown_peak_is_the_compilers_and_no_compiled_plan_is_better(seed):
    planted = Planted(6, seed)
    profile = planted.profile(hybrid(4))
    compiler = Compiler(planted, profile, spread=0.3)
    result = recommend_verified(profile, PlanQuestion(CLUSTER, **BATCH), compiler, max_plans=50)
    assert result.why.verified.settled, "fifty rounds are more than this space needs"
    assert (
        result.peak_bytes
        == max(compiler.peaks(result.plan))
        == min(max(compiler.peaks(plan)) for plan in compiler.compiled)
    )
    assert len(compiler.compiled) == len(set(compiler.compiled)) == result.why.verified.num_plans
    unverified = recommend(profile, PlanQuestion(CLUSTER, **BATCH))
    assert result.peak_bytes <= max(compiler.peaks(unverified.plan)), (
        "the first plan that was compiled is the search's own"
    )


def test_a_cap_on_plans_is_kept_and_said():
    planted = Planted(6, 2)
    profile = planted.profile(hybrid(4))
    compiler = Compiler(planted, profile, spread=0.3)
    result = recommend_verified(profile, PlanQuestion(CLUSTER, **BATCH), compiler, max_plans=1)
    assert len(compiler.compiled) == 1 and not result.why.verified.settled
    assert list(result.plan.verification.peak_bytes_per_device) == compiler.peaks(result.plan)


def test_an_exact_profile_is_settled_at_once():
    planted = Planted(6, 2)
    profile = planted.profile(hybrid(4))
    compiler = Compiler(planted, profile, spread=0)
    result = recommend_verified(profile, PlanQuestion(CLUSTER, **BATCH), compiler, max_plans=5)
    assert (len(compiler.compiled), result.why.verified.settled) == (1, True)
    assert result.peak_bytes == pytest.approx(result.prediction.peak_bytes, abs=LOSSES)


def test_a_limit_is_judged_by_compiled_peaks():
    planted = Planted(6, 3)
    profile = planted.profile(hybrid(4))
    compiler = Compiler(planted, profile, spread=0.3)
    least = recommend_verified(
        profile, PlanQuestion(CLUSTER, **BATCH), compiler, max_plans=50
    ).peak_bytes
    for limit, status in ((least, "ok"), (least - 1, "infeasible")):
        question = PlanQuestion(CLUSTER, **BATCH, memory_limit_bytes=limit)
        result = recommend_verified(
            profile, question, Compiler(planted, profile, spread=0.3), max_plans=50
        )
        assert (result.status, result.headroom.verdict) == (
            status,
            "fits" if status == "ok" else "does not fit",
        )


def test_plans_for_speed_are_ranked_by_compiled_work():
    """The compiler makes every stage slower than predicted, so that the first plan seems faster
    than any that is known."""
    profile = planted_profile(4)
    predictor, cluster = AdditivePredictor(profile), Cluster((2, 2), "a100-40g")
    question = PlanQuestion(cluster, 128, 8, objective="throughput")

    def compiled(plan: Plan, known: Profile):
        verified = {}
        for c in configs_of(plan):
            slowness = 1 + np.random.default_rng([c.first, c.stop, c.choice.data_parallel]).uniform(
                0.1, 1
            )
            verified[c] = with_work(
                c, predictor.stage_cost(c.first, c.stop, c.choice, c.microbatch_size), slowness
            )
        return Verified(predictor.predict(plan).peak_bytes_per_device), replace(
            known, verified={**known.verified, **verified}
        )

    result = recommend_verified(profile, question, compiled, max_plans=50)
    assert result.why.verified.settled and result.why.verified.num_plans > 1
    _, known = compiled(result.plan, profile)
    assert result.proof.step_seconds > recommend(profile, question).proof.step_seconds
    assert result.proof.step_seconds == pytest.approx(
        float(predicted_timeline(result.plan, known).step_seconds), rel=0.05
    )


def test_a_verified_stage_is_exact_and_has_no_interval():
    planted = Planted(6)
    profile = planted.profile(hybrid(2), errors=[0.03] * 60)
    plan = make_plan([4, 2], [StageChoice(2, 1), StageChoice(1, 2)])
    compiler = Compiler(planted, profile, spread=0.3)
    _, known = compiler(plan, profile)
    prediction = AdditivePredictor(known).predict(plan)
    assert list(prediction.peak_bytes_per_device) == pytest.approx(compiler.peaks(plan), abs=LOSSES)
    assert prediction.interval_coverage == 1.0 and all(
        stage.verified for stage in prediction.stages
    )
    assert all(
        stage.interval_bytes == (stage.peak_bytes, stage.peak_bytes) for stage in prediction.stages
    )
    again = Profile.from_json(known.to_json())
    assert again.verified == known.verified


def test_a_profile_of_another_target_is_refused():
    profile = Planted(6).profile(hybrid(2))
    plan = make_plan([4, 2], [StageChoice(2, 1), StageChoice(1, 2)])
    with pytest.raises(
        ProfileError, match=r"target='h100' and the profile of 'cpu'.*\[profile-target\]$"
    ):
        AdditivePredictor(profile).predict(plan.with_(cluster=Cluster(plan.cluster.nodes, "h100")))
