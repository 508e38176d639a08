"""The whole question on small spaces, against all their plans compiled: best plans and fronts are
those of brute force, and whatever is proven of an answer holds. ``benchmarks/brute_force.py`` asks
more of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.brute_force import EFFORTS, POLICIES, Asked, wrong


@pytest.fixture(scope="module", params=[12, 27])
def asked(request):
    return Asked.of(request.param)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_those_of_brute_force(asked, name):
    for effort in EFFORTS:
        assert not list(wrong(asked, name, effort)), effort


@pytest.mark.parametrize("name", POLICIES)
def test_a_plan_that_needs_a_byte_too_many_is_no_answer(asked, name):
    fastest = min(asked.fitting, key=lambda each: each.seconds)
    tight = replace(asked, limit=fastest.peak_bytes - 1)
    assert not list(wrong(tight, name, EFFORTS[0]))
