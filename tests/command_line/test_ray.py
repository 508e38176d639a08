"""Jobs on Ray clusters of several nodes, all of them on this machine: nodes die and join, drivers
are killed, kinds of devices differ.

``make ray`` runs this file: starting the nodes takes most of its time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import environment_apart, user_model
from timeouts import TIMEOUT_SECONDS

from capture.errors import ProfileError
from capture.model.workload import WorkloadSpec
from profiling_runs.jobs import Job, Setting
from profiling_runs.pools.ray_pool import demand_of, travelling
from profiling_runs.pools.where import Where, setting_of

QUESTION = [
    "model.py:model",
    "--cluster",
    "1x1",
    "--global-batch",
    "4",
    "--microbatches",
    "2",
    "--calibration-plans",
    "0",
]
SPEC = WorkloadSpec("model.py", "model")


# ---- without a cluster ---------------------------------------------------------------------------


def test_a_worker_that_compiles_needs_a_processor_and_memory():
    demand = demand_of(Setting(SPEC, target="a100-40g"), None)
    assert demand.room({"CPU": 4, "memory": 64e9}) == 4
    assert demand.room({"CPU": 4, "memory": 2.5e9}) == 2
    assert demand.options()["num_gpus"] == 0


def test_a_run_for_a_kind_of_device_fits_nowhere_else():
    demand = demand_of(Setting(SPEC, num_devices=2, backend="run", target="a100-40g"), None)
    node = {"CPU": 16, "GPU": 4, "memory": 64e9}
    assert demand.room({**node, "accelerator_type:A100": 1}) == 2
    assert demand.room({**node, "accelerator_type:H100": 1}) == demand.room(node) == 0
    assert demand.options()["resources"] == {"accelerator_type:A100": 0.001}
    assert (
        demand_of(
            Setting(SPEC, num_devices=2, backend="run", target="h100"), "H100-SXM"
        ).accelerator_type
        == "H100-SXM"
    )


def test_what_does_not_travel_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inside = Setting(WorkloadSpec(str(tmp_path / "here" / "model.py"), "model"))
    assert travelling(inside).workload.location == "model.py"
    assert (
        travelling(Setting(WorkloadSpec("package.module", "model"))).workload.location
        == "package.module"
    )
    for outside in (
        Setting(WorkloadSpec("../model.py", "model")),
        Setting(SPEC, target=str(tmp_path / "mine.json")),
    ):
        with pytest.raises(ProfileError) as error:
            travelling(outside)
        assert error.value.codes == ("ray-workload",)


# ---- on a cluster --------------------------------------------------------------------------------


def patiently(start_node, attempts: int = 3):
    """Ray gives a node 30 seconds to start, which a busy machine may need for other things."""
    for attempt in range(1, attempts + 1):
        try:
            return start_node()
        except Exception as error:
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def ray_cluster():
    """A head without processors, so that it is given no work, and functions that add and kill
    nodes."""
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs the extra [ray]")
    node = {"object_store_memory": 80_000_000, "include_log_monitor": False}
    head = {**node, "num_cpus": 0, "include_dashboard": False, "no_monitor": True}
    cluster = patiently(lambda: cluster_utils.Cluster(initialize_head=True, head_node_args=head))
    yield SimpleNamespace(
        address=cluster.address,
        add=lambda **resources: patiently(
            lambda: cluster.add_node(**{**node, "num_cpus": 1, **resources})
        ),
        kill=lambda added: cluster.remove_node(added, allow_graceful=False),
        kill_head=lambda: cluster.head_node.kill_gcs_server(check_alive=False),
    )
    cluster.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    (path / "model.py").write_text(user_model("widths"))
    return path


def start(directory: Path, *options: str) -> subprocess.Popen:
    env = environment_apart(SOURCE_DATE_EPOCH="0", JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", "capture", "profile", *QUESTION, "--quiet", *options]
    return subprocess.Popen(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return said


def events(path: Path, state: str) -> list[dict]:
    """Whole lines that say that a job is in a state."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        event
        for line in lines
        if (event := json.loads(line)).get("state") == state and event["event"] == "job"
    ]


