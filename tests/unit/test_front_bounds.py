"""The search for the front on bounds with a planted compiler: against all plans compiled, with
bounds that are wrong, and when it is to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_fastest_bounds import EXPECTED, QUESTION, Timed

from capture.measured.bounds import Bounds
from capture.measured.profile import Profile
from capture.plan.choices import StageChoice
from capture.plan.why import Why
from recommender.capture.effort import Effort
from recommender.capture.nearness import ROUNDING
from recommender.capture.parts import Part
from recommender.capture.refine import refine
from recommender.capture.speed import Timed as Policy

WHOLE = Effort()
ASKED = replace(QUESTION, objective="pareto")


class Planted(Timed):
    """As ``Timed``, with bounds of bytes that are a fifth too low; or, of the stages with a choice,
    too high."""

    def __init__(self, seed: int, spread: float = 0.2, too_high: StageChoice | None = None):
        self.too_high = too_high
        super().__init__(seed, spread)

    def bounds(self, name: str) -> Profile:
        exact = super().bounds(name)
        parts = ("residual_bytes", "forward_bytes", "backward_bytes")

        def scaled(config, cost):
            factor = 9 if config.choice == self.too_high else 0.8
            return replace(cost, **{part: int(factor * getattr(cost, part)) for part in parts})

        measurements = {each: scaled(each, cost) for each, cost in exact.measurements.items()}
        return replace(exact, measurements=measurements)

    def search(self, effort: Effort = WHOLE, **changes):
        asked = replace(ASKED, **changes)
        part = Part(asked, lambda: Bounds(self.least, self.bounds("most")))
        return refine(Policy(front=True), [part], self, effort)

    def values(self, stages_of) -> list[tuple[int, float]]:
        """Bytes and simulated seconds of compiled plans, or of points of a front."""
        return [self.value(each.stages) for each in stages_of]


def front_of(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those of which none is both smaller and faster than another."""
    left: list[tuple[int, float]] = []
    for peak, seconds in sorted(values):
        if not left or seconds < left[-1][1] * (1 - ROUNDING):
            left.append((peak, seconds))
    return left


def wrong(planted: Planted, found) -> list[tuple[int, float]]:
    """Plans that are further from an answer than it says."""
    proven, points = found.why.proven, found.why.front.points
    compiled, every = planted.values(planted.compiler.compiled), planted.every()
    by = 1 + proven.within_fraction + ROUNDING
    far = [
        (peak, seconds)
        for peak, seconds in every
        if all(p > peak * by or s > seconds * by for p, s in compiled)
    ]
    for point, (peak, seconds) in zip(points, planted.values(points), strict=True):
        by = 1 + point.within_fraction + ROUNDING
        far += [(p, s) for p, s in every if p * by < peak and s * by < seconds]
        by = 1 + point.bound_fraction + ROUNDING
        far += [(p, s) for p, s in every if p <= peak and s * by < seconds]
    return far


@pytest.mark.parametrize(
    ("seed", "spread"),
    [
        (1, 0.0),
        (2, 0.2),
        *(
            pytest.param(seed, 0.1, marks=pytest.mark.slow if seed < 3 else pytest.mark.exhaustive)
            for seed in range(8)
        ),
    ],
)
def test_the_front_is_that_of_all_plans_compiled(seed, spread):
    planted = Planted(seed, spread)
    found = planted.search(EXPECTED)
    compiled = planted.compiler.compiled
    expected = front_of(planted.every())
    for (peak, seconds), (p, s) in zip(front_of(planted.values(compiled)), expected, strict=True):
        assert (peak, seconds) == (p, pytest.approx(s))
    assert len(compiled) == len(set(compiled)) < len(planted.every()) / 4
    assert wrong(planted, found) == []
    assert found.why.front.points[0].within_fraction < 0.02, "its bytes are hardly below"
    assert found.plan.stages == found.why.front.points[-1].stages
    assert {point.stages for point in found.why.front.points} <= {p.stages for p in compiled}


def test_a_bound_that_is_too_high_is_said_and_proves_nothing(monkeypatch):
    smallest = Planted(2).search().why.front.points[0]
    planted = Planted(2, too_high=smallest.stages[0].choice)
    found = planted.search()
    assert wrong(planted, found) == []
    assert "please report it" in found.why.proven.refuted[0]
    monkeypatch.setattr(Policy, "refuted_by", lambda self, part, compiled: ())
    assert wrong(planted, planted.search()), "the check of this file sees it"


def test_an_answer_near_enough_says_how_near():
    planted = Planted(2)
    found = planted.search(Effort(within_fraction=0.2))
    proven = found.why.proven
    assert wrong(planted, found) == [] and proven.ended == "search"
    assert f"needs at most {proven.within_fraction:.1%} more bytes and seconds" in found.why.summary
    assert proven.within_fraction == proven.trail[-1].within_fraction
    near = planted.search(Effort(within_fraction=9.0))
    assert near.why.proven.ended == "within" and len(near.why.front.points) == 1


def test_no_point_is_above_the_limit():
    planted = Planted(2)
    points = planted.search().why.front.points
    limit = points[-1].peak_bytes - 1
    within = planted.search(memory_limit_bytes=limit)
    assert [point.peak_bytes for point in within.why.front.points] == [
        point.peak_bytes for point in points[:-1]
    ]
    nothing = planted.search(memory_limit_bytes=1)
    assert (nothing.status, nothing.why.code) == ("infeasible", "memory-limit")
    assert "proven with 0 compiled stages" in nothing.why.summary


def test_without_compiling_the_bracket_is_the_answer():
    planted = Planted(0)
    found = planted.search(Effort(compiles=0))
    assert not found.compiled and not planted.compiler.compiled and found.why.front is None
    assert found.why.uncompiled and found.why.proven.ended == "compiles"
    assert found.why.proven.within_fraction is None
    said = str(found.why.proven.trail[0])
    assert "peak memory: lower bound" in said
    assert "; no plan is faster than" in said


def test_an_interrupt_ends_with_the_points_so_far(monkeypatch):
    planted, attempt = Planted(2), Timed.attempt

    def once(self, plan, known):
        if self.compiler.compiled:
            raise KeyboardInterrupt
        return attempt(self, plan, known)

    monkeypatch.setattr(Timed, "attempt", once)
    found = planted.search()
    assert (found.why.proven.ended, found.compiled) == ("interrupted", True)
    assert len(found.why.front.points) == 1 and not found.why.front.complete
    assert wrong(planted, found) == []


def test_a_plan_that_is_refused_is_left_out(monkeypatch):
    best = Planted(2).search().plan
    attempt = Timed.attempt

    def refuses(self, plan, known):
        return (None, known) if plan.stages == best.stages else attempt(self, plan, known)

    monkeypatch.setattr(Timed, "attempt", refuses)
    found = Planted(2).search()
    assert found.status == "ok"
    assert best.stages not in {point.stages for point in found.why.front.points}


def test_points_are_read_as_they_were_written():
    why = Planted(1).search().why
    written = why.to_json()
    assert Why.read(written) == why
    point = written["front"]["points"][0]
    assert point["within_fraction"] == 0 and "schedule" not in point
