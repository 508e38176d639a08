"""A file from somebody else runs nothing: plans of every kind, profiles, questions and lists of
models that name code, through every verb. What would run leaves a file behind."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from array_models import array_plan
from commands import run_here
from plan_examples import two_stages
from processes import environment_apart, user_model

from capture import Plan, ShardingPlan, WorkloadSpec, train_array
from capture.cli.main import VERBS, build_parser, main
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.machine.server import Server
from capture.machine.target import TARGETS_FOLDER, Target
from capture.measured.layer_profile import LayerProfile
from capture.measured.profile import Profile
from capture.model.trust import is_remembered, remember
from capture.plan.array import ArrayPlan
from capture.plan.kinds import KINDS, load_plan
from capture.plan.packs import PacksPlan
from capture.plan.sharding import DP, ZDP
from capture.plan.task_graph import Configuration, Packs
from profiling_runs.jobs import Setting
from profiling_runs.pools.where import setting_of

FILES = Path(__file__).parents[1] / "recorded" / "files"
LAYERS = Path(__file__).parents[2] / "benchmarks" / "papers" / "harmony" / "profiles" / "toy6.json"
PWNED = Path("pwned")
#: Touches the file when it is imported, when a default is evaluated, and whatever of it is called.
EVIL = """
import functools, os, subprocess
from os import system
from subprocess import run
def touch(command="touch pwned"): os.system("touch pwned")
touch()
def default(command=touch()): touch()
small = functools.partial(touch)
under = lambda command="": touch()
class Model:
    def __init__(self, command=""): touch()
class Callable:
    def __call__(self, command=""): touch()
called = Callable()
@functools.cache
def cached(command=""): touch()
"""
TOUCH = {"command": "touch pwned"}
#: (location, function, arguments), as a file names them.
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "os": ("os", "system", TOUCH),
    "posix": ("posix", "system", TOUCH),
    "popen": ("os", "popen", {"cmd": "touch pwned"}),
    "subprocess": ("subprocess", "run", {"args": "touch pwned", "shell": True}),
    "getoutput": ("subprocess", "getoutput", {"cmd": "touch pwned"}),
    "exec": ("builtins", "exec", {"source": "open('pwned', 'w')"}),
    "eval": ("builtins", "eval", {"source": "open('pwned', 'w')"}),
    "open": ("builtins", "open", {"file": "pwned", "mode": "w"}),
    "import": ("importlib", "import_module", {"name": "evil"}),
    "runpy": ("runpy", "run_path", {"path_name": "evil.py"}),
    "pickle": ("capture.papers.alpa.worker", "main", {"path": "job.json"}),
    "worker": ("capture.papers.alpa.worker", "method_of", {"source": "open('pwned', 'w')"}),
    "dotted": ("os", "path.os.system", TOUCH),
    "dunder": ("os", "__builtins__", {}),
    "main": ("__main__", "main", {"arguments": "run"}),
    "beside": ("evil.py", "touch", TOUCH),
    "dot": ("./evil.py", "touch", {}),
    "up": ("models/../evil.py", "touch", {}),
    "absolute": ("{here}/evil.py", "touch", {}),
    "symlink": ("link.py", "touch", {}),
    "imported": ("evil.py", "system", TOUCH),
    "imported run": ("evil.py", "run", {"args": "touch pwned", "shell": True}),
    "default": ("evil.py", "default", {}),
    "lambda": ("evil.py", "under", {}),
    "partial": ("evil.py", "small", {}),
    "class": ("evil.py", "Model", {}),
    "callable": ("evil.py", "called", {}),
    "cached": ("evil.py", "cached", {}),
    "nothing": ("evil.py", "missing", {}),
    "shadowing": ("evil", "touch", {}),
    "package": ("package.evil", "touch", {}),
    "package itself": ("package", "touch", {}),
    "upper case": ("evil.PY", "touch", {}),
    "trailing space": ("evil.py ", "touch", {}),
    "spaced module": ("evil ", "touch", {}),
    "newline": ("evil.py\n", "touch", {}),
    "escapes": ("evil.py", "touch\n\x1b[2J", {"x\n": "\x1b[2J"}),
    "zero": ("evil\0.py", "touch", {}),
    "loop": ("loop.py", "touch", {}),
    "arguments": ("evil.py", "touch", {"command": {"nested": ["touch pwned"]}}),
    "same relative path": ("net.py", "model", {}),
    "claims": ("evil.py", "touch", {}),
}
#: Of variants whose names are no workload names on a command line.
UNNAMED = {"dotted", "arguments", "newline", "zero", "escapes"}


def packs_plan() -> PacksPlan:
    configuration = Configuration(Packs(1, ((0, 1),)), Packs(1, ((0, 1), (1, 2))))
    return PacksPlan(
        Server.load("gtx1080ti-x4"), 2, 4, "pp", configuration, cluster=Cluster((4,), "h100")
    )


def sharding_plan() -> ShardingPlan:
    names, params = ("embedding", "head"), (("embedding",), ("head/kernel",))
    modes, cluster = (DP, ZDP), Cluster((2,), "cpu")
    return ShardingPlan(2, modes, 0.002, 3000, 4000.0, names, params, cluster=cluster)


def plans() -> dict[str, dict[str, Any]]:
    """The document of a plan of each kind."""
    made = {
        "stages": two_stages(),
        "sharding": sharding_plan(),
        "packs": packs_plan(),
        "array": array_plan(),
    }
    assert made.keys() == KINDS.keys(), "a kind of plan that this test does not know"
    return {kind: plan.to_json() for kind, plan in made.items()}


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    return plans()


@pytest.fixture
def strangers(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder that somebody else has made, as the working directory; modules are found there, as
    with ``python -m``. A folder beside it is the user's own."""
    own, folder = tmp_path / "own", tmp_path / "strangers"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (own, folder / "models", folder / "package"):
        name.mkdir(parents=True)
    for name in ("net.py", "mine.py"):
        (own / name).write_text(user_model("tiny"))
    remember(str(own / "net.py"), "model")
    for name in ("evil.py", "evil.PY", "evil.py ", "net.py", "package/__init__.py"):
        (folder / name).write_text(EVIL + "def model(): touch()\n")
    (folder / "package" / "evil.py").write_text(EVIL)
    (folder / "link.py").symlink_to("evil.py")
    (folder / "loop.py").symlink_to("loop.py")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("capture.cli.main.build_parser", _parser)
    before = set(sys.modules)
    yield folder
    for name in {"evil", "package", "package.evil"} & (set(sys.modules) - before):
        del sys.modules[name]


