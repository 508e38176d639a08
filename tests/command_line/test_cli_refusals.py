"""Bad input on the command line: one message with its code, and where a model went wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_here, run_json
from planned_model import BATCH, STORE
from processes import environment_apart, user_model
from timeouts import TIMEOUT_SECONDS

from capture.cli import asked
from capture.cli.main import _report, _show_warning, build_parser, main
from capture.errors import Violation

# ---- bad input -----------------------------------------------------------------------------------

PLAN = ["plan", "tiny.py:model", "--profile", "profile.json"]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("plan-batch", [*PLAN, "--cluster", "1x2", "--global-batch", "10", "--microbatches", "4"]),
        ("plan-batch", [*PLAN, "--cluster", "1x2", "--microbatches", "0"]),
        ("target-unknown", [*PLAN, *BATCH, "--target", "h900"]),
        ("cluster-syntax", [*PLAN, "--cluster", "two"]),
        ("cluster-nodes", [*PLAN, "--cluster", "2x0"]),
        ("memory-syntax", [*PLAN, *BATCH, "--memory", "much"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--objective", "pareto"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "mcap", "--objective", "throughput"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--mode", "paper"]),
        ("plan-algorithm", [*PLAN, *BATCH, "--algorithm", "autostage", "--merge-layers", "2"]),
        ("recommend-objective", [*PLAN, *BATCH, "--objective", "pareto", "--mode", "paper"]),
        ("profile-no-times", [*PLAN, *BATCH, "--algorithm", "autostage"]),
        ("profile-choice", [*PLAN, *BATCH, "--remat", "full"]),
        ("profile-choice", [*PLAN, *BATCH, "--shard-params"]),
        ("profile-choice", [*PLAN, *BATCH, "--sequence-parallel"]),
        ("profile-file", ["plan", "tiny.py:model", *BATCH, "--profile", "missing.json"]),
        ("store-corrupt", ["profile", "tiny.py:model", *BATCH, "--store", "tiny.py"]),
        ("option-number", ["profile", "tiny.py:model", *BATCH, "--neighbours", "0"]),
        ("option-number", ["run", "plan.json", "--steps", "0"]),
        ("option-number", ["evaluate", "tiny.py:model", *BATCH, "--plans", "some"]),
        ("workload-name", ["profile", "tiny.py", *BATCH, *STORE]),
        ("workload-file", ["profile", "missing.py:model", *BATCH, *STORE]),
        ("workload-function", ["profile", "tiny.py:modal", *BATCH, *STORE]),
        ("workload-arguments", ["profile", "tiny.py:model?depth=3", *BATCH, *STORE]),
        ("workload-module", ["profile", "no_such_module:model", *BATCH, *STORE]),
        ("plan-file", ["run", "missing.json"]),
        ("plan-file", ["explain", "missing.json"]),
        ("profile-file", ["predict", "plan.json", "--profile", "missing.json"]),
        (
            "profile-measured",
            ["plan", "tiny.py:model", *BATCH, "--profile", "profile.json", "--neighbours", "1"],
        ),
        (
            "profile-choice",
            [
                "plan",
                "tiny.py:model",
                *BATCH,
                "--profile",
                "profile.json",
                "--tensor-parallel-rule",
                "largest",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:2] + value[-2:]),
)
def test_bad_input_ends_with_2_and_one_message_with_its_code(
    inside_planned, capsys, code, arguments
):
    status, out, err = run_here(capsys, *arguments, "--json")
    assert status == 2
    document = json.loads(out)
    assert (document["status"], [error["code"] for error in document["errors"]]) == (
        "error",
        [code],
    )
    (message,) = [line for line in err.splitlines() if "error: " in line]
    assert message.endswith(f"[{code}]")
    assert "Traceback" not in err


def test_a_loss_that_is_no_scalar_is_refused(inside_planned, capsys):
    status, out, err = run_here(
        capsys, "profile", "tiny.py:model?scalar=false", *BATCH, *STORE, "--quiet"
    )
    assert (status, out) == (2, "")
    assert re.fullmatch(r"error: .*scalar.* \[[a-z-]+\]\n", err)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"schema_version": 9}, "plan-schema"),
        ({"stages": 3}, "plan-corrupt"),
        ({"num_layers": 9}, "plan-layers"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(inside_planned, capsys, tmp_path, changes, code):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(Path("plan.json").read_text()) | changes))
    for arguments in (
        ["run", str(path)],
        ["predict", str(path), "--profile", "profile.json"],
        ["explain", str(path), *STORE],
    ):
        status, out, err = run_here(capsys, *arguments)
        assert (
            (status, out) == (2, "") and err.startswith("error: ") and err.endswith(f"[{code}]\n")
        )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "profile-corrupt"),
        ('{"schema_version": 1}', "profile-corrupt"),
        ('{"schema_version": 9}', "profile-schema"),
    ],
)
def test_a_profile_that_is_none_is_refused(inside_planned, capsys, tmp_path, content, code):
    path = tmp_path / "profile.json"
    path.write_text(content)
    for arguments in (
        ["predict", "plan.json", "--profile", str(path)],
        ["plan", "tiny.py:model", *BATCH, "--profile", str(path)],
    ):
        status, out, err = run_here(capsys, *arguments)
        assert (
            (status, out) == (2, "") and err.startswith("error: ") and err.endswith(f"[{code}]\n")
        )


def test_a_plan_of_a_model_that_was_edited_since_is_refused(inside_planned, capsys, tmp_path):
    (tmp_path / "edited.py").write_text(user_model("tiny").replace("jnp.tanh", "jnp.sin"))
    for arguments in (["run", "plan.json"], ["explain", "plan.json", *STORE]):
        status, out, err = run_here(capsys, *arguments, "--workload", f"{tmp_path}/edited.py:model")
        assert (status, out) == (2, "")
        assert re.search(r"^error: .* \[plan-other-model\]$", err, re.MULTILINE), err
        assert "made for tiny.py:model" in err and f"{tmp_path}/edited.py:model has " in err


def test_a_plan_made_from_objects_asks_for_its_workload(inside_planned, capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(Path("plan.json").read_text()) | {"workload": None}))
    status, _, err = run_here(capsys, "run", str(path))
    assert status == 2 and err == (
        "error: the plan was made from Python objects and names no workload; give --workload. "
        "[plan-workload]\n"
    )


def test_a_plan_needs_as_many_layers_as_evaluate_draws_stages(inside_planned, capsys):
    cluster = ["--cluster", "8x1", "--global-batch", "4", "--microbatches", "4"]
    status, _, err = run_here(
        capsys,
        "evaluate",
        "tiny.py:model?layers=3",
        *cluster,
        *STORE,
        "--neighbours",
        "1",
        "--quiet",
    )
    assert status == 2 and err.endswith("[sampling-empty]\n")


def test_the_command_alone_prints_its_help(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "usage: capture [-h] [--version] VERB" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # the same page
        main(["--help"])
    assert "  plan " in capsys.readouterr().out


#: What each verb that writes needs beside the file that it writes; nothing of it is there.
WRITERS = {
    "plan": ["none.py:model"],
    "osdp": ["none.py:model"],
    "profile": ["none.py:model"],
    "evaluate": ["none.py:model"],
    "predict": ["none.json", "--profile", "none.json"],
    "verify": ["none.json"],
    "explain": ["none.json"],
    "report": ["none.json"],
    "export": ["none.json", "--to", "alpa"],
    "run": ["none.json"],
}


@pytest.mark.parametrize("verb", WRITERS)
def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_read(
    tmp_path, monkeypatch, capsys, verb
):
    """Folders that are missing, files in the place of folders and the reverse, and where the system
    lets nobody write; ``profile`` makes folders. Nothing is left there."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    both = ["-o", "--trace"]
    flags = {"report": both, "explain": both, "run": ["--trace", "--metrics", "--save"]}.get(
        verb, ["-o"]
    )
    wrong = {
        "missing/x": "there is no folder missing",
        ".": "it is a folder",
        "file/x": "file is a file",
        "/proc/x": "no file can be made in /proc",
    }
    for flag in flags:
        for path, said in wrong.items():
            if flag == "--save":
                said = {".": "", "missing/x": ""}.get(path, said)
            elif verb == "profile" and path == "missing/x":
                said = ""
            assert main([verb, *WRITERS[verb], flag, path]) == 2
            error = capsys.readouterr().err
            assert ("[option-output]" in error) == bool(said) and said in error
        assert main([verb, *WRITERS[verb], flag, "x"]) == 2
        assert "[option-output]" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_verb_that_writes_is_among_them():
    (verbs,) = (action.choices for action in build_parser()._actions if action.choices)
    writers = {
        name
        for name, parser in verbs.items()
        if {"output", "trace", "metrics", "save"} & {action.dest for action in parser._actions}
    }
    assert writers == set(WRITERS)


