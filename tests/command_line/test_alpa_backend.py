"""Runs in Alpa's own interpreter: their jobs, their failures, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from refusals import codes_of

from capture.cli.main import main
from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.papers.alpa.backend import AlpaBackend
from capture.papers.capture.execution import ProfilingRun
from capture.plan.choices import StageChoice
from profiling_runs import ProfileQuestion
from profiling_runs import profile as make_profile

# ---- the profiling backend -----------------------------------------------------------------------

SPEC = WorkloadSpec.parse(
    f"{Path(__file__).parents[1] / 'alpa_conformance' / 'own_model.py'}:model?num_layers=4"
)


def test_a_job_holds_all_that_alpas_process_needs(tmp_path):
    backend = AlpaBackend(SPEC, Cluster((4, 4), "a100-40g"), sys.executable)
    run = ProfilingRun((2, 2), StageChoice(2, 1), 4, 8, "gpipe")
    job = backend.job(run, tmp_path / "result.json")
    assert (job["num_hosts"], job["num_devices_per_host"], job["global_batch_size"]) == (1, 4, 32)
    assert Path(job["workload"]["location"]).is_absolute() and job["workload"]["arguments"] == {
        "num_layers": 4
    }
    assert "num_micro_batches=8" in job["method"] and 'pipeline_schedule="gpipe"' in job["method"]
    assert backend.nodes_of(8) == (4, 4) and backend.nodes_of(2) == (2,)
    assert codes_of(lambda: backend.nodes_of(6)) == ("alpa-submesh",)


def test_a_run_whose_process_ends_is_a_failed_run(tmp_path):
    backend = AlpaBackend(SPEC, Cluster((2,)), sys.executable)
    executed = backend.execute(ProfilingRun((2, 2), StageChoice(1, 1), 4, 2, "gpipe"))
    assert executed.peak_bytes_per_stage is None and "alpa" in executed.failure, (
        "this environment has no alpa"
    )


@pytest.mark.parametrize(
    ("python", "said"),
    [(sys.executable, "cannot import alpa: ModuleNotFoundError"), ("/no/python", "cannot be run")],
)
def test_an_interpreter_without_alpa_is_refused_at_once(python, said):
    with pytest.raises(ExecutionError, match=rf"{said}.*\[alpa-python\]$"):
        make_profile(
            ProfileQuestion(
                SPEC,
                Cluster((2,)),
                microbatch_size=4,
                backend="alpa",
                paper=("gpipe", 4),
                alpa_python=python,
            )
        )


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "alpa"],
        ["--alpa-python", "python"],
        ["--backend", "alpa", "--alpa-python", "p", "--tensor-parallel-rule", "largest"],
    ],
)
def test_the_interpreter_and_the_backend_belong_together(options, capsys):
    code = main(
        [
            "profile",
            str(SPEC),
            "--cluster",
            "1x2",
            "--microbatches",
            "4",
            "--mode",
            "paper",
            *options,
            "--json",
        ]
    )
    assert code == 2 and "profile-backend" in capsys.readouterr().out
