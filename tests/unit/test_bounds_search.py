"""The search on bounds with a planted compiler: against all plans compiled, with stages that are
refused, and when it is to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_profiles import MICROBATCH_SIZE, Planted, hybrid
from test_verified import Compiler

from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.bounds import Bounds
from capture.measured.profile import Profile, StageConfig
from capture.plan.stages import Plan
from capture.plan.why import Why
from capture.quantities import format_bytes
from recommender import PlanQuestion, recommend
from recommender.capture import lowest_peak
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.parts import Part
from recommender.capture.refine import refine

QUESTION = PlanQuestion(Cluster((2, 2)), 8 * MICROBATCH_SIZE, 8)
FIVE = Cluster((1,) * 5)
SPREAD = 0.3
WHOLE = Effort()


class Planted4:
    """A few layers, what a compiler says of them, and bounds of it.

    Attributes:
        refused: Stages that do not compile.
    """

    sizes: tuple[int, ...] = (MICROBATCH_SIZE,)

    def __init__(self, seed: int, *refused: StageConfig, num_layers: int = 6):
        planted = Planted(num_layers, seed)
        exact = planted.profile(hybrid(2), sizes=self.sizes, num_neighbours=5)
        self.compiler, self.refused = Compiler(planted, exact, SPREAD), set(refused)
        self.probed = []
        self.all = replace(
            exact, verified={config: self.compiler.cost(config) for config in exact.measurements}
        )
        self.least, self.most = (self.bounds(name, exact) for name in ("least", "most"))

    def bounds(self, name: str, exact: Profile) -> Profile:
        factor = 1 + SPREAD if name == "most" else 1 - SPREAD

        def scaled(cost):
            parts = ("residual_bytes", "forward_bytes", "backward_bytes")
            return replace(cost, **{part: int(factor * getattr(cost, part)) for part in parts})

        windows = {c: scaled(cost) for c, cost in exact.measurements.items() if c.num_layers <= 2}
        return replace(exact, measurements=windows, provenance={**exact.provenance, "bounds": name})

    def probe(self, configs, known: Profile):
        refused = self.refused.intersection(configs)
        costs = {config: self.compiler.cost(config) for config in {*configs} - refused}
        self.probed.append(set(configs))
        known = replace(known, verified={**known.verified, **costs})
        return len(configs), known.without_stages(dict.fromkeys(refused, "it is odd"))

    def attempt(self, plan: Plan, known: Profile):
        configs = {StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages}
        if refused := configs & self.refused:
            return None, known.without_stages(dict.fromkeys(refused, "it is odd"))
        said, known = self.compiler(plan, known)
        return replace(said, num_stages_compiled=len(configs)), known

    def begin(self, configs):
        """Nothing is compiled beside anything."""

    def search(self, effort=WHOLE, **changes):
        part = Part(replace(QUESTION, **changes), lambda: Bounds(self.least, self.most))
        return refine(LowestPeak(), [part], self, effort)


def num_asked(planted):
    """Stages that were compiled, counted as often as they were asked for."""
    return sum(map(len, planted.probed)) + sum(
        plan.num_stages for plan in planted.compiler.compiled
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_needs_less_where_every_stage_is_compiled(seed):
    planted = Planted4(seed)
    found = planted.search()
    assert found.peak_bytes == recommend(planted.all, QUESTION).peak_bytes
    assert found.proof.optimal and found.why.proven.ended == "proven"
    assert len(planted.compiler.compiled) == len(set(planted.compiler.compiled))
    assert found.why.proven.trail[-1].num_compiled == num_asked(planted)


def test_what_may_be_twice_as_large_is_not_called_proven():
    planted = Planted4(0)
    tiny = {
        config: replace(
            cost, **dict.fromkeys(("residual_bytes", "forward_bytes"), 0), backward_bytes=0
        )
        for config, cost in planted.least.measurements.items()
    }
    planted.least = replace(planted.least, measurements=tiny)
    once = planted.search(Effort(compiles=1)).why
    assert once.proven.within_fraction > 1
    least = once.proven.trail[-1].least_bytes
    assert f"not proven: no plan needs less than {format_bytes(least)} for remat" in once.summary
    assert "proven optimal for remat" in planted.search().why.summary


@pytest.mark.parametrize("most", [2, 5])
def test_where_bounds_say_little_plans_are_tried_as_long_as_they_are_smaller(monkeypatch, most):
    """A compiler may give every program so much that no bound comes near it."""
    monkeypatch.setattr(lowest_peak, "_MOST_MISSED", most)
    planted = Planted4(0)
    nothing = {
        config: replace(cost, residual_bytes=0, forward_bytes=0, backward_bytes=0)
        for config, cost in planted.least.measurements.items()
    }
    planted.least = replace(planted.least, measurements=nothing)
    found = planted.search(Effort(within_fraction=0.01))
    assert found.why.proven.ended == "missed" and not found.why.verified.settled
    compiled = [planted.compiler(plan, planted.all)[0] for plan in planted.compiler.compiled.copy()]
    peaks = [max(each.peak_bytes_per_device) for each in compiled]
    assert peaks.index(min(peaks)) < len(peaks) - most
    assert found.peak_bytes == min(peaks)
    assert planted.search().why.proven.ended == "proven", "where the best of all is asked for"


def test_stages_that_decide_are_compiled_first():
    counts = []
    for at_once in (1, 2, 99):
        planted = Planted4(1, num_layers=10)
        peak = planted.search(Effort(at_once=at_once), cluster=FIVE).peak_bytes
        assert all(len(each) <= at_once for each in planted.probed)
        counts.append((num_asked(planted), peak, len(planted.probed)))
    (one, peak, _), (two, same, probed), (all_of_them, other, _) = counts
    assert one <= two < all_of_them and peak == same == other and probed > 0


def test_a_stage_that_is_refused_is_left_out_by_name():
    best = Planted4(0).search().plan
    refused = StageConfig.of(best.stages[0], MICROBATCH_SIZE)
    planted = Planted4(0, refused)
    found = planted.search()
    assert found.status == "ok" and found.proof.optimal
    assert refused not in {StageConfig.of(stage, MICROBATCH_SIZE) for stage in found.plan.stages}
    known = planted.all.without_stages({refused: ""})
    assert found.peak_bytes == recommend(known, QUESTION).peak_bytes
    every = Planted4(0, *planted.all.measurements)
    with pytest.raises(ProfileError, match=r"such as .*: it is odd\. \[verify-stage\]") as error:
        every.search()
    assert str(error.value).count("it is odd") == 1, "of many stages, for one cause"


def test_an_interrupt_ends_with_the_best_so_far(monkeypatch):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    planted = Planted4(1, num_layers=10)
    monkeypatch.setattr(Planted4, "probe", interrupted)
    found = planted.search(cluster=FIVE)
    proven = found.why.proven
    assert (proven.ended, found.compiled) == ("interrupted", True)
    assert len(planted.compiler.compiled) == 2, "of the lowest bound, and expected to be best"
    assert proven.trail[-1].least_bytes < found.peak_bytes == proven.trail[-1].most_bytes
    assert proven.within_fraction > 0
    monkeypatch.setattr(Planted4, "attempt", interrupted)
    assert not planted.search(cluster=FIVE).why.proven.trail[-1].compiled


def test_a_search_ends_where_it_is_told_to():
    planted = Planted4(2)
    whole = planted.search()
    least = whole.why.proven.trail[0].least_bytes
    below = planted.search(effort=Effort(below_bytes=least))
    assert (below.why.proven.ended, below.compiled) == ("below", False)
    room = 2 * whole.peak_bytes
    fits = planted.search(effort=Effort(any_that_fits=True), memory_limit_bytes=room)
    assert (fits.status, fits.why.proven.ended) == ("ok", "fits")
    assert len(fits.why.proven.trail) == 2
    none = planted.search(memory_limit_bytes=whole.peak_bytes - 1)
    assert (none.status, none.why.proven.ended) == ("infeasible", "memory")


def test_what_is_near_enough_but_does_not_fit_is_no_answer():
    planted = Planted4(2)
    peak = planted.search().peak_bytes
    found = planted.search(effort=Effort(within_fraction=9.0), memory_limit_bytes=peak)
    assert (found.status, found.peak_bytes) == ("ok", peak)


@pytest.mark.parametrize(
    ("field", "part"), [("forward_bytes", "forward"), ("residual_bytes", "kept")]
)
def test_a_bound_that_a_compiled_stage_refutes_is_said_and_used_no_longer(field, part):
    planted, best = Planted4(1), recommend(Planted4(1).all, QUESTION).peak_bytes
    wrong = {
        config: replace(cost, **{field: 3 * getattr(cost, field)})
        for config, cost in planted.least.measurements.items()
    }
    planted.least = replace(planted.least, measurements=wrong)
    found = planted.search()
    assert found.peak_bytes == best and found.why.proven.ended == "proven"
    assert found.why.proven.trail[0].least_bytes <= best, "no bracket rests on what is refuted"
    said = found.why.proven.refuted[0]
    assert said.startswith("a lower bound is wrong: layers ") and "please report it" in said
    assert f"({part})" in said
    assert Why.read(found.why.to_json()) == found.why
    assert "refuted" not in Planted4(1).search().why.to_json()["proven"]


def test_an_answer_says_how_it_was_found():
    planted = Planted4(1)
    why = planted.search().why
    first, last = why.proven.trail[0], why.proven.trail[-1]
    count = last.num_compiled
    assert (
        f"with {count} new stages compiled; proven optimal for remat=none (default), 8 "
        "micro-batches (default), 1F1B (default); not searched: other remat, " in why.found
    )
    assert why.found.endswith(f" First: {first}. Last: {last}.")
    assert " s: peak memory: lower bound" in str(first)
    assert "so far about" in str(first) and "about" not in str(last)
    quick = planted.search(effort=Effort(compiles=0)).why
    assert quick.found == f"{quick.uncompiled} {quick.proven.trail[0]}."
    assert Why("predicted").found == ""
