"""Each pass by itself: what it guarantees, on steps of every kind that uses it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from capture.alpa.step import build_alpa_step
from capture.step.evaluation import build_evaluation
from capture.step.passes.frees import free
from capture.step.pipeline import build_step
from capture.step.program import Copy, Feed, Free, Host, Place, Program, Run, Step
from tests.property import test_step, test_step_tables
from tests.step_judge import check_lifetimes, judge

steps = st.one_of(test_step.steps(), test_step_tables.steps())


@settings(max_examples=30)
@given(steps, st.sampled_from([build_step, build_evaluation]))
def test_what_nothing_uses_any_more_is_freed_right_behind_its_last_use(made, build):
    step = build(*made)
    judge(step) if build is build_step else check_lifetimes(step)
    *passes, last = step.instructions
    assert last == Free(tuple(step.reported))
    for before, each in pairwise(passes):
        if isinstance(each, Free) and len(passes) == step.num_passes:
            assert {*each.slots} <= {*before.used}


@settings(max_examples=20)
@given(test_step.steps())
def test_a_pass_over_a_step_that_has_its_frees_adds_none(made):
    for build in (build_step, build_alpa_step):
        step = build(*made)
        again = replace(step, instructions=list(step.instructions))
        free(again)
        assert again == step


def test_frees_by_hand():
    """A slot that two programs read, one that is written over, one that nobody reads, one that the
    lowering frees later than it had to, and a loss; the border of the updates moves with them."""
    place = Place("a", (0,))
    step = Step((place,), {"work": Program("work", place, 1)})
    state = step.keep("state", place, "parameters", 8)
    fed, read, over, unread, late, loss = (
        step.slot(name, place, "any", 1)
        for name in ("fed", "read", "over", "unread", "late", "loss")
    )
    step.reported.append(loss)
    runs = [
        Run("work", ((state, fed),), (read, over, unread), (), "one"),
        Run("work", ((read, over),), (late, loss), (over,), "two"),
        Run("work", ((read, state),), (state,), (state,), "update"),
    ]
    step.instructions = [Feed(fed, 0, (0,), "feed"), *runs, Free((late,))]
    step.num_passes = 3
    free(step)
    assert step.instructions == [
        Feed(fed, 0, (0,), "feed"),
        runs[0],
        Free((fed, unread)),
        runs[1],
        runs[2],
        Free((read,)),
        Free((late,)),
        Free((loss,)),
    ]
    assert step.num_passes == 4
    check_lifetimes(step)


def test_the_source_of_a_copy_is_freed_behind_it():
    places = Place("a", (0,)), Place("b", (1,))
    step = Step(places)
    fed, came = step.slot("fed", places[0], "any", 1), step.slot("came", places[1], "any", 1)
    step.instructions = [Feed(fed, 0, (0,), "feed"), Copy(fed, came, 1, "send")]
    step.num_passes = 2
    free(step)
    assert step.instructions[2:] == [Free((fed, came))] and step.num_passes == 3


def test_a_slot_of_a_host_is_freed_behind_the_program_that_reads_its_copy():
    """What that program changes and nobody reads again, too."""
    place, host = Place("a", (0,)), Place("host of a", (0,), Host("host"))
    step = Step((place, host), {"work": Program("work", place, 1)})
    out, kept = (step.slot(name, host, "any", 1) for name in ("out", "kept"))
    came, changed = (step.slot(name, place, "any", 1) for name in ("came", "changed"))
    before = [Feed(changed, 0, (0,), "feed"), Feed(out, 0, (0,), "feed"), Copy(out, came, 1, "in")]
    runs = [Run("work", ((came, changed),), (changed,), (changed,), label) for label in ("1", "2")]
    step.instructions = [*before, Feed(kept, 0, (0,), "feed"), *runs]
    step.num_passes = 6
    free(step)
    assert step.instructions[3:] == [
        Feed(kept, 0, (0,), "feed"),
        Free((kept,)),
        runs[0],
        Free((out,)),
        runs[1],
        Free((came, changed)),
    ]
    check_lifetimes(step)
