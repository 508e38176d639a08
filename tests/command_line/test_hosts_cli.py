"""``capture run --hosts``: one document of all hosts; what cannot be is refused; and nothing is left
running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_here
from plan_examples import two_stages
from processes import QUICK_CODE, REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage

WORKLOAD = f"{REPOSITORY / 'tests/pipeline_models.py'}:tied"


@pytest.fixture
def plan(tmp_path) -> Path:
    """Unequal layouts on two nodes; the model has dropout, tied parameters and a skip."""
    stages = (
        Stage(0, 2, (0, 1), StageChoice(data_parallel=2)),
        Stage(2, 4, (2, 3), StageChoice(tensor_parallel=2)),
    )
    changes = {"cluster": Cluster((2, 2)), "num_layers": 4, "stages": stages}
    made = two_stages(workload=WorkloadSpec.parse(WORKLOAD), global_batch_size=8, **changes)
    made.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_stage_that_spans_nodes_is_refused(plan, capsys):
    spanning = plan.with_name("spanning.json")
    two_stages(workload=WorkloadSpec.parse(WORKLOAD), cluster=Cluster((1, 3))).save(spanning)
    code, _, said = run_here(capsys, "run", str(spanning), "--hosts", "local", "--trust")
    assert code == 2 and said.endswith("[run-hosts-span]\n")


def test_a_transport_of_one_process_is_refused(plan, capsys):
    code, _, said = run_here(capsys, "run", str(plan), "--transport", "device_put")
    assert code == 2 and said.endswith(
        "--transport device_put is of several hosts; add --hosts or --ray. [run-transport]\n"
    )


def start(plan: Path, *options: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "capture", "run", plan, "--trust", *options],
        env=environment_apart(xla_flags=QUICK_CODE, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.slow
def test_hosts_train_as_one_process(plan):
    documents = []
    for name, where in (("one", ()), ("hosts", ("--hosts", "local"))):
        options = ("--steps", "2", "--check", "--json", "--save", str(plan.with_name(name)))
        out, said = start(plan, *options, *where).communicate(timeout=TIMEOUT_SECONDS)
        documents.append(json.loads(out))
        assert "step 1: loss" in said
    one, hosts = documents
    for name in ("losses", "reference_losses", "max_relative_gradient_error", "num_devices"):
        assert hosts[name] == one[name], name
    assert hosts["measured_peak_bytes_per_device"] == hosts["replayed_peak_bytes_per_device"]
    offered = hosts["offered_peak_bytes_per_device"]
    alone = one["replayed_peak_bytes_per_device"]
    both = [a + b for a, b in zip(alone, offered, strict=True)]
    assert both == hosts["replayed_peak_bytes_per_device"] and max(offered) > 0
    assert [host["num_devices"] for host in hosts["hosts"]] == [2, 2]
    assert min(host["ledger_checks"] for host in hosts["hosts"]) > 50
    # The training goes on over hosts from what one process saved, and the other way round.
    losses = []
    for name, where in (("hosts", ()), ("one", ("--hosts", "local"))):
        options = ("--steps", "1", "--json", "--restore", str(plan.with_name(name)))
        out, _ = start(plan, *options, *where).communicate(timeout=TIMEOUT_SECONDS)
        losses.append(json.loads(out)["losses"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ("--hosts", "none", "--steps", "1", "--json", "--restore", str(plan.with_name("one")))
    hosts = {"CAPTURE_COORDINATOR": address, "CAPTURE_NUM_HOSTS": "2"}
    both = [start(plan, *options, CAPTURE_HOST=host, **hosts) for host in ("0", "1")]
    told = [command.communicate(timeout=TIMEOUT_SECONDS)[0] for command in both]
    assert told[1] == "" and json.loads(told[0])["losses"] == losses[0] == losses[1]


def hosts_of(command: subprocess.Popen) -> list[int]:
    """The processes of a run, once both train."""
    assert command.stderr is not None
    assert "compiling the step" in command.stderr.readline()
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    found = [int(child) for child in children if "spawn_main" in _arguments(int(child))]
    assert len(found) == 2
    return found


def _arguments(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def is_gone(process: int) -> bool:
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [("interrupt", 130, "interrupted"), ("kill", 3, "host 1: its process ended by signal 9")],
)
def test_nothing_is_left_running(plan, end, code, says):
    command = start(plan, "--hosts", "local", "--steps", "1000")
    started = hosts_of(command)
    # The driver loads no JAX, and is small.
    assert "jaxlib" not in Path(f"/proc/{command.pid}/maps").read_text()
    resident = Path(f"/proc/{command.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(resident) < 300_000, "kB"
    if end == "interrupt":
        command.send_signal(signal.SIGINT)
    else:
        os.kill(max(started), signal.SIGKILL)  # the second that was started
    _, said = command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == code and says in said
    assert all(map(is_gone, started))
