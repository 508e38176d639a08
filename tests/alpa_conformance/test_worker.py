"""The profiling job in Alpa's environment, up to where devices would be needed: the model with its
marks, the train step, the method."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import compile_method, mesh, replay
from steps import of_workload

from capture.alpa import to_alpa
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.papers.alpa import worker
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.plan.stages import Plan

HERE = Path(__file__).parent
PLAN = Plan(
    Cluster((4,)),
    4,
    (Stage(0, 2, [0, 1], StageChoice(2, 1, "none", True)), Stage(2, 4, [2, 3], StageChoice(1, 2))),
    32,
    4,
    "1f1b",
)
SPEC = {
    "location": str(HERE / "own_model.py"),
    "function": "model",
    "arguments": {"num_layers": 4, "width": 16},
}


def test_the_job_compiles_to_the_plans_stages(as_worker):
    workload = worker.load_workload(SPEC)
    method = worker.method_of(to_alpa(PLAN).source())(mesh(1, 4))
    state, batch = worker.state_and_batch(workload, PLAN.global_batch_size)
    found = compile_method(worker.train_step(workload), (state, batch), method)
    assert found.stage_option.forward_stage_layer_ids == [[0, 1], [2, 3]]
    peaks = [max(nbytes for _, nbytes in timeline) for timeline in replay(found)]
    assert len(peaks) == 2 and all(peak > 3 * 2 * 16 * 16 * 4 for peak in peaks), (
        "parameters and Adam's state are there"
    )


@pytest.mark.parametrize("family", ["gpt", "moe", "wide_resnet"])
def test_models_of_the_zoo_are_trained_by_alpa(family, as_worker):
    """The load-balancing loss of the mixture of experts crosses as a scalar, which Alpa alone does
    not let it."""
    spec = WorkloadSpec(
        str(HERE.parents[1] / "models" / f"{family}.py"),
        family,
        {"size": "tiny", **({"num_layers": 4} if family == "gpt" else {})},
    )
    plan = replace(PLAN, workload=spec)
    found = compile_method(*of_workload(plan), worker.method_of(to_alpa(plan).source())(mesh(1, 4)))
    assert found.stage_option.forward_stage_layer_ids == [[0, 1], [2, 3]]


def test_a_job_that_fails_says_why(tmp_path):
    """Here: this process has no Ray cluster, and not even Alpa's jaxlib."""
    job = {
        "workload": SPEC,
        "method": to_alpa(PLAN).source(),
        "num_hosts": 1,
        "num_devices_per_host": 4,
        "global_batch_size": 32,
        "result": str(tmp_path / "result.json"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, worker.__file__, str(tmp_path / "job.json")],
        check=True,
        capture_output=True,
    )
    assert json.loads((tmp_path / "result.json").read_text())["failure"].startswith(
        "RuntimeError: jaxlib version"
    )
