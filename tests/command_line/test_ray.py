"""Jobs and trainings on Ray clusters of several nodes, all of them on this machine: nodes die and
join, drivers are killed, kinds of devices differ.

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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plan_examples import two_stages
from processes import QUICK_CODE, environment_apart, user_model
from timeouts import TIMEOUT_SECONDS

from capture.errors import ExecutionError, ProfileError
from capture.machine.cluster import Cluster
from capture.machine.ray_cluster import RayCluster
from capture.model.workload import WorkloadSpec
from capture.plan.stage import Stage
from capture.runtime.hosts.ray_hosts import RayStarter
from capture.runtime.hosts.restarts import Restarts, train_over_hosts
from capture.runtime.hosts.saved import complete_steps
from capture.runtime.hosts.watching import watch
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
    demand = demand_of(Setting(SPEC, num_devices=2, executes=True, target="a100-40g"), None)
    node = {"CPU": 16, "GPU": 4, "memory": 64e9}
    assert demand.room({**node, "accelerator_type:A100": 1}) == 2
    assert demand.room({**node, "accelerator_type:H100": 1}) == demand.room(node) == 0
    assert demand.options()["resources"] == {"accelerator_type:A100": 0.001}
    assert (
        demand_of(
            Setting(SPEC, num_devices=2, executes=True, target="h100"), "H100-SXM"
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
        nodes=lambda: cluster.worker_nodes,
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
    setting = setting_of(Setting(SPEC, num_devices=2, executes=True, target="a100-40g"))
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


# ---- training ------------------------------------------------------------------------------------


@pytest.fixture
def plan(directory):
    """Two nodes of a device."""
    stages = tuple(Stage(first, first + 1, (first,)) for first in (0, 1))
    made = two_stages(
        workload=WorkloadSpec.parse(f"{directory / 'model.py'}:model?widths=8,12"),
        cluster=Cluster((1, 1)),
        num_layers=2,
        stages=stages,
        global_batch_size=4,
    )
    made.save(directory / "plan.json")
    return made


def run(directory: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "capture", "run", "plan.json", "--trust", *options],
        cwd=directory,
        env=environment_apart(xla_flags=QUICK_CODE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def until_it_says(process: subprocess.Popen, text: str) -> None:
    assert process.stderr is not None
    said = []
    while not said or text not in said[-1]:
        said.append(process.stderr.readline())
        assert said[-1], said


def actors_of(driver: int) -> list[int]:
    """Processes that hold a ``RemoteHost`` and are of a driver's own cluster."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if "RemoteHost" in path.read_text() and driver in _ancestors(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def _ancestors(process: int) -> list[int]:
    found = []
    while process > 1:
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.split("PPid:")[1].split()[0])
        found.append(process)
    return found


def is_gone(process: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while Path(f"/proc/{process}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not Path(f"/proc/{process}/cmdline").exists()


@pytest.mark.ray
def test_a_plan_trains_over_actors_as_in_one_process_and_its_driver_loads_no_jax(directory, plan):
    alone, _ = run(directory, "--steps", "2", "--json").communicate(timeout=TIMEOUT_SECONDS)
    driver = run(directory, "--steps", "2", "--json", "--ray", "local", "--trace", "trace.json")
    until_it_says(driver, "step 1: loss")
    assert "jaxlib" not in Path(f"/proc/{driver.pid}/maps").read_text()
    resident = Path(f"/proc/{driver.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(resident) < 300_000, "kB"
    actors = actors_of(driver.pid)
    assert len(actors) == 2
    out, said = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, said
    one, over = json.loads(alone), json.loads(out)
    assert over["losses"] == one["losses"] and [h["num_devices"] for h in over["hosts"]] == [1, 1]
    assert all(map(is_gone, actors))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


@pytest.mark.ray
def test_ctrl_c_leaves_nothing_running(directory, plan):
    driver = run(directory, "--steps", "100000", "--ray", "local")
    until_it_says(driver, "step 2: loss")
    actors = actors_of(driver.pid)
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 130 and len(actors) == 2 and all(map(is_gone, actors))


@pytest.mark.ray
def test_hosts_are_placed_apart_and_started_again_on_other_nodes(
    ray_cluster, directory, plan, monkeypatch
):
    monkeypatch.chdir(directory)
    cluster = RayCluster(ray_cluster.address, ExecutionError)
    starter = RayStarter(cluster, plan.workload, place_seconds=2.0)
    ray_cluster.add()
    try:
        with pytest.raises(ExecutionError) as refused:
            starter.start(plan, {})
        assert refused.value.codes == ("ray-resources",)
        assert "2 processes need 1 CPU, 1000000000 bytes of memory each, each on a node of" in str(
            refused.value
        )
        assert "waited" in str(refused.value) and starter.missing(plan) == {1}
        second = ray_cluster.add()
        training = {"num_steps": 600, "save": directory / "state", "save_every": 100}
        nodes: list[set[str]] = []
        started = RayStarter.start

        def start(self, plan, training):
            processes = started(self, plan, training)
            nodes.append({greeting.node for greeting in processes._greetings})
            return processes

        monkeypatch.setattr(RayStarter, "start", start)
        killed: list[str] = []

        def report(text: str) -> None:
            if not killed and complete_steps(directory / "state"):
                killed.append(second.node_id)
                ray_cluster.kill(second)
                ray_cluster.add()

        patient = replace(starter, place_seconds=60.0)
        document = train_over_hosts(patient, plan, training, Restarts(2), report)
        assert [len(each) for each in nodes] == [2, 2] and killed[0] in nodes[0] - nodes[1]
        assert len(document["losses"]) == 600 and len(document["restarts"]) == 1
        assert document["restarts"][0]["resumed_from_step"] in range(100, 600, 100)
        alone, _ = run(directory, "--steps", "600", "--json").communicate(timeout=TIMEOUT_SECONDS)
        assert document["losses"] == json.loads(alone)["losses"]
        # One that is stopped is found, and ended all the same.
        processes = starter.start(plan, {"num_steps": 100_000})
        stopped = processes._greetings[1].process
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(ExecutionError, match=r"host 1: its process gives no sign of life"):
            watch(processes, 2, silent_seconds=4.0)
        processes.end()
        assert is_gone(stopped)
    finally:
        cluster.close()
    for node in list(ray_cluster.nodes()):
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
