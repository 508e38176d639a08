"""Questions as files: TOML, and plans that say what they were asked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import run_here
from processes import user_model

from capture.cli.main import build_parser
from capture.cli.plan import options_by_system
from capture.options import merged
from capture.plan.kinds import KINDS, load_plan

QUESTION = """
workload = "tiny.py:model"
system = "osdp"
cluster = "1x4"
target = "h100"
memory = "1GB"
batch = 2
slices = [1, 2]
partly = true
no_verify = true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(user_model("tiny"))
    (tmp_path / "question.toml").write_text(QUESTION)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys, *arguments: str) -> str:
    code, out, err = run_here(capsys, "plan", *arguments)
    assert code == 0, err
    return out


def test_a_file_asks_what_the_command_line_asks_and_a_plan_asks_it_again(folder, capsys):
    line = "--system osdp --cluster 1x4 --target h100 --memory 1GB --batch 2 --slices 1,2 --partly"
    plan(capsys, "tiny.py:model", *line.split(), "--no-verify", "-o", "line.json")
    plan(capsys, "question.toml", "-o", "file.json")
    plan(capsys, "line.json", "-o", "again.json")
    plans = [load_plan(f"{name}.json") for name in ("line", "file", "again")]
    assert plans[0] == plans[1] == plans[2] and plans[0].batch_size == 2
    assert plans[0].asked == {
        "system": "osdp",
        "cluster": "1x4",
        "target": "h100",
        "memory": 10**9,
        "batch": 2,
        "slices": [1, 2],
        "partly": True,
        "no_verify": True,
    }
    assert all(each.asked == plans[0].asked for each in plans)


def test_the_command_line_counts_in_the_place_of_the_file(folder, capsys):
    plan(capsys, "question.toml", "--trust", "--cluster", "1x2", "--batch", "1", "-o", "own.json")
    made = load_plan("own.json")
    assert (made.cluster.nodes, made.batch_size) == ((2,), 1)
    # Also a default, said where the file says something else.
    Path("question.toml").write_text(QUESTION.replace("osdp", "harmony"))
    code, _, err = run_here(capsys, "plan", "question.toml", "--trust", "--system", "capture")
    assert code == 2 and "--partly is not of --system capture, but of osdp" in err, err


def test_files_are_named_as_seen_from_the_file(folder, capsys, monkeypatch):
    target = json.loads(
        (Path(__file__).parents[2] / "capture/machine/targets/h100.json").read_text()
    )
    Path("mine.json").write_text(json.dumps(target))
    Path("question.toml").write_text(QUESTION.replace("h100", "mine.json"))
    plan(capsys, "tiny.py:model", "--system", "osdp", "--target", "h100", "--no-verify")  # named
    (folder / "else" / "where").mkdir(parents=True)
    monkeypatch.chdir(folder / "else")
    plan(capsys, "../question.toml", "-o", "where/plan.json")
    assert json.loads(Path("where/plan.json").read_text())["asked"]["target"] == os.path.join(
        "..", "..", "mine.json"
    )
    monkeypatch.chdir(folder)
    plan(capsys, "else/where/plan.json", "-o", "again.json")
    assert load_plan("again.json") == load_plan("else/where/plan.json")


def test_what_names_code_is_trusted_or_refused(folder, capsys):
    code, _, err = run_here(capsys, "plan", "question.toml")
    assert code == 2 and "'question.toml' would run model() of 'tiny.py'" in err
    assert err.endswith("[workload-untrusted]\n")
    plan(capsys, "question.toml", "--trust")
    plan(capsys, "question.toml", "--workload", "tiny.py:model")  # which names it
    plan(capsys, "question.toml")


def test_a_workload_beside_a_question_counts_where_that_names_none(folder, capsys):
    lines = Path("question.toml").read_text().splitlines()
    rest = [line for line in lines if not line.startswith("workload")]
    assert len(rest) < len(lines)
    Path("question.toml").write_text("\n".join(rest))
    plan(capsys, "question.toml", "--workload", "tiny.py:model")
    assert load_plan("plan.json").workload.function == "model"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memori = 1", "'memori' is no key here; those are "),
        ("memori = 1", " Did you mean memory? [question-option]"),
        ('schedule = "1f1"', "schedule = '1f1': choose one of gpipe, 1f1b, "),
        ('schedule = "1f1"', " Did you mean 1f1b? [question-option]"),
        ("any_divisor = 1", "any_divisor = 1: write true or false. [question-option]"),
        ("most = 0", "most = 0: '0' is no whole number of at least 1."),
        ('host_memory = "1 lot"', "memory='1 lot' is no size; write bytes"),
        ("microbatches = 2", "--microbatches is not of --system osdp, but of capture; leave it "),
        ("workers = 3", "'workers' is no key here"),  # this machine is no question
        ('alpa_python = "./evil"', "'alpa_python' is no key here"),  # which would be run
        ("= 3", "is not TOML: "),
    ],
)
def test_what_is_wrong_is_said_with_the_file_the_key_and_what_is_allowed(
    folder, capsys, line, said
):
    Path("question.toml").write_text(f"{QUESTION}{line}\n")
    code, out, err = run_here(capsys, "plan", "question.toml", "--trust", "--quiet")
    assert (code, out) == (2, "") and said in err, err
    assert "question.toml" in err or "plan-system" in err


def test_a_plan_that_does_not_say_what_it_was_asked(folder, capsys):
    plan(capsys, "question.toml", "--trust", "-o", "old.json")
    document = json.loads(Path("old.json").read_text())
    del document["asked"]
    Path("old.json").write_text(json.dumps(document))
    code, _, err = run_here(
        *(capsys, "plan", "old.json", "--trust", "--target", "a100-40g", "--no-verify"),
        *("-o", "new.json"),
    )
    assert code == 0 and "asked again of old.json: its workload, devices and examples" in err
    made = load_plan("new.json")
    assert (made.cluster.target, made.batch_size) == ("a100-40g", 2)
    assert made.asked["global_batch"] == 8 and "partly" not in made.asked


def test_every_option_is_of_the_systems_that_read_it_and_comes_back_from_a_file():
    assert {kind.system for kind in KINDS.values()} == options_by_system().keys()
    texts = {
        "--vary": "seed=0.0,1.0",
        "--within": "2.5%",
        "--overlap": "0.5",
        "--search": "remat,stages",
        "--remat": "full:2",
    }
    for option, of in merged(options_by_system()).values():
        assert of and option.help, option
        if option.is_switch:
            assert option.value(option.written(True)) is True
            continue
        text = texts.get(option.flag) or (option.choices or ["7"])[0]
        value = option.value(text)
        assert option.value(json.loads(json.dumps(option.written(value)))) == value, option.name


def test_every_option_of_a_system_is_on_its_command_line():
    parser = build_parser(["plan"])
    [verbs] = [each for each in parser._actions if each.dest == "main" or each.choices]
    known = verbs.choices["plan"]._option_string_actions
    assert {option.flag for of in options_by_system().values() for option in of} <= known.keys()
