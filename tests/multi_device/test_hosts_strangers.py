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
from capture.runtime.hosts.driver import LocalProcesses, LocalStarter, free_port
from capture.runtime.hosts.process import HostJob
from capture.runtime.hosts.restarts import train_over_hosts
from capture.runtime.training import Training, train

WORKLOAD = WorkloadSpec.parse(f"{REPOSITORY / 'tests/pipeline_models.py'}:tied")
SECRET = "what only the hosts of this run know"
NUM_STEPS = 100
MOST_HELD_BYTES = 64_000_000


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
        count: Of them.
    """

    count: int
    strangers: Strangers = field(default_factory=lambda: Strangers(SECRET))
    said: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("step 1:"):
            self._thread = threading.Thread(target=self._come)
            self._thread.start()

    def _come(self) -> None:
        hosts = sorted(each.pid for each in multiprocessing.active_children() if each.pid)
        processes = with_children(hosts)
        self.ports = ports_of(processes)
        before, held = resident_bytes(processes), []
        for _ in range(10):
            self.strangers.come(self.ports, self.count // 10, time.monotonic() + 30)
            held.append(resident_bytes(processes) - before)
        self.last_line, self.most_held_bytes = len(self.said), max(held)
        self.processes = processes

    def end(self) -> None:
        self._thread.join()
        self.strangers.go()


@pytest.mark.slow
@pytest.mark.parametrize(("starter", "num_ports"), [(Gated, 3), (LocalStarter, 1)])
def test_a_thousand_strangers_change_nothing(starter, num_ports):
    plan = pipeline((2, 2), ((2, 1), (1, 2)), remat="full").with_(cluster=Cluster((2, 2)))
    undisturbed = train(plan, tied(), Training(num_steps=NUM_STEPS))
    visit = Visit(1000)
    document = train_over_hosts(starter(WORKLOAD), plan, {"num_steps": NUM_STEPS}, report=visit)
    visit.end()
    print(
        visit.ports,
        visit.strangers.done,
        visit.strangers.unreached,
        visit.strangers.answered,
        visit.most_held_bytes,
        visit.last_line,
        len(visit.said),
    )
    assert document["loss"] == undisturbed["loss"] and len(document["loss"]) == NUM_STEPS
    assert "restarts" not in document
    assert sum(visit.strangers.done.values()) == 1000
    assert visit.most_held_bytes < MOST_HELD_BYTES
    assert len(visit.ports) == num_ports
