"""The codec: what is missing or wrong is named with its path, and what was written is read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.documents import FieldError, Format, read, write
from capture.errors import PlanError


@dataclass(frozen=True)
class Part:
    pair: tuple[int, int]
    kind: Literal["round", "flat"] = "flat"
    weight: int | float = 1


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    name: str
    seconds: float
    whole: bool = False
    limit: float | None = None
    of: Mapping[str, Part] = field(default_factory=dict)
    by_size: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    note: Mapping[str, Any] | None = None


WHOLE = {"parts": [{"pair": [0, 1]}], "name": "one", "seconds": 1.5}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"parts": 3}, "parts is 3 and must be a list"),
        ({"parts": [3]}, "parts[0] is 3 and must be an object"),
        ({"parts": [{}]}, "parts[0].pair is missing"),
        ({"parts": [{"pair": [0]}]}, "parts[0].pair has 1 items and must have 2"),
        ({"parts": [{"pair": [0, 1.0]}]}, "parts[0].pair[1] is 1.0 and must be a whole number"),
        ({"parts": [{"pair": [True, 1]}]}, "parts[0].pair[0] is True and must be a whole number"),
        (
            {"of": {"a": {"pair": [0, 1], "kind": "oval"}}},
            "of.a.kind is 'oval' and must be one of round, flat",
        ),
        ({"of": {"a": {"pair": [0, 1], "weight": "2"}}}, "of.a.weight is '2' and must be a number"),
        ({"by_size": {"4": [1, None]}}, "by_size.4[1] is None and must be a whole number"),
        ({"name": None}, "name is None and must be a text"),
        ({"seconds": True}, "seconds is True and must be a number"),
        ({"limit": "most"}, "limit is 'most' and must be a number"),
        ({"whole": 1}, "whole is 1 and must be true or false"),
        ({"note": []}, "note is [] and must be an object"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_field_is_named_with_its_path(change, wrong, strict):
    with pytest.raises(FieldError) as caught:
        read({**WHOLE, **change}, Whole, strict=strict)
    assert str(caught.value) == wrong


def test_only_a_strict_reader_refuses_fields_that_no_class_has():
    data = {**WHOLE, "parts": [{"pair": [0, 1], "wieght": 2}]}
    assert read(data, Whole).parts == (Part((0, 1)),)
    with pytest.raises(FieldError, match=r"^parts\[0\]\.wieght is no field; 'weight' is$"):
        read(data, Whole, strict=True)


parts = st.builds(
    Part,
    st.tuples(st.integers(), st.integers()),
    st.sampled_from(["round", "flat"]),
    st.integers() | st.floats(allow_nan=False),
)
number = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.builds(
        Whole,
        st.lists(parts, max_size=2).map(tuple),
        st.text(max_size=3),
        number,
        st.booleans(),
        st.none() | number,
        st.dictionaries(st.text(max_size=2), parts, max_size=2),
        st.dictionaries(st.integers(), st.tuples(st.integers()), max_size=2),
        st.none() | st.dictionaries(st.text(max_size=2), st.lists(st.integers()), max_size=2),
    )
)
def test_what_was_written_is_read_back_and_written_alike(value):
    text = json.dumps(write(value))
    again = read(json.loads(text), Whole, strict=True)
    assert again == value and json.dumps(write(again)) == text


def test_a_number_that_is_whole_stays_so():
    assert json.dumps(write(read({"pair": [0, 1], "weight": 3}, Part))["weight"]) == "3"


FORMAT = Format("cake", PlanError, "cake", "bake it again", versions=(1, 2), strict=True)


def test_a_file_of_a_newer_version_is_refused_by_name(tmp_path):
    path = tmp_path / "cake.json"
    path.write_text(json.dumps({**WHOLE, "schema_version": 3}))
    with pytest.raises(PlanError) as caught:
        FORMAT.load(path, lambda data: FORMAT.read(data, Whole))
    assert str(caught.value) == (
        f"{str(path)!r}: cake has schema_version=3; this version of capture reads 1 and 2. The "
        "file is of a newer version: update capture. [cake-schema]"
    )


@pytest.mark.parametrize("version", [0, None, "1", True])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(PlanError) as caught:
        FORMAT.read({**WHOLE, "schema_version": version}, Whole)
    assert str(caught.value) == (
        f"cake has schema_version={version!r}; this version of capture reads 1 and 2. Bake it "
        "again. [cake-schema]"
    )


def test_files_that_are_no_document(tmp_path):
    path = tmp_path / "cake.json"

    def said() -> str:
        with pytest.raises(PlanError) as caught:
            FORMAT.load(path, lambda data: FORMAT.read(data, Whole))
        return str(caught.value).replace(str(path), "FILE")

    assert said() == "cake 'FILE' does not exist. [cake-file]"
    path.mkdir()
    assert said() == "cake 'FILE' cannot be read: Is a directory. [cake-file]"
    path.rmdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert said().startswith("cake 'FILE' is not JSON: ") and said().endswith("[cake-corrupt]")
    path.write_text(json.dumps(FORMAT.write({**WHOLE, "nme": 3})))
    assert said() == (
        "'FILE': cake is not one: nme is no field; 'name' is. Bake it again. [cake-corrupt]"
    )
    path.write_text(json.dumps(FORMAT.write(WHOLE)))
    assert FORMAT.load(path, lambda data: FORMAT.read(data, Whole)) == read(WHOLE, Whole)
