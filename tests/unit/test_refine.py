"""The loop of search and compiler over several numbers of micro-batches and schedules, against all
plans compiled."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from seeds import seeds
from synthetic_profiles import MICROBATCH_SIZE
from test_bounds_search import QUESTION as FOR_MEMORY
from test_bounds_search import Planted4
from test_fastest_bounds import QUESTION as FOR_SPEED
from test_fastest_bounds import Timed

from capture.measured.bounds import Bounds
from capture.plan.headroom import Headroom
from capture.processor_time import processor_seconds
from recommender import recommend
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.parts import Part
from recommender.capture.refine import refine
from recommender.capture.speed import Timed as ForSpeed

SIZES = (MICROBATCH_SIZE, 2 * MICROBATCH_SIZE)


def questions(question):
    """All micro-batch sizes with both schedules."""
    return [
        replace(question, num_microbatches=question.global_batch_size // size, schedule=schedule)
        for size in SIZES
        for schedule in ("1f1b", "gpipe")
    ]


class Small(Planted4):
    sizes = SIZES

    def parts(self, **floors):
        return [
            Part(each, lambda: Bounds(self.least, self.most), **floors)
            for each in questions(FOR_MEMORY)
        ]


class Fast(Timed):
    sizes = SIZES

    def parts(self, **changes):
        return [
            Part(replace(each, **changes), lambda: Bounds(self.least, self.bounds("most")))
            for each in questions(FOR_SPEED)
        ]

    def all_values(self):
        return [value for asked in questions(FOR_SPEED) for value in self.every(asked)]


def never_opened():
    raise AssertionError("nothing of this part matters")


@pytest.mark.parametrize("seed", range(3))
def test_the_least_peak_of_all_parts_is_proven(seed):
    planted = Small(seed)
    found = refine(LowestPeak(), planted.parts(), planted)
    best = min(recommend(planted.all, asked).peak_bytes for asked in questions(FOR_MEMORY))
    assert found.peak_bytes == best and found.proof.optimal
    asked = Counter(
        (plan.microbatch_size, stages)
        for plan in planted.compiler.compiled
        for stages in [(plan.schedule, plan.stages)]
    )
    assert max(asked.values()) == 1
    assert "4 or 8 micro-batches, 1F1B or GPIPE; not searched: other remat, other micro" in (
        found.why.summary
    )


def test_a_part_whose_floor_is_above_the_best_plan_is_not_opened():
    planted = Small(1)
    peak = refine(LowestPeak(), planted.parts(), planted).peak_bytes
    parts = planted.parts()
    with pytest.raises(AssertionError, match="nothing of this part matters"):
        refine(LowestPeak(), [*parts, replace(parts[0], open=never_opened)], Small(1))
    left_out = Part(parts[0].question, never_opened, least_bytes=peak + 1)
    assert refine(LowestPeak(), [left_out, *parts], Small(1)).peak_bytes == peak


def test_a_floor_counts_while_its_part_is_not_open():
    planted, brackets = Small(0), []
    parts = [replace(part, least_bytes=1 + i) for i, part in enumerate(planted.parts())]
    refine(LowestPeak(), parts, planted, told=brackets.append)
    assert [bracket.least_bytes for bracket in brackets[:3]] == [2, 3, 4]
    assert not any(bracket.num_compiled for bracket in brackets[:4]), "opening is cheaper"
    brackets.clear()
    refine(LowestPeak(), Small(0).parts(), Small(0), told=brackets.append)
    assert all(bracket.least_bytes for bracket in brackets), "no floor is nothing to tell"


def test_the_least_floor_of_seconds_is_told_before_anything_is_open():
    planted, said = Fast(0), list[object]()

    def noted(part):
        return lambda: [said.append("opened"), part.open()][1]

    parts = planted.parts()
    floors = [
        replace(part, least_seconds=(2 + i) * 1e-9, open=noted(part))
        for i, part in enumerate(parts)
    ]
    refine(ForSpeed(), floors, planted, told=said.append)
    first, then = said[:2]
    assert (first.least_step_seconds, first.compiled, then) == (2e-9, False, "opened")
    assert first.words == "no plan is faster than 0.002 µs"
    said.clear()
    refine(
        ForSpeed(), [replace(part, open=noted(part)) for part in parts], Fast(0), told=said.append
    )
    assert said[0] == "opened", "no floor is nothing to tell"


class Doubtful(ForSpeed):
    """The first plan is not expected to fit."""

    def early(self, search, look):
        headroom = Headroom(2, "given", 3, 4, 0.9, False)
        unsure = look.found._replace(answer=replace(look.found.answer, headroom=headroom))
        is_first = len(search.parts) == 1
        return super().early(search, look._replace(found=unsure) if is_first else look)


def test_the_first_plan_is_begun_while_other_parts_are_opened():
    def begun(effort, policy=ForSpeed):
        planted, found = Fast(0), list[int]()

        def noted(part):
            return lambda: [found.append(len(getattr(planted, "begun", ()))), part.open()][1]

        parts = [replace(part, open=noted(part)) for part in planted.parts()]
        return refine(policy(), parts, planted, effort), found

    answer, found = begun(Effort())
    assert found[0] == 0 < found[1] and len(found) > 2
    assert {*found[1:]} == {found[1]}, "no other plan before one is asked for"
    one, none = begun(Effort(at_once=1))
    assert not any(none) and one.plan.stages == answer.plan.stages
    assert not any(begun(Effort(compiles=0))[1])
    _, found = begun(Effort(), Doubtful)
    assert found[:2] == [0, 0] and found[2], "the next one that fits is begun"


def test_the_first_plan_is_known_as_soon_as_it_is_compiled():
    """Other parts are opened after it; what is found is the same."""

    def answered(is_done):
        planted, nums = Fast(0), list[int]()
        begin, attempt = planted.begin, planted.attempt
        plans = []
        planted.begin = lambda configs: begin(configs) or is_done
        planted.attempt = lambda plan, known: [plans.append(plan), attempt(plan, known)][1]

        def noted(part):
            return lambda: [nums.append(len(plans)), part.open()][1]

        parts = [replace(part, open=noted(part)) for part in planted.parts()]
        return refine(ForSpeed(), parts, planted, Effort()), nums

    late, nums = answered(False)
    assert not any(nums), "the last part is opened before the first plan is asked for"
    soon, nums = answered(True)
    assert nums[:2] == [0, 1] and len(nums) > 2
    assert soon.plan.stages == late.plan.stages


def test_workers_get_what_waits_for_them_whenever_something_is_worked_out():
    def asked(effort):
        planted, nums = Fast(0), list[int]()
        begin = planted.begin

        def counted(configs):
            nums.append(len(configs))
            begin(configs)

        planted.begin = counted
        refine(ForSpeed(), planted.parts(), planted, effort)
        return nums

    nums = asked(Effort())
    assert nums.count(0) > 20 and any(nums), "with nothing new, workers that ended are heard"
    assert not asked(Effort(at_once=1)) and not asked(Effort(compiles=0))


def test_the_more_parts_took_longer_than_equal_stages_the_more_is_expected_of_the_next():
    def part(schedule):
        asked = replace(FOR_SPEED, schedule=schedule, num_microbatches=8)
        return Part(asked, lambda: None, expected_seconds=2.0)

    policy, search = ForSpeed(), SimpleNamespace(plain_parts=[])
    assert policy.hoped(search, part("zb-v")) == 2.0

    def hoped(*known):
        policy._beyond[2, True] = {object(): each for each in known}
        return policy.hoped(search, part("zb-v"))

    found = [hoped(*[(1.2, True), (1.4, True), (1.6, True)][:num]) for num in (1, 2, 3)]
    assert found == sorted(found) and found[0] > 2.0 and found[-1] < 2.0 * 1.2
    assert hoped((1.4, True), (1.2, True)) == found[0], "the last one is the best: it gets better"
    assert hoped((1.2, True), (1.1, False)) == found[1], "not looked for to the end, it takes more"
    assert hoped((1.1, False), (1.2, False)) > 2.0
    assert policy.hoped(search, part("interleaved")) == 2.0, "another schedule says nothing of it"


def test_a_floor_counts_once_its_part_is_open():
    """Bounds of stages may be looser."""
    planted, brackets = Small(0), []
    least = min(recommend(planted.all, asked).peak_bytes for asked in questions(FOR_MEMORY))
    parts = [replace(part, least_bytes=least) for part in planted.parts()]
    refine(LowestPeak(), parts, planted, told=brackets.append)
    assert {bracket.least_bytes for bracket in brackets} == {least}


def refuted_by_compilers() -> Small:
    """Bounds of forward passes that are too high."""
    planted = Small(1)
    wrong = {
        config: replace(cost, forward_bytes=3 * cost.forward_bytes)
        for config, cost in planted.least.measurements.items()
    }
    planted.least = replace(planted.least, measurements=wrong)
    return planted


def test_nothing_that_is_refuted_leaves_a_floor():
    planted = refuted_by_compilers()
    peaks = [recommend(planted.all, asked).peak_bytes for asked in questions(FOR_MEMORY)]
    best, parts = peaks.index(min(peaks)), planted.parts()
    parts[best] = replace(parts[best], least_bytes=10**9)
    found = refine(LowestPeak(), parts, planted)
    assert found.why.proven.refuted
    assert found.peak_bytes == peaks[best] < sorted(peaks)[1], "though its floor was wrong"


def test_an_interrupt_keeps_a_compiled_plan_though_bounds_were_refuted():
    """Then no floor is known of the part that is opened next, and no bracket was told."""
    planted = refuted_by_compilers()

    def interrupted():
        raise KeyboardInterrupt

    one, other, *_ = planted.parts()
    other = replace(other, open=interrupted, least_bytes=10**9)
    found = refine(LowestPeak(), [replace(one, least_bytes=1), other], planted)
    assert found.compiled and found.why.proven.ended == "interrupted"
    assert found.why.proven.refuted
    # Of a part without a floor nothing is known, so that no bracket was told; there is a plan.
    unknown = [replace(each, least_bytes=0) for each in (one, other)]
    found = refine(LowestPeak(), unknown, planted)
    assert found.plan is not None and not found.compiled and found.why.uncompiled


@pytest.mark.parametrize("seed", seeds(range(2)))
def test_no_plan_of_any_part_is_faster_than_is_said(seed):
    planted = Fast(seed)
    found = refine(ForSpeed(), planted.parts(), planted)
    last, fastest = found.why.proven.trail[-1], min(s for _, s in planted.all_values())
    assert last.least_step_seconds <= fastest * (1 + 1e-9)
    assert found.proof.step_seconds == last.most_step_seconds <= fastest * 1.05
    asked = next(each for each in questions(FOR_SPEED) if is_of(found.plan, each))
    assert planted.value(found.plan.stages, asked)[1] == pytest.approx(found.proof.step_seconds)


def is_of(plan, asked):
    return (plan.num_microbatches, plan.schedule) == (asked.num_microbatches, asked.schedule)


def test_the_front_of_all_parts_is_as_near_as_is_said():
    planted = Fast(2)
    found = refine(ForSpeed(front=True), planted.parts(), planted, Effort(within_fraction=0.05))
    points = [(each.peak_bytes, each.step_seconds) for each in found.why.front.points]
    by = 1 + found.why.proven.within_fraction + 1e-9
    for peak, seconds in planted.all_values():
        assert any(p <= peak * by and s <= seconds * by for p, s in points)
    assert all(each.num_microbatches in (4, 8) for each in found.why.front.points)
    for point in points:
        assert any(value == pytest.approx(point) for value in planted.all_values())


def test_what_cannot_fit_is_told_over_all_parts():
    planted = Fast(0)
    found = refine(ForSpeed(), planted.parts(memory_limit_bytes=1), planted)
    assert (found.status, found.why.code, found.why.proven.ended) == (
        "infeasible",
        "memory-limit",
        "memory",
    )


def test_effort_counts_what_is_computed_and_not_the_clock():
    planted = Small(2)

    class Slow:
        attempt = staticmethod(planted.attempt)

        def probe(self, configs, known):
            time.sleep(0.4)
            return planted.probe(configs, known)

    waits = refine(LowestPeak(), planted.parts(), Slow(), Effort(seconds=30, at_once=1))
    assert waits.why.proven.ended == "proven"
    before = processor_seconds()
    time.sleep(0.2)
    assert processor_seconds() - before < 0.1
    none = refine(LowestPeak(), Small(2).parts(), Small(2), Effort(seconds=0.0))
    assert none.why.proven.ended == "seconds" and len(none.why.proven.trail) == 1
