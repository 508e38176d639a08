"""The default answer's named plans, with a planted compiler."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from types import SimpleNamespace

import pytest
from search_kit import every_plan
from test_fastest_bounds import QUESTION, place
from test_front_bounds import Planted

from capture.cli.output import other_plans
from capture.machine.links import Layout
from capture.measured.bounds import Bounds
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from capture.predictor.times import TimePredictor
from capture.quantities import format_bytes
from recommender.capture import estimates, lowest_peak, named, parts, speed
from recommender.capture.effort import Effort
from recommender.capture.named import FASTEST, KNEE, LOWEST, Named
from recommender.capture.nearness import ROUNDING
from recommender.capture.parts import Found, OpenPart, Part, num_missed, posed
from recommender.capture.posed import _Predicting, search_problem
from recommender.capture.refine import Search, refine
from recommender.capture.speed import Timed


class NamedPlans(Planted):
    def search(self, effort: Effort = Effort(), schedules=("1f1b",)):
        parts = [
            Part(
                replace(QUESTION, objective="throughput", schedule=schedule),
                lambda: Bounds(self.least, self.bounds("most")),
            )
            for schedule in schedules
        ]
        return refine(Named(), parts, self, effort)


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_is_saved_and_named_beside_a_smaller_one(seed):
    planted = NamedPlans(seed, 0.0)
    found = planted.search()
    points, compiled = found.why.front.points, planted.values(planted.compiler.compiled)
    assert points[-1].name == FASTEST and found.plan.stages == points[-1].stages
    assert points[-1].step_seconds == pytest.approx(min(seconds for _, seconds in compiled))
    assert {point.name for point in points} <= {FASTEST, KNEE, LOWEST, ""}
    names = [point.name for point in points if point.name]
    assert len(names) == len(set(names))
    assert all(point.schedule and point.num_microbatches for point in points)
    said = other_plans(SimpleNamespace(output="plan.json"), found)
    assert all(f"plan.json:{name.replace(' ', '-')}" in "".join(said) for name in names[:-1])
    if LOWEST in names:
        least = next(point for point in points if point.name == LOWEST)
        assert least.peak_bytes == min(peak for peak, _ in compiled)


def test_no_plan_has_a_name_before_it_is_looked_for():
    """The smallest of those that were compiled to be fast is not the one of lowest memory."""
    found = NamedPlans(1, 0.2).search(Effort(compiles=1))
    assert [point.name for point in found.why.front.points][-1] == FASTEST
    assert LOWEST not in [point.name for point in found.why.front.points]
    assert other_plans(SimpleNamespace(output="plan.json"), found) == []


def test_choices_are_predicted_once_and_again_where_stages_of_them_are_compiled(monkeypatch):
    predicted, predict = [], _Predicting.__call__

    def counted(self, choices, compiled):
        predicted.extend(choices)
        return predict(self, choices, compiled)

    monkeypatch.setattr(_Predicting, "__call__", counted)
    planted = NamedPlans(0, 0.0)
    planted.search()
    choices = set(predicted)
    plans = planted.compiler.compiled
    compiled = [{stage.choice for stage in plan.stages} for plan in plans]
    again = sum(len(set().union(*compiled[: n + 1])) for n in range(len(compiled)))
    # All of them anew where compiled stages say how a value is split: here once.
    assert again and len(predicted) <= 2 * (2 * len(choices) + again), "lower bounds, and the most"


class Small(NamedPlans):
    """Of programs to which the compiler adds so much that lower bounds say next to nothing."""

    def bounds(self, name: str):
        exact = super().bounds(name)
        factor = 0.1 if name == "least" else 1.5
        return replace(
            exact,
            measurements={
                config: replace(
                    cost,
                    forward_bytes=int(factor * cost.forward_bytes),
                    backward_bytes=int(factor * cost.backward_bytes),
                )
                for config, cost in exact.measurements.items()
            },
        )

    def within(self, part: float, policy: type[Timed] = Named):
        """Search within a part of what every plan needs, or a little more."""
        least = min(peak for peak, _ in self.every())
        asked = replace(QUESTION, objective="throughput", memory_limit_bytes=int(part * least))
        bounds = Bounds(self.least, self.bounds("most"))
        return refine(policy(), [Part(asked, lambda: bounds)], self, Effort(within_fraction=0.05))


@pytest.mark.parametrize(("seed", "policy"), [*product(range(3), (Named, Timed))])
def test_a_search_of_plans_that_do_not_fit_ends_and_says_so(monkeypatch, seed, policy):
    monkeypatch.setattr(named, "MOST_MISSED", 1)
    monkeypatch.setattr(speed, "MOST_UNFIT", named.SMALL_TRIES)
    planted = Small(seed, 0.0)
    found, compiled = planted.within(0.95, policy), planted.compiler.compiled
    assert not found.compiled and found.why.proven.ended == "missed"
    assert len(compiled) == named.SMALL_TRIES
    smallest = min(peak for peak, _ in planted.values(compiled))
    assert f"of {len(compiled)} compiled plans none fits" in found.why.uncompiled
    assert f"the smallest needs {format_bytes(smallest)}" in found.why.uncompiled


def test_what_compilers_add_to_every_program_is_learned(monkeypatch):
    """So that fewer plans are compiled that do not fit, and the fastest that fits is found."""
    nums = []
    monkeypatch.setattr(Named, "_sure", lambda self, search: None)
    for learns in (True, False):
        if not learns:
            monkeypatch.setattr(estimates, "nearness", lambda part: 0.5)
            monkeypatch.setattr(lowest_peak, "nearness", lambda part: 0.5)
        nums.append(0)
        for seed in range(6):
            planted = Small(seed, 0.0)
            assert planted.within(1.05).compiled
            limit = 1.05 * min(peak for peak, _ in planted.every())
            compiled = planted.values(planted.compiler.compiled)
            nums[-1] += sum(peak > limit for peak, _ in compiled)
    assert nums[0] < nums[1]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_compiled_beside_a_plan_is_asked_for_later(seed):
    planted = NamedPlans(seed, 0.1)
    planted.search(Effort(at_once=1))
    assert not hasattr(planted, "begun"), "one worker has nothing beside it"
    planted.search(Effort(within_fraction=0.05))
    asked = {
        StageConfig.of(stage, plan.microbatch_size)
        for plan in planted.compiler.compiled
        for stage in plan.stages
    }
    assert planted.begun and {*planted.begun} <= asked


@pytest.mark.parametrize("most", [-1.0, float("inf")])
def test_stages_that_are_alike_are_preferred_where_they_are_hardly_slower(monkeypatch, most):
    """They are as small as the plan in whose place they come."""
    monkeypatch.setattr(named, "ALIKE", most)
    nums, replaced = [], named._alike

    def alike(found, known):
        other = replaced(found, known)
        peaks = [max(s.peak_bytes for s in each.answer.proof.stages) for each in (other, found)]
        assert peaks[0] <= peaks[1]
        nums.append(
            [len({stage.choice for stage in each.answer.proof.stages}) for each in (other, found)]
        )
        return other

    monkeypatch.setattr(named, "_alike", alike)
    for seed in range(4):
        NamedPlans(seed, 0.1).search(Effort(within_fraction=0.05))
    differed = [of for of in nums if of[1] > 1]
    assert differed and all(other == (1 if most > 0 else own) for other, own in differed)


def test_estimates_of_small_models_are_doubted(monkeypatch):
    """Plans that are estimated to be hardly slower, here those of a schedule that is as fast, are
    compiled as well, but no more than a few, and not of a model of many layers."""
    counts = []
    monkeypatch.setattr(Named, "_named", lambda self, _, name: self._names.setdefault(name, None))
    for most, layers in ((0, 99), (2, 99), (2, 1)):
        monkeypatch.setattr(named, "MOST_DOUBTED", most)
        monkeypatch.setattr(named, "FEW_LAYERS", layers)
        planted = NamedPlans(1, 0.1)
        found = planted.search(Effort(within_fraction=0.01), ("1f1b", "gpipe"))
        assert found.why.front.points[-1].step_seconds == found.proof.step_seconds
        counts.append(len(planted.compiler.compiled))
    assert counts[0] == counts[2] < counts[1] <= counts[0] + 2


def test_a_compiled_plan_that_is_proposed_as_faster_than_it_is_hides_no_other(monkeypatch):
    propose = speed.proposed

    def wrong(part, *given):
        factor = 0.5 if part.question.schedule == "1f1b" else 0.9
        for found in propose(part, *given):
            proof = replace(found.answer.proof, step_seconds=factor * speed.seconds_of(found))
            yield found._replace(answer=replace(found.answer, proof=proof))

    monkeypatch.setattr(speed, "proposed", lambda *given: [*wrong(*given)])
    monkeypatch.setattr(named, "MOST_DOUBTED", 0)
    monkeypatch.setattr(Named, "_of_compiled_stages", lambda self, search: None)
    monkeypatch.setattr(Named, "_named", lambda self, _, name: self._names.setdefault(name, None))
    planted = NamedPlans(1, 0.0)
    planted.search(Effort(within_fraction=0.01), ("1f1b", "gpipe"))
    assert {plan.schedule for plan in planted.compiler.compiled} == {"1f1b", "gpipe"}


@pytest.mark.parametrize(("seconds", "is_worth"), [(0.97, False), (0.9, True)])
def test_what_compiled_plans_of_other_names_say_may_show_a_faster_one(
    monkeypatch, seconds, is_worth
):
    def found(seconds):
        proof = SimpleNamespace(step_seconds=seconds)
        return SimpleNamespace(configs=[], answer=SimpleNamespace(proof=proof))

    other, best, policy = found(seconds), found(1.0), Named()
    search = SimpleNamespace(
        fitting=[best],
        compiled=[best],
        effort=Effort(within_fraction=0.05),
        parts={},
        num_missed=lambda best: 0,
    )
    monkeypatch.setattr(Timed, "next", lambda self, search, look: other)
    monkeypatch.setattr(Timed, "within", lambda self, search: None)
    monkeypatch.setattr(Named, "_of_compiled_stages", lambda self, search: None)
    monkeypatch.setattr(Named, "_has_missed", lambda self, search: False)
    monkeypatch.setattr(Named, "_doubted", lambda self, search: None)
    assert policy._next_faster(search, None) is other
    policy._knows_fastest = True
    assert (policy._next_faster(search, None) is other) == is_worth


def test_an_interrupt_before_the_first_compile_leaves_a_plan_by_estimates(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    planted = NamedPlans(1, 0.1)
    monkeypatch.setattr(planted, "attempt", interrupted)
    found = planted.search()
    assert (found.status, found.compiled, found.why.proven.ended) == ("ok", False, "interrupted")
    assert "nothing that fits was compiled: this plan is estimated to take" in found.why.uncompiled


@pytest.mark.parametrize(("num_layers", "ratio"), [(2, 1.0), (99, 2.0)])
def test_what_stages_of_one_size_take_beyond_their_estimate_is_no_doubt_of_another(
    num_layers, ratio
):
    """A small model's plan of other micro-batches is compiled, although those of the compiled size
    take twice what was expected; what takes a minute to compile is expected to be as slow."""
    choice, asked = StageChoice(), {}

    class Size(SimpleNamespace):
        def once(self, function, *given):
            if function is speed.slowness:
                return {choice: 2.0} if self.size == 8 else {}
            if function is estimates._ratios:
                return function(self, *given)
            asked[self.size] = given[0]
            return []

    known = SimpleNamespace(choices=[choice], graph=SimpleNamespace(num_layers=num_layers))
    parts = [Size(size=size, is_plain=False, known=known) for size in (8, 4)]
    proof = SimpleNamespace(step_seconds=1.0)
    found = SimpleNamespace(answer=SimpleNamespace(proof=proof))
    search = SimpleNamespace(fitting=[found], plain_parts=parts, parts=dict(enumerate(parts)))
    assert Named()._doubted(search) is None
    assert asked == {8: ((2.0,),), 4: ((ratio,),)}


def test_other_names_come_before_many_plans_that_are_not_faster(monkeypatch):
    """Here nothing is learned of estimates that are too low, so that every plan seems faster."""
    monkeypatch.setattr(Named, "first", lambda self, search, found: ())
    monkeypatch.setattr(named, "slowness", lambda part: {})
    monkeypatch.setattr(speed, "slowness", lambda part: {})
    found = {}
    for patience, most in ((1, 99), (99, 99), (1, 3)):
        monkeypatch.setattr(named, "PATIENCE", patience)
        monkeypatch.setattr(named, "MOST_MISSED", most)
        monkeypatch.setattr(named, "SMALL_TRIES", 1)
        planted, numbers = NamedPlans(1, 0.5), []
        look_for = Named._named

        def counted(self, search, name, look_for=look_for, numbers=numbers):
            if name in self._asked:
                numbers.append(len(search.compiled))
            return look_for(self, search, name)

        with monkeypatch.context() as patched:
            patched.setattr(Named, "_named", counted)
            answer = planted.search(Effort(within_fraction=0.05, at_once=1))
        seconds = [value for _, value in planted.values(planted.compiler.compiled)]
        assert (answer.why.proven.ended == "missed") == (most == 3)
        assert answer.why.verified.settled == (most != 3), "some are still expected to be faster"
        found[patience, most] = numbers[0], seconds, answer.proof.step_seconds
    soon, late, few = found.values()
    assert soon[0] < late[0] and soon[0] < len(soon[1])
    assert soon[2] == late[2], "what may be faster is looked at all the same"
    assert few[1] == soon[1][: len(few[1])]
    assert few[1].index(min(few[1])) == len(few[1]) - 1 - 3 < len(soon[1]) - 1 - 3


def test_of_a_small_model_more_plans_are_tried(monkeypatch):
    """Its stages compile in seconds, and estimates of latencies are rough."""
    monkeypatch.setattr(Named, "first", lambda self, search, found: ())
    monkeypatch.setattr(named, "slowness", lambda part: {})
    monkeypatch.setattr(speed, "slowness", lambda part: {})
    monkeypatch.setattr(named, "MOST_MISSED", 2)
    missed = []
    for few_layers in (0, 99):
        monkeypatch.setattr(named, "FEW_LAYERS", few_layers)
        planted = NamedPlans(1, 0.5)
        planted.search(Effort(within_fraction=0.05, at_once=1))
        seconds = [value for _, value in planted.values(planted.compiler.compiled)]
        missed.append(len(seconds) - 1 - seconds.index(min(seconds)))
    assert missed[0] < missed[1]


def to_look_at(configs, seconds, num_windows=0, **known):
    """A plan of stages, of which so many windows may be compiled alone, and a search that has a
    plan that fits."""
    part = SimpleNamespace(
        known=SimpleNamespace(verified={}),
        expected=SimpleNamespace(microbatch_seconds=seconds.__getitem__),
        windows=lambda choices: configs[:1] * num_windows * len(choices),
        rehearsed=set(),
        is_plain=True,
    )
    found = SimpleNamespace(part=part, configs=configs, answer=SimpleNamespace(headroom=None))
    effort = Effort(within_fraction=0.05, at_once=2, **known)
    large = SimpleNamespace(known=SimpleNamespace(graph=SimpleNamespace(num_layers=99)))
    return found, SimpleNamespace(fitting=[object()], effort=effort, parts={0: large})


def test_the_slowest_stages_of_a_plan_are_compiled_first():
    """Where they show that it is not faster, its others are not compiled."""
    kinds = [StageChoice(1, 2), StageChoice(2, 1), StageChoice(1, 2, "full")]
    configs = [StageConfig(n, n + 1, kinds[n % 3], 8) for n in range(5)]
    seconds = dict(zip(configs, (1.0, 4.0, 3.0, 2.0, 5.0), strict=True))
    found, search = to_look_at(configs, seconds)
    known, policy = found.part.known, Named()
    assert policy.first(search, found).configs == [configs[4], configs[2]], "of two choices"
    known.verified = dict.fromkeys(configs[:2])
    assert policy.first(search, found).configs == [configs[4], configs[2]]
    seconds[configs[3]] = seconds[configs[0]] = 9.0
    known.verified = dict.fromkeys(configs[1:3])
    assert policy.first(search, found) is None, "two of the same choice are one program"
    known.verified = {}
    policy._names[KNEE] = found
    assert policy.first(search, found) is None, "it is compiled whatever it takes"
    del policy._names[KNEE]
    search.fitting = []
    assert policy.first(search, found) is None, "there is nothing to be faster than"
    for asked in ({"within_fraction": 0.0}, {"compiles": 3}):
        search = SimpleNamespace(fitting=[object()], effort=replace(Effort(0.05), **asked))
        assert policy.first(search, found) is None


def test_layers_alone_are_compiled_before_a_long_stage():
    choice, mixture = StageChoice(1, 2, "full"), StageChoice(1, 2, "full:9")
    stage = StageConfig(0, 24, mixture, 8)
    found, search = to_look_at([stage], {stage: 1.0})
    assert Named().first(search, found) is None, "no layer is there often"
    found.part.windows = lambda choices: [StageConfig(1, 3, each, 8) for each in choices]
    assert Named().first(search, found).windows == {*mixture.measured}
    search.parts[0].known.graph.num_layers = named.FEW_LAYERS
    assert Named().first(search, found) is None, "the model is small"
    search.parts[0].known.graph.num_layers += 1
    found.part.rehearsed = {*mixture.measured}
    assert Named().first(search, found) is None, "they were asked for"
    found.configs[:] = [StageConfig(0, 3, choice, 8)]
    found.part.rehearsed = set()
    found.part.windows = lambda choices: [
        StageConfig(1, 2, choice, 8),
        StageConfig(1, 3, choice, 8),
    ]
    found.part.expected.microbatch_seconds = lambda config: 1.0
    assert Named().first(search, found) is None, "they are no less than the stage"


def test_what_layers_take_alone_is_what_stages_like_them_are_expected_to_take(monkeypatch):
    monkeypatch.setattr(parts, "_OFTEN", 2)
    planted, one = NamedPlans(0, 0.0), StageChoice(1, 2)
    most = planted.bounds("most")
    of = {
        c: most.measurements[replace(c, first=1, stop=1 + c.num_layers)]
        for c in most.measurements
        if c.first > 0 and c.stop < most.graph.num_layers
    }
    most = replace(most, measurements={**most.measurements, **of})  # inner layers are alike
    part = OpenPart(replace(QUESTION, objective="throughput"), Bounds(planted.least, most))
    windows = part.windows([one])
    assert [(each.num_layers, each.choice) for each in windows] == [(1, one), (2, one)]
    assert part.once(estimates.slowness) == {}

    def compiled(config):
        cost = most.measurements[config]
        works = ("forward_work", "backward_work")
        twice = {w: replace(getattr(cost, w), flops=2 * getattr(cost, w).flops) for w in works}
        return replace(cost, **twice)

    part.rehearse([one], {each: compiled(each) for each in windows})
    assert part.once(estimates.slowness) == {one: pytest.approx(2, rel=0.1)}
    part.learn(replace(planted.all, verified=dict(planted.all.verified)))
    exact = part.once(estimates.slowness)
    part.rehearse([one], {})
    assert part.once(estimates.slowness) == exact, "stages say more than layers"


def test_beside_a_plan_that_may_not_fit_one_is_compiled_that_does(monkeypatch):
    """Where the first does not fit, a plan that does is known soon all the same."""

    def found(seconds, verdict):
        answer = SimpleNamespace(
            headroom=SimpleNamespace(verdict=verdict), proof=SimpleNamespace(step_seconds=seconds)
        )
        return SimpleNamespace(answer=answer, configs=[])

    risky, sure, slower, lowest = map(
        found, (1.0, 2.0, 3.0, 9.0), ("does not fit", "fits", "may not fit", "fits")
    )
    parts = [
        SimpleNamespace(once=lambda function, ratios, is_last, of=of: [of if is_last else risky])
        for of in (slower, sure, risky)
    ]
    search = SimpleNamespace(
        plain_parts=parts, fitting=[], compiled=[], is_asked=lambda each: each is risky
    )
    monkeypatch.setattr(Named, "_points", lambda self, search: [risky])
    monkeypatch.setattr(Named, "ratios", lambda self, search, part: ())
    monkeypatch.setattr(Named, "_named", lambda self, search, name: lowest)
    monkeypatch.setattr(Named, "_has_missed", lambda self, search: False)
    monkeypatch.setattr(Named, "_of_compiled_stages", lambda self, search: None)
    monkeypatch.setattr(Named, "_faster", lambda self, search, look: risky)
    policy = Named()
    assert policy.beside(search) is sure
    assert policy._next_faster(search, None) is risky, "it is the first"
    search.compiled = [risky]
    assert policy._next_faster(search, None) is sure
    search.fitting = [sure]
    assert policy._next_faster(search, None) is risky and policy.beside(search) is lowest
    search.fitting, risky.answer.headroom.verdict = [], "fits"
    assert policy.beside(search) is lowest, "the first is expected to fit"


def test_a_plan_that_its_first_stages_rule_out_is_a_miss():
    search = Search(Named(), [], None, Effort(), lambda bracket: None)
    best, worse = (SimpleNamespace(configs=[n], answer=SimpleNamespace()) for n in range(2))
    search.compiled = [worse, best]
    search._begun = {"before": (1, 1.0), "first": (2, 1.0), "layers": (2, 0.5), "last": (2, 1.0)}
    assert search.num_missed(best) == 1.5, "neither what was before the best one, nor the last"
    assert search.num_missed(None) == 4.5
    search._asked["first"] = worse
    assert search.num_missed(best) == 0.5, "it was compiled: not counted twice"


def test_estimates_with_other_ratios_share_their_bytes():
    """These are most of what a search of a deep model keeps in memory."""
    planted = NamedPlans(0, 0.0)
    part = OpenPart(replace(QUESTION, objective="throughput"), Bounds(planted.least, planted.all))
    compiled = dict(islice(planted.all.verified.items(), 0, None, 3))
    part.known = replace(part.known, verified=compiled)
    once, twice = (
        part.once(
            estimates.estimates,
            tuple(tuple(factor for _ in of) for of in part.once(posed).choices.values()),
        )
        for factor in (1.0, 2.0)
    )
    own = TimePredictor(part.most, Layout(2))
    for d, choices in once.choices.items():
        assert once.cost[d] is twice.cost[d]
        for c, choice in enumerate(choices):
            for first, stop in ((0, 1), (1, 3), (2, 4)):
                kind = once.kinds[first, stop]
                more = own.table(choice, part.size).at(first, stop).microbatch_seconds
                if StageConfig(first, stop, choice, part.size) in compiled:
                    more = 0.0
                found = twice.seconds[d][c, kind] - once.seconds[d][c, kind]
                assert found == pytest.approx(more), "what is sent, and compiled, is no ratio"


def test_a_part_is_hoped_to_take_what_it_took_when_it_was_last_looked_for():
    policy, search = Timed(), SimpleNamespace(plain_parts=[])
    asked = replace(QUESTION, schedule="zb-h1", num_microbatches=4)
    parts = [
        Part(asked, lambda: None, least_bytes, expected_seconds=seconds)
        for least_bytes, seconds in enumerate((1.0, 1.0, 2.0))
    ]
    known = policy._beyond[1, True]
    known[parts[0]] = 1.5, True
    assert policy.hoped(search, parts[0]) == 1.5
    assert policy.hoped(search, parts[2]) == 2 * 1.25
    known[parts[1]] = 3.0, False
    assert policy.hoped(search, parts[1]) == 3.0, "and not what the best one of its schedule did"
    assert policy.hoped(search, parts[2]) == 2 * 1.375


@pytest.mark.parametrize("looks", [True, False])
def test_no_plan_of_compiled_stages_is_faster_than_the_answer(monkeypatch, looks):
    """However wrong estimates are, here too high for all that is not compiled; every third stage is,
    as by an earlier question."""

    class Earlier(NamedPlans):
        def attempt(self, plan, known):
            said, known = super().attempt(plan, known)
            others = dict(islice(self.all.verified.items(), self.seed % 3, None, 3))
            return said, replace(known, verified={**known.verified, **others})

    def one(self, search, look):
        return None if search.fitting else Timed.next(self, search, look)

    monkeypatch.setattr(Named, "_faster", one)
    monkeypatch.setattr(Named, "_named", lambda self, _, name: self._names.setdefault(name, None))
    if not looks:
        monkeypatch.setattr(Named, "_of_compiled_stages", lambda self, search: None)
    slower = []
    for seed in range(4):
        planted = Earlier(seed, 0.5)
        answer = planted.search(Effort(within_fraction=0.05, at_once=1))
        (first, *_), problem = (
            planted.compiler.compiled,
            search_problem(planted.all, QUESTION, with_times=True),
        )
        _, known = planted.attempt(first, planted.least)
        compiled = {(each.first, each.stop, each.choice) for each in known.verified}
        of_compiled = [
            planted.value(place(cuts, choices))[1]
            for cuts in every_plan(problem)
            for choices in product(*(problem.choices[d] for *_, d in cuts))
            if {(i, j, c) for (i, j, _), c in zip(cuts, choices, strict=True)} <= compiled
        ]
        slower.append(answer.proof.step_seconds > min(of_compiled) * (1 + ROUNDING))
    assert any(slower) != looks


def test_after_misses_a_plan_of_another_shape_is_next():
    """Of other micro-batches or stages than what was compiled since the fastest plan."""

    def found(part, stages, seconds):
        proof = SimpleNamespace(step_seconds=seconds)
        configs = [object() for _ in range(stages)]
        return SimpleNamespace(part=part, configs=configs, answer=SimpleNamespace(proof=proof))

    class Size(SimpleNamespace):
        def once(self, function, *given):
            of = {speed.slowness: {}, estimates._ratios: ((1.0,),)}
            return of.get(function, self.proposed)

    known = SimpleNamespace(choices=[StageChoice()], graph=SimpleNamespace(num_layers=99))
    parts = [
        Size(size=n, is_plain=False, known=known, question=SimpleNamespace(num_microbatches=n))
        for n in (8, 2, 1)
    ]
    for part, (stages, seconds) in zip(parts, [(4, 0.5), (2, 0.7), (1, 0.8)], strict=True):
        part.proposed = [found(part, stages, seconds)]
    fastest, *missed = (found(parts[0], 4, seconds) for seconds in (0.9, 1.5, 1.5))
    search = SimpleNamespace(
        parts=dict(enumerate(parts)),
        compiled=[found(parts[1], 2, 0.95), fastest, *missed],
        fitting=[fastest],
        is_asked=lambda each: False,
        num_missed=lambda best: num_missed(search.compiled, best),
    )
    other = parts[1].proposed[0]
    assert Named()._of_another_shape(search, 0.9) is other
    assert Named()._of_another_shape(search, 0.6) is None
    search.is_asked = lambda each: each is other
    assert Named()._of_another_shape(search, 0.9) is parts[2].proposed[0]
    missed[1].configs = [*missed[0].configs[:2], *fastest.configs[:2]]
    assert Named()._of_another_shape(search, 0.9) is None, "nothing was compiled for the second"
    search.compiled.pop()
    assert Named()._of_another_shape(search, 0.9) is None, "one may be chance"


@pytest.mark.parametrize(("slowness", "goes_on"), [(1.0, True), (9.0, False)])
def test_a_plan_that_its_layers_do_not_rule_out_is_compiled_next(slowness, goes_on):
    """Whatever others, of which no layer is compiled, seem to take."""
    planted = NamedPlans(0, 0.0)
    bounds = Bounds(planted.least, planted.bounds("most"))
    part = OpenPart(replace(QUESTION, objective="throughput"), bounds)
    policy = Named()
    search = SimpleNamespace(
        fitting=[], parts={0: part}, effort=Effort(within_fraction=0.05), is_asked=lambda e: False
    )
    problem = part.once(estimates.estimates, policy.ratios(search, part))
    only = named._only(problem, problem.choices[2][0], problem.limit_bytes)
    plan = Found(part, lowest_peak.expected(part, named.throughput(only)))
    best = replace(plan.answer.proof, step_seconds=2 * speed.seconds_of(plan))
    search.fitting = [plan._replace(answer=replace(plan.answer, proof=best))]
    choices = {config.choice for config in plan.configs}
    assert len(choices) == 1
    policy._rehearsed = plan
    part.once = lambda of, *given, once=part.once: (
        dict.fromkeys(choices, slowness) if of is estimates.slowness else once(of, *given)
    )
    found = policy._after_layers(search)
    assert (found is not None) == goes_on
    assert policy._after_layers(search) is None, "once"