def test_an_unknown_verb_and_the_version(capsys):
    assert run_here(capsys, "guess")[0] == 2
    assert run_here(capsys, "--version")[:2] == (0, "capture 0.1.0\n")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("constructor", "broken.py:18 in model: KeyError: 'x'"),
        (
            "init",
            "broken.py:21 in init: TypeError: dot_general requires contracting dimensions to have "
            "the same shape, got (3,) and (4,).",
        ),
        (
            "batch",
            "broken.py:24 in batch: FileNotFoundError: [Errno 2] No such file or directory: 'no "
            "data'",
        ),
        ("loss", "broken.py:27 in loss_fn: IndexError: list index out of range"),
    ],
)
def test_an_exception_of_the_model_says_where_in_its_file(
    inside_planned, capsys, tmp_path, where, said
):
    (inside_planned / "broken.py").write_text(user_model("broken"))
    status, out, err = run_here(
        capsys, "profile", f"broken.py:model?broken={where}", *BATCH, *STORE, "--quiet", "--json"
    )
    assert (status, json.loads(out)["errors"]) == (2, [{"code": "exception", "message": said}])
    first, begin, frame = err.splitlines()[:3]
    assert first == f"error: {said} [exception]" and begin.startswith("Traceback")
    assert "broken.py" in frame, "what calls the model is of no interest"


