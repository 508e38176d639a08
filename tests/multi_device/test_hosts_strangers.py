"""Strangers connect to every port of a run over hosts, and change nothing."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass, field

import pytest
from pipeline_models import pipeline, tied
from processes import REPOSITORY
from strangers import Strangers, ports_of, resident_bytes, with_children

from capture import environment
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.runtime.asked import Training
from capture.runtime.hosts.addresses import free_port
from capture.runtime.hosts.driver import LocalProcesses, LocalStarter
from capture.runtime.hosts.process import HostJob
from capture.runtime.hosts.restarts import train_over_hosts
from capture.runtime.training import train

WORKLOAD = WorkloadSpec.parse(f"{REPOSITORY / 'tests/pipeline_models.py'}:tied")
SECRET = "what only the hosts of this run know"
NUM_STEPS = 100
MOST_HELD_BYTES = 64_000_000
PLAN = pipeline((2, 2), ((2, 1), (1, 2)), remat="full").with_(cluster=Cluster((2, 2)))


class Gated(LocalStarter):
    """As on several machines: each host behind its gate."""

    def start(self, plan, training):
        flags, where = environment.active_flags(), f"127.0.0.1:{free_port()}"
        return LocalProcesses(
            [
                HostJob(plan, WORKLOAD, dict(training), where, 2, host, flags, secret=SECRET)
                for host in (0, 1)
            ]
        )


@dataclass
class Visit:
    """Strangers that come when a training has made its first step.

    Attributes:
        count: Of them, to each port.
        ports: That were found.
        held_bytes: The most that all processes of the run had more than before.
        last_line: Of the training's, when the last stranger had come.
    """

    count: int
    strangers: Strangers = field(default_factory=lambda: Strangers(SECRET))
    said: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    held_bytes: int = 0
    last_line: int = 0

    def __call__(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("step 1:"):
            self._thread = threading.Thread(target=self._come)
            self._thread.start()

    def _come(self) -> None:
        hosts = [each.pid for each in multiprocessing.active_children() if each.pid]
        processes = with_children(hosts)
        self.ports = ports_of(processes)
        before = resident_bytes(processes)
        for _ in range(10):
            count = self.count * len(self.ports) // 10
            self.strangers.come(self.ports, count, time.monotonic() + environment.patience(30))
            self.held_bytes = max(self.held_bytes, resident_bytes(processes) - before)
        self.last_line = len(self.said)

    def end(self) -> None:
        self._thread.join()
        self.strangers.go()


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses of one process."""
    return train(PLAN, tied(), Training(num_steps=NUM_STEPS))["losses"]


def train_with_strangers(starter: type[LocalStarter], count: int, num_ports: int) -> list[float]:
    """The losses of hosts to each of whose ports so many strangers have come."""
    visit = Visit(count)
    document = train_over_hosts(starter(WORKLOAD), PLAN, {"num_steps": NUM_STEPS}, report=visit)
    visit.end()
    strangers = visit.strangers
    print(visit.ports, visit.held_bytes, visit.last_line, strangers.answered, strangers.done)
    assert len(visit.ports) == num_ports and strangers.unreached == 0
    assert sum(strangers.done.values()) == count * num_ports
    assert visit.last_line < len(visit.said), "the last one came while it trained"
    assert visit.held_bytes < MOST_HELD_BYTES
    assert document["restarts"] is None
    return document["losses"]


@pytest.mark.slow
def test_a_thousand_strangers_change_nothing(undisturbed):
    """The ports are those of two gates, JAX's service, and the way of host 1 to it."""
    assert train_with_strangers(Gated, 250, 4) == undisturbed


@pytest.mark.slow
def test_on_one_machine_only_the_service_of_jax_listens(undisturbed):
    assert train_with_strangers(LocalStarter, 1000, 1) == undisturbed