def write_files(documents: dict[str, dict[str, Any]], variant: str) -> None:
    """The files of a stranger, all of which name the variant."""
    location, function, arguments = VARIANTS[variant]
    named = {"location": location, "function": function, "arguments": arguments}
    named["location"] = location.format(here=os.getcwd()) if "{" in location else location
    if variant == "claims":
        named |= {"named_by": ""}
    spelled = f"{named['location']}:{function}"
    if variant not in UNNAMED:
        query = "&".join(f"{name}={value}" for name, value in arguments.items())
        spelled += f"?{query}" if query else ""
    for kind, document in documents.items():
        Path(f"{kind}.json").write_text(json.dumps({**document, "workload": named}))
    models = [{"seed": 0, "workload": spelled}, {"seed": 1}]
    Path("models.json").write_text(json.dumps(models))
    mixed = {**documents["array"], "workload": None, "partition": [[0], [1]], "decisions": []}
    Path("mixed.json").write_text(json.dumps({**mixed, "models": models}))
    text = json.dumps(spelled)
    Path("question.toml").write_text(f'workload = {text}\ncluster = "1x1"\ntarget = "h100"\n')
    profile = json.loads((FILES / "uneven.profile.json").read_text())
    Path("profile.json").write_text(json.dumps({**profile, "workload": named}))
    layers = json.loads(LAYERS.read_text())
    Path("layers.json").write_text(json.dumps({**layers, "workload": named}))


_OWN = "../own/mine.py:model"
#: Of which most of a command's time would go into the making.
_whole_parser = cache(build_parser)


def _parser(asked: object = ()) -> argparse.ArgumentParser:
    """Return the parser of all verbs, made once."""
    return _whole_parser()


