"""Sizes as people write them, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import PlanError
from capture.quantities import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        (" 40 GB ", 40 * 10**9),
        ("39.5GiB", 39 * 2**30 + 2**29),
        ("1k", 1000),
        ("1.5MB", 1_500_000),
        ("2tib", 2**41),
        ("8b", 8),
        ("0.1KB", 100),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, "") for text in ("", "GB", "-1", "1e9", "40PB", "nan")),
        ("40 G B", " Did you mean 40GB?"),
        ("4,5GB", " Did you mean 4.5GB?"),
        ("80,000 MiBs", " Did you mean 80000MiB?"),
    ],
)
def test_what_is_no_size_is_refused_and_the_nearest_offered(text, meant):
    with pytest.raises(PlanError) as error:
        parse_bytes(text)
    assert str(error.value) == (
        f"memory={text!r} is no size; write bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB "
        f"or TiB.{meant} [memory-syntax]"
    )


@given(st.integers(0, 999 * 10**12))
def test_what_is_written_reads_back_within_three_digits(nbytes):
    text = format_bytes(nbytes)
    assert "e" not in text and parse_bytes(text) == pytest.approx(nbytes, rel=0.005, abs=0.5)


def test_negative_savings_and_the_largest_sizes_are_written_plainly():
    assert format_bytes(-1500) == "-1.5 kB"
    assert format_bytes(999_499) == "999 kB"
    assert format_bytes(1234567 * 10**12) == "1234567 TB"
