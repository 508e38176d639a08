"""A plan, what a report draws of it, and the same of a large one."""

from __future__ import annotations

import pytest
from report_plans import FRONT_POINTS, planted_profile, predicted_plan, verified

from capture.plan.choices import StageChoice
from capture.plan.why import Why
from capture.report.data import report_facts


@pytest.fixture(scope="module")
def profile():
    return planted_profile(8)


@pytest.fixture(scope="module")
def plan(profile):
    plan = predicted_plan(profile, [2, 2, 2, 2], (4, 4), StageChoice(2, 1), num_microbatches=8)
    return verified(plan).with_(
        why=Why.read({"front": {"points": FRONT_POINTS, "complete": False}})
    )


@pytest.fixture(scope="module")
def facts(plan, profile):
    return report_facts(plan, profile)


@pytest.fixture(scope="module")
def large():
    """16 stages and 64 micro-batches."""
    profile = planted_profile(32)
    return report_facts(
        predicted_plan(profile, [2] * 16, (8,) * 4, StageChoice(1, 2), num_microbatches=64), profile
    )