def test_what_python_cannot_read_is_named_by_its_line(inside_planned, capsys):
    (inside_planned / "unreadable.py").write_text("\ndef model(:\n")
    status, _, err = run_here(capsys, "profile", "unreadable.py:model", *BATCH, *STORE, "--quiet")
    assert (
        status == 2
        and err.startswith("error: ")
        and "unreadable.py:2: SyntaxError: invalid syntax [exception]\n" in err
    )


def test_a_warning_is_a_line_that_names_a_file_of_the_users_alone(inside_planned, capsys):
    for file in (str(inside_planned / "tiny.py"), asked.__file__):
        _show_warning("mind this", UserWarning, file, 3)
    assert capsys.readouterr().err == "warning: tiny.py:3: mind this\nwarning: mind this\n"


def test_codes_of_a_model_are_its_own_and_need_no_traceback(inside_planned, capsys):
    (inside_planned / "broken.py").write_text(user_model("broken"))
    status, out, err = run_here(
        capsys, "profile", "broken.py:model?broken=codes", *BATCH, *STORE, "--quiet", "--json"
    )
    assert (status, [error["code"] for error in json.loads(out)["errors"]]) == (
        2,
        ["broken-size", "broken-depth"],
    )
    assert err == (
        "error: size='xl' is no size; give small. [broken-size]\nerror: depth=0 is none; give "
        "1. [broken-depth]\n"
    )


@pytest.mark.parametrize(
    "arguments", [["tiny.py:model?width=24"], ["tiny.py:model", "--num-layers", "9"]]
)
def test_a_profile_of_another_model_is_refused(inside_planned, capsys, arguments):
    status, _, err = run_here(capsys, "plan", *arguments, *BATCH, "--profile", "profile.json")
    assert status == 2 and err.endswith("[profile-other-model]\n")


