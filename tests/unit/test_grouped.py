"""Schedules whose stages share devices or whose backward passes are split, beside 1F1B in one search
on bounds: against all plans of all schedules with a planted compiler."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import combinations, product
from math import inf

import numpy as np
import pytest
from report_plans import with_work
from synthetic_profiles import MICROBATCH_SIZE, Planted
from test_fastest_bounds import Timed
from test_front_bounds import front_of
from test_table_search import TABLES, table_plan
from test_verified import Compiler

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.machine.links import Layout
from capture.measured.bounds import Bounds
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import SplitCost
from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.formula import kept_bytes
from capture.predictor.step_time import simulated_timeline
from capture.predictor.times import TimePredictor
from recommender import PlanQuestion
from recommender.capture import grouped, named, speed, table_space
from recommender.capture.effort import Effort
from recommender.capture.lowest_peak import LowestPeak
from recommender.capture.named import FASTEST, KNEE, LOWEST, Named
from recommender.capture.parts import OpenPart, Part
from recommender.capture.refine import refine
from recommender.capture.speed import Timed as Policy
from recommender.capture.tables import several_groups

ONE, NUM_LAYERS, TARGET = StageChoice(1, 1), 6, "a100-40g"
CLUSTER, COUNTS, BATCH = Cluster((1, 1), TARGET), (2, 8), 8 * MICROBATCH_SIZE
#: Seconds of a floor that says nothing.
LITTLE = 1e-12


def asked(name: str, num_microbatches: int, **changes) -> PlanQuestion:
    return PlanQuestion(CLUSTER, BATCH, num_microbatches, name, objective="throughput", **changes)


#: Seconds and bytes of all plans by the seed of their compiler: several tests ask them.
EVERY: dict[int, dict[Plan, tuple[float, int]]] = {}


class Splitting(Compiler):
    """As its base, with backward passes in two programs, too."""

    def cost(self, config: StageConfig):
        cost = super().cost(config)
        inputs = cost.backward_bytes * (config.first > 0)
        split = SplitCost(inputs, cost.backward_bytes, 0, cost.residual_bytes)
        return replace(cost, split=split)


class Everything(Timed):
    """Two nodes of one device, and a compiler that splits backward passes: both programs together
    take a little longer than the whole, each stage by its own factor."""

    sizes = tuple(BATCH // m for m in COUNTS)

    def __init__(self, seed: int):
        planted = Planted(NUM_LAYERS, seed)
        for table in (planted.fixed, planted.per_example):
            table[:, 0] = table[:, 1]  # so that no part needs more than the whole
        exact = planted.profile([ONE], sizes=self.sizes, num_neighbours=NUM_LAYERS - 1)
        every = {
            StageConfig(a, b, ONE, size)
            for size in self.sizes
            for b in range(1, NUM_LAYERS + 1)
            for a in range(b)
        }
        exact = replace(
            exact,
            measurements={config: planted.cost(config) for config in every},
            provenance={"backend": "compile", "target": TARGET},
        )
        self.compiler, self.seed = Splitting(planted, exact, spread=0.0), seed
        self.all = replace(exact, measurements={c: self.cost(c) for c in every})
        self.all = replace(self.all, verified=self.all.measurements)
        self.least = self.bounds("least")

    def cost(self, config: StageConfig):
        noise = np.random.default_rng([self.seed, config.first, config.stop]).uniform()
        cost = with_work(config, self.compiler.cost(config), 1 + 0.1 * noise)
        whole = cost.backward_work.flops
        weights = whole // 3 if config.first else whole
        works = [
            replace(cost.backward_work, flops=int(1.02 * flops))
            for flops in (whole - weights, weights)
        ]
        return replace(cost, split=replace(cost.split, inputs_work=works[0], weights_work=works[1]))

    def attempt(self, plan, known):
        """As compiled stages are known: what is kept is all named."""
        said, known = super().attempt(plan, known)
        named = {
            config: replace(
                cost, kept_inputs=(), kept_batch=(),
                residual_bytes=kept_bytes(
                    self.all.graph_at(config.microbatch_size), config.first, config.stop, ONE, cost
                ),
            )
            for config, cost in known.verified.items()
            if cost.kept_inputs or cost.kept_batch
        }  # fmt: skip
        return said, replace(known, verified={**known.verified, **named})

    def probe(self, configs, known):
        costs = {config: self.cost(config) for config in configs}
        return len(costs), replace(known, verified={**known.verified, **costs})

    def between(self, name: str) -> Bounds:
        """Bounds of the stages of a schedule, from windows of whole passes."""
        least, most = (
            replace(profile, measurements={
                config: replace(cost, split=None) for config, cost in profile.measurements.items()
            })
            for profile in (self.least, self.bounds("most"))
        )  # fmt: skip
        between = Bounds(least, most)
        return between.split if SCHEDULES[name].splits_backward else between

    def parts(self, **changes) -> list[Part]:
        """All schedules with all numbers of micro-batches; their floors say little."""
        times, found = TimePredictor(self.bounds("most"), Layout(1)), list[Part]()
        for name, m in product(("1f1b", *TABLES), COUNTS):
            question = asked(name, m, **changes)
            layers = times.table(ONE, question.microbatch_size).at(0, NUM_LAYERS)
            seconds = LITTLE, layers.microbatch_seconds / 2
            floor = LITTLE, m * seconds[1]
            if name in TABLES:
                floor = grouped.floor(question, NUM_LAYERS, lambda d, each=seconds: each)
            found.append(Part(question, lambda name=name: self.between(name), 0, *floor))
        return found

    @cached_property
    def every_plan(self) -> dict[Plan, tuple[float, int]]:
        """Seconds and bytes of all plans of all schedules and numbers of micro-batches, with all
        stages compiled."""
        if self.seed in EVERY:
            return EVERY[self.seed]
        found = {}
        predictors = AdditivePredictor(self.all), TimePredictor(self.all, CLUSTER.layout)
        for name, m in product(("1f1b", *TABLES), COUNTS):
            num_borders = 2 * SCHEDULES[name].stages_per_group - 1
            for borders in combinations(range(1, NUM_LAYERS), num_borders):
                with suppress(PlanError):  # too few micro-batches
                    plan = table_plan(name, (0, *borders, NUM_LAYERS), ONE, m, TARGET)
                    plan = plan.with_(cluster=CLUSTER, global_batch_size=BATCH)
                    seconds = float(simulated_timeline(plan, *predictors).step_seconds)
                    found[plan] = seconds, max(self.compiler.peaks(plan))
        EVERY[self.seed] = found
        return found

    def known(self, plan: Plan) -> tuple[float, int]:
        """The seconds and bytes of an answer's plan."""
        return self.every_plan[next(each for each in self.every_plan if is_same(each, plan))]


