"""Offload as a searched choice, against all plans compiled with everything that may rest on hosts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recommender.capture.compiled import most_on_a_host
from recommender.capture.effort import Effort
from recommender.question import PlanQuestion
from tests.brute_force import Asked, wrong

PLENTY = 10**12
#: By seed, a limit of memory within which plans with offload are faster, or alone fit.
FASTER, ALONE = (36, 2_434_779), (29, 3_386_396)
#: One whose stages share a host.
SEVERAL = 12, 2_614_461
SLOW = pytest.mark.slow


def asked(seed: int, limit: int, host: int | None = PLENTY) -> Asked:
    return replace(Asked.of(seed), limit=limit, host=host)


@pytest.mark.parametrize("name", ["throughput", "named"])
@pytest.mark.parametrize(
    "host", [PLENTY, pytest.param(3_000_000, marks=SLOW), pytest.param(1_000_000, marks=SLOW)]
)
@pytest.mark.parametrize("seed, limit", [FASTER, pytest.param(*ALONE, marks=SLOW)])
def test_answers_are_those_of_brute_force(seed, limit, host, name):
    for effort in (Effort(), Effort(compiles=2), Effort(within_fraction=0.2)):
        assert not list(wrong(asked(seed, limit, host), name, effort)), effort


def test_a_plan_with_offload_is_chosen_where_it_is_faster_and_says_by_how_much():
    among = asked(*FASTER)
    best = {
        way: min(p.seconds for p in among.fitting if bool(p.question.offload) is way)
        for way in (False, True)
    }
    found, _ = among.answer("throughput", Effort())
    assert found.plan is not None and any(stage.offload for stage in found.plan.stages)
    assert found.proof.step_seconds == pytest.approx(best[True]) and best[True] < best[False]
    ratio = f"without offload about {best[False] / best[True]:.2f} x slower"
    assert found.why.summary.endswith(f"; {ratio}.") and "On the host: " in found.why.summary


def test_a_plan_with_offload_fits_where_no_other_does():
    assert asked(*ALONE, None).answer("named", Effort())[0].status == "infeasible"
    found, _ = asked(*ALONE).answer("named", Effort())
    assert (
        found.status == "ok" and "nothing is expected to fit without offload" in found.why.summary
    )


def test_hosts_that_hold_too_little_are_said():
    found, _ = asked(*ALONE, 1000).answer("named", Effort())
    assert found.status == "infeasible"
    assert "need more than the 1 kB of a host were left out." in found.why.summary


@pytest.mark.parametrize("seed, limit", [FASTER, SEVERAL])
def test_all_devices_share_the_memory_of_their_host(seed, limit):
    """Of every plan that is compiled, the sum of what its stages keep there."""
    among = asked(seed, limit)
    plan = among.answer("throughput", Effort())[0].plan
    assert plan is not None
    held = most_on_a_host(plan, among.space.bounds[plan.microbatch_size].least)
    assert held > 0
    less = asked(seed, limit, held - 1)
    found, _ = less.answer("throughput", Effort())
    if less.fitting:
        assert not list(wrong(less, "throughput", Effort()))
    assert (found.status == "ok") is bool(less.fitting)


def test_offload_that_nobody_could_search_is_said_where_memory_is_short(monkeypatch):
    said = "Offload was not searched: the host's memory is not known; say --host-memory"

    def unknown(self):
        return [
            replace(self.space.whole.question(m), offload=None)
            for m in self.space.whole.microbatches
        ]

    monkeypatch.setattr(Asked, "questions", property(unknown))
    for seed, limit in (FASTER, ALONE):
        assert said in asked(seed, limit, None).answer("named", Effort())[0].why.summary
    most = max(each.peak_bytes for each in asked(*FASTER, None).every)
    assert (
        "ffload" not in asked(FASTER[0], 10 * most, None).answer("named", Effort())[0].why.summary
    )


def test_nothing_with_offload_is_opened_where_memory_is_enough(monkeypatch):
    opened, among = list[PlanQuestion](), asked(FASTER[0], PLENTY)
    part = Asked._part

    def watched(self, question, floor, expected):
        made = part(self, question, floor, expected)
        return replace(made, open=lambda: opened.append(question) or made.open())

    monkeypatch.setattr(Asked, "_part", watched)
    among.answer("named", Effort(within_fraction=0.05))
    assert opened and not any(question.offload for question in opened)
