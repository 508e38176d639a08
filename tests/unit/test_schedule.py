"""Schedules as text tables, and their rules for any number of stages and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import PlanError
from capture.plan.schedule import (
    Occupancy,
    Schedule,
    StagePass,
    make_schedule,
    occupancy_by_position,
)

schedules = st.builds(
    make_schedule, st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 7), st.integers(1, 9)
)

GPIPE_3_4 = """\
0: F0 F1 F2 F3 B0 B1 B2 B3
1: F0 F1 F2 F3 B0 B1 B2 B3
2: F0 F1 F2 F3 B0 B1 B2 B3"""

ONE_F_ONE_B_4_6 = """\
0: F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"""

ONE_F_ONE_B_4_2 = """\
0: F0 F1 B0 B1
1: F0 F1 B0 B1
2: F0 F1 B0 B1
3: F0 B0 F1 B1"""

GPIPE_CLOCKS_3_2 = """\
F0@0
F1@0 F0@1
F1@1 F0@2
F1@2
B0@2
B0@1 B1@2
B0@0 B1@1
B1@0"""

ONE_F_ONE_B_CLOCKS_3_4 = """\
F0@0
F1@0 F0@1
F2@0 F1@1 F0@2
B0@2
B0@1 F1@2
B0@0 F2@1 B1@2
F3@0 B1@1 F2@2
B1@0 F3@1 B2@2
B2@1 F3@2
B2@0 B3@2
B3@1
B3@0"""


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "table"),
    [
        ("gpipe", 3, 4, GPIPE_3_4),
        ("1f1b", 4, 6, ONE_F_ONE_B_4_6),
        ("1f1b", 4, 2, ONE_F_ONE_B_4_2),
        ("1f1b", 1, 2, "0: F0 B0 F1 B1"),
    ],
)
def test_table(name, num_stages, num_microbatches, table):
    assert make_schedule(name, num_stages, num_microbatches).as_text() == table


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches", "clocks"),
    [("gpipe", 3, 2, GPIPE_CLOCKS_3_2), ("1f1b", 3, 4, ONE_F_ONE_B_CLOCKS_3_4)],
)
def test_clocks(name, num_stages, num_microbatches, clocks):
    schedule = make_schedule(name, num_stages, num_microbatches)
    assert "\n".join(" ".join(map(str, clock)) for clock in schedule.clocks) == clocks


@given(schedules)
def test_every_stage_does_every_task_once(schedule):
    for s, order in enumerate(schedule.orders):
        assert sorted(order) == sorted(
            StagePass(s, kind, m)
            for kind, m in product(("forward", "backward"), range(schedule.num_microbatches))
        )


@given(schedules)
def test_the_clocks_are_the_orders_and_respect_what_a_task_needs(schedule):
    done: dict[StagePass, int] = {}
    for at, clock in enumerate(schedule.clocks):
        assert len({task.stage_id for task in clock}) == len(clock)
        for task in clock:
            done[task] = at
    assert [[t for t in done if t.stage_id == s] for s in range(schedule.num_stages)] == [
        list(order) for order in schedule.orders
    ]
    for task, at in done.items():
        s, m = task.stage_id, task.microbatch
        needed = [StagePass(s, "forward", m)] if task.kind == "backward" else []
        if task.kind == "forward" and s > 0:
            needed.append(StagePass(s - 1, "forward", m))
        if task.kind == "backward" and s + 1 < schedule.num_stages:
            needed.append(StagePass(s + 1, "backward", m))
        assert all(done[other] < at for other in needed)


@given(schedules)
def test_as_many_microbatches_in_flight_as_the_schedule_promises(schedule):
    for s, order in enumerate(schedule.orders):
        in_flight = most = 0
        for task in order:
            in_flight += 1 if task.kind == "forward" else -1
            most = max(most, in_flight)
            assert in_flight >= 0
        promised = (
            schedule.num_microbatches
            if schedule.name == "gpipe"
            else min(schedule.num_stages - s, schedule.num_microbatches)
        )
        assert most == promised


@given(schedules)
def test_occupancies_cover_every_moment_and_none_another(schedule):
    """Against the history of each stage, read off the clocks without counters."""
    before: list[StagePass] = []
    reached = [set() for _ in range(schedule.num_stages)]

    def done(s: int, kind: str) -> int:
        return sum(task.stage_id == s and task.kind == kind for task in before)

    for clock in schedule.clocks:
        for task in clock:
            s, forward = task.stage_id, task.kind == "forward"
            kept = done(s, "forward") - done(s, "backward")
            inputs = done(s - 1, "forward") - done(s, "forward") - forward if s else 0
            gradients = (
                done(s + 1, "backward") - done(s, "backward") - (not forward)
                if s + 1 < schedule.num_stages
                else 0
            )
            losses = done(s, "forward") if s == schedule.num_stages - 1 else 0
            state = Occupancy(task.kind, kept, inputs, gradients, losses)
            accumulates = not forward or done(s, "backward") > 0
            reached[s].add(replace(state, accumulates=accumulates))
        before += clock
    for states, listed in zip(reached, schedule.occupancies, strict=True):
        assert set(listed) <= states
        assert all(any(dominates(o, state) for o in listed) for state in states)
        assert not any(a != b and dominates(a, b) for a in listed for b in listed)


def dominates(one, other):
    """Whether an occupancy needs at least as much as another, of the same kind."""
    pairs = zip(one.counts, other.counts, strict=True)
    return one.kind == other.kind and all(mine >= theirs for mine, theirs in pairs)


@given(schedules)
def test_only_an_input_ever_waits_and_only_one_under_1f1b(schedule):
    for occupancy in (o for stage in schedule.occupancies for o in stage):
        assert occupancy.num_waiting_gradients == 0
        waits = occupancy.num_waiting_inputs
        assert waits == 0 if schedule.name == "gpipe" or occupancy.kind == "forward" else waits <= 1


@given(schedules, st.integers(0, 3))
def test_occupancy_by_position_is_that_of_any_pipeline(schedule, more):
    """The last entry stands for all longer distances; the first stage of a pipeline receives
    nothing, and only the last has losses."""
    table = occupancy_by_position(
        schedule.name, schedule.num_microbatches, schedule.num_stages + more
    )
    for s, occupancies in enumerate(schedule.occupancies):
        expected = table[min(schedule.num_stages - s, len(table)) - 1]
        here = {
            replace(
                o,
                num_waiting_inputs=o.num_waiting_inputs if s else 0,
                num_losses=o.num_losses if s == schedule.num_stages - 1 else 0,
            )
            for o in expected
        }
        assert occupancies == tuple(
            sorted(o for o in here if not any(other != o and dominates(other, o) for other in here))
        )


def test_occupancy_by_position_is_no_longer_than_it_must_be():
    assert [len(occupancy_by_position(name, 3, 8)) for name in ("gpipe", "1f1b")] == [1, 3]
    assert len(occupancy_by_position("1f1b", 8, 3)) == 3
    assert occupancy_by_position("1f1b", 3, 8) == (
        (
            Occupancy("backward", 1, 0, 0, 3),
            Occupancy("backward", 1, 1, 0, 1),
            Occupancy("forward", 0, 0, 0, 2),
        ),
        (Occupancy("backward", 2, 1, 0), Occupancy("forward", 1, 0, 0)),
        (Occupancy("backward", 3, 0, 0), Occupancy("forward", 2, 0, 0, accumulates=False)),
    )


def test_a_cycle_is_our_bug():
    order = (StagePass(0, "backward", 0), StagePass(0, "forward", 0))
    with pytest.raises(AssertionError, match=r"^schedule odd has a dependency cycle$"):
        Schedule("odd", 1, (order,)).clocks  # noqa: B018


def test_an_unknown_name_is_refused():
    with pytest.raises(PlanError) as caught:
        make_schedule("zigzag", 2, 2)
    assert (
        str(caught.value)
        == "schedule='zigzag' is unknown; choose one of gpipe, 1f1b, interleaved, zb-h1, zb-h2, "
        "zb-v, dualpipev, v-half. [plan-schedule]"
    )