def is_same(plan: Plan, other: Plan) -> bool:
    same = "stages", "schedule", "num_microbatches"
    return all(getattr(plan, name) == getattr(other, name) for name in same)


def never_opened():
    raise AssertionError("nothing of this part is promising")


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_plan_of_all_schedules_is_found_and_bounded(seed):
    planted = Everything(seed)
    found = refine(Policy(), planted.parts(), planted)
    fastest, last = min(planted.every_plan.values())[0], found.why.proven.trail[-1]
    assert last.least_step_seconds <= fastest * (1 + 1e-9)
    assert found.proof.step_seconds <= 1.02 * fastest
    assert (found.proof.step_seconds, found.peak_bytes) == pytest.approx(planted.known(found.plan))
    plain = [each[0] for plan, each in planted.every_plan.items() if plan.schedule == "1f1b"]
    assert fastest < min(plain), "waiting is what other schedules spare"
    assert "2 or 8 micro-batches, all schedules; not searched: other remat" in found.why.summary
    assert len(set(planted.compiler.compiled)) < len(planted.every_plan) / 10


@pytest.mark.parametrize(("seed", "is_other"), [(0, False), (1, True), (2, False)])
def test_of_the_lowest_memory_other_schedules_are_asked_where_they_may_need_less(seed, is_other):
    planted = Everything(seed)
    found = refine(LowestPeak(), planted.parts(), planted)
    peaks = {plan: peak for plan, (_, peak) in planted.every_plan.items()}
    plain = min(peak for plan, peak in peaks.items() if plan.schedule == "1f1b")
    assert found.peak_bytes == planted.known(found.plan)[1] <= plain
    assert found.peak_bytes == min(peaks.values())
    assert (found.plan.schedule in TABLES) == is_other
    assert found.why.proven.trail[-1].least_bytes <= plain
    assert "2 or 8 micro-batches, 1F1B (default); not searched" in found.why.summary
    assert not is_other or " of the plans of 1F1B for remat" in found.why.summary
    alone = refine(LowestPeak(), [p for p in planted.parts() if p.is_plain], planted)
    assert alone.peak_bytes == plain and (plain > found.peak_bytes) == is_other