def test_the_help_of_plan_fits_a_screen_and_says_how_to_see_the_rest(capsys):
    def help_of(option: str) -> str:
        with pytest.raises(SystemExit) as ended:
            build_parser(["plan"]).parse_args(["plan", option])
        assert ended.value.code == 0
        return capsys.readouterr().out

    short, whole = help_of("--help"), help_of("--help-all")
    assert len(short.splitlines()) <= 60 and "--help-all" in short
    for everyday in ("WORKLOAD", "--cluster", "--target", "--memory", "--objective", "--remat"):
        assert everyday in short
    assert "--equi-fb" in whole and "--equi-fb" not in short
    hidden = int(re.search(r"(\d+) more options", short)[1])
    options = re.findall(r"^  (?:-o FILE, )?(--[a-z-]+)", whole, re.MULTILINE)
    shown = re.findall(r"^  (?:-o FILE, )?(--[a-z-]+)", short, re.MULTILINE)
    assert set(shown) < set(options) and len(options) - len(shown) == hidden


def test_an_option_that_a_verb_does_not_know_is_refused_with_the_nearest(capsys):
    status, out, err = run_here(capsys, "plan", "tiny.py:model", "--clutser", "1x2")
    assert (status, out, err) == (
        2,
        "",
        "error: capture plan has no --clutser 1x2; see capture plan --help. Did you mean "
        "--cluster? [option-unknown]\n",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("plan m.py:f --schedule gpip", "option-value", "--help. Did you mean gpipe?"),
        ("plam m.py:f", "option-value", "--help. Did you mean plan?"),
        ("plan m.py:f --mtbf -5h --disk-rate 2GB/s --cluster 1x2 --target h100", "money-number",
         "--mtbf -5h: write hours"),
        ("plan m.py:f --memory -5GB", "memory-syntax", "memory='-5GB' is no size"),
        ("plan m.py:f --workers x", "option-number", "'x' is no whole number of at least 0"),
        ("plan", "option-value", "the following arguments are required: WORKLOAD"),
        ("plan --clutser 1x2", "option-unknown", "Did you mean --cluster?"),
        ("plan m.py:f --system harmony --global-batch 4 --machine gtx1080ti-4", "server-unknown",
         "Did you mean gtx1080ti-x4?"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_a_document_too(capsys, arguments, code, message):
    status, document, err = run_json(capsys, *arguments.split())
    assert (status, document["status"]) == (2, "error")
    (error,) = document["errors"]
    assert error["code"] == code and message in error["message"] and error["message"] in err


def test_a_target_without_its_compiler_is_refused_before_any_work(
    inside_planned, capsys, monkeypatch
):
    monkeypatch.setattr("capture.machine.target.find_spec", lambda name: None)
    monkeypatch.setattr("capture.cli.asked.open_measurements", lambda *given: 1 / 0)
    command = ("plan", "tiny.py:model", *BATCH, "--target", "h100")
    code, _, err = run_here(capsys, *command)
    assert code == 2 and err.count("[target-missing]") == 1 and "pip install" in err
    assert "division" in run_here(capsys, *command, "--quick")[2], "which compiles nothing"


@pytest.mark.parametrize(
    ("variable", "target"), [("XLA_FLAGS", "cpu"), ("LIBTPU_INIT_ARGS", "v6e")]
)
def test_a_flag_that_the_compiler_does_not_know_is_said_before_any_work(tmp_path, variable, target):
    """XLA and libtpu would end the process, or its workers, and their words go to a file."""
    store = tmp_path / "store.sqlite"
    command = ["plan", "capture.cli.tiny_gpt:gpt", *BATCH, "--target", target, "--store", store]
    ended = subprocess.run(
        [sys.executable, "-m", "capture", *command],
        env=environment_apart(XDG_CACHE_HOME=str(tmp_path)) | {variable: "--xla_no_such=true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith(f"error: {variable} has ") and "xla_no_such" in ended.stderr
    assert ended.stderr.endswith("[target-flags]\n") and not list(tmp_path.glob("*.sqlite"))


def test_a_full_disk_is_noticed_before_any_work(inside_planned, capsys, monkeypatch):
    monkeypatch.setattr("capture.cli.asked.LEAST_FREE_BYTES", 10**18)
    code, _, err = run_here(capsys, "plan", "tiny.py:model", *BATCH, *STORE)
    assert code == 3 and "name a store elsewhere" in err and "[store-write]" in err


def test_no_error_is_longer_than_anybody_reads(capsys):
    _report(False, [Violation("it is odd. " * 900, "odd")])
    said = capsys.readouterr().err
    assert len(said) < 1500 and "characters more) [odd]" in said
