"""What the processes of a run tell each other, and what they refuse."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from plan_examples import two_stages

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.runtime import multihost
from capture.runtime.hosts import addresses, device_puts
from capture.runtime.hosts.part import StepPart
from capture.runtime.hosts.saving import Saver
from capture.runtime.layout import first_devices
from capture.runtime.multihost import Hosts, initialize


class Store:
    """As the client of ``jax.distributed``, for threads."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def hosts_of(count: int, patience_seconds: float = 60.0) -> list[Hosts]:
    store = Store()
    return [
        Hosts(n, count, store, patience_seconds=patience_seconds, on_silence=print)
        for n in range(count)
    ]


def together(hosts: list[Hosts], call) -> list[Any]:
    """What each gives, or raises."""
    found: list[Any] = [None] * len(hosts)

    def run(host: Hosts) -> None:
        try:
            found[host.process] = call(host)
        except ExecutionError as error:
            found[host.process] = error

    threads = [threading.Thread(target=run, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_everybody_learns_what_each_says():
    hosts = hosts_of(3)
    for again in (1, 2):
        said = together(hosts, lambda host, again=again: host.exchange("x", host.process * again))
        assert said == [[0, again, 2 * again]] * 3


def test_hosts_that_differ_are_refused_everywhere_with_host_and_difference():
    def compare(host):
        host.compare({"jax": "0.10.2", "flags": ["-a"] if host.process == 1 else []})

    for error in together(hosts_of(3), compare):
        assert str(error) == (
            "host 1 has flags=['-a'] and host 0 []; start all hosts with the same files, packages "
            "and environment. [run-hosts-differ]"
        )


def test_nobody_is_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("capture.environment.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with pytest.raises(ExecutionError) as refused:
        hosts_of(2, patience_seconds=0.05)[0].exchange("costs", {})
    assert str(refused.value) == (
        "host 1 has not said its costs within 0 s; look why it is late, or ended. "
        "[run-hosts-silent]"
    )


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(113, "No route to host")])
def test_an_address_that_nobody_answers_is_refused_once_the_time_is_over(monkeypatch, error):
    tried: list[float] = []

    def connect(place, seconds):
        tried.append(seconds)
        raise error

    monkeypatch.setattr(addresses, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(addresses, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ExecutionError) as refused:
        addresses.check_coordinator("10.0.0.9:4321", 2)
    assert str(refused.value) == (
        f"host 2 does not reach host 0 at 10.0.0.9:4321: {error}; give an address and a free port "
        "of host 0 that every host reaches. [run-hosts-start]"
    )
    assert tried and max(tried) <= 0.05


@pytest.mark.parametrize("method", ["key_value_set", "blocking_key_value_get"])
def test_a_service_that_is_gone_is_said(monkeypatch, method):
    def gone(*arguments):
        raise RuntimeError("UNAVAILABLE: Socket closed\nand more")

    monkeypatch.setattr(Store, method, gone)
    with pytest.raises(ExecutionError) as refused:
        hosts_of(2)[1].exchange("costs", {})
    assert str(refused.value) == (
        "the service of the run in host 0 does not answer host 1: UNAVAILABLE: Socket closed; look "
        "at that host and the network. [run-hosts-cut]"
    )


def test_a_host_that_cannot_write_is_named_by_all(tmp_path):
    def write(host):
        saver = object.__new__(Saver)
        saver._hosts, saver._directory = host, tmp_path

        def on_one_host():
            if host.process == 1:
                raise OSError("No space left on device")
            return host.process

        return saver._agreed("written", on_one_host)

    for error in together(hosts_of(3), write):
        assert str(error) == (
            f"host 1 could not write into {str(tmp_path)!r}: OSError: No space left on device. "
            "[checkpoint-write]"
        )


def test_an_address_is_tried_before_jax_would_crash_or_wait(monkeypatch):
    monkeypatch.setattr(addresses, "ANSWER_SECONDS", 0.0)
    unknown = "no-such-host.invalid:4321"
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        closed.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{closed.getsockname()[1]}"
        for address, host, says in (
            (busy, 0, f"host 0 cannot listen at {busy}: [Errno 98] Address already in use; give"),
            (unknown, 0, f"host 0 cannot listen at {unknown}: "),
            (unknown, 1, f"host 1 does not reach host 0 at {unknown}: "),
        ):
            with pytest.raises(ExecutionError) as refused:
                initialize(address, 2, host, transport="device_put")
            assert refused.value.codes == ("run-hosts-start",)
            assert str(refused.value).startswith(says)
        addresses.check_coordinator(silent, 1)  # host 0 may come later
        there = [busy, silent, busy]
        found = together(
            hosts_of(3),
            lambda host: addresses.check_reached(
                there, host.process, lambda mine: host.exchange("reached", mine)
            ),
        )
    for error in found:
        assert error.codes == ("run-hosts-start",) * 2
        assert f"host 2 does not reach host 1 at {silent}: [Errno 111] Connection refused" in str(
            error
        )


def test_a_node_needs_its_process_and_devices(monkeypatch):
    devices = [SimpleNamespace(process_index=host, id=i) for i, host in enumerate([0, 0, 0, 1])]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    host = hosts_of(2)[0]
    plan = two_stages(cluster=Cluster((2, 2)))
    with pytest.raises(ExecutionError) as refused:
        host.devices(plan)
    assert str(refused.value) == (
        "node 1 of the plan has 2 devices and host 1 1; plan for what the hosts have. [run-hosts]"
    )
    with pytest.raises(ExecutionError) as refused:
        host.devices(plan.with_(cluster=Cluster((2, 1, 1))))
    assert str(refused.value) == (
        "the plan's cluster 2+1+1 has 3 nodes and the run 2 processes; start one process per node. "
        "[run-hosts]"
    )
    devices.append(SimpleNamespace(process_index=1, id=4))
    assert [device.id for device in host.devices(plan)] == [0, 1, 3, 4], "node-major"


def test_hosts_without_collectives_refuse_a_stage_that_spans_them(monkeypatch):
    devices = [SimpleNamespace(process_index=host, id=i) for i, host in enumerate([0, 0, 1, 1])]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    host, plan = hosts_of(2)[0], two_stages(cluster=Cluster((2, 2)))
    wide = plan.with_(stages=(Stage(0, plan.num_layers, (0, 1, 2, 3), StageChoice(4)),))
    assert len(host.devices(wide)) == 4
    host.are_joined = False
    assert len(host.devices(plan)) == 4
    with pytest.raises(ExecutionError) as refused:
        host.devices(wide)
    assert str(refused.value) == (
        "a stage of the plan spans hosts, and multihost.initialize(plan=) was given a plan without "
        "such stages; give it the one that is run. [run-hosts]"
    )


def test_a_sender_waits_for_what_it_sent_and_a_receiver_for_nothing():
    """By the number of the copy in all executions; the next execution counts on."""
    waited: list[int] = []
    copies = {n: SimpleNamespace(sends=n == 3, wait=waited.append) for n in (3, 4)}
    part: Any = SimpleNamespace(_copies=copies, _first=100)
    waits = [StepPart._bind_wait(part, n) for n in copies]
    for part._first in (100, 200):
        for wait in waits:
            wait(None)
    assert waited == [103, 203]


def test_the_scheduler_says_who_is_who(monkeypatch):
    for name, value in {
        "JOB_ID": "70001",
        "STEP_NODELIST": "node[003-004]",
        "JOB_NUM_NODES": "2",
        "NTASKS": "2",
        "PROCID": "1",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    address, count, host, devices = multihost._parties(None, None, None)
    assert (address.partition(":")[0], count, host, devices) == ("node003", 2, 1, [0])
    assert multihost._parties("a:1", 3, 2) == ("a:1", 3, 2, None)


def test_a_run_that_nobody_describes_is_refused():
    with pytest.raises(ExecutionError) as refused:
        initialize()
    assert str(refused.value) == (
        "no scheduler says which host this is, where host 0 listens and how many there are; start "
        "the command with srun or mpirun, or set CAPTURE_COORDINATOR, CAPTURE_NUM_HOSTS and "
        "CAPTURE_HOST. [run-hosts-start]"
    )


def test_what_nothing_protects_between_machines_is_warned_of(recwarn):
    multihost._warn_of_strangers("127.0.0.1:1", "device_put", joined=True)
    multihost._warn_of_strangers("10.0.0.1:1", "sockets", joined=False)
    assert not recwarn.list
    for transport, joined, said in (
        ("device_put", False, "--transport device_put: the library"),
        ("sockets", True, "collectives of stages that span hosts: the library"),
    ):
        with pytest.warns(UserWarning, match=f"^{said} that moves these arrays listens for"):
            multihost._warn_of_strangers("10.0.0.1:1", transport, joined)


def test_a_transport_that_nobody_knows_is_refused():
    with pytest.raises(ExecutionError) as refused:
        initialize(transport="pigeons")
    assert str(refused.value) == (
        "transport='pigeons' is not known; choose one of sockets, device_put. [run-transport]"
    )


def test_copies_by_jax_are_made_pair_by_pair_of_devices(monkeypatch):
    """In one call jaxlib would go through the pairs in another order in every process."""
    calls = []

    def device_put(arrays, shardings):
        calls.append((list(arrays), [next(iter(each.device_set)).id for each in shardings]))
        return [(array, "there") for array in arrays]

    monkeypatch.setattr(jax, "device_put", device_put)
    first, second, *_ = jax.devices()
    put = device_puts._put(["a", "b", "c", "d"], [first, second, first, first], [second] * 4)
    assert put == [(name, "there") for name in "abcd"]
    assert calls == [(["a", "c", "d"], [second.id] * 3), (["b"], [second.id])]


def test_devices_of_other_processes_are_refused_where_nobody_shares_the_plan():
    devices = [SimpleNamespace(process_index=host, platform="cpu") for host in (0, 1)]
    assert first_devices(devices, 1) == devices[:1]  # type: ignore[arg-type]
    with pytest.raises(ExecutionError) as refused:
        first_devices(devices, 2)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "the plan uses 2 devices, some of which are of processes [1], and this is process 0; give "
        "pipeshard the processes that share the plan "
        "(hosts=capture.runtime.multihost.initialize()), or devices of this one. [run-devices]"
    )


def test_a_directory_that_not_all_hosts_see_is_refused():
    hosts = hosts_of(3)
    seen = [[2, 4], [2, 4], []]
    found = together(hosts, lambda host: host.check_alike("checkpoints in 'd'", seen[host.process]))
    assert {error.codes for error in found} == {("checkpoint-not-shared",)}
    assert str(found[0]).startswith("host 2 sees [] as checkpoints in 'd', and host 0 [2, 4]; give")
    assert together(hosts, lambda host: host.check_alike("files", [1])) == [None] * 3