def test_what_fits_by_another_schedule_alone_is_the_answer():
    planted = Everything(1)
    peaks = {plan: peak for plan, (_, peak) in planted.every_plan.items()}
    plain = min(peak for plan, peak in peaks.items() if plan.schedule == "1f1b")
    assert min(peaks.values()) < plain
    found = refine(LowestPeak(), planted.parts(memory_limit_bytes=plain - 1), planted)
    assert (found.status, found.peak_bytes) == ("ok", min(peaks.values()))
    assert found.plan.schedule in TABLES and found.headroom.verdict == "fits"


def test_where_nothing_fits_or_nothing_may_be_compiled_no_other_schedule_is_tried():
    planted = Everything(1)
    for limit, effort in ((1, Effort()), (1, Effort(compiles=0)), (None, Effort(compiles=0))):
        parts = planted.parts(memory_limit_bytes=limit)
        found = refine(LowestPeak(), parts, planted, effort)
        assert found.plan.schedule == "1f1b" and not planted.compiler.compiled
        assert (found.why.proven.ended == "memory") == (limit is not None)
        assert (found.status == "infeasible") == (limit is not None)


def test_after_a_bound_is_refuted_other_schedules_bound_nothing():
    planted = Everything(0)
    costs = planted.least.measurements.items()
    wrong = {each: replace(cost, backward_bytes=3 * cost.backward_bytes) for each, cost in costs}
    planted.least = replace(planted.least, measurements=wrong)
    found = refine(LowestPeak(), planted.parts(), planted)
    assert found.why.proven.refuted and found.why.proven.trail[-1].least_bytes > 0


