"""``capture plan --fix``, and the plans of a front that one file has."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from capture.cli import bounds_first
from capture.cli.main import main
from capture.cli.output import other_plans
from capture.plan.kinds import load_plan
from capture.plan.schedule import SCHEDULES
from capture.plan.why import Front
from profiling_runs.verify import verify
from tests import user_models
from tests.planned_model import STORE

WORKLOAD = f"{user_models.__path__[0]}/tiny.py:model?layers=2"
OPEN = ["--cluster", "1x2", "--target", "h100", "--global-batch", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fixed")


@pytest.fixture
def asked(folder, monkeypatch, capsys):
    """Runs a verb in this process: exit code, document, and what was said on the way."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        code = main([*arguments, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


@pytest.fixture
def saved(asked, folder):
    """The answer of the open question, asked once."""
    if not (folder / "plan.json").exists():
        code, _, _ = asked("plan", WORKLOAD, *OPEN, *STORE)
        assert code == 0
    return load_plan("plan.json")


def test_every_plan_of_the_front_is_in_the_file(asked, saved):
    front = saved.why.front
    assert len(front.points) > 1 and "fastest" in front.names
    for name, point in front.names.items():
        code, document, _ = asked("report", f"plan.json:{name}", "-o", f"{name}.html")
        assert code == 0 and document["schedule"]["step_seconds"] == point.step_seconds
        code, document, _ = asked("verify", f"plan.json:{name}", *STORE)
        assert code == 0 and document["num_compiled"] == 0, "it was compiled already"
        assert max(document["peak_bytes_per_device"]) == point.peak_bytes
        assert document["time"]["step_seconds"] == pytest.approx(point.step_seconds)
    code, document, _ = asked("verify", "plan.json:nothing", *STORE)
    assert code == 2 and document["errors"][0]["code"] == "plan-front"
    assert document["errors"][0]["message"].endswith(f"it has {', '.join(front.names)}.")


def test_only_what_is_named_is_searched_again(asked, saved):
    kept = ("num_microbatches", "schedule", "cluster", "global_batch_size")
    code, document, said = asked("plan", WORKLOAD, "--fix", "plan.json", *STORE, "-o", "same.json")
    assert code == 0 and load_plan("same.json") == saved
    assert "searched or named: nothing" in said
    assert "stages, degrees, remat, sharding" in document["why"]["summary"]
    again = ["--fix", "plan.json", "--quick", "-o", "other.json", *STORE]
    code, *_ = asked("plan", WORKLOAD, *again, "--remat", "full")
    other = load_plan("other.json")
    assert code == 0 and all(getattr(saved, name) == getattr(other, name) for name in kept)
    assert [replace(s.choice, remat="") for s in other.stages] == [
        replace(s.choice, remat="") for s in saved.stages
    ]
    assert {stage.choice.remat for stage in other.stages} == {"full"}
    code, *_ = asked("plan", WORKLOAD, *again, "--microbatches", "2")
    other = load_plan("other.json")
    assert code == 0 and other.num_microbatches == 2 and other.stages == saved.stages


def test_what_has_to_be_searched_again_is_named(asked, saved, monkeypatch):
    """Of a planted space, in which other stages with other degrees alone are small."""

    def recommend(profile, question):
        fits = not {"stages", "degrees"} & {*question.fixed.decisions}
        return SimpleNamespace(status="ok" if fits else "infeasible", peak_bytes=7)

    monkeypatch.setattr("capture.cli.bounds_first.recommend", recommend)
    for more, named in (((), "leave out --fix"), (("--search", "stages"), "--search degrees")):
        limit = ["--memory", "20kB", *more, "-o", "other.json"]
        code, document, _ = asked("plan", WORKLOAD, "--fix", "plan.json", *limit, *STORE)
        change = document["cheapest_change"]
        assert (code, change["change"], change["peak_bytes"]) == (1, named, 7)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--search", "remat", "--remat", "full"], "plan-fix", "leave out one of them"),
        (["--smallest-cluster"], "plan-fix", "other clusters than that of plan.json"),
        (["--cluster", "1x4"], "plan-fix", "--search stages,degrees"),
        (["--algorithm", "minmax"], "plan-algorithm", "--fix plan.json"),
        (["--target", "cpu"], "plan-fix", "the target 'cpu' has no rates"),
        (["--target", "a100-40g", "--tensor-parallel-rule", "largest"], "", ""),
        (["--fix", "none.json"], "plan-file", "does not exist"),
        (
            ["--fix", "interleaved.json"],
            "plan-fix",
            "keeps none of a plan; name another: --schedule 1f1b",
        ),
        (["--fix", "cpu.json"], "plan-fix", "has no rates"),
        (["--fix", "hosts.json"], "plan-offload", "give --host-memory, such as 1TB"),
        (["--search", "cuts"], "option-search", "microbatches, schedule, stages"),
    ],
)
def test_contradictions_are_said_at_once(asked, saved, more, code, said):
    cluster = replace(saved.cluster, target="cpu")
    saved.with_(cluster=cluster).save("cpu.json")
    rests = [replace(stage, offload=("optimizer",)) for stage in saved.stages]
    saved.with_(stages=rests).save("hosts.json")
    assert not SCHEDULES["zb-h1"].is_plain
    saved.with_(schedule="zb-h1").save("interleaved.json")
    asked_for = ["--fix", "plan.json", *more, "--quick", *STORE, "-o", "other.json"]
    ended, document, _ = asked("plan", WORKLOAD, *asked_for)
    if not code:
        assert ended == 0
        return
    assert ended == 2
    assert (document["errors"][0]["code"], said in document["errors"][0]["message"]) == (code, True)


def test_another_model_and_a_decision_without_a_plan_are_refused(asked, saved):
    other = WORKLOAD.replace("layers=2", "layers=3")
    code, document, _ = asked("plan", other, "--fix", "plan.json", "--quick", *STORE)
    assert (code, document["errors"][0]["code"]) == (2, "plan-other-model")
    code, document, _ = asked("plan", WORKLOAD, *OPEN, "--search", "remat", *STORE)
    assert (code, document["errors"][0]["code"]) == (2, "plan-fix")


def test_the_step_of_every_named_plan_is_simulated_once(asked, saved, monkeypatch):
    simulated = []

    def verified(plan, measurements):
        simulated.append(plan.decisions)
        return verify(plan, measurements)

    monkeypatch.setattr(bounds_first, "verify", verified)
    code, document, _ = asked("plan", WORKLOAD, *OPEN, *STORE, "-o", "again.json")
    front = load_plan("again.json").why.front
    assert code == 0 and len(simulated) == len({*simulated}) == len(front.points)
    assert document["needs"]["step_seconds"] == front.names["fastest"].step_seconds


def test_plans_that_differ_in_schedule_alone_have_names_of_their_own(saved):
    fastest = replace(saved.why.front.names["fastest"], schedule="1f1b", name="fastest")
    other = replace(fastest, schedule="zb-h1", name="knee")
    plan = saved.with_(why=replace(saved.why, front=Front((other, fastest), False)))
    (line,) = other_plans(
        SimpleNamespace(output="plan.json"), SimpleNamespace(plan=plan, why=plan.why)
    )
    assert line.endswith(": plan.json:knee")
