"""A profile is JSON with a version; what is no profile is refused with its code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_graphs import layer_graphs
from synthetic_profiles import Planted, hybrid

from capture.choices import StageChoice
from capture.errors import CaptureError, ProfileError
from capture.profile import Calibration, Profile, StageConfig, rescaled
from capture.workload import WorkloadSpec


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


@pytest.mark.parametrize("version", [2, None, "1"])
def test_an_unknown_version_is_refused(version):
    message = errors_of(lambda: Profile.from_json({**a_profile().to_json(), "schema_version": version}))
    assert message == (
        f"profile has schema_version={version!r}; this version of capture reads 1. Make it again with capture profile. [profile-schema]"
    )


def test_an_unknown_version_of_the_graph_is_refused():
    data = a_profile().to_json()
    data["graph"]["schema_version"] = 7
    assert errors_of(lambda: Profile.from_json(data)).endswith("[graph-schema]")


@pytest.mark.parametrize("data", [[], None, 3, "profile"])
def test_json_that_is_no_object_is_refused(data):
    assert errors_of(lambda: Profile.from_json(data)).endswith("[profile-schema]")


@pytest.mark.parametrize("key", [key for key in a_profile().to_json() if key not in ("schema_version", "verified")])
@pytest.mark.parametrize("wrong", ["missing", 5])
def test_a_missing_or_wrong_field_is_refused_by_name(key, wrong):
    data = a_profile().to_json()
    if wrong == "missing":
        del data[key]
        assert errors_of(lambda: Profile.from_json(data)) == (
            f"profile is not what capture profile writes: the field {key!r} is missing. Make it again. [profile-corrupt]"
        )
    elif key not in ("provenance", "auto_layers", "tensor_parallel_rule", "paper"):  # kept as they are
        data[key] = wrong
        assert errors_of(lambda: Profile.from_json(data)).endswith("Make it again. [profile-corrupt]")


def test_a_measurement_without_its_cost_is_refused():
    data = a_profile().to_json()
    del data["measurements"][0]["cost"]["kept_batch"]
    assert errors_of(lambda: Profile.from_json(data)).endswith("[profile-corrupt]")


def test_missing_and_corrupt_files_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    assert errors_of(lambda: Profile.load(path)) == f"profile {str(path)!r} does not exist. [profile-file]"
    assert errors_of(lambda: Profile.load(tmp_path)) == f"profile {str(tmp_path)!r} cannot be read: Is a directory. [profile-file]"
    a_profile().save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff\xfe\0"):
        path.write_bytes(content)
        message = errors_of(lambda: Profile.load(path))
        assert message.startswith(f"profile {str(path)!r} is not JSON: ") and message.endswith("Make it again. [profile-corrupt]")


# ---- other micro-batch sizes ---------------------------------------------------------------------------------------


@given(layer_graphs(), st.integers(1, 5))
def test_a_rescaled_graph_scales_what_has_a_batch_dimension(graph, factor):
    size = graph.microbatch_size * factor
    scaled = rescaled(graph, size, "other")
    assert scaled.microbatch_size == size
    for mine, theirs in zip((*graph.values, *graph.batch), (*scaled.values, *scaled.batch), strict=True):
        assert theirs.nbytes == mine.nbytes * (1 if mine.batch_dim is None else factor)
    assert scaled.params == graph.params
    assert [layer.flops for layer in scaled.layers] == [layer.flops * factor for layer in graph.layers]
    back = rescaled(scaled, graph.microbatch_size, graph.model_hash)
    assert back == graph


def test_the_graph_at_a_profiled_size_carries_the_hash_of_that_size():
    profile = a_profile()
    assert profile.graph_at(16) is profile.graph
    assert (profile.graph_at(8).model_hash, profile.graph_at(8).microbatch_size) == ("hash8", 8)
    assert profile.graph_at(12).model_hash == ""


# ---- the interval --------------------------------------------------------------------------------------------------


def test_without_errors_the_interval_is_wide():
    assert Calibration((), 0, 0).interval() == (0.75, 1.25)


def test_the_interval_is_the_conformal_rank_of_the_absolute_errors():
    """n = 99 at 98 %: the 98th smallest of them."""
    errors = [(-1) ** i * i / 100 for i in range(1, 100)]
    low, high = Calibration(tuple(errors), 0, 9).interval(0.98)
    assert (low, high) == (pytest.approx(1 - 0.98), pytest.approx(1.98))
    assert Calibration(tuple(errors), 0, 9).interval(0.5)[1] == pytest.approx(1.50)


def test_with_few_errors_it_reaches_beyond_the_largest():
    assert Calibration((0.02, -0.04), 0, 1).interval() == (pytest.approx(0.94), pytest.approx(1.06))


def test_it_is_never_narrower_than_half_a_percent():
    assert Calibration((0.0,) * 200, 0, 9).interval() == (0.995, 1.005)


@given(st.lists(st.floats(-0.9, 3), max_size=120), st.floats(0.1, 0.98), st.floats(0.1, 0.98))
def test_more_coverage_is_never_narrower(errors, one, other):
    narrow, wide = (Calibration(tuple(errors), 0, 1).interval(c) for c in sorted((one, other)))
    assert wide[0] <= narrow[0] < 1 < narrow[1] <= wide[1]


@given(st.lists(st.floats(-0.9, 3), min_size=1, max_size=120), st.floats(0.1, 0.98))
def test_it_holds_at_least_the_share_of_its_own_errors(errors, coverage):
    low, high = Calibration(tuple(errors), 0, 1).interval(coverage)
    held = sum(low - 1e-12 <= 1 + e <= high + 1e-12 for e in errors)
    assert held >= coverage * len(errors) - 1e-9
