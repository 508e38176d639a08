"""Profiles put together, and profiles that lack a measurement: what is planned all the same, and
what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic_profiles import Planted

from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.papers.capture.choices import hybrid_choices
from capture.plan.choices import StageChoice
from profiling_runs.collect import missing_statistics
from recommender import PlanQuestion, recommend

ONE, TWO = StageChoice(), StageChoice(2, 1)
BATCH = {"global_batch_size": 128, "num_microbatches": 8}


def profile(choices=(ONE, TWO), sizes=(8, 16), **changes) -> Profile:
    found = Planted(5, 1).profile(choices, sizes=sizes, errors=[0.01])
    return replace(found, **changes)


def of_target(profile: Profile, target: str, **facts) -> Profile:
    return replace(profile, provenance={**profile.provenance, "target": target, **facts})


def test_profiles_of_other_degrees_and_sizes_are_one():
    whole = profile(sizes=(8, 16))
    parts = [
        replace(
            whole, measurements={c: m for c, m in whole.measurements.items() if c.choice == choice}
        )
        for choice in (ONE, TWO)
    ]
    together = merge_profiles(parts, "cpu")
    assert together.measurements == whole.measurements
    assert together.calibration.errors == whole.calibration.errors * 2
    mine, theirs = (
        recommend(parts, PlanQuestion(Cluster((2,)), **BATCH)),
        recommend(together, PlanQuestion(Cluster((2,)), **BATCH)),
    )
    assert mine.plan == theirs.plan and {stage.num_devices for stage in mine.plan.stages} <= {1, 2}
    assert Profile.from_json(json.loads(json.dumps(together.to_json()))) == together


def test_of_another_target_only_what_tracing_says_is_taken():
    here = profile((ONE,))
    there = of_target(
        replace(
            profile((TWO,)),
            param_bytes={(2, 1): (1,) * len(here.graph.params)},
            model_hashes={4: "hash4"},
        ),
        "h100",
    )
    together = merge_profiles([here, there], "cpu")
    assert together.measurements == here.measurements
    assert set(together.param_bytes) == {*here.param_bytes, (2, 1)}
    assert together.model_hashes == {**here.model_hashes, 4: "hash4"}
    assert together.microbatch_sizes == here.microbatch_sizes and together.target == "cpu"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda p: replace(p, model_hashes={16: "another"}),
            "model_hash at micro-batch size 16 is another, not hash16; plan each by itself.",
        ),
        (lambda p: replace(p, graph=Planted(6, 1).graph, model_hashes={}), "num_layers=6, not 5"),
        (
            lambda p: replace(p, tensor_parallel_rule="largest"),
            "tensor_parallel_rule='largest', not 'auto'",
        ),
        (
            lambda p: of_target(p, "cpu", versions={"jax": "0.0.1"}),
            "were not measured alike (versions: ",
        ),
        (lambda p: of_target(p, "cpu", flags=["--fast"]), "were not measured alike (flags: "),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(change, says):
    with pytest.raises(ProfileError) as error:
        recommend([profile(), change(profile())], PlanQuestion(Cluster((2,)), **BATCH))
    assert error.value.codes == ("profile-mixture",)
    assert says in str(error.value)


def test_profiles_of_other_targets_alone_are_refused():
    with pytest.raises(
        ProfileError,
        match=r"no profile is of target='cpu' \(there is h100\); profile for it\. "
        r"\[profile-mixture\]",
    ):
        recommend([of_target(profile(), "h100")], PlanQuestion(Cluster((2,)), **BATCH))


# ---- what is missing -----------------------------------------------------------------------------


def without(profile: Profile, choice: StageChoice, length: int) -> tuple[Profile, tuple[str, ...]]:
    """The profile without one window of so many layers, and the warnings about that."""
    lost = next(
        c
        for c in profile.measurements
        if c.choice == choice and c.num_layers == length and c.microbatch_size == 16
    )
    rest = {config: cost for config, cost in profile.measurements.items() if config != lost}
    return replace(profile, measurements=rest, failures=(f"{lost}: no",)), missing_statistics(
        list(profile.measurements), rest
    )


def test_a_choice_that_cannot_be_predicted_is_done_without():
    whole = Planted(5, 1).profile(hybrid_choices(2)[1] + hybrid_choices(2)[2], num_neighbours=2)
    lacking, warnings = without(whole, ONE, 2)
    (warning,) = warnings
    assert (
        "data parallel 1, tensor parallel 1; micro-batch size 16: M_a is not known of every layer "
        "(without "
    ) in warning
    plan = recommend(lacking, PlanQuestion(Cluster((2,)), **BATCH)).plan
    assert [stage.num_devices for stage in plan.stages] == [2]
    with pytest.raises(ProfileError) as error:
        recommend(lacking, PlanQuestion(Cluster((1, 1)), **BATCH))
    assert error.value.codes == ("profile-missing",)


def test_a_longer_window_that_is_missing_costs_a_neighbour_only():
    whole = Planted(5, 1).profile([ONE], num_neighbours=2)
    lacking, (warning,) = without(whole, ONE, 3)
    assert "M_a with 2 neighbours is not known of every layer" in warning and warning.endswith(
        "it is taken with 1. Layers count from 0."
    )
    mine, theirs = (
        recommend(p, PlanQuestion(Cluster((1, 1)), **BATCH)).prediction.peak_bytes
        for p in (lacking, whole)
    )
    assert mine == theirs  # what is planted adds up, so that one neighbour says as much as two


def test_where_nothing_can_be_predicted_the_refusal_names_what_is_missing():
    lacking, _ = without(profile((ONE,)), ONE, 1)
    with pytest.raises(
        ProfileError,
        match=r"the profile lacks layer 0, data .*\nfailed: layer 0, data .*: no "
        r"\[profile-missing\]$",
    ):
        recommend(lacking, PlanQuestion(Cluster((1,)), **BATCH))
