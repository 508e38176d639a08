"""Tables of schedules whose stages share devices or whose backward passes are split: their rules,
and the bubbles and passes in flight of their papers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import PlanError
from capture.plan.schedule import (
    PLAIN_SCHEDULES,
    SCHEDULES,
    Schedule,
    StagePass,
    make_schedule,
)

TABLES = [name for name in SCHEDULES if name not in PLAIN_SCHEDULES]

INTERLEAVED_2_4 = """\
0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"""

ZB_H1_3_4 = """\
0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
1: F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"""

ZB_H2_2_3 = """\
0: F0 F1 F2 I0 W0 I1 W1 I2 W2
1: F0 I0 F1 I1 F2 I2 W0 W1 W2"""


@st.composite
def tables(draw) -> Schedule:
    name, num_groups = draw(st.sampled_from(TABLES)), draw(st.integers(1, 6))
    kind = SCHEDULES[name]
    num_microbatches = draw(st.integers(max(1, kind.least_per_group * num_groups), 14))
    if kind.multiple:
        num_microbatches = num_groups * draw(st.integers(1, 3))
    return make_schedule(name, num_groups, num_microbatches)


@pytest.mark.parametrize(
    ("name", "num_groups", "num_microbatches", "table"),
    [
        ("interleaved", 2, 4, INTERLEAVED_2_4),
        ("zb-h1", 3, 4, ZB_H1_3_4),
        ("zb-h2", 2, 3, ZB_H2_2_3),
    ],
)
def test_table(name, num_groups, num_microbatches, table):
    assert make_schedule(name, num_groups, num_microbatches).as_text() == table


@given(tables())
def test_every_task_is_done_once_where_its_stage_is_after_what_it_needs(schedule):
    assert list(schedule.violations()) == []
    done: dict[StagePass, int] = {}
    for at, clock in enumerate(schedule.clocks):
        assert len({schedule.placement[task.stage_id] for task in clock}) == len(clock)
        done |= dict.fromkeys(clock, at)
    for g, order in enumerate(schedule.orders):
        assert [t for t in done if schedule.placement[t.stage_id] == g] == list(order)
    backward = (
        ("backward_inputs", "backward_weights") if schedule.splits_backward else ("backward",)
    )
    for s in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            first, *rest = [done[StagePass(s, kind, m)] for kind in ("forward", *backward)]
            assert all(first < other for other in rest) and rest == sorted(rest)
            if s:
                assert done[StagePass(s - 1, "forward", m)] < first
                assert rest[0] < done[StagePass(s - 1, backward[0], m)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda order: order[:-1], "leaves a task out"),
        (lambda order: (*order, order[-1]), "does a task twice"),
        (lambda order: (*order[:-1], replace(order[-1], stage_id=1)), "has not its stage"),
    ],
)
def test_a_table_that_breaks_a_rule_is_named(change, says):
    good = make_schedule("zb-h1", 2, 2)
    bad = Schedule("odd", 2, (change(good.orders[0]), good.orders[1]))
    assert says in " ".join(bad.violations())
    with pytest.raises(AssertionError, match=r"^schedule odd "):
        bad.clocks  # noqa: B018


@pytest.mark.parametrize(
    ("name", "num_microbatches", "needs"),
    [("interleaved", 6, "a multiple of 4"), ("dualpipev", 7, "at least 8")],
)
def test_numbers_that_a_schedule_cannot_do_are_refused(name, num_microbatches, needs):
    with pytest.raises(PlanError, match=needs) as caught:
        make_schedule(name, 4, num_microbatches)
    assert caught.value.codes == ("plan-schedule-microbatches",)


# ---- bubbles -------------------------------------------------------------------------------------


def waits_of(schedule: Schedule) -> tuple[int, int]:
    """(most passes that a group waits from its first to its last task, passes that the step is
    longer than the work of a group), with F = I = W = 1 and a whole backward pass of 2."""
    end: dict[StagePass | None, int] = {None: 0}
    free, begin = [0] * schedule.num_groups, dict[int, int]()
    for task in (task for clock in schedule.clocks for task in clock):
        group = schedule.placement[task.stage_id]
        start = max(free[group], end[schedule.requirement(task)])
        end[task] = free[group] = start + (2 if task.kind == "backward" else 1)
        begin.setdefault(group, start)
    work = 3 * schedule.num_microbatches * (schedule.num_stages // schedule.num_groups)
    return max(free[g] - begin[g] for g in begin) - work, max(free) - work


@given(st.integers(1, 6), st.integers(1, 4))
def test_bubbles_are_those_of_the_papers(num_groups, more):
    """In passes of a stage: two stages of a group do half of a stage's work each. The zero bubble
    of ZB-H2 is that between the first and the last task of a group, which does not wait for the
    updates of others."""
    num_microbatches, d = 2 * num_groups * more, num_groups

    def waits(name: str) -> tuple[int, int]:
        return waits_of(make_schedule(name, d, num_microbatches))

    for name in PLAIN_SCHEDULES:  # (D - 1) (F + B)
        assert waits(name) == (3 * (d - 1), 3 * (d - 1))
    assert waits("interleaved") == (3 * (d - 1), 3 * (d - 1))  # of half the length
    assert waits("zb-h1") == (d - 1, d - 1)  # (D - 1) (F + I - W)
    assert waits("zb-h2") == (0, d - 1)  # (D - 1) (F + I - 2 W)
    # At most (D - 1) (F&B + B - 3 W): a stage waits for the inputs' gradients alone.
    assert waits("dualpipev") == (d - 1, d - 1)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("gpipe", 27.3),
        ("1f1b", 27.3),
        ("interleaved", 15.8),
        ("zb-h1", 11.1),
        ("zb-h2", 11.1),
        ("zb-v", 5.9),
        ("dualpipev", 5.9),
        ("v-half", 11.1),
    ],
)
def test_bubbles_of_four_groups_and_eight_microbatches(name, percent):
    schedule = make_schedule(name, 4, 8)
    work = 24 * schedule.num_stages // 4
    waits = waits_of(schedule)[1]
    assert round(100 * waits / (waits + work), 1) == percent


# ---- passes in flight ----------------------------------------------------------------------------


def most_kept(schedule: Schedule) -> list[int]:
    """Per group, the most passes that are kept: of a forward pass from its beginning to the end of
    the last pass that needs it."""
    ends = {"backward", "backward_weights"}
    found = []
    for order in schedule.orders:
        kept = most = 0
        for task in order:
            kept += task.kind == "forward"
            most = max(most, kept)
            kept -= task.kind in ends
        found.append(most)
    return found


@given(st.integers(1, 6))
def test_passes_in_flight_are_those_of_the_papers(d):
    def kept(name: str) -> list[int]:
        return most_kept(make_schedule(name, d, 4 * d))

    assert kept("interleaved") == [3 * d - 1 - 2 * g for g in range(d)]
    assert kept("zb-h1") == [d] * d
    assert kept("zb-h2") == [2 * d - 1] * d
    assert kept("zb-v") == [2 * d] * d
    assert kept("dualpipev") == [2 * d + 1] * d
    assert kept("v-half") == [2 * (d // 2 + 1)] * d


@given(tables())
def test_moments_cover_every_state_and_none_another(schedule):
    """Against the history of each group, read off the rounds without counters."""
    before: Counter[tuple[int, str]] = Counter()
    last = schedule.num_stages - 1
    backward = "backward_inputs" if schedule.splits_backward else "backward"
    added = "backward_weights" if schedule.splits_backward else "backward"
    reached = [set() for _ in range(schedule.num_groups)]
    for (task,) in schedule.rounds:
        group, states = schedule.placement[task.stage_id], []
        for s in schedule.stages[group]:
            running = task.kind if s == task.stage_id else "idle"
            done = {kind: before[s, kind] for kind in ("forward", backward, "backward_weights")}
            states.append(
                (
                    running,
                    done["forward"] - done[backward],
                    before[s - 1, "forward"] - done["forward"] - (running == "forward") if s else 0,
                    before[s + 1, backward] - done[backward] - (running == backward)
                    if s < last
                    else 0,
                    done["forward"] if s == last else 0,
                    (done[backward] - done["backward_weights"]) * schedule.splits_backward,
                    done[added] > 0 or running == added,
                )
            )
        reached[group].add(tuple(states))
        before[task.stage_id, task.kind] += 1
    for found, listed in zip(reached, schedule.moments, strict=True):
        numbers = [
            tuple(
                (
                    o.kind,
                    o.num_kept,
                    o.num_waiting_inputs,
                    o.num_waiting_gradients,
                    o.num_losses,
                    o.num_deferred,
                    o.accumulates,
                )
                for o in moment
            )
            for moment in listed
        ]
        assert set(numbers) <= found

        def covers(one, other):
            return all(
                a[0] == b[0] and all(x >= y for x, y in zip(a[1:], b[1:], strict=True))
                for a, b in zip(one, other, strict=True)
            )

        assert all(any(covers(one, state) for one in numbers) for state in found)
        assert not any(a != b and covers(a, b) for a in numbers for b in numbers)
