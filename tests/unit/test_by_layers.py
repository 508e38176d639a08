"""What layers that are compiled one by one say of the fastest plan, with a planted compiler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from report_plans import with_work
from test_fastest_bounds import EXPECTED, QUESTION, Timed

from capture.measured.bounds import Bounds
from capture.measured.profile import StageConfig
from capture.plan.choices import StageChoice
from recommender.capture.by_layers import LayerProof, _Ratios
from recommender.capture.effort import Effort
from recommender.capture.parts import OpenPart
from recommender.capture.posed import search_problem
from recommender.capture.problem import together

#: By tensor parallelism, what programs take over what they are expected to.
OVER = {1: 0.9, 2: 1.3}


class Layered(Timed):
    """A compiler of programs that take ``OVER``; ``refuses`` those of layers alone."""

    refuses = False

    def __init__(self, seed: int):
        super().__init__(seed, spread=0.0)
        self.asked = list[StageConfig]()

    def cost(self, config):
        noise = 1 + self.spread * np.random.default_rng([config.first, config.stop]).uniform()
        slowness = 3 * OVER[config.choice.tensor_parallel] * noise
        return with_work(config, self.compiler.cost(config), slowness)

    def bounds(self, name: str):
        found = super().bounds(name)
        if name == "least":
            return found
        costs = found.measurements.items()
        return replace(found, measurements={c: with_work(c, cost, 3) for c, cost in costs})

    def probe(self, configs, known):
        self.asked += configs
        costs = {} if self.refuses else {config: self.cost(config) for config in configs}
        return len(configs), replace(known, verified={**known.verified, **costs})


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_faster_than_compiled_layers_say(seed):
    """Here every kind of layer takes what one of it does, so that it holds exactly; and it says
    more than tracing."""
    planted = Layered(seed)
    proven = planted.search(EXPECTED).why.proven
    said, traced = proven.by_layers, proven.trail[-1].least_step_seconds
    assert traced < said.least_step_seconds <= planted.fastest() * (1 + 1e-9)
    assert said.num_layers == len(planted.asked) and {c.num_layers for c in planted.asked} <= {1}
    assert said.error_fraction == pytest.approx(1 / 0.9 - 1)


def test_layers_are_compiled_of_what_may_be_faster_and_is_not_known():
    planted = Layered(3)
    planted.search(EXPECTED)
    stages = planted.compiler.compiled
    known = {stage.choice.tensor_parallel for plan in stages for stage in plan.stages}
    asked = {config.choice.tensor_parallel for config in planted.asked}
    assert asked and not asked & known


def test_layers_that_are_begun_ahead_are_those_that_are_asked_for_first(monkeypatch):
    planted, begun, run = Layered(3), [], LayerProof.run

    def spied(proof):
        begun.extend(LayerProof(proof._search, proof._problems, proof._enough).ahead())
        return run(proof)

    monkeypatch.setattr(LayerProof, "run", spied)
    planted.search(EXPECTED)
    assert begun and [*begun[0]] == planted.asked[: len(begun[0])]


def test_a_round_that_leaves_workers_idle_begins_the_next(monkeypatch):
    """What is looked for ahead changes nothing of what is known."""
    first, second = (StageConfig(n, n + 1, StageChoice(tensor_parallel=n), 16) for n in (1, 2))
    search, begun, compiled = SimpleNamespace(is_spent=False), [], []
    search.begin, search.effort = begun.append, Effort(at_once=2)
    proof = LayerProof(search, None, 1.0)

    def following(self):
        known = [self._ratios.is_known(each) for each in (first, second)]
        return None if all(known) else (None, [second if known[0] else first])

    def learn(self, part, layers):
        assert not self._ratios.is_known(*layers)
        compiled.extend(layers)
        self._ratios.assume(layers)

    monkeypatch.setattr(LayerProof, "_next", following)
    monkeypatch.setattr(LayerProof, "_compile", learn)
    monkeypatch.setattr(LayerProof, "_open_all", lambda self: None)
    monkeypatch.setattr(LayerProof, "_learn_verified", lambda self: None)
    monkeypatch.setattr(LayerProof, "_floors", lambda self: iter(()))
    monkeypatch.setattr(LayerProof, "_plain", [0])
    monkeypatch.setattr(LayerProof, "_bound", lambda self, number: 0.0)
    proof.run()
    assert compiled == [first, second] and begun == [[first, second], [second]]


def test_layers_that_do_not_compile_say_nothing():
    planted = Layered(3)
    planted.refuses = True
    assert planted.search(EXPECTED).why.proven.by_layers is None and planted.asked


def test_no_stage_that_was_compiled_is_faster_than_its_kind_says():
    """Whatever each takes over what is expected."""
    planted = Layered(0)
    planted.spread = 0.5
    part = OpenPart(QUESTION, Bounds(planted.least, planted.bounds("most")))
    problem = search_problem(part.known, QUESTION, with_times=True)
    expected = search_problem(part.most, QUESTION, with_times=True)
    problem, expected = together(problem, expected)
    ratios, real = _Ratios(), {config: planted.cost(config) for config in planted.all.measurements}
    ratios.learn(part, real)
    known, nearer = ratios.applied(part, problem, expected).seconds, 0
    for config, cost in real.items():
        d, kind = config.choice.num_devices, problem.kinds[config.first, config.stop]
        row = problem.choices[d].index(config.choice), kind
        seconds = part.expected.model.stage_times(cost).microbatch_seconds
        assert problem.seconds[d][row] <= known[d][row] <= seconds * (1 + 1e-9)
        nearer += known[d][row] > problem.seconds[d][row]
    assert nearer > len(real) / 2


def test_a_kind_has_the_ratio_of_as_many_examples_or_the_least_known():
    """A small layer compiles to less of what is expected than a large one."""
    ratios, choice = _Ratios(), StageChoice(2, 1, "dots")
    small, large = (StageConfig(0, 1, choice, 2 * size) for size in (1, 16))
    ratios._note(large, 1.0)
    assert ratios.is_known(large) and not ratios.is_known(small)
    assert ratios._of(choice, 2) == 1.0, "nothing nearer is known"
    ratios._note(small, 0.7)
    assert [ratios._of(choice, 2 * size) for size in (1, 4, 16)] == [0.7, 0.7, 1.0]
    other = replace(choice, data_parallel=4)
    assert ratios._of(other, 64) == 1.0 and ratios._of(replace(choice, remat="none"), 2) == 0.0
    assert ratios.error == pytest.approx(1 / 0.7 - 1)


def test_what_tracing_proves_needs_no_layers():
    planted = Layered(0)
    proven = planted.search(Effort(within_fraction=10.0)).why.proven
    assert proven.by_layers is None and not planted.asked


def test_the_answer_says_which_proof_is_which():
    found = Layered(1).search(EXPECTED)
    said, seconds = found.why.proven.by_layers, found.proof.step_seconds
    assert not said.num_layers
    within = (
        f"by estimates no plan that fits is faster by more than {said.within_fraction(seconds):.1%}"
    )
    assert within in found.why.summary and "by a bound that leaves transfers out" in (
        found.why.summary
    )
    written = found.why.to_json()["proven"]["by_layers"]
    assert written["num_layers"] == said.num_layers


def test_an_interrupt_before_anything_is_known_says_nothing(monkeypatch):
    monkeypatch.setattr(LayerProof, "_next", interrupted)
    found = Layered(3).search(EXPECTED)
    assert found.status == "ok" and found.why.proven.by_layers is None
    assert "by estimates" not in found.why.summary


def interrupted(self):
    raise KeyboardInterrupt
