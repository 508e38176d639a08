"""The search on bounds with a planted compiler: against all plans compiled, with stages that are
refused, and when it is to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_profiles import MICROBATCH_SIZE, Planted, hybrid
from test_verified import Compiler

from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.profile import Profile, StageConfig
from capture.plan.stages import Plan
from recommender import PlanQuestion, recommend
from recommender.capture.bounds_first import Effort, bounds_first

QUESTION = PlanQuestion(Cluster((2, 2)), 8 * MICROBATCH_SIZE, 8)
SPREAD = 0.3
WHOLE = Effort()


class Planted4:
    """Six layers, what a compiler says of them, and bounds of it.

    Attributes:
        refused: Stages that do not compile.
    """

    def __init__(self, seed: int, *refused: StageConfig):
        planted = Planted(6, seed)
        exact = planted.profile(hybrid(2), sizes=(MICROBATCH_SIZE,), num_neighbours=5)
        self.compiler, self.refused = Compiler(planted, exact, SPREAD), set(refused)
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

    def attempted(self, plan: Plan, known: Profile):
        configs = {StageConfig.of(stage, MICROBATCH_SIZE) for stage in plan.stages}
        if refused := configs & self.refused:
            return None, known.without_stages(dict.fromkeys(refused, "it is odd"))
        said, known = self.compiler(plan, known)
        return replace(said, num_stages_compiled=len(configs)), known

    def search(self, attempted=None, effort=WHOLE, **changes):
        asked = replace(QUESTION, **changes)
        return bounds_first(self.least, self.most, asked, attempted or self.attempted, effort)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_needs_less_where_every_stage_is_compiled(seed):
    planted = Planted4(seed)
    found = planted.search()
    assert found.peak_bytes == recommend(planted.all, QUESTION).peak_bytes
    assert found.proof.optimal and found.why.proven.ended == "proven"
    assert len(planted.compiler.compiled) == len(set(planted.compiler.compiled))


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
    with pytest.raises(ProfileError, match=r"it is odd.*\[verify-stage\]"):
        every.search()


def test_an_interrupt_ends_with_the_best_so_far():
    planted = Planted4(1)

    def once(plan, known):
        if planted.compiler.compiled:
            raise KeyboardInterrupt
        return planted.attempted(plan, known)

    found = planted.search(once)
    proven = found.why.proven
    assert (proven.ended, found.compiled, len(planted.compiler.compiled)) == (
        "interrupted",
        True,
        1,
    )
    assert proven.trail[-1].least_bytes < found.peak_bytes == proven.trail[-1].most_bytes
    assert proven.within_fraction > 0

    def at_once(plan, known):
        raise KeyboardInterrupt

    assert planted.search(at_once).why.proven.trail[-1].compiled is False


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
