"""A training over hosts of which processes are killed gives what it gives undisturbed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass, field

import host_lives
import pytest
from pipeline_models import pipeline, tied
from processes import REPOSITORY

from capture import environment
from capture.machine.cluster import Cluster
from capture.model.workload import WorkloadSpec
from capture.runtime.asked import Training
from capture.runtime.hosts.addresses import free_port
from capture.runtime.hosts.driver import LocalProcesses, LocalStarter
from capture.runtime.hosts.process import HostJob
from capture.runtime.hosts.restarts import Restarts, train_over_hosts
from capture.runtime.hosts.saved import complete_steps
from capture.runtime.training import train

WORKLOAD = WorkloadSpec.parse(f"{REPOSITORY / 'tests/pipeline_models.py'}:tied")


@dataclass
class Killer:
    """Ends a process of its parent once, when a line of progress is said.

    Attributes:
        at: Host by the beginning of the line.
    """

    at: dict[str, int]
    said: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.said.append(text)
        for line in [line for line in self.at if text.startswith(line)]:
            hosts = sorted(multiprocessing.active_children(), key=lambda host: host.pid or 0)
            pid = hosts[self.at.pop(line)].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)


class Shrinking(LocalStarter):
    """Node 1 is gone when nobody is left to be killed."""

    def missing(self, plan):
        return frozenset() if killer.at else frozenset({1})


killer = Killer({})


@pytest.mark.slow
def test_killed_processes_change_nothing_and_a_node_may_stay_away(tmp_path):
    plan = pipeline((2, 2), ((2, 1), (1, 2)), remat="full").with_(cluster=Cluster((2, 2)))
    smaller = pipeline((4,), ((2, 1),)).with_(cluster=Cluster((2,)))
    undisturbed = train(plan, tied(), Training(num_steps=10))
    # While it compiles, after a checkpoint, and for good.
    killer.at.update({"compiling": 1, "step 6": 0, "step 9": 1})
    training = {"num_steps": 10, "save": tmp_path, "save_every": 4}
    restarts = Restarts(2, lambda old, gone: smaller)
    document = train_over_hosts(Shrinking(WORKLOAD), plan, training, restarts, killer)
    assert not multiprocessing.active_children()
    first, second, last = document["restarts"]
    assert (first["host"], first["resumed_from_step"]) == (1, None)
    # Without host 0, which JAX's service is in, the other one ends at once, too. The save of the
    # step before may still have been under way.
    assert second["host"] == 0 and second["resumed_from_step"] in (None, 4)
    assert "signal 9" in second["said"]
    assert last["host"] == 1 and last["nodes_gone"] == [1]
    done = last["resumed_from_step"]
    assert done in (4, 8) and complete_steps(tmp_path) == [8, 10]
    assert document["losses"][:done] == undisturbed["losses"][:done]
    assert document["losses"] == pytest.approx(undisturbed["losses"], rel=1e-5)
    said = f"node 1 is gone: going on from the checkpoint of step {done}"
    assert any(line.startswith(said) for line in killer.said)


class Mortal(LocalStarter):
    """Whose processes are killed while they save, and while they restore."""

    def start(self, plan, training):
        flags, where = environment.active_flags(), f"127.0.0.1:{free_port()}"
        jobs = [HostJob(plan, WORKLOAD, dict(training), where, 2, h, flags) for h in (0, 1)]
        return LocalProcesses(jobs, host_lives.mortal)


@pytest.mark.exhaustive
def test_kills_while_it_saves_and_while_it_restores_lose_nothing(tmp_path):
    plan = pipeline((2, 2), ((2, 1), (1, 2)), remat="full").with_(cluster=Cluster((2, 2)))
    undisturbed = train(plan, tied(), Training(num_steps=10))
    saved = tmp_path / "saved"
    training = {"num_steps": 10, "save": saved, "save_every": 4}
    document = train_over_hosts(Mortal(WORKLOAD), plan, training, Restarts(2))
    assert not multiprocessing.active_children()
    while_saving, while_restoring = document["restarts"]
    assert (while_saving["host"], while_saving["resumed_from_step"]) == (0, 4)
    assert (while_restoring["host"], while_restoring["resumed_from_step"]) == (1, 4)
    assert document["losses"] == undisturbed["losses"] and complete_steps(saved) == [8, 10]
