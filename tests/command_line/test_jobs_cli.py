"""Job files on the command line: read, refused, resumed, terminated in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_json
from processes import QUICK_CODE, REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.cli.job_file import ProfileJob
from capture.cli.main import build_parser, main
from capture.cli.progress import Events, Tally
from capture.errors import ProfileError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from profiling_runs.question import ProfileQuestion

QUESTION = [
    "pipeline_models:mlp?num_blocks=2",
    "--cluster",
    "1x1",
    "--global-batch",
    "4",
    "--microbatches",
    "2",
]


SMALL = ["--neighbours", "1", "--calibration-plans", "0"]


FILE = """
[defaults]
cluster = "1x1"
microbatches = 2
neighbours = 1
calibration_plans = 0

[[profile]]
workload = "pipeline_models:mlp?num_blocks=2"
global_batch = [2, 4]
output = "profiles/mlp-{global_batch}.json"

[[profile]]
workload = "pipeline_models:mlp?num_blocks=3"
shard_optimizer = true
global_batch = 2
"""


def read(path: Path):
    from capture.cli.job_file import read_job_file

    return read_job_file(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("jobs")
    (path / "jobs.toml").write_text(FILE)
    return path


@pytest.fixture
def inside(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


# ---- job files -----------------------------------------------------------------------------------


def test_a_file_is_read_as_the_command_line_is(folder):
    small, large, other = read(folder / "jobs.toml")
    given = ["--microbatches", "2", "--global-batch", "4", "-o", "profiles/mlp-4.json"]
    written = build_parser().parse_args(["profile", *QUESTION[:3], *SMALL, *given])
    assert (
        large.question
        == ProfileJob.of(vars(written)).question
        == ProfileQuestion(
            WorkloadSpec.parse(QUESTION[0]),
            Cluster.parse(QUESTION[2]),
            2,
            num_neighbours=1,
            calibration_plans=0,
        )
    )
    assert large.values == {name: vars(written)[name] for name in large.values}
    assert (small.question.microbatch_size, str(small.output)) == (1, "profiles/mlp-2.json")
    assert (other.question.shard_optimizer, str(other.question.cluster), str(other.output)) == (
        True,
        "1x1",
        "profile.json",
    )


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("[[profile]", "jobs-file", "is not TOML"),
        ("[other]", "jobs-file", "has other; write one"),
        ("profile = [1, 2]", "jobs-file", "as tables of options"),
        ("[[defaults]]\n[[profile]]", "jobs-file", "needs [defaults], once"),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nglobal_batch = []',
            "jobs-option",
            "profile 1: global_batch = [] has no value",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nglobal_batch = 7\nmicrobatches = 2',
            "plan-batch",
            "profile 1: global_batch_size=7",
        ),
        ('[[profile]]\ncluster = "1x1"', "jobs-option", "'workload' is missing."),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nbatch = 3',
            "jobs-option",
            "'batch' is no key here; those are ",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nworkers = 3',
            "jobs-option",
            "'workers' is no key here",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nneighbours = 0',
            "jobs-option",
            "no whole number of at least 1",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nremat = "some"',
            "jobs-option",
            "choose one of auto, none, cheap, dots, full, full:K for K layers, or a percentage such as 2%.",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\nwhole_nodes = 1',
            "jobs-option",
            "write true or false.",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = ["1x1", "1x2"]',
            "jobs-output",
            "profile.json more than once",
        ),
        (
            '[[profile]]\nworkload = "m:f"\ncluster = "1x1"\noutput = "{size}"',
            "jobs-option",
            "names what is no option: 'size'",
        ),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path, text, code, says):
    (tmp_path / "jobs.toml").write_text(text)
    with pytest.raises(ProfileError) as error:
        read(tmp_path / "jobs.toml")
    assert set(error.value.codes) == {code}
    assert says in str(error.value)


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "profiling_runs" / "configs").glob("*.toml")),
    ids=lambda path: path.name,
)
def test_the_shipped_files_are_read(path):
    assert len({profile.output for profile in read(path)}) >= 3


def test_the_profiles_of_a_file_are_made_with_events_and_resume(inside, capsys):
    command = [
        "profile",
        "--jobs",
        "jobs.toml",
        "--trust",
        "--store",
        "store.sqlite",
        "--workers",
        "0",
        "--quiet",
        "--events",
        "events.jsonl",
    ]
    code, plan, _ = run_json(capsys, *command, "--dry-run")
    assert code == 0 and not Path("profiles").exists()
    listed = sum(kind["num_jobs"] for profile in plan["jobs"] for kind in profile["kinds"].values())
    assert plan["worker_seconds"] > 0 and listed > 0
    code, document, _ = run_json(capsys, *command)
    assert code == 0
    assert [profile["profile"] for profile in document["profiles"]] == [
        "profiles/mlp-2.json",
        "profiles/mlp-4.json",
        "profile.json",
    ]
    assert all(Path(profile["profile"]).exists() for profile in document["profiles"])
    lines = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "end" and lines[-1]["exit_code"] == 0
    done = {line["key"] for line in lines if line["event"] == "job" and line["state"] == "done"}
    assert done == set(Store(Path("store.sqlite")).get(done)) and 0 < len(done) <= listed
    progress = [line for line in lines if line["event"] == "progress"][-1]
    assert (
        progress["done"]
        == progress["total"]
        == sum(kind["total"] for kind in progress["kinds"].values())
    )
    code, again, _ = run_json(capsys, *command, "--dry-run")
    assert again["worker_seconds"] == 0
    count = len(lines)
    run_json(capsys, *command)
    assert not [
        line
        for line in map(json.loads, Path("events.jsonl").read_text().splitlines()[count:])
        if line["event"] == "job"
    ]


def test_only_the_jobs_of_a_changed_layer_are_new(inside, capsys):
    """Six equal layers; then the fifth is another one."""
    (inside / "wide.py").write_text(
        "import jax.numpy as jnp, optax\nfrom types import SimpleNamespace\nfrom "
        "jax.ad_checkpoint import checkpoint_name\n\n"
        "def model(odd=-1):\n"
        "    init = lambda key: [jnp.ones((8, 24 if i == odd else 16)) for i in range(6)]\n"
        "    def loss_fn(params, x):\n"
        "        for i, w in enumerate(params):\n"
        "            x = checkpoint_name(x, 'layer_boundary') if i else x\n"
        "            x = x + jnp.tanh(x @ w) @ w.T\n"
        "        return (x**2).mean()\n"
        "    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=lambda key, n: jnp.ones((n, "
        "8)), optimizer=optax.sgd(0.1))\n"
    )
    question = [
        *QUESTION[1:],
        "--neighbours",
        "1",
        "--calibration-plans",
        "0",
        "--store",
        "wide.sqlite",
        "--workers",
        "0",
    ]
    assert (
        run_json(capsys, "profile", "wide.py:model", *question, "--quiet", "-o", "wide.json")[0]
        == 0
    )
    listed = run_json(capsys, "jobs", "wide.py:model?odd=4", *question)[1]
    fresh = run_json(
        capsys, "jobs", "wide.py:model?odd=4", *question[:-4], "--store", "empty.sqlite"
    )[1]
    assert listed["num_jobs"] == fresh["num_jobs"] and fresh["num_done"] == 0
    windows = listed["kinds"]["layer windows"]
    # At each of two micro-batch sizes: the layer alone, with the one before, with the one after
    # (the last).
    assert windows["num_jobs"] - windows["num_done"] == 2 * 3
    assert run_json(capsys, "jobs", "wide.py:model", *question)[1]["worker_seconds"] == 0


def test_a_profile_without_a_measurement_is_written_ends_with_1_and_names_it(
    inside, capsys, monkeypatch
):
    from capture.profiler.compile import CompileBackend

    programs_of = CompileBackend.programs

    def fail_on_the_first(self, config, **options):
        if (config.first, config.stop) == (0, 1):
            raise RuntimeError("no")
        return programs_of(self, config, **options)

    monkeypatch.setattr(CompileBackend, "programs", fail_on_the_first)
    command = [
        "profile",
        *QUESTION,
        *SMALL,
        "--store",
        "lacking.sqlite",
        "--workers",
        "0",
        "--quiet",
        "-o",
        "lacking.json",
    ]
    for _ in range(2):  # the second time it is known, and not tried
        code, document, _ = run_json(capsys, *command)
        assert (code, Path("lacking.json").exists()) == (1, True)
        (made,) = document["profiles"]
        assert (
            made["num_set_aside"] >= 2
            and "2 stages (all with layer 0; data parallel 1, " in made["failures"][0]
        )
        assert "M_i is not known of every layer (without layers 0 to 0)" in made["warnings"][-1]
    assert "capture store retry" in made["failures"][0]
    plan = ["plan", *QUESTION, "--profile", "lacking.json", "-o", "plan.json"]
    assert main(plan) == 2
    said = capsys.readouterr().err
    assert (
        said.endswith("lets it be tried again) [profile-missing]\n")
        and "target='cpu': no (set aside" in said
    )
    monkeypatch.undo()
    monkeypatch.chdir(inside)
    run_json(capsys, "store", "--store", "lacking.sqlite", "retry")
    assert run_json(capsys, *command)[0] == 0


def test_missing_and_superfluous_arguments_are_refused(inside, capsys):
    for arguments, says in (
        (["profile"], "WORKLOAD is missing"),
        (["profile", "--cluster", "1x1", "--jobs", "jobs.toml"], "leave"),
        (["profile", *QUESTION, "--jobs", "jobs.toml"], "leave"),
        (
            ["profile", "--jobs", "jobs.toml", "--target", "h100", "--remat", "full"],
            "--target, --remat beside --jobs would hold for no",
        ),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert says in err and err.endswith("[jobs-option]\n")


def test_a_terminated_profile_ends_in_order(inside):
    """As Slurm does before the time is over: exit code 143, an event that says so, and no job left
    running."""
    env = environment_apart(REPOSITORY / "tests", xla_flags=QUICK_CODE)
    command = [
        sys.executable,
        "-m",
        "capture",
        "profile",
        "pipeline_models:mlp?num_blocks=8",
        *QUESTION[1:],
        "--quiet",
        "--workers",
        "1",
    ]
    command += ["--store", "terminated.sqlite", "--events", "terminated.jsonl"]
    process = subprocess.Popen(command, cwd=inside, env=env, stderr=subprocess.PIPE, text=True)
    events, deadline = inside / "terminated.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while (
        '"state": "done"' not in (events.read_text() if events.exists() else "")
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.endswith("terminated; finished measurements are kept, the same command resumes\n")
    assert json.loads(events.read_text().splitlines()[-1])["exit_code"] == 143
    states = {row.state for row in Store(inside / "terminated.sqlite").rows()}
    assert "done" in states and "running" not in states


# ---- progress ------------------------------------------------------------------------------------


def test_a_tally_knows_rate_and_time_left():
    seconds = [0.0]
    tally = Tally(clock=lambda: seconds[0])
    tally.note("a", 0, 10)
    assert tally.jobs_per_minute is None
    tally.note("b", 0, 20)
    seconds[0] = 30.0
    tally.note("a", 5, 10)
    assert (tally.done, tally.total) == (5, 30)
    assert tally.jobs_per_minute == 10
    assert tally.seconds_left == 150


def test_events_without_a_file_are_none(tmp_path):
    Events(None).say("end", exit_code=0)
    Events(tmp_path / "events").say("end", exit_code=0)
    assert json.loads((tmp_path / "events").read_text())["exit_code"] == 0
