"""Kinds of plan compete: which outcome wins, what it says of the others, and when others are asked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from capture.cli.compete import compete
from capture.cli.options import Asks
from capture.cli.output import SearchEnd
from capture.errors import PlanError
from capture.options import Option
from capture.plan.why import Why
from recommender.answer import Answer

NOTHING = Why()
SHARED = (
    Option("cluster", "devices", "1x1"),
    Option("target", "kind"),
    Option("memory", "limit"),
    Option("host_memory", "host"),
    Option("quiet", "say nothing", False),
    Option("quick", "no compiler", False),
    Option("compiles", "at most", None, int),
    Option("global_batch", "examples", 256, int),
    Option("output", "file", Path("plan.json"), Path),
)
READ = {
    "capture": (*SHARED, Option("schedule", "of pipelines"), Option("seconds", "to search"),
                Option("objective", "what is searched")),
    "harmony": SHARED,
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    why: Why = NOTHING
    plan: object = None
    written: dict = field(default_factory=dict)


@dataclass(frozen=True)
class FakePlan:
    name: str
    compiled: bool = True
    why: Why = NOTHING

    def to_json(self):
        return {"name": self.name, "why": self.why.summary}

    def save(self, path):
        path.write_text(self.name)


def outcome(name, seconds=None, *, fits=True, compiled=True, **why):
    plan = FakePlan(name, compiled)
    said = Why(f"{name}'s own reason.", **why)
    answer = Answer("ok" if fits else "infeasible", plan, SimpleNamespace(), said)
    return SearchEnd(Report(said, plan), [name], int(not fits), answer, seconds)


def asked(rival, first, *typed):
    parser = argparse.ArgumentParser()
    for option in {o.name: o for options in READ.values() for o in options}.values():
        option.add_to(parser)
    given = ["--cluster", "1x2", "--target", "h100", "--host-memory", "1000000000000", "--quiet"]
    options = parser.parse_args([*given, *typed])
    options.parser, options.host_memory = parser, int(options.host_memory or 0) or None
    calls = []

    def searched(own, seconds):
        calls.append((own.system, seconds))
        if isinstance(rival, BaseException):
            raise rival
        return rival

    every = {
        "capture": Asks("", "stages", (), None),
        "harmony": Asks("", "packs", (), None, rival=searched),
    }
    return compete(options, first, every, READ), calls


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_faster_plan_wins_and_says_what_the_other_gives():
    stages, packs = outcome("stages", 2.0, endless_step_seconds=1.5), outcome("packs", 1.0)
    found, calls = asked(packs, stages)
    assert calls == [("harmony", 2.0)]
    assert found.answer.plan.name == "packs" and found.exit_code == 0
    assert found.answer.why.summary == "packs's own reason. Stages: 2.00 x slower (2 s)."
    # What is saved and printed as JSON says so, too.
    assert found.answer.plan.why == found.answer.why == found.report.why
    assert found.report.plan["why"] == found.answer.why.summary
    assert found.lines == ["packs", "Stages: 2.00 x slower (2 s)."]
    # Nothing is lost.
    assert found.report.written == {"plan of --system capture": "plan-capture.json"}
    assert Path("plan-capture.json").read_text() == "stages"
    Path("plan-capture.json").unlink()

    found, _ = asked(outcome("packs", 3.0, compiled=False), stages)
    assert found.answer.plan.name == "stages"
    assert found.answer.why.summary.endswith("Packs: 1.50 x slower (3 s, not compiled).")
    assert not found.report.written and not Path("plan-capture.json").exists()


def test_where_stages_do_not_fit_packs_are_the_answer():
    change = replace(outcome("stages", fits=False, code="memory-limit"), change=lambda: None)
    found, calls = asked(outcome("packs", 5.0), change)
    assert calls == [("harmony", float("inf"))]
    assert (found.answer.plan.name, found.exit_code, found.change) == ("packs", 0, None)
    assert found.lines[-1] == "Stages: none fits: stages's own reason."
    assert not found.report.written and not list(Path().iterdir())

    # Nor do packs: then the change of the stages is looked for.
    found, _ = asked(outcome("packs", 5.0, fits=False), change)
    assert (found.answer.plan.name, found.exit_code) == ("stages", 1) and found.change is not None
    assert found.lines[-1] == "Packs: none fits: packs's own reason."


def test_a_plan_that_is_not_compiled_beats_none_that_is():
    stages = outcome("stages", 2.0, endless_step_seconds=1.5)
    found, _ = asked(outcome("packs", 1.0, compiled=False), stages)
    assert found.answer.plan.name == "stages"
    both = outcome("stages", 2.0, compiled=False, endless_step_seconds=1.5)
    found, _ = asked(outcome("packs", 1.0, compiled=False), both)
    assert found.answer.plan.name == "packs"
    # A plan that was to be compiled and was not is no plan that fits.
    found, calls = asked(outcome("packs", 9.0), replace(both, exit_code=1))
    assert (found.answer.plan.name, calls) == ("packs", [("harmony", float("inf"))])


@pytest.mark.parametrize(
    "first",
    [
        outcome("stages", 2.0),
        outcome("stages", 2.0, endless_step_seconds=1.9),
        outcome("stages", fits=False, code="devices-unfillable"),
        replace(outcome("stages", 2.0, endless_step_seconds=1.5), exit_code=130),
        SearchEnd(Report(), ["several targets"], 0),
    ],
)
def test_others_are_asked_only_where_memory_binds(first):
    found, calls = asked(outcome("packs", 1.0), first)
    assert found is first and not calls


def test_options_of_one_kind_narrow_the_question_to_it():
    stages, packs = outcome("stages", 2.0, endless_step_seconds=1.5), outcome("packs", 1.0)
    for typed in (["--schedule", "1f1b"], ["--objective", "memory"]):
        found, calls = asked(packs, stages, *typed)
        assert not calls and found is stages
    for typed in (["--seconds", "60"], ["--objective", "throughput"]):
        assert asked(packs, stages, *typed)[1], typed


def test_a_kind_that_is_left_out_says_why():
    stages = outcome("stages", fits=False, code="memory-limit")
    found, calls = asked(None, stages, "--cluster", "2x4")
    assert not calls and found.lines[-1] == "Packs: they are of one host, and 2x4 has 2."
    found, calls = asked(None, stages, "--host-memory", "0")
    assert not calls and "say --host-memory, such as --host-memory 1TB." in found.lines[-1]
    fits = outcome("stages", 2.0, endless_step_seconds=1.5)
    found, calls = asked(None, fits, "--host-memory", "0")
    assert not calls and found.lines == ["stages"], "its own reason says so"
    for flag in ("--quick", "--compiles=0"):
        found, calls = asked(None, stages, flag)
        assert not calls and found.lines[-1].startswith(
            "Packs: their layers are compiled, which --"
        )
    found, _ = asked(PlanError.of("nobody knows.", "packs-none"), stages)
    assert found.exit_code == 1 and "nobody knows." in found.lines[-1]


def test_a_plan_beside_that_cannot_be_saved_loses_no_answer():
    Path("plan-capture.json").mkdir()
    stages = outcome("stages", 2.0, endless_step_seconds=1.5)
    found, _ = asked(outcome("packs", 1.0), stages)
    assert found.answer.plan.name == "packs"
    assert "not saved" in found.report.written["plan of --system capture"]


def test_a_plan_that_is_shown_and_does_not_fit_is_none():
    shown = replace(outcome("stages", 2.0), exit_code=1)
    found, calls = asked(outcome("packs", 9.0), shown)
    assert (found.answer.plan.name, calls) == ("packs", [("harmony", float("inf"))])


def test_an_interrupt_of_another_search_keeps_what_is_known():
    stages = outcome("stages", 2.0, endless_step_seconds=1.5)
    found, _ = asked(KeyboardInterrupt(), stages)
    assert (found.answer.plan.name, found.exit_code) == ("stages", 130)
    assert not found.report.written, "it is the answer"
    none = replace(outcome("stages", fits=False, code="memory-limit"), change=lambda: None)
    ended, _ = asked(KeyboardInterrupt(), none)
    assert (ended.exit_code, ended.change) == (130, None), "nothing more is searched"
    assert "Packs: not known, as the search was interrupted." in found.answer.why.summary