#: By verb: command lines that would load what a file names, and others that read such a file.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "demo": ([], []),
    "store": ([], ["ls", "import stages.json", "merge stages.json"]),
    "evaluate": ([], []),
    "estimate": ([], []),
    "profile": ([], []),
    "plan": (
        [
            f"{_OWN} --system mutwo --models models.json",
            *("question.toml", "question.toml --system osdp", "question.toml --quick"),
            *("stages.json", "sharding.json", "packs.json", "array.json --models models.json"),
        ],
        [
            f"{_OWN} --profile profile.json",
            "--system harmony --layers layers.json --global-batch 4 --machine gtx1080ti-x4",
        ],
    ),
    "predict": ([], ["stages.json --profile profile.json", "packs.json --profile profile.json"]),
    "verify": (["stages.json", "sharding.json", "packs.json"], ["array.json"]),
    "run": (
        [
            *("stages.json", "sharding.json", "packs.json", "array.json"),
            f"mixed.json --workload {_OWN}",
            *("stages.json --hosts local", "stages.json --hosts none", "stages.json --ray local"),
        ],
        [],
    ),
    "osdp": (["stages.json", "sharding.json", "packs.json", "array.json", "question.toml"], []),
    "explain": (
        ["stages.json", "array.json -o page.html", "array.json --trace trace.json"],
        ["sharding.json", "packs.json", "array.json"],
    ),
    "report": (
        [],
        [
            *("stages.json", "sharding.json", "packs.json", "array.json"),
            "stages.json --profile profile.json -o page.html",
            "packs.json --trace trace.json --profile layers.json",
            "array.json -o page.html",
        ],
    ),
    "diff": (
        [],
        [f"{kind}.json {kind}.json" for kind in ("stages", "sharding", "packs", "array")]
        + ["stages.json stages.json --profile profile.json"],
    ),
    "export": ([], ["stages.json --to alpa -o method.py --profile profile.json"]),
}


def test_every_verb_has_its_command_lines():
    assert COMMANDS.keys() == set(VERBS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_file_of_a_stranger_names_is_not_run(strangers, documents, capsys, variant):
    write_files(documents, variant)
    for verb, (loading, others) in COMMANDS.items():
        for line in loading:
            code, out, err = run_here(capsys, verb, *line.split(), "--quiet")
            assert code == 2 and out == "", (verb, line, out)
            assert err[:-1].isprintable() and err.startswith("error: "), (verb, line, err)
            if variant not in UNNAMED:
                assert err.endswith(" [workload-untrusted]\n"), (verb, line, err)
                assert VARIANTS[variant][1] in err and "--trust" in err
        for line in others:
            run_here(capsys, verb, *line.split(), "--quiet")
        assert not PWNED.exists(), verb
    assert not {"evil", "package", "package.evil"} & sys.modules.keys()
    assert is_remembered("../own/net.py", "model") and not is_remembered("net.py", "model")


@pytest.mark.parametrize("verb", list(VERBS))
def test_help_loads_nothing(strangers, documents, capsys, verb):
    write_files(documents, "beside")
    files = [] if verb in ("demo", "store") else ["stages.json"]
    assert run_here(capsys, verb, *files, "--help")[0] == 0 and not PWNED.exists()


def test_the_sentence_names_the_file_what_it_would_run_and_what_to_type(
    strangers, documents, capsys
):
    write_files(documents, "os")
    assert run_here(capsys, "run", "stages.json")[2] == (
        "error: 'stages.json' would run system(command='touch pwned') of 'os', which was never "
        "named on a command line here; if you know what that does, add --trust (in Python "
        "trust=True) or name the workload yourself, as with --workload. [workload-untrusted]\n"
    )
    assert run_here(capsys, "report", "stages.json")[2] == (
        "error: the plan has no prediction, which is what is shown; add it with capture predict "
        "PLAN --profile FILE -o PLAN, from the FILE that capture profile makes of the model. "
        "[report-prediction]\n"
    )
    assert run_here(capsys, "report", "array.json", "--trace", "t.json")[2] == (
        "error: the trace of an array is of its programs, and a report loads no model; capture "
        "explain PLAN --trace FILE writes it. [array-page]\n"
    )
    code, said, _ = run_here(capsys, "report", "array.json", "-o", "page.html")
    assert code == 0 and "page -> page.html" in said, "which loads nothing"


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("os", "os does not define 'system' (builtin_function_or_method), and a workload is a "),
        ("exec", "builtins does not define 'exec' (builtin_function_or_method)"),
        ("imported", "evil.py does not define 'system' (builtin_function_or_method)"),
        ("imported run", "evil.py does not define 'run' (subprocess), and a workload is a "),
        ("lambda", "evil.py does not define 'under' (function)"),
        ("partial", "evil.py does not define 'small' (partial)"),
        ("class", "evil.py does not define 'Model' (type)"),
        ("callable", "evil.py does not define 'called' (Callable)"),
        ("dotted", "os has no function 'path.os.system'; it has "),
        ("arguments", "'stages.json' has arguments of touch that are no texts, numbers, true or "),
    ],
)
def test_what_is_no_function_of_its_own_file_is_not_called_even_if_trusted(
    strangers, documents, capsys, variant, said
):
    """Importing the file is what trust is for; its names are looked at before one is called."""
    write_files(documents, variant)
    Path("evil.py").write_text(EVIL.replace("\ntouch()\n", "\n").replace("command=touch()", ""))
    code, _, err = run_here(capsys, "verify", "stages.json", "--trust")
    assert code == 2 and err.startswith(f"error: {said}") and not PWNED.exists(), err


