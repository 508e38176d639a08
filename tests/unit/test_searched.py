"""A proof says what was searched, and what was not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from recommender.capture.searched import searched
from recommender.question import PlanQuestion

ASKED = PlanQuestion(Cluster((4,)), 12, 1)


@pytest.mark.parametrize(
    ("counts", "is_named"), [((1, 2, 3, 4, 6, 12), False), ((1, 2, 3, 4, 6), True), ((12,), True)]
)
def test_micro_batches_are_not_searched_unless_all_were(counts, is_named):
    questions = [replace(ASKED, num_microbatches=count) for count in counts]
    said = searched(questions, [StageChoice(1)])
    assert ("other micro-batches" in said.partition("not searched: ")[2]) == is_named


def test_other_schedules_are_not_searched_unless_all_were():
    names = [name for name in SCHEDULES if name != "gpipe"]
    said = searched([replace(ASKED, schedule=name) for name in names], [StageChoice(1)])
    assert "all schedules; not searched: " in said and "other schedules" not in said
    said = searched([replace(ASKED, schedule=name) for name in names[1:]], [StageChoice(1)])
    assert "DUALPIPEV, INTERLEAVED, V-HALF" in said and "other schedules" in said