def test_within_a_limit_the_fastest_that_fits_is_found():
    """Several chunks of a device hold more than a stage of 1F1B."""
    planted = Everything(0)
    plain = sorted(
        peak for plan, (_, peak) in planted.every_plan.items() if plan.schedule == "1f1b"
    )
    schedules = set()
    for limit in (plain[0], plain[len(plain) // 2], 2 * plain[-1]):
        found = refine(Policy(), planted.parts(memory_limit_bytes=limit), planted)
        fitting = [seconds for seconds, peak in planted.every_plan.values() if peak <= limit]
        assert found.status == "ok" and found.peak_bytes <= limit
        assert found.why.proven.trail[-1].least_step_seconds <= min(fitting) * (1 + 1e-9)
        assert found.peak_bytes == planted.known(found.plan)[1]
        schedules.add(found.plan.schedule)
    assert len(schedules) > 1


def test_parts_that_are_not_opened_are_bounded_too():
    planted = Everything(1)
    parts = [
        part if part.is_plain else replace(part, open=never_opened, expected_seconds=1e3)
        for part in planted.parts()
    ]
    found = refine(Policy(), parts, planted)
    least = found.why.proven.trail[-1].least_step_seconds
    assert found.plan.schedule == "1f1b"
    assert 0.75 * found.proof.step_seconds < least <= min(planted.every_plan.values())[0]


def test_where_no_plan_of_1f1b_fits_no_other_schedule_is_tried():
    planted = Everything(0)
    parts = [
        part if part.is_plain else replace(part, open=never_opened)
        for part in planted.parts(memory_limit_bytes=1)
    ]
    found = refine(Policy(), parts, planted)
    assert (found.status, found.why.proven.ended) == ("infeasible", "memory")
    assert found.why.summary.startswith("Every plan of 1F1B needs at least ")


def test_no_plan_of_a_schedule_is_below_its_bound():
    planted = Everything(2)
    for name, m in product(TABLES, COUNTS):
        question = asked(name, m)
        bound = grouped.least_seconds(OpenPart(question, planted.between(name)), question)
        seconds = [
            each
            for plan, (each, _) in planted.every_plan.items()
            if (plan.schedule, plan.num_microbatches) == (name, m)
        ]
        assert not seconds or 0.5 * min(seconds) < bound <= min(seconds)


def test_two_programs_that_are_faster_than_the_bound_of_the_pass_refute_it(monkeypatch):
    planted = Everything(0)
    right = planted.cost

    def faster(config):
        cost = right(config)
        inputs = replace(cost.split.inputs_work, flops=0, product_bytes=0, other_bytes=0)
        return replace(cost, split=replace(cost.split, inputs_work=inputs))

    monkeypatch.setattr(planted, "cost", faster)
    found = refine(Policy(), planted.parts(), planted)
    assert any("(seconds)" in said for said in found.why.proven.refuted)


def test_a_stage_is_news_again_once_its_split_backward_pass_is_compiled():
    planted = Everything(0)
    part = OpenPart(asked("zb-h1", 8), planted.between("zb-h1"))
    config = StageConfig(1, 3, ONE, MICROBATCH_SIZE)
    whole = replace(planted.cost(config), split=None)
    for cost, is_new in ((whole, True), (planted.cost(config), True), (whole, False)):
        known = replace(part.known, verified={config: cost})
        assert bool(part.learn(known)) == is_new
    assert part.known.verified[config].split is not None


def test_a_group_has_as_many_microbatches_as_there_are_groups():
    four = replace(asked("zb-h1", 2), cluster=Cluster((2, 2), TARGET))
    assert several_groups(four, NUM_LAYERS) == [2]
    assert several_groups(replace(four, num_microbatches=4), NUM_LAYERS) == [1, 2]
    assert not several_groups(replace(four, num_microbatches=1), NUM_LAYERS)
    assert not several_groups(asked("dualpipev", 2), NUM_LAYERS), "it needs twice as many"
    assert not several_groups(asked("zb-v", 4), 3), "two stages to a group"
    assert grouped.floor(asked("zb-v", 4), 3, lambda d: (1.0, 1.0)) == (inf, inf)


def test_a_step_of_equal_stages_is_that_of_its_table():
    assert table_space.step_of_equal_stages("interleaved", 4, 8) == pytest.approx(9.5)
    assert table_space.step_of_equal_stages("zb-h1", 4, 64) == pytest.approx(65.0)
    for name in TABLES:
        short, long = (table_space.step_of_equal_stages(name, 2, m) for m in (8, 32))
        assert long == pytest.approx(short + 24)


def test_estimates_take_layers_like_compiled_ones_as_compiled():
    planted, config = Everything(0), StageConfig(1, 3, ONE, MICROBATCH_SIZE)
    most = planted.between("zb-h1").most
    layers = tuple(replace(layer, key="same") for layer in most.graph.layers)
    graph = replace(most.graph, layers=layers)
    most = replace(most, graph=graph, verified={config: planted.cost(config)})
    table = grouped._Estimated(most, 1, {ONE: 2.0}).table(ONE, MICROBATCH_SIZE)
    expected = TimePredictor(replace(most, verified={}), Layout(1)).table(ONE, MICROBATCH_SIZE)
    compiled = TimePredictor(most, Layout(1)).table(ONE, MICROBATCH_SIZE)
    for name in ("forward", "backward_inputs", "backward_weights"):
        assert getattr(table, name)[2, 4] == getattr(compiled, name)[1, 3] > 0
    assert table.forward[0, 2] == 2 * expected.forward[0, 2], "the first layers are others"
    assert table.backward_weights[0, 2] == table.backward[0, 2] > table.backward_inputs[0, 2] == 0
    parts = table.backward_inputs[3, 6] + table.backward_weights[3, 6]
    assert parts == pytest.approx(table.backward[3, 6]) and table.backward_inputs[3, 6] > 0


@pytest.mark.parametrize("seed", [3, 5])
def test_the_plans_with_names_are_of_all_schedules(seed, monkeypatch):
    """That of lowest memory needs least of all plans of all schedules, and less than any of 1F1B;
    the knee is of another schedule as well."""
    planted = Everything(seed)
    found = refine(Named(), planted.parts(), planted, Effort(within_fraction=0.05))
    points = {point.name: point for point in found.why.front.points}
    least = {
        name: min(b for plan, (_, b) in planted.every_plan.items() if plan.schedule == name)
        for name in ("1f1b", *TABLES)
    }
    assert points[LOWEST].peak_bytes == min(least.values()) < least["1f1b"]
    assert points[LOWEST].peak_bytes < points[KNEE].peak_bytes < points[FASTEST].peak_bytes
    assert all(points[name].schedule in TABLES for name in (LOWEST, KNEE))
    monkeypatch.setattr(named, "open_others", lambda search, found: False)
    monkeypatch.setattr(Named, "is_promising", lambda self, search, part: part.is_plain)
    found = refine(Named(), planted.parts(), planted, Effort(within_fraction=0.05))
    assert found.why.front.points[0].peak_bytes >= least["1f1b"], "the test sees what is missing"


def test_schedules_share_what_they_do_not_change(monkeypatch):
    """What is compiled meanwhile is new to all of them: then, and only then, it is made anew."""
    made, tables, compiled = [], [], []
    rows_of, tables_of = grouped.StageRows, grouped._tables

    def rows(predictor, steps, size):
        made.append((size, predictor.profile.splits_backward, len(compiled)))
        return rows_of(predictor, steps, size)

    def counted(part, ratios):
        tables.append(part.question.schedule)
        return tables_of(part, ratios)

    class Counted(Everything):
        def attempt(self, plan, known):
            compiled.append(plan)
            return super().attempt(plan, known)

    monkeypatch.setattr(grouped, "StageRows", rows)
    monkeypatch.setattr(grouped, "_tables", counted)
    planted = Counted(3)
    refine(Policy(), planted.parts(), planted, Effort(within_fraction=0.05))
    assert len(made) == len(set(made)) < len(tables) and len({*tables}) > 1


@pytest.mark.parametrize("seed", [3, 5])
def test_a_front_has_plans_of_all_schedules(seed, monkeypatch):
    """Below those of 1F1B, of which alone it is proven; and none is below another."""
    planted = Everything(seed)
    found = refine(Policy(front=True), planted.parts(), planted, Effort(within_fraction=0.05))
    points = found.why.front.points
    assert {point.schedule for point in points} & {*TABLES}
    assert "for every plan of 1F1B that fits, one of them needs " in found.why.summary
    values = [(point.peak_bytes, point.step_seconds) for point in points]
    assert values == front_of(values)
    by = 1 + found.why.proven.within_fraction + 1e-9
    for plan, (seconds, peak) in planted.every_plan.items():
        if plan.schedule == "1f1b":
            assert any(p <= by * peak and s <= by * seconds for p, s in values), plan
    last = found.why.proven.trail[-1]
    assert last.least_bytes <= values[0][0] and last.least_step_seconds <= values[-1][1]
    monkeypatch.setattr(speed, "open_others", lambda search, found: False)
    plain = refine(Policy(front=True), planted.parts(), planted, Effort(within_fraction=0.05))
    before = [(point.peak_bytes, point.step_seconds) for point in plain.why.front.points]
    assert {point.schedule for point in plain.why.front.points} == {"1f1b"}
    assert front_of([*values, *before]) != front_of(before), "the others are worth it"