def test_a_function_that_returns_no_workload_and_wrong_arguments(strangers, tmp_path):
    Path("mine.py").write_text(
        "import functools\n"
        "def deco(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(*args, **kwargs): return f(*args, **kwargs)\n"
        "    return wrapper\n"
        "def bare(f): return lambda: f()\n"
        "@deco\ndef decorated(width=1): return width\n"
        "@functools.cache\ndef cached(width=1): return width\n"
        "@bare\ndef lost(): return 1\n"
        "def positional(width, /): return 1\n"
    )

    def refusal(function: str, **arguments: Any) -> str:
        with pytest.raises(CaptureError) as error:
            WorkloadSpec("mine.py", function, arguments).load()
        return error.value.codes[0]

    # These are called, and what they return is looked at.
    assert refusal("decorated") == refusal("cached", width=2) == "workload-members"
    assert refusal("decorated", depth=2) == refusal("positional", width=2) == "workload-arguments"
    assert refusal("lost") == "workload-function"


def test_what_was_named_is_remembered_by_its_file(strangers, documents, capsys):
    """Whatever the plan file says, and from wherever it is seen; the file may be edited."""
    own = Path("../own")
    plan = json.loads(json.dumps(documents["stages"]))
    location = {"location": "net.py", "function": "model", "arguments": {"layers": 3}}
    for folder in (own, Path()):
        (folder / "plan.json").write_text(json.dumps({**plan, "workload": location}))
    assert load_plan("../own/plan.json").workload.admitted().named_by == ""
    assert run_here(capsys, "verify", "../own/plan.json", "--workers", "0", "--quiet")[0] == 0
    (own / "net.py").write_text(user_model("tiny") + "\n")
    assert load_plan("../own/plan.json").workload.admitted().named_by == ""
    with pytest.raises(CaptureError, match="workload-untrusted"):
        load_plan("plan.json").workload.admitted()
    assert not is_remembered("../own/net.py", "other")


