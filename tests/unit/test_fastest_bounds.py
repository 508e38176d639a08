"""The search for the fastest plan on bounds with a planted compiler: against all plans compiled,
with limits of memory, and when it is to end."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np
import pytest
from report_plans import with_work
from search_kit import every_plan
from synthetic_profiles import MICROBATCH_SIZE, Planted, hybrid
from test_verified import Compiler

from capture.cli.output import front_table
from capture.machine.cluster import Cluster
from capture.measured.bounds import Bounds
from capture.measured.profile import StageConfig
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.plan.why import Bracket, Front, FrontPoint, distance_text, fastest_possible
from capture.predictor import AdditivePredictor
from capture.predictor.step_time import simulated_timeline
from capture.predictor.times import TimePredictor
from recommender import PlanQuestion, recommend
from recommender.capture.effort import Effort
from recommender.capture.nearness import ROUNDING
from recommender.capture.parts import Part
from recommender.capture.posed import plan_of, search_problem
from recommender.capture.recommendation import predict_plan
from recommender.capture.refine import refine
from recommender.capture.speed import Timed as Policy

TARGET = "a100-40g"
WHOLE = Effort()
#: To the end of what estimates propose, and not of what bounds leave.
EXPECTED = Effort(within_fraction=ROUNDING)
QUESTION = PlanQuestion(
    Cluster((2, 2), TARGET), 8 * MICROBATCH_SIZE, 8, objective="throughput", algorithm=None
)


#: Bytes and seconds of all plans of a question, by what they depend on: several tests ask them.
EVERY: dict[tuple[type, int, float, tuple[int, ...], PlanQuestion], list[tuple[int, float]]] = {}


class Timed:
    """A few layers, and a compiler whose programs take longer than their products: by choice, and
    each by its own factor."""

    sizes: tuple[int, ...] = (MICROBATCH_SIZE,)

    def __init__(self, seed: int, spread: float = 0.2):
        planted = Planted(5, seed)
        exact = planted.profile(hybrid(2), sizes=self.sizes, num_neighbours=4)
        exact = replace(exact, provenance={"backend": "compile", "target": TARGET})
        self.compiler = Compiler(planted, exact, spread=0.0)
        self.seed, self.spread = seed, spread
        self.all = replace(
            exact,
            measurements={c: with_work(c, cost) for c, cost in exact.measurements.items()},
            verified={config: self.cost(config) for config in exact.measurements},
        )
        self.least = self.bounds("least")

    def cost(self, config: StageConfig):
        """What the compiler says."""
        choice = config.choice
        seed = [config.first, config.stop, choice.data_parallel, choice.tensor_parallel]
        noise = self.spread * np.random.default_rng(seed).uniform()
        slowness = 1 + 0.5 * (choice.tensor_parallel > 1) + noise
        return with_work(config, self.compiler.cost(config), slowness)

    def bounds(self, name: str):
        """Of windows, products alone."""

        def products(work):
            return replace(work, product_bytes=0, other_bytes=0)

        windows = {
            config: replace(
                cost,
                forward_work=products(cost.forward_work),
                backward_work=products(cost.backward_work),
                update_work=products(cost.update_work),
            )
            for config, cost in self.all.measurements.items()
            if config.num_layers <= 2
        }
        provenance = {**self.all.provenance, "bounds": name}
        return replace(self.all, measurements=windows, verified={}, provenance=provenance)

    def attempt(self, plan: Plan, known):
        said, _ = self.compiler(plan, known)
        configs = [StageConfig.of(stage, plan.microbatch_size) for stage in plan.stages]
        new, known = Timed.probe(self, configs, known)
        return replace(said, num_stages_compiled=new), known

    def probe(self, configs, known):
        verified = {**known.verified, **{config: self.cost(config) for config in configs}}
        new = len(set(configs) - known.verified.keys())
        return new, replace(known, verified=verified)

    def begin(self, configs):
        self.begun = [*getattr(self, "begun", []), *configs]

    def search(self, effort=WHOLE, **changes):
        asked = replace(QUESTION, **changes)
        part = Part(asked, lambda: Bounds(self.least, self.bounds("most")))
        return refine(Policy(), [part], self, effort)

    def every(self, asked: PlanQuestion = QUESTION) -> list[tuple[int, float]]:
        """Bytes and simulated seconds of all plans, with all stages compiled."""
        key = type(self), self.seed, self.spread, self.sizes, asked
        if key not in EVERY:
            problem = search_problem(self.all, asked, with_times=True)
            EVERY[key] = [
                self.value(place(cuts, choices), asked)
                for cuts in every_plan(problem)
                for choices in product(*(problem.choices[d] for *_, d in cuts))
            ]
        return EVERY[key]

    @cached_property
    def predictors(self) -> tuple[AdditivePredictor, TimePredictor]:
        """Of bytes and of seconds, with all stages compiled."""
        return AdditivePredictor(self.all), TimePredictor(self.all, QUESTION.cluster.layout)

    def value(self, stages, asked: PlanQuestion = QUESTION) -> tuple[int, float]:
        """The same of one plan."""
        plan = plan_of(self.all, asked, stages)
        seconds = simulated_timeline(plan, *self.predictors).step_seconds
        return self.predictors[0].predict(plan).peak_bytes, float(seconds)

    def fastest(self, memory_limit_bytes: int = 10**18) -> float:
        """Seconds of the fastest plan by all stages compiled."""
        return min(seconds for peak, seconds in self.every() if peak <= memory_limit_bytes)


def place(cuts, choices) -> list[Stage]:
    """On consecutive devices."""
    stages, device = list[Stage](), 0
    for (first, stop, d), choice in zip(cuts, choices, strict=True):
        stages.append(Stage.at(device, first, stop, choice))
        device += d
    return stages


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_faster_than_the_bracket_says(seed):
    planted = Timed(seed)
    found, fastest = planted.search(), planted.fastest()
    last = found.why.proven.trail[-1]
    assert found.compiled and found.status == "ok" and last.compiled
    assert last.least_step_seconds <= fastest * (1 + 1e-9)
    assert fastest <= last.most_step_seconds * (1 + 1e-9)
    assert last.most_step_seconds <= last.least_step_seconds * (
        1 + found.why.proven.within_fraction
    )
    assert "by a bound that leaves transfers out" in found.why.summary


def test_seconds_that_a_compiled_stage_refutes_are_said_and_bound_no_longer():
    planted = Timed(0)
    right = planted.bounds("least")

    def slower(cost):
        work = replace(cost.forward_work, flops=100 * cost.forward_work.flops)
        return replace(cost, forward_work=work)

    slow = {c: slower(cost) for c, cost in right.measurements.items()}
    planted.least = replace(right, measurements=slow)
    found = planted.search()
    assert any(" s (seconds), and compile to " in said for said in found.why.proven.refuted)
    last = found.why.proven.trail[-1]
    assert last.least_step_seconds <= planted.fastest() * (1 + 1e-9)


def test_what_stages_of_a_choice_take_decides_which_plan_is_compiled():
    planted = Timed(0, spread=0.0)
    found = planted.search(EXPECTED)
    assert found.why.proven.trail[-1].most_step_seconds == pytest.approx(planted.fastest())
    assert found.why.proven.ended in ("search", "proven")
    assert len(planted.compiler.compiled) == len(set(planted.compiler.compiled)) <= 4


def test_a_plan_within_the_limit_is_fastest_of_those():
    planted = Timed(2, spread=0.0)
    whole = planted.search()
    limit = recommend(planted.all, replace(QUESTION, objective="memory")).peak_bytes
    assert limit < whole.peak_bytes
    found = planted.search(memory_limit_bytes=limit)
    assert found.status == "ok" and found.peak_bytes <= limit
    last = found.why.proven.trail[-1]
    assert last.least_step_seconds <= planted.fastest(memory_limit_bytes=limit) * (1 + 1e-9)
    assert last.most_step_seconds >= whole.why.proven.trail[-1].most_step_seconds
    nothing = planted.search(memory_limit_bytes=1)
    assert (nothing.status, nothing.why.code) == ("infeasible", "memory-limit")
    assert "proven with 0 compiled stages" in nothing.why.summary


def test_without_compiling_the_bracket_is_the_answer():
    planted = Timed(0)
    found = planted.search(Effort(compiles=0))
    assert not found.compiled and not planted.compiler.compiled
    assert found.why.uncompiled and found.why.proven.ended == "compiles"
    assert found.why.proven.within_fraction is None
    assert "no plan is faster than" in str(found.why.proven.trail[0])
    near = planted.search(Effort(within_fraction=9.0))
    assert near.why.proven.ended == "within" and len(planted.compiler.compiled) == 1


class Larger(Timed):
    """Stages are expected to need at most twice of what tracing bounds, and more."""

    def bounds(self, name: str):
        found = super().bounds(name)
        if name == "least":
            return found
        return replace(
            found,
            measurements={
                config: replace(
                    cost,
                    forward_bytes=2 * cost.forward_bytes + 10**8,
                    backward_bytes=2 * cost.backward_bytes + 10**8,
                )
                for config, cost in found.measurements.items()
            },
        )


@pytest.mark.parametrize("seed", [0, 5, 6])
def test_a_plan_that_nobody_compiles_fits_by_what_it_needs_at_most(seed):
    """Any plan does that needs less than the limit by that; a compiler would tell of others."""
    planted = Larger(seed)
    least = recommend(planted.bounds("most"), replace(QUESTION, objective="memory")).peak_bytes
    tight = 0
    for limit in (least, int(1.02 * least), int(1.1 * least), int(1.3 * least)):
        found = planted.search(Effort(compiles=0), memory_limit_bytes=limit)
        assert found.headroom.verdict != "does not fit", limit
        larger = planted.search(Effort(compiles=1), memory_limit_bytes=limit).plan
        tight += predict_plan(planted.bounds("most"), larger).peak_bytes > limit
    assert tight, "some plans that are compiled first do not"


def test_a_bound_of_nothing_is_said_to_prove_nothing(monkeypatch):
    """Where the rates of a target or the work of layers leave none, it is 0 seconds."""
    assert fastest_possible(2.5e-6) == "no plan is faster than 2.5 µs"
    bracket = Bracket(1.0, 0, 5, 5, False, least_step_seconds=0.0, expected_step_seconds=0.25)
    assert str(bracket).endswith("best estimate 250 ms; nothing is proven of the least seconds")
    monkeypatch.setattr(Policy, "_bounds", lambda self, search: [(0.0, 0.0)])
    said = Timed(1).search(EXPECTED).why.summary
    assert "; the fastest of these, not proven: nothing is proven of the least seconds" in said
    assert "0 µs" not in said and "transfers" not in said


def test_gaps_of_a_front_are_explained_and_those_that_prove_nothing_are_not_numbers():
    assert [*map(distance_text, (0.0, 0.171, 95.71))] == ["proven", "17.1%", "not proven"]
    points = [
        FrontPoint(peak, seconds, 0.0, (), within_fraction=within)
        for peak, seconds, within in ((5, 2.0, 95.71), (9, 1.0, 0.171))
    ]
    [_, rows, means] = front_table(Front(tuple(points), False, False, 1.0), lambda seconds: None)
    assert "not proven" in rows and "17.1%" in rows and "9571" not in rows
    assert (
        means == "gap at most: no plan that fits is both smaller and faster than that one by more"
    )
    proven = Front((replace(points[0], within_fraction=0.0),), True, False, 1.0)
    assert len(front_table(proven, lambda seconds: None)) == 2
