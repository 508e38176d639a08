"""Plans of packs that are compiled when they are made: what the compiler says counts, where layers
alone say too little and where they say too much. The compiler here is a function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capture.errors import ProfileError
from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.packs import PacksPlan, StepBytes
from recommender.harmony import PacksQuestion, harmony
from recommender.harmony.within import host_bytes

PROFILES = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles"
LIMIT = 2_200_000_000


class CompilerThatSays:
    """That packs need a factor of what layers alone say.

    Attributes:
        then: The factor of all packs but the first that are compiled.
        asked: Peaks of what was compiled, as predicted.
    """

    def __init__(self, factor: float, host: float = 1.0, then: float | None = None):
        self.factor, self.host, self.then, self.asked = factor, host, then, []

    def __call__(self, plan: PacksPlan) -> PacksPlan:
        step = plan.prediction.step
        factor = self.then if self.asked and self.then else self.factor
        self.asked.append(max(step.device_peak_bytes))
        peaks = tuple(int(peak * factor) for peak in step.device_peak_bytes)
        compiled = StepBytes(peaks, {}, int(step.host_peak_bytes * self.host), {})
        return replace(plan, prediction=replace(plan.prediction, compiled=compiled))


def question(limit: int = LIMIT, name: str = "toy6", **changes) -> PacksQuestion:
    server = Server.load("gtx1080ti-x4").with_(num_devices=2, usable_bytes=limit)
    profile = LayerProfile.load(PROFILES / f"{name}.json")
    # As of a model that was traced.
    return PacksQuestion(replace(profile, model_hashes={20: "one"}), server, 20, **changes)


def test_what_is_answered_is_compiled():
    compiler = CompilerThatSays(1.0)
    answer, estimate = harmony(question(), compiler), harmony(question())
    assert answer.plan == estimate.plan and len(compiler.asked) == 1
    assert answer.compiled and not estimate.compiled
    assert answer.headroom.verdict == "fits" and answer.headroom.coverage == 1
    assert estimate.headroom.verdict == "fits by extrapolation"


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [("bounded", 1.02), ("bounded", 1.3), ("bounded", 1.8), ("paper", 1.3), ("wide", 1.02)],
)
def test_no_answer_is_above_its_limit(algorithm, factor):
    asked = question(3 * LIMIT, algorithm=algorithm)
    low = max(harmony(asked).plan.prediction.step.device_peak_bytes)
    asked = question(int(1.01 * low), algorithm=algorithm)
    answer = harmony(asked, CompilerThatSays(factor))
    if answer.plan is None:
        assert answer.why.least_peak_bytes > asked.limit_bytes
        return
    assert answer.compiled and answer.peak_bytes <= asked.limit_bytes
    assert answer.peak_bytes == answer.headroom.peak_bytes


def test_what_layers_alone_refuse_is_compiled_where_nothing_else_is_found():
    limit = 1_300_000_000
    estimate = harmony(question(limit))
    least = estimate.why.least_peak_bytes
    assert estimate.status == "infeasible" and least > limit
    said = f"Cheapest change: a limit of {least} bytes per device by estimate"
    assert said in estimate.why.summary
    answer = harmony(question(limit), CompilerThatSays(limit / least))
    assert answer.status == "ok" and answer.peak_bytes <= limit
    compiler = CompilerThatSays(1.1 * limit / least)
    answer = harmony(question(limit), compiler)
    (estimated,) = compiler.asked
    assert (answer.status, answer.why.code) == ("infeasible", "packs-none")
    assert answer.why.least_peak_bytes == int(estimated * compiler.factor) > limit
    assert "by estimate" not in answer.why.summary


def test_a_faster_plan_that_layers_alone_refuse_is_compiled():
    limit, compiler = 1_600_000_000, CompilerThatSays(0.9)
    slower, faster = harmony(question(limit)), harmony(question(limit), compiler)
    assert max(faster.plan.prediction.step.device_peak_bytes) > limit >= faster.peak_bytes
    assert faster.proof.best.seconds < slower.proof.best.seconds and len(compiler.asked) == 2
    # It may compile to more than the other one let expect: then it is not taken.
    compiler = CompilerThatSays(0.9, then=1.1)
    within = harmony(question(limit), compiler)
    assert within.plan.configuration == slower.plan.configuration
    assert within.peak_bytes <= limit < min(compiler.asked[1:])
    # Were it as far above as the other, it would not fit.
    compiler = CompilerThatSays(0.999)
    assert harmony(question(limit), compiler).plan == slower.plan and len(compiler.asked) == 1


def test_a_compiler_that_refuses_leaves_an_estimate():
    def refuses(plan: PacksPlan) -> PacksPlan:
        raise ProfileError.of("program 'x' does not compile.", "packs-compile")

    answer = harmony(question(), refuses)
    assert answer.status == "ok" and not answer.compiled
    assert answer.why.uncompiled == answer.plan.why.uncompiled
    assert "does not compile" in answer.why.uncompiled
    with pytest.raises(ZeroDivisionError):
        harmony(question(), lambda plan: 1 // 0)


def test_the_host_is_held_to_what_is_compiled():
    need = host_bytes(harmony(question()).plan)
    asked = question()
    asked = replace(asked, server=asked.server.with_(host_memory_bytes=need))
    assert harmony(asked, CompilerThatSays(1.0)).status == "ok"
    answer = harmony(asked, CompilerThatSays(1.0, host=1.001))
    assert (answer.status, answer.why.code) == ("infeasible", "packs-host")