def test_a_command_remembers_what_it_was_given_and_not_what_a_file_names(
    strangers, capsys, monkeypatch
):
    monkeypatch.chdir("../own")
    asked = ["--cluster", "1x1", "--global-batch", "4", "--microbatches", "2", "--quiet"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    assert not is_remembered("net.py", "model")
    assert run_here(capsys, "estimate", "net.py:model?layers=2")[0] == 0
    assert is_remembered("net.py", "model") and not is_remembered("net.py", "other")
    Path("second.py").write_text(user_model("tiny"))
    Path("question.toml").write_text('workload = "second.py:model"\n')
    command = ["plan", "question.toml", *asked, "--store", "elsewhere.sqlite", "--workers", "0"]
    assert main([*command, "--quick", "--trust"]) == 0
    assert not is_remembered("second.py", "model")  # --trust is for one command
    assert main([*command, "--quick"]) == 2
    assert run_here(capsys, "estimate", "net.py:missing")[0] == 2
    assert not is_remembered("net.py", "missing")


def test_a_module_is_remembered_by_its_file_too(strangers, tmp_path, monkeypatch):
    """A module of the same name in the working directory is another one; that is known without an
    import."""
    monkeypatch.chdir(tmp_path / "own")
    (tmp_path / "own" / "package" / "deep").mkdir(parents=True)  # without an __init__.py
    (tmp_path / "own" / "package" / "deep" / "evil.py").write_text("def touch(): pass\n")
    (tmp_path / "own" / "evil.py").write_text("def touch(): pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), *sys.path[1:]])
    for name in ("evil", "package.deep.evil"):
        remember(name, "touch")
        assert is_remembered(name, "touch") and not is_remembered(name, "other")
    monkeypatch.setattr(sys, "path", [str(strangers), *sys.path[1:]])
    assert not is_remembered("evil", "touch") and not is_remembered("package.deep.evil", "touch")
    assert not is_remembered("no.such.module", "touch")
    assert not {"evil", "package"} & sys.modules.keys() and not PWNED.exists()


def test_python_asks_likewise(strangers, documents):
    """Every reader of a document marks what it names; only ``trust`` or a user takes the mark."""
    write_files(documents, "claims")
    read = [load_plan(f"{kind}.json") for kind in KINDS]
    read += [
        KINDS[kind].plan.from_json(json.loads(Path(f"{kind}.json").read_text())) for kind in KINDS
    ]
    for kind, file in ((Profile, "profile.json"), (LayerProfile, "layers.json")):
        read += [kind.load(file), kind.from_json(json.loads(Path(file).read_text()))]
    for one in read:
        for load in (one.workload.load, one.workload.admitted, lambda s=one: refused(s)):
            with pytest.raises(CaptureError, match="workload-untrusted"):
                load()
        assert one.workload.admitted(trust=True).named_by == ""
        assert "named_by" not in json.dumps(one.to_json()["workload"])
    mixed = ArrayPlan.load("mixed.json")
    own = WorkloadSpec("../own/net.py", "model").load()
    for plan in (mixed, ArrayPlan.from_json(json.loads(Path("mixed.json").read_text()))):
        with pytest.raises(CaptureError, match="workload-untrusted"):
            train_array(own, plan)
    assert not PWNED.exists()
    stages = replace(Plan.load("stages.json").workload, location="../own/net.py", function="model")
    assert setting_of(Setting(stages)).workload.named_by == ""  # workers ask nobody


def refused(one: Any) -> None:
    setting_of(Setting(one.workload))


def test_an_exported_plan_is_no_code_of_the_file(strangers, documents, capsys):
    """The name of the workload is a line of the docstring of a Python file."""
    evil = '"""; open("pwned", "w"); """\\'
    named = {
        "location": evil,
        "function": '\n"""\nopen("pwned", "w")',
        "arguments": {"x": '\\"""\n'},
    }
    one = {**documents["stages"], "workload": named}
    Path("stages.json").write_text(json.dumps(one))
    code, _, err = run_here(
        capsys, "export", "stages.json", "--to", "alpa", "-o", "method.py", "--quiet"
    )
    assert code == 0, err
    namespace: dict[str, Any] = {}
    source = Path("method.py").read_text().replace("import alpa\n\n\ndef", "def")
    exec(compile(source, "method.py", "exec"), namespace)
    assert not PWNED.exists() and callable(namespace["method"])


@pytest.mark.parametrize("value", ["/tmp/programs", ["x"], None])
def test_options_of_a_target_file_name_no_paths(strangers, value):
    """XLA runs programs of some folders that options name, and writes into others."""
    target = json.loads((TARGETS_FOLDER / "h100.json").read_text())
    target["compiler"]["options"] = {"xla_gpu_cuda_data_dir": value}
    Path("target.json").write_text(json.dumps(target))
    with pytest.raises(CaptureError, match=r"xla_gpu_cuda_data_dir is .* \[target-corrupt\]"):
        Target.load("target.json")


def test_processes_of_a_command_find_no_modules_in_the_working_directory(strangers, tmp_path):
    """``multiprocessing`` would: a worker imports ``socket`` and ``pickle`` first."""
    for name in ("socket", "pickle", "selectors"):
        Path(f"{name}.py").write_text("open('pwned', 'w')")
    program = tmp_path / "command.py"
    program.write_text(
        "import multiprocessing, sys\n"
        "from capture.cli.main import console\n"
        "if __name__ == '__main__':\n"
        "    sys.argv = ['capture', 'store', '--store', 'none.sqlite', 'ls']\n"
        "    console()\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    sys.exit(worker.exitcode)\n"
    )
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment_apart(), capture_output=True, text=True)
    assert done.returncode == 0 and not PWNED.exists(), done.stderr
