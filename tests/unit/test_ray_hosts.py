"""The driver's side of a run over Ray, with actors that are threads of this process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
from plan_examples import two_stages

from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.machine.demand import Demand
from capture.machine.ray_cluster import ProcessLostError
from capture.model.workload import WorkloadSpec
from capture.runtime.hosts import ray_hosts, watching
from capture.runtime.hosts.process import Alive, Done, Said
from capture.runtime.hosts.ray_hosts import Greeting, RayStarter, unplaced, versions_here
from capture.runtime.hosts.restarts import Restarts, train_over_hosts
from capture.runtime.hosts.watching import HostError, watch
from capture.runtime.step_record import StepRecord

PLAN = two_stages(cluster=Cluster((2, 2)))
NODE = {"CPU": 8.0, "memory": 64e9}


class FakeHost:
    """What a host says, by number; one that has nothing more to say is stopped."""

    over: threading.Event
    said: list[list[Any]]
    versions: list[dict[str, str]]
    jobs: list[Any]

    def __init__(self, number: int):
        self._number, self._left = number, list(self.said[number])

    def greet(self) -> Greeting:
        number = self._number
        return Greeting(f"node {number}", number, f"10.0.0.{number}:1", self.versions[number])

    def live(self, job: Any) -> None:
        self.jobs.append(job)

    def hear(self, seconds: float) -> list[Any]:
        if not self._left:
            self.over.wait(30)
            return []
        if isinstance(self._left[0], Alive):  # ever after
            time.sleep(0.01)
            return [self._left[0]]
        message = self._left.pop(0)
        if isinstance(message, Exception):
            raise message
        return [message]


class FakeCluster:
    """With threads in the place of actors; what is given back or killed is noted."""

    def __init__(self):
        self.released, self.killed, self.pool = 0, [], ThreadPoolExecutor(8)
        self.found = [NODE, NODE]
        self.asked: list[Any] = []

    def reserve(self, demands, apart, seconds):
        self.asked.append((demands, apart))
        self.options = list(range(len(demands)))
        return self

    def release(self):
        self.released += 1

    def actor(self, made_of, number, num_threads):
        assert made_of is ray_hosts.RemoteHost and num_threads == 2
        host = FakeHost(number)
        cluster = self

        class Actor:
            def call(self, method: str, *arguments: Any) -> Future:
                return cluster.pool.submit(getattr(host, method), *arguments)

            def kill(self) -> None:
                cluster.killed.append(number)

        return Actor()

    def ready(self, references, seconds):
        return list(wait(references, seconds, FIRST_COMPLETED).done)

    def result(self, reference):
        return reference.result()

    def hears_head(self):
        return True

    def nodes(self):
        return [{"Resources": node} for node in self.found]


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    found = FakeCluster()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_hosts, "Actor", found.actor)
    monkeypatch.setattr(ray_hosts, "kill_process", lambda *who: found.killed.append(who))
    monkeypatch.setattr(ray_hosts, "_STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(FakeHost, "versions", [versions_here()] * 2, raising=False)
    monkeypatch.setattr(FakeHost, "over", threading.Event(), raising=False)
    monkeypatch.setattr(FakeHost, "jobs", [], raising=False)
    yield found
    FakeHost.over.set()
    found.pool.shutdown(wait=False, cancel_futures=True)


def starter(cluster: Any, **options: Any) -> RayStarter:
    return RayStarter(cluster, WorkloadSpec.parse("a.py:b"), place_seconds=0.0, **options)


def test_all_are_heard_and_ended(cluster, monkeypatch):
    said = [[Said("trains"), StepRecord(1, 0.5, 0.1, 8.0), Done({"host": n})] for n in (0, 1)]
    monkeypatch.setattr(FakeHost, "said", said, raising=False)
    processes, noted = starter(cluster).start(PLAN, {}), []
    assert watch(processes, 2, noted.append) == [{"host": 0}, {"host": 1}]
    assert noted == said[0][:2]
    processes.end()
    processes.end()
    assert cluster.released == 1 and [n for n in cluster.killed if n in (0, 1)] == [0, 1]
    (demands, apart) = cluster.asked[0]
    assert apart and [demand.devices for demand in demands] == [None, None]


def test_hosts_of_one_start_have_a_secret_that_no_other_start_has(cluster, monkeypatch):
    monkeypatch.setattr(FakeHost, "said", [[Done({})]] * 2, raising=False)
    for _ in range(2):
        processes = starter(cluster).start(PLAN, {})
        watch(processes, 2, lambda message: None)
        processes.end()
    first, other, third, fourth = (job.secret for job in FakeHost.jobs)
    assert first == other != third == fourth and len(first) == 64
    assert first not in repr(FakeHost.jobs[0])


def test_a_process_that_ray_lost_is_named_and_a_stopped_one_is_killed_on_its_node(
    cluster, monkeypatch
):
    gone = ProcessLostError("The actor died.", node=True)
    monkeypatch.setattr(FakeHost, "said", [[Said("trains")], [gone]], raising=False)
    processes = starter(cluster).start(PLAN, {})
    with pytest.raises(HostError) as refused:
        watch(processes, 2)
    assert str(refused.value) == (
        "host 1: its node was lost (killed, or out of memory?): The actor died. [run-host-lost]"
    )
    time.sleep(2 * ray_hosts._STOPPED_SECONDS)
    processes.end()
    assert ("node 0", 0) in cluster.killed and ("node 1", 1) not in cluster.killed


@pytest.mark.parametrize("host", [0, 1])
def test_how_a_process_ended_ray_does_not_say_so_it_is_named_once_others_live(
    cluster, monkeypatch, host
):
    """Of two that end it is host 0, without which the other one ends."""
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.05)
    gone = ProcessLostError("The actor died.", node=False)
    of_another_clock = Alive(-1e9)
    first = [of_another_clock] if host else [Said("trains"), gone]
    monkeypatch.setattr(FakeHost, "said", [first, [gone]], raising=False)
    processes = starter(cluster).start(PLAN, {})
    with pytest.raises(HostError) as refused:
        watch(processes, 2)
    assert refused.value.host == host and refused.value.codes == ("run-host-lost",)
    processes.end()


def test_a_head_that_is_gone_ends_the_run(cluster, monkeypatch):
    monkeypatch.setattr(FakeHost, "said", [[], []], raising=False)
    gone = ExecutionError.of("the head of the cluster does not answer.", "ray-lost")

    def hears_head():
        if begun.is_set():
            raise gone

    begun = threading.Event()
    monkeypatch.setattr(FakeHost, "live", lambda self, job: begun.set())
    monkeypatch.setattr(cluster, "hears_head", hears_head)
    with pytest.raises(ExecutionError) as refused:
        train_over_hosts(starter(cluster), PLAN, {}, Restarts(3))
    assert refused.value is gone and cluster.released == 1
    assert [each for each in cluster.killed if each in (0, 1)] == [0, 1]


def test_hosts_with_other_versions_than_the_driver_are_refused_and_ended(cluster, monkeypatch):
    monkeypatch.setattr(FakeHost, "said", [[], []], raising=False)
    own = versions_here()
    monkeypatch.setattr(FakeHost, "versions", [own, own | {"jax": "0.9.9"}])
    with pytest.raises(ExecutionError) as refused:
        starter(cluster).start(PLAN, {})
    assert str(refused.value) == (
        f"host 1 has jax 0.9.9 and the driver {own['jax']}; start the command where the versions "
        "are those of the cluster. [run-hosts-differ]"
    )
    assert cluster.released == 1


def test_processes_are_on_devices_of_the_target_and_alone_on_virtual_ones(cluster):
    plan = two_stages(cluster=Cluster((2, 2), target="a100-40g"))
    for alone, devices, kind in ((False, "GPU", "A100"), (True, None, None)):
        for demand in starter(cluster, alone=alone).demands(plan):
            assert (demand.devices, demand.accelerator_type) == (devices, kind)
            assert demand.num_devices == (0 if alone else 2)


def test_nodes_that_the_cluster_has_no_more_are_missing(cluster):
    assert starter(cluster).missing(PLAN) == frozenset()
    cluster.found.pop()
    assert starter(cluster).missing(PLAN) == {1}
    assert starter(cluster, alone=True).missing(PLAN) == frozenset()
    big, small = (Demand(10**9, "GPU", count, "A100") for count in (8, 2))
    kind = {"accelerator_type:A100": 1.0}
    nodes = [{**NODE, "GPU": 8.0, **kind}, {**NODE, "GPU": 2.0, **kind}]
    assert unplaced([small, big], nodes) == frozenset()
    assert unplaced([small, big], nodes[1:]) == {1}


def test_a_workload_that_does_not_travel_is_refused(cluster):
    with pytest.raises(ExecutionError) as refused:
        RayStarter(cluster, WorkloadSpec.parse("../a.py:b"))
    assert refused.value.codes == ("ray-workload",)
