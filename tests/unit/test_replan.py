"""The plan for the nodes that are left comes from a profile, runs over hosts, and names the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_here
from plan_examples import two_stages
from synthetic_profiles import Planted, hybrid

from capture.cli.replan import replanner
from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.runtime.hosts.addresses import check_nodes

WORKLOAD = WorkloadSpec.parse("a.py:b")
PLAN = two_stages(cluster=Cluster((2, 2)), workload=WORKLOAD)


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("replan") / "profile.json"
    made = Planted(8).profile(hybrid(2))
    made.save(path)
    replace(made, workload=WorkloadSpec.parse("c.py:d")).save(path.with_name("other.json"))
    return path


def test_the_others_get_the_best_plan(profile):
    plan = PLAN.with_(global_batch_size=32, num_microbatches=2)
    found = replanner([profile], plan)(plan, frozenset({0}))
    assert found.cluster == Cluster((2,)) and found.workload == WORKLOAD
    assert (found.global_batch_size, found.num_microbatches) == (32, 2)
    assert found.schedule == plan.schedule and found.num_layers == 8
    check_nodes(found)


def test_another_model_is_refused_at_the_start(profile):
    with pytest.raises(ExecutionError) as error:
        replanner([profile.with_name("other.json")], PLAN)
    assert error.value.codes == ("run-hosts-replan",)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--max-restarts", "2"), "run-restarts"),
        (("--hosts", "none", "--heartbeat", "2"), "run-restarts"),
        (("--hosts", "local", "--on-loss", "replan"), "run-restarts"),
        (("--hosts", "local", "--profile", "profile.json"), "run-restarts"),
        (("--hosts", "none", "--on-loss", "replan", "--profile", "a.json"), "run-restarts"),
    ],
)
def test_options_that_nothing_would_read_are_refused(tmp_path, capsys, options, code):
    PLAN.save(tmp_path / "plan.json")
    status, _, said = run_here(capsys, "run", str(tmp_path / "plan.json"), *options)
    assert status == 2 and said.endswith(f"[{code}]\n")
