"""A plan over several processes does what it does in one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import host_cases
import jax
import numpy as np
import pytest
from pipeline_models import pipeline
from processes import QUICK_CODE, REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture import pipeshard
from capture.errors import ExecutionError
from capture.runtime import checkpoint
from capture.runtime.hosts.saved import MARKER, complete_steps


def run_hosts(
    folder: Path, names: list[str], num_hosts: int = 2, delay: float = 0.0, seeds: int = 1
) -> None:
    """Start the processes, wait until all have ended, and end them if one fails or it is late."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    program = [sys.executable, REPOSITORY / "tests/programs/host_process.py", coordinator]
    started = []
    try:
        for host in range(num_hosts):
            numbers = [str(num_hosts), str(host), str(folder), str(delay), str(seeds)]
            with (folder / f"{host}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [*program, *numbers, *names],
                        env=environment_apart(REPOSITORY / "tests", xla_flags=QUICK_CODE),
                        stderr=log,
                    )
                )
        end = time.monotonic() + TIMEOUT_SECONDS
        while any(process.poll() is None for process in started):
            failed = [host for host, process in enumerate(started) if process.poll()]
            if failed or time.monotonic() > end:
                host = failed[0] if failed else 0
                pytest.fail(f"host {host}: {(folder / f'{host}.log').read_text()[-3000:]}")
            time.sleep(0.05)
        assert not any(process.returncode for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def assert_as_one_process(folder: Path, names: Collection[str], num_hosts: int = 2) -> None:
    waiting = sum(one_process_waiting(folder, name, num_hosts) for name in names)
    # What a host offers may be taken before it looks; of all plans something is there.
    assert waiting > 0


def one_process_waiting(folder: Path, name: str, num_hosts: int) -> int:
    """Bytes that waited to be pulled, after the hosts' results have been held against those of one
    process."""
    workload, plan, _ = host_cases.case(name)
    one = host_cases.train(
        pipeshard(workload, plan, jax.devices()[: sum(plan.cluster.nodes)]), workload
    )
    found = [dict(np.load(folder / f"{name}.{host}.npz")) for host in range(num_hosts)]
    alone = {"peaks", "replayed", "num_checks", "examples read", "waiting"}
    each = np.array([of_host["examples read"] for of_host in found])
    assert (each.sum(0) >= one["examples read"]).all() and (each <= one["examples read"]).all()
    assert each.sum() < num_hosts * one["examples read"].sum(), (
        "nobody needs all that the others do"
    )
    for host, of_host in enumerate(found):
        for what in one.keys() - alone:
            np.testing.assert_array_equal(of_host[what], one[what], f"{name}, host {host}: {what}")
        assert of_host["num_checks"] > len(plan.stages) * plan.num_microbatches
        assert (of_host["replayed"] == found[0]["replayed"]).all()
        assert (of_host["waiting"] < of_host["peaks"]).all()
    measured = np.concatenate([of_host["peaks"] for of_host in found])
    np.testing.assert_array_equal(measured, found[0]["replayed"], name)
    assert (measured >= one["replayed"]).all(), "what waits to be pulled is held beside the rest"
    return sum(int(of_host["waiting"].sum()) for of_host in found)


def test_two_hosts_are_one_process(tmp_path):
    names = [*host_cases.CASES, *by_device_put(host_cases.SMALL)]
    run_hosts(tmp_path, names)
    assert_as_one_process(tmp_path, names)
    assert_restored_alone(tmp_path)


def by_device_put(names: Collection[str]) -> list[str]:
    return [f"device_put:{name}" for name in names]


def assert_restored_alone(folder: Path) -> None:
    """One process reads what two have written, under another plan; and the checkpoint before it, if
    that is not whole."""
    saved, name = folder / "saved", host_cases.SAVED
    assert complete_steps(saved) == [2, 3]
    workload, _, _ = host_cases.ALL[name]()
    step = pipeshard(workload, pipeline((4,), ((1, 1),)))
    state = checkpoint.restore(step, saved)
    found = np.load(folder / f"{name}.0.npz")
    for what, tree in (("params", step.params), ("optimizer", step.optimizer_state)):
        for i, leaf in enumerate(jax.tree.leaves(tree(state))):
            np.testing.assert_array_equal(leaf, found[f"{what} {i}"])

    def passed_over() -> str:
        said: list[str] = []
        assert checkpoint.restore(step, saved, report=said.append).num_steps == 2
        (line,) = said
        assert line.endswith("going on from that of step 2")
        return line

    (data,) = (saved / "3/stage_1/d").iterdir()
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"is damaged: ValueError: stage_1/d/{data.name} has other content" in passed_over()
    data.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes and was written with {len(whole)}" in passed_over()
    data.unlink()
    assert f"stage_1/d/{data.name} is missing" in passed_over()
    (saved / "3" / MARKER).unlink()
    assert "the checkpoint of step 3" in (line := passed_over())
    assert "was not written to its end" in line
    (saved / "2" / MARKER).write_text("{")
    with pytest.raises(ExecutionError) as refused:
        checkpoint.restore(step, saved, num_steps=2)
    assert refused.value.codes == ("checkpoint-damaged",)


@pytest.mark.slow
def test_more_plans_and_late_processes(tmp_path):
    run_hosts(tmp_path, list(host_cases.SLOW_CASES), delay=0.02)
    assert_as_one_process(tmp_path, host_cases.SLOW_CASES)


@pytest.mark.slow
def test_three_hosts_with_random_delays(tmp_path):
    names = [*host_cases.THREE_HOSTS, *by_device_put(["three"])]
    run_hosts(tmp_path, names, num_hosts=3, delay=0.02)
    assert_as_one_process(tmp_path, names, num_hosts=3)


@pytest.mark.exhaustive
def test_every_plan_by_device_put(tmp_path):
    names = by_device_put(host_cases.CASES | host_cases.SLOW_CASES)
    run_hosts(tmp_path, names, delay=0.02)
    assert_as_one_process(tmp_path, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("prefix", ["", "device_put:"])
def test_twenty_orders_of_events_give_the_same(tmp_path, prefix):
    names = [f"{prefix}{name}" for name in host_cases.THREE_HOSTS]
    run_hosts(tmp_path, names, num_hosts=3, delay=0.02, seeds=20)
    assert_as_one_process(tmp_path, names, num_hosts=3)
