"""A profile is JSON with a version; what is no profile is refused with its code."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_graphs import layer_graphs
from synthetic_profiles import Planted, hybrid

from capture.errors import CaptureError, ProfileError
from capture.measured.profile import Calibration, Profile, StageConfig, StageError, rescaled
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice

ONE = StageChoice()


def a_profile() -> Profile:
    bare = Planted(4, skips=[(0, 3)]).profile(hybrid(2), errors=[0.01, -0.002])
    return replace(
        bare,
        workload=WorkloadSpec("models/gpt.py", "gpt", {"size": "tiny", "depth": 3, "tied": True}),
        auto_layers=True,
        tensor_parallel_rule="largest",
        paper={"num_runs": 3},
        warnings=("a",),
        failures=("b", "c"),
    )


def test_round_trip_through_a_file(tmp_path):
    profile, path = a_profile(), tmp_path / "profile.json"
    profile.save(path)
    again = Profile.load(path)
    assert again == profile
    assert all(isinstance(config, StageConfig) for config in again.measurements)
    assert json.loads(path.read_text())["schema_version"] == 1


def test_round_trip_without_the_optional_parts():
    bare = Planted(2).profile([StageChoice()])
    assert Profile.from_json(json.loads(json.dumps(bare.to_json()))) == bare
    assert bare.choices == (StageChoice(),)


def test_layers_are_written_first_to_last():
    rows = a_profile().to_json()["measurements"]
    assert [0, 1] in [row["layers"] for row in rows] and max(row["layers"][1] for row in rows) == 3


def errors_of(call) -> str:
    with pytest.raises(CaptureError) as error:
        call()
    assert isinstance(error.value, ProfileError)
    return str(error.value)


@pytest.mark.parametrize("version", [0, None, "1"])
def test_an_unknown_version_is_refused(version):
    message = errors_of(
        lambda: Profile.from_json({**a_profile().to_json(), "schema_version": version})
    )
    assert message == (
        f"profile has schema_version={version!r}; this version of capture reads 1. Make it again "
        "with capture profile. [profile-schema]"
    )


def test_an_unknown_version_of_the_graph_is_refused():
    data = a_profile().to_json()
    data["graph"]["schema_version"] = 7
    assert errors_of(lambda: Profile.from_json(data)).endswith("[graph-schema]")


@pytest.mark.parametrize("data", [[], None, 3, "profile"])
def test_json_that_is_no_object_is_refused(data):
    assert errors_of(lambda: Profile.from_json(data)).endswith("[profile-schema]")


@pytest.mark.parametrize(
    "key", [key for key in a_profile().to_json() if key not in ("schema_version", "verified")]
)
def test_a_missing_or_wrong_field_is_refused_by_name(key):
    data = a_profile().to_json()
    data[key] = 5
    assert re.fullmatch(
        rf"profile is not one: {key} is 5 and must be .*\. Make it again with capture profile\. "
        r"\[profile-corrupt\]",
        errors_of(lambda: Profile.from_json(data)),
    )
    del data[key]
    assert errors_of(lambda: Profile.from_json(data)) == (
        f"profile is not one: {key} is missing. Make it again with capture profile. "
        "[profile-corrupt]"
    )


def test_a_measurement_without_its_cost_is_refused():
    data = a_profile().to_json()
    del data["measurements"][0]["cost"]["kept_batch"]
    assert "measurements[0].cost.kept_batch is missing" in errors_of(
        lambda: Profile.from_json(data)
    )


def test_missing_and_corrupt_files_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    assert (
        errors_of(lambda: Profile.load(path))
        == f"profile {str(path)!r} does not exist. [profile-file]"
    )
    assert (
        errors_of(lambda: Profile.load(tmp_path))
        == f"profile {str(tmp_path)!r} cannot be read: Is a directory. [profile-file]"
    )
    a_profile().save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff\xfe\0"):
        path.write_bytes(content)
        message = errors_of(lambda: Profile.load(path))
        assert message.startswith(f"profile {str(path)!r} is not JSON: ") and message.endswith(
            "Make it again with capture profile. [profile-corrupt]"
        )


# ---- other micro-batch sizes ---------------------------------------------------------------------


@given(layer_graphs(), st.integers(1, 5))
def test_a_rescaled_graph_scales_what_has_a_batch_dimension(graph, factor):
    size = graph.microbatch_size * factor
    scaled = rescaled(graph, size, "other")
    assert scaled.microbatch_size == size
    for mine, theirs in zip(
        (*graph.values, *graph.batch), (*scaled.values, *scaled.batch), strict=True
    ):
        assert theirs.nbytes == mine.nbytes * (1 if mine.batch_dim is None else factor)
    assert scaled.params == graph.params
    assert [layer.flops for layer in scaled.layers] == [
        layer.flops * factor for layer in graph.layers
    ]
    back = rescaled(scaled, graph.microbatch_size, graph.model_hash)
    assert back == graph


def test_the_graph_at_a_profiled_size_carries_the_hash_of_that_size():
    profile = a_profile()
    assert profile.graph_at(16) is profile.graph
    assert (profile.graph_at(8).model_hash, profile.graph_at(8).microbatch_size) == ("hash8", 8)
    assert profile.graph_at(12).model_hash == ""


# ---- the interval --------------------------------------------------------------------------------


def calibration(
    *errors: float, choice: StageChoice = ONE, layers: tuple[int, int] | None = None
) -> Calibration:
    """Of a model of ten layers: error i is that of a stage of its own inside it."""
    configs = [
        StageConfig(*(layers or (1 + i % 4, 6 + i // 4 % 3)), choice, 16 + i // 12)
        for i in range(len(errors))
    ]
    return Calibration(tuple(map(StageError, configs, errors)), 0, 1)


INNER = StageConfig(2, 5, ONE, 16)


def test_without_errors_the_interval_is_wide():
    assert Calibration((), 0, 0).interval(INNER, 10) == (0.75, 1.4)
    assert Calibration((), 0, 0).coverage() is None


def test_each_side_is_its_largest_error_stretched():
    """n = 4 of every kind: 1 + 2 / sqrt(4) times the largest."""
    low, high = calibration(0.04, -0.02, -0.06, 0.03).interval(INNER, 10)
    assert (low, high) == (pytest.approx(1 - 0.12), pytest.approx(1.08))


def test_many_errors_stretch_less():
    assert calibration(*[0.04] * 100).interval(INNER, 10)[1] == pytest.approx(1.048)


@pytest.mark.parametrize(
    "choice, layers",
    [
        (StageChoice(2, 1), (2, 5)),
        (ONE, (0, 5)),
        (ONE, (5, 10)),
        (ONE, (0, 10)),
        (StageChoice(remat="full"), (2, 5)),
    ],
    ids=str,
)
def test_a_kind_that_was_not_seen_has_a_floor(choice, layers):
    """0.5 % * (1 + 8) where nothing of the kind was seen, whatever else was."""
    seen = calibration(*[0.0] * 99)
    assert seen.interval(INNER, 10) == pytest.approx((1 - 0.0054, 1.0054))
    assert seen.interval(StageConfig(*layers, choice, 16), 10) == pytest.approx((1 - 0.045, 1.045))


@pytest.mark.parametrize(
    "kind, config",
    [
        ("the same end", StageConfig(0, 4, StageChoice(4, 1), 16)),
        ("the same degrees", StageConfig(5, 10, StageChoice(2, 2), 16)),
    ],
)
def test_a_kind_that_is_worse_than_the_rest_has_an_interval_of_its_own(kind, config):
    worse = Calibration((StageError(StageConfig(0, 3, StageChoice(2, 2), 16), 0.05),), 0, 1)
    both = Calibration((*calibration(*[0.0] * 400).errors, *worse.errors), 0, 2)
    assert both.interval(INNER, 10)[1] == pytest.approx(
        1 + 0.05 * (1 + 2 / math.sqrt(both.num_stages))
    )
    assert both.interval(config, 10)[1] == pytest.approx(1.15), kind


def test_errors_of_one_stage_at_several_positions_count_once():
    one = calibration(*[0.01] * 30, layers=(1, 4))
    assert len({e.config for e in one.errors}) == one.num_stages == 3
    assert one.coverage() == pytest.approx(0.5)
    assert one.interval(INNER, 10)[1] == pytest.approx(1 + 0.01 * (1 + 2 / math.sqrt(3)))


@pytest.mark.parametrize("num_errors, coverage", [(1, None), (2, 1 / 3), (19, 0.9), (200, 0.98)])
def test_no_more_coverage_is_claimed_than_the_errors_support(num_errors, coverage):
    assert calibration(*[0.01] * num_errors).coverage() == (
        None if coverage is None else pytest.approx(coverage)
    )


@given(st.lists(st.floats(-0.9, 3), min_size=1, max_size=60), st.integers(0, 8), st.integers(1, 2))
def test_it_holds_its_own_errors_and_one_more_never_makes_it_lose_them(errors, first, degree):
    found = calibration(*errors)
    low, high = found.interval(StageConfig(first, first + 2, StageChoice(degree, 1), 16), 10)
    assert all(low - 1e-12 <= 1 + e <= high + 1e-12 for e in errors)


def test_the_widest_is_that_of_the_least_certain_kind():
    low, high = calibration(*[0.0] * 99).widest([ONE], 10)
    assert (low, high) == pytest.approx((1 - 0.045, 1.045))


def test_a_calibration_that_does_not_say_what_of_is_not_believed():
    """Those of earlier versions were errors of the closed form, which left out what stages
    exchange."""
    document = replace(a_profile(), calibration=calibration(0.25)).to_json()
    assert Profile.from_json(json.loads(json.dumps(document))).calibration == calibration(0.25)
    document["calibration"]["errors"] = [0.25]
    assert Profile.from_json(document).calibration is None