def wait_for(path: Path, count: int, process: subprocess.Popen) -> None:
    """Until so many jobs are done."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(events(path, "done")) < count:
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(directory) -> bytes:
    """The profile as one local worker makes it."""
    process = start(directory, "--store", "local.sqlite", "--workers", "1", "-o", "profile.json")
    assert finish(process) is not None and process.returncode == 0
    return (directory / "profile.json").read_bytes()


@pytest.mark.ray
def test_nodes_that_die_and_join_and_a_driver_that_is_killed_change_nothing(
    ray_cluster, directory, undisturbed
):
    (directory / "profile.json").unlink()
    happened = directory / "events.jsonl"
    command = (
        "--store",
        "ray.sqlite",
        "--ray",
        ray_cluster.address,
        "--events",
        str(happened),
        "-o",
        "profile.json",
    )
    first = ray_cluster.add()
    driver = start(directory, *command)
    wait_for(happened, 2, driver)
    ray_cluster.kill(first)
    second = ray_cluster.add()
    wait_for(happened, 5, driver)
    os.kill(driver.pid, signal.SIGKILL)
    finish(driver)
    driver = start(directory, *command)
    said = finish(driver)
    assert driver.returncode == 0, said
    assert (directory / "profile.json").read_bytes() == undisturbed
    done = Counter(event["key"] for event in events(happened, "done"))
    assert set(done.values()) == {1} and not events(happened, "set aside")
    ray_cluster.kill(second)


@pytest.mark.ray
def test_a_job_for_a_kind_of_device_lands_on_it_and_is_refused_without(
    ray_cluster, directory, monkeypatch
):
    monkeypatch.chdir(directory)
    setting = setting_of(Setting(SPEC, num_devices=2, backend="run", target="a100-40g"))
    other = ray_cluster.add(num_gpus=2, resources={"accelerator_type:H100": 1})
    with pytest.raises(ProfileError) as error:
        Where(ray=ray_cluster.address).open(setting, None, 1)
    assert error.value.codes == ("ray-resources",)
    assert "2 GPU of type A100" in str(error.value) and "accelerator_type:H100 1" in str(
        error.value
    )
    wanted = ray_cluster.add(num_gpus=2, resources={"accelerator_type:A100": 1})
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    runner = Where(ray=ray_cluster.address).open(setting, None, 5)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (slots := runner.idle()) and time.monotonic() < deadline:
            runner.finished(1.0)
        assert [slot._nodes for slot in slots] == [{wanted.node_id}]
        runner.start(slots[0], Job("machine", None, "machine"))
        outcomes = []
        while not outcomes and time.monotonic() < deadline:
            outcomes = runner.finished(1.0)
        assert outcomes[0].failure is None
    finally:
        runner.close()
    refused = Where(ray=ray_cluster.address).open(
        replace(setting, versions={"jax": "0.0.1"}), None, 1
    )
    with pytest.raises(ProfileError) as error:
        while time.monotonic() < deadline:
            refused.idle()
            refused.finished(1.0)
    refused.close()
    assert error.value.codes == ("worker-versions",) and "instead of 0.0.1" in str(error.value)
    for node in (other, wanted):
        ray_cluster.kill(node)


@pytest.mark.ray
def test_a_lost_head_is_said_before_ray_ends_the_driver(ray_cluster, directory, monkeypatch):
    """The last test: the cluster is gone after it."""
    monkeypatch.chdir(directory)
    ray_cluster.add()
    runner = Where(ray=ray_cluster.address).open(setting_of(Setting(SPEC)), None, 1)
    ray_cluster.kill_head()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with pytest.raises(ProfileError) as error:
        while time.monotonic() < deadline:
            runner.idle()
            runner.finished(1.0)
    assert error.value.codes == ("ray-lost",) and "does not answer" in str(error.value)
    runner.close()
