"""Stages that recompute their first layers as a whole: the tables of both kinds put together, what
is measured and searched for them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import code_of
from report_plans import with_work
from synthetic_profiles import Planted, make_plan
from test_table_search import every_plan, question, recomputing

from capture.cli.profile_file import read_profile
from capture.machine.cluster import Cluster
from capture.machine.links import Layout
from capture.measured.profile import Calibration, StageConfig, StageError
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice, with_mixtures
from capture.predictor import AdditivePredictor, mixture
from capture.predictor.alike import Kinds, empty_stages
from capture.predictor.mixture import Mixed
from capture.predictor.times import TimePredictor
from profiling_runs.question import ProfileQuestion
from recommender.capture.posed import stage_choices
from recommender.capture.recommendation import recommend

CHEAP, FULL = StageChoice(remat="cheap"), StageChoice(remat="full")


def mixed(num_full: int) -> StageChoice:
    return replace(FULL, remat=f"full:{num_full}")


@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_a_mixture_needs_no_less_than_its_parts(num_layers, num_full, seed):
    """Whatever the tables: what is kept is the sum, what runs the larger of both, each with what
    the other kind grows by; seconds are between."""
    draw = np.random.default_rng(seed)
    grows = np.cumsum(draw.integers(0, 9, (2, num_layers, num_layers + 1)), axis=2).astype(float)
    full, cheap = grows
    at = Mixed.every(num_layers, num_full)
    kept, running = (of(full, cheap, at) for of in (mixture.kept, mixture.running))
    seconds = mixture.seconds(full, cheap, at)
    for first in range(num_layers):
        for stop in range(first + 1, num_layers + 1):
            at, border = (first, stop), min(first + num_full, stop)
            if border == stop:
                assert kept[at] == running[at] == seconds[at] == full[at]
                continue
            assert kept[at] == full[first, border] + cheap[border, stop]
            assert running[at] >= max(full[first, border], cheap[border, stop])
            more = cheap[border - 1, stop] - cheap[border - 1, border]
            assert seconds[at] == full[first, border] + more <= running[at]


@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
def test_stages_that_are_alike_are_mixed_of_what_is_alike(num_layers, seed):
    draw = np.random.default_rng(seed)
    full, cheap = draw.integers(0, 2, (2, num_layers, num_layers + 1))
    passed, kinds = draw.integers(0, 2, num_layers + 1), Kinds(full, cheap)
    kinds.look(np.broadcast_to(passed, kinds.of.shape))
    counts, inside = np.arange(1, num_layers), ~empty_stages(num_layers)
    once = Mixed.of_kinds(kinds, counts)
    ways = [mixture.kept, mixture.running, mixture.seconds]
    ways += [partial(of, passed=passed) for of in (mixture.least_kept, mixture.least_running)]
    for n, num_full in enumerate(counts.tolist()):
        for of in ways:
            every = of(full, cheap, Mixed.every(num_layers, num_full))
            assert (of(full, cheap, once)[n][kinds.of] == every)[inside].all()


def test_planted_layers_of_both_kinds_add_up():
    """Half as much is kept of every layer that recomputes as a whole; programs need the same."""
    planted = Planted(6, seed=3)
    planted.fixed[0] *= 2
    profile = recomputing(planted, CHEAP, FULL)
    predictor, times = AdditivePredictor(profile), TimePredictor(profile, Layout(1))
    cheap, full = (predictor.memory(choice, 16) for choice in (CHEAP, FULL))
    for num_full in (1, 2, 5, 9):
        memory = predictor.memory(mixed(num_full), 16)
        seconds = times.table(mixed(num_full), 16)
        for at in ((0, 6), (1, 4), (4, 6), (2, 3)):
            border = min(at[0] + num_full, at[1])
            rest = cheap.kept[border, at[1]] if border < at[1] else 0
            assert memory.kept[at] == full.kept[at[0], border] + rest
            assert memory.update[at] == cheap.update[at]
            assert memory.backward[at] >= full.backward[at[0], border]
            passes = times.table(CHEAP, 16).backward[0, 1] * (at[1] - at[0])
            again = times.table(CHEAP, 16).forward[0, 1] * (border - at[0])
            assert seconds.backward[at] == pytest.approx(passes + again)


def test_seconds_of_a_mixture_do_not_rest_on_stages_that_were_compiled():
    """A part that is known better than its neighbours would take the sum above what nothing is
    below."""
    profile = recomputing(Planted(6, seed=3), CHEAP, FULL)
    stage = StageConfig(0, 6, CHEAP, 16)
    slow = with_work(stage, profile.measurements[replace(stage, stop=1)], slowness=3.0)
    known = replace(profile, verified={stage: slow})
    before, after = (
        TimePredictor(each, Layout(1)).table(mixed(1), 16) for each in (profile, known)
    )
    assert after.at(0, 6) == before.at(0, 6)
    cheap = TimePredictor(known, Layout(1)).table(CHEAP, 16)
    assert cheap.at(0, 6).microbatch_seconds > 2 * before.at(0, 6).microbatch_seconds


def test_a_prediction_of_a_mixture_has_the_width_of_what_was_not_compiled():
    profile = recomputing(Planted(6, seed=3), CHEAP, FULL)
    stage = StageConfig(0, 3, mixed(1), 16)
    errors = tuple(
        StageError(replace(stage, choice=choice, stop=stop), 0.04)
        for choice in (CHEAP, FULL, mixed(2))
        for stop in (3, 4, 5)
    )
    profile = replace(profile, calibration=Calibration(errors, 1, 3))
    predictor = AdditivePredictor(profile)
    assert not predictor.is_extrapolated(mixed(1), 16) and predictor.is_extrapolated(mixed(1), 32)
    assert predictor.has_long_windows(mixed(1), 16)
    assert not predictor.has_long_windows(mixed(1), 32)
    plan = make_plan([3, 3], [mixed(1), mixed(1)])
    plan = plan.with_(cluster=Cluster((2,), "a100-40g"))
    for found in predictor.predict(plan).stages:
        assert found.interval_bytes[1] >= 1.04 * found.peak_bytes and not found.extrapolated
    assert profile.calibration.interval(stage, 6) == profile.calibration.interval(
        replace(stage, choice=mixed(2)), 6
    )


@pytest.mark.parametrize(("name", "num_layers"), [("1f1b", 5), ("interleaved", 7)])
def test_every_stage_recomputes_as_many_layers_as_it_must(name, num_layers):
    """The fastest plans within limits between those of one kind; of two stages by brute force."""
    profile = recomputing(Planted(num_layers, seed=7), CHEAP, FULL)
    asked = question(name, target="a100-40g", memory_limit_bytes=1 << 40)
    choices = with_mixtures((CHEAP, FULL), num_layers)
    assert stage_choices(profile) == choices
    alone = every_plan(profile, asked, (CHEAP, FULL))
    every = every_plan(profile, asked, choices) if name == "1f1b" else alone
    least, most = min(alone)[0], min(alone, key=lambda one: (one[1], one[0]))[0]
    gains = []
    for limit in range(least, most + 1, 1 + (most - least) // 5):
        fast = replace(asked, memory_limit_bytes=limit, objective="throughput")
        answer = recommend(profile, fast)
        assert answer.status == "ok" and answer.peak_bytes <= limit
        seconds = answer.proof.step_seconds
        assert seconds <= 1.001 * min(one[1] for one in every if one[0] <= limit)
        gains.append(min(one[1] for one in alone if one[0] <= limit) / seconds - 1)
    assert max(gains) > 0.02


def test_a_mixture_by_name_is_what_all_stages_have():
    profile = recomputing(Planted(5, seed=7), CHEAP, FULL)
    asked = replace(question("1f1b", target="a100-40g"), remat="full:2")
    answer = recommend(profile, asked)
    assert {stage.choice for stage in answer.plan.stages} == {mixed(2)}
    named = replace(asked, remat="cheap")
    assert {s.choice for s in recommend(profile, named).plan.stages} == {CHEAP}
    bounded = replace(profile, provenance={**profile.provenance, "bounds": "least"})
    assert mixed(2) in stage_choices(bounded)
    size = asked.microbatch_size
    least, both = (AdditivePredictor(p).memory(mixed(2), size) for p in (bounded, profile))
    upper = np.triu_indices(5, 1, 6)
    for part in ("kept", "forward", "backward"):
        assert (getattr(least, part)[upper] <= getattr(both, part)[upper]).all(), part
    assert code_of(lambda: replace(asked, remat="full:0")) == "plan-remat"
    for refused in ({"mode": "paper"}, {"algorithm": "autostage", "objective": "throughput"}):
        assert code_of(lambda refused=refused: replace(asked, **refused)) == "plan-algorithm"


def test_a_profile_in_a_file_serves_a_mixture_where_it_has_both_kinds(tmp_path):
    profile = recomputing(Planted(5, seed=7), StageChoice(), CHEAP, FULL)
    asked = ProfileQuestion(WorkloadSpec.parse("models/gpt.py:gpt"), Cluster((2,)), 16)
    paths = [tmp_path / "all.json", tmp_path / "cheap.json"]
    profile.save(paths[0])
    recomputing(Planted(5, seed=7), CHEAP).save(paths[1])
    for remat, kinds in (("full:2", {CHEAP, FULL}), ("cheap", {CHEAP})):
        read = read_profile(paths[:1], replace(asked, remat=(remat,)), remat)
        assert set(read.choices) == kinds
    refused = lambda: read_profile(paths[1:], replace(asked, remat=("full:2",)), "full:2")  # noqa: E731
    assert code_of(refused) == "profile-choice"


def test_what_is_measured_for_a_mixture_are_its_parts():
    spec, cluster = WorkloadSpec.parse("models/gpt.py:gpt"), Cluster((2,))
    asked = ProfileQuestion(spec, cluster, 8, remat=("full:2",))
    assert {choice.remat for choice in asked.stage_choices} == {"full:2"}
    assert {choice.remat for choice in asked.profiled_choices} == {"cheap", "full"}
    assert code_of(lambda: replace(asked, paper=("1f1b", 4))) == "profile-remat"
