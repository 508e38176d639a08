"""Layer profiles: the shipped files go in and out unchanged, sizes between are on lines, and all
that is wrong with a file is said at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from capture.errors import ProfileError
from capture.measured.layer_profile import LayerProfile
from capture.step.pack_sizes import ProfileSizes

PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"
TOY = json.loads((PROFILES / "toy6.json").read_text())


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_go_in_and_out_unchanged(path, tmp_path):
    profile = LayerProfile.load(path)
    profile.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())


def test_sizes_between_are_on_the_line_and_measured_ones_exact():
    profile = LayerProfile.load(PROFILES / "toy6.json")
    at_2, at_5 = profile.at("forward", 2), profile.at("forward", 5)
    assert at_2.seconds[0] == pytest.approx(0.014 + (0.03 - 0.014) / 4)
    assert at_2.memory_bytes[0] == int(234881024 + (335544320 - 234881024) / 4)
    assert at_5.seconds.tolist() == [0.03] * 6
    assert at_5.inputs == [5 * 8388608] * 6 + [0]
    # Two layers share what passes between them.
    assert at_5.pack_bytes(2, 4) == 2 * 335544320 - 5 * 8388608


def test_held_out_errors_of_the_sizes_between():
    bert = LayerProfile.load(PROFILES / "bert_large.json")
    assert np.median(np.abs(bert.held_out_errors("forward", 10))) < 0.006
    with pytest.raises(ProfileError) as error:
        LayerProfile.from_json(
            {**TOY, "fwd": {k: v[:1] for k, v in TOY["fwd"].items()}}
        ).held_out_errors("forward", 9)
    assert error.value.codes == ("layers-range",)


def test_sizes_outside_are_refused():
    with pytest.raises(ProfileError) as error:
        LayerProfile.load(PROFILES / "toy6.json").at("backward", 11)
    assert str(error.value) == (
        "backward micro-batch size 11 of 'toy6' was not profiled: the sizes go from 1 to 10. Choose one between, or profile it. [layers-range]"
    )


def test_all_that_is_wrong_is_said_at_once():
    document = copy.deepcopy(TOY)
    document["w_bytes"] = document["w_bytes"][:5]
    document["k_bytes"][3] = -1
    document["fwd"]["time"][1][2] = float("nan")
    document["bwd"]["u"] = [1, 10, 5]
    document["bwd"]["time"][0][4] = 0.001
    document["fwd"]["memory"] = document["fwd"]["memory"][:3]
    document["units"] = {"time": "ms", "memory": "bytes"}
    with pytest.raises(ProfileError) as error:
        LayerProfile.from_json(document)
    assert sorted(error.value.codes) == sorted(
        [
            "layers-units",
            "layers-count",
            "layers-number",
            "layers-number",
            "layers-count",
            "layers-sizes",
            "layers-backward",
        ]
    )
    assert "w_bytes has 5 layers and num_layers=6" in str(error.value)
    assert "fwd.time[1] is nan for layer 2" in str(error.value)


@pytest.mark.parametrize(
    ("text", "code"), [("{", "layers-file"), ("{}", "layers-corrupt"), (None, "layers-file")]
)
def test_files_that_are_none(text, code, tmp_path):
    path = tmp_path / "layers.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError) as error:
        LayerProfile.load(path)
    assert error.value.codes == (code,)


def test_a_misspelt_field_is_named():
    with pytest.raises(ProfileError, match="w_byte is no field; 'w_bytes' is"):
        LayerProfile.from_json({**TOY, "w_byte": []})


def half_streamed() -> dict:
    """Three of six layers read half of their weights, of 8 bytes each, as casts of half the size;
    the second of them in two places."""
    document, casts = copy.deepcopy(TOY), [1, 1, 0, 1, 0, 0]
    document["w_bytes"], document["k_bytes"] = [8] * 6, [16] * 6
    document["update_cpu_time"], document["b_bytes"] = [7.0] * 6, [4, 0, 0, 0, 0, 0]
    document["casts"] = {
        "bfloat16": {
            "w_bytes": [8 - 2 * cast for cast in casts],
            "b_bytes": [2, 0, 0, 0, 0, 0],
            "cast_bytes": [2 * cast for cast in casts],
            "gradient_bytes": [6, 8, 8, 6, 8, 8],
        }
    }
    return document


def test_what_devices_get_of_layers_that_are_streamed_as_casts():
    profile = LayerProfile.from_json(half_streamed())
    assert profile.streamed_bytes(0, 6) == profile.gradient_bytes(0, 6, alone=True) == 52
    streamed = profile.as_streamed("bfloat16")
    assert streamed.as_streamed("bfloat16") is streamed and streamed.as_streamed("") == profile
    assert LayerProfile.from_json(streamed.to_json()) == streamed
    assert streamed.weight_bytes(0, 6) == streamed.gradient_bytes(0, 6) == 52
    assert (streamed.streamed_bytes(0, 6), streamed.streamed_bytes(0, 1)) == (44, 8)
    assert streamed.gradient_bytes(0, 6, alone=True) == 48
    assert streamed.cast_bytes(1, 4) == 4
    # A layer holds so much less; the host also reads 4 bytes of parameters per 2 of casts.
    for which in ("forward", "backward"):
        less = profile.at(which, 1).memory_bytes - streamed.at(which, 1).memory_bytes
        assert less.tolist() == [4, 2, 0, 2, 0, 0]
    assert streamed.update_seconds(0, 6) == 42
    assert streamed.cast_seconds(0, 6) == pytest.approx(42 * (12 + 6) / (6 * 56))
    assert streamed.widen_seconds(0, 1) == pytest.approx(7 * (12 + 10) / 56)
    assert streamed.widen_seconds(1, 3) == profile.cast_seconds(0, 6) == 0


@pytest.mark.parametrize(
    ("dtype", "said"), [("bfloat16", "parameters as they are"), ("float16", "as bfloat16,")]
)
def test_nothing_to_stream_is_said(dtype, said):
    document = half_streamed() if dtype == "float16" else TOY
    with pytest.raises(ProfileError, match=said) as error:
        LayerProfile.from_json(document).as_streamed(dtype)
    assert error.value.codes == ("packs-stream",)
    with pytest.raises(ProfileError, match="not among the casts"):
        LayerProfile.from_json(document | {"streamed": dtype})


@pytest.mark.parametrize(
    ("shared", "says"),
    [
        ([], "by the parameters in shared it is [0, 0, 0, 0, 0, 0]"),
        ([[7, 0, 5], [2, 1, 5]], "by the parameters in shared it is [0, 0, 0, 0, 0, 9]"),
        ([[7, 5, 0]], "shared has [7, 5, 0]"),
        ([[7, 0, 6]], "shared has [7, 0, 6]"),
        ([[7, 0]], "shared has [7, 0]"),
    ],
)
def test_parameters_of_several_layers_are_those_that_later_ones_read(shared, says):
    """Of traced models, whose gradients an update on a device would leave out otherwise."""
    document = {**TOY, "b_bytes": [0, 0, 0, 0, 0, 7], "model_hashes": {"1": "traced"}}
    right = LayerProfile.from_json({**document, "shared": [[7, 0, 5]]})
    assert [ProfileSizes(right).layers.shared(span) for span in ((3, 6), (0, 5))] == [(0,), ()]
    with pytest.raises(ProfileError, match="layers-shared") as error:
        LayerProfile.from_json({**document, "shared": shared})
    assert says in str(error.value)
