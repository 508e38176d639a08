"""The processes that a run over hosts starts: heard, ended, and what breaks in one of them named
once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time

import host_lives
import pytest
from plan_examples import two_stages

from capture.errors import ExecutionError, PlanError, Violation
from capture.machine.cluster import Cluster
from capture.runtime.hosts import driver
from capture.runtime.hosts.addresses import check_nodes
from capture.runtime.hosts.documents import joined
from capture.runtime.hosts.driver import LocalProcesses, ended
from capture.runtime.hosts.process import Failed, Said
from capture.runtime.hosts.watching import GRACE_SECONDS, first_cause, is_settled, lost, watch

JOBS = [host_lives.JOB, host_lives.SECOND]


def watched(life, **options) -> list:
    processes = LocalProcesses(JOBS, life)
    try:
        return watch(processes, len(JOBS), **options)
    finally:
        processes.end()
        assert not multiprocessing.active_children()


def refusal(life, **options) -> ExecutionError:
    with pytest.raises(ExecutionError) as refused:
        watched(life, **options)
    return refused.value


def test_all_are_heard_and_ended():
    said: list = []
    assert watched(host_lives.done, note=said.append) == [{"host": 0}, {"host": 1}]
    assert said == [Said("host 0 trains")]


def test_the_host_that_was_killed_is_named_not_those_that_notice():
    error = refusal(host_lives.killed)
    assert str(error) == (
        "host 1: its process ended by signal 9 (killed, or out of memory?) [run-host-lost]"
    )


def test_a_host_that_crashes_is_named_once_the_others_are_known_to_live():
    assert str(refusal(host_lives.crashed)) == (
        "host 1: its process crashed by signal 6; it may have said why [run-host-lost]"
    )
    error = refusal(host_lives.crashed_with_host_0)
    assert str(error).startswith("host 0: its process ended by signal 9")


#: What is said of a host that was killed, froze, crashed, saw its connection break, raised an
#: exception of its own or of another's, or breaks a rule.
KILLED, FROZEN, LEFT = ended(-9), lost("frozen?"), ended(1)
CRASHED = ended(-6)
CUT, RAISED, SILENT, DIFFERS, FULL = (
    Failed((Violation("why", code),))
    for code in (
        "run-hosts-cut",
        "exception",
        "run-hosts-silent",
        "run-hosts-differ",
        "run-host-memory",
    )
)


@pytest.mark.parametrize(
    ("failures", "host"),
    [
        ({0: KILLED, 1: CRASHED, 2: CUT}, 0),
        ({1: FROZEN, 2: RAISED}, 1),
        ({0: FROZEN, 1: CUT}, 0),
        ({0: RAISED, 1: CUT, 2: KILLED}, 2),
        ({0: KILLED, 1: DIFFERS}, 0),
        # Two crashed: without host 0 the others end, and not the other way round.
        ({0: CRASHED, 1: CRASHED, 2: CRASHED}, 0),
        ({0: LEFT, 1: LEFT}, 0),
        ({0: CUT, 2: CRASHED}, 2),
        ({0: CUT, 1: RAISED, 2: FULL}, 2),
        ({0: SILENT, 1: DIFFERS}, 1),
    ],
)
def test_the_host_where_it_began_is_found_in_every_order_of_what_is_heard(failures, host):
    for order in itertools.permutations(failures):
        assert first_cause({each: failures[each] for each in order}) == host


@pytest.mark.parametrize("said", [KILLED, FROZEN, RAISED, CUT, DIFFERS])
def test_of_what_is_alike_it_is_what_is_heard_first(said):
    assert first_cause({2: said, 0: said}) == 2
    assert first_cause({1: CRASHED, 2: CRASHED, 0: CUT}) == 1


def test_a_failure_that_may_follow_waits_for_signs_of_life_that_are_newer():
    since, after = 100.0, 100.0 + GRACE_SECONDS
    for said in (CRASHED, CUT, RAISED, DIFFERS):
        assert not is_settled({1: said}, since, {0: since - 1, 1: since, 2: after})
        assert is_settled({1: said}, since, {0: after, 1: since, 2: after})
        assert is_settled({1: said, 0: CUT}, since, {0: since, 1: since, 2: after})
        assert is_settled({1: said, 0: KILLED}, since, dict.fromkeys(range(3), since))
    assert is_settled({1: FROZEN}, since, dict.fromkeys(range(3), since))
    assert not is_settled({}, since, {0: after})


def test_how_a_process_ended_is_said_with_whether_it_was_its_own_doing():
    assert not KILLED.crashed and not ended(-15).crashed
    assert all(ended(code).crashed for code in (-6, -11, 1, 0, None))
    assert ended(3).violations[0].message == "its process ended with code 3"


def test_an_exception_on_one_host_is_told_once_with_its_traceback():
    error = refusal(host_lives.raising)
    assert str(error) == (
        "host 1: ValueError: no data\nTraceback: users_model.py, line 3 [exception]"
    )


def test_a_host_that_freezes_is_named():
    error = refusal(host_lives.frozen, silent_seconds=3.0)
    assert error.codes == ("run-host-lost",)
    assert "host 1: its process gives no sign of life for" in str(error)


def test_a_host_that_stops_for_less_than_the_heartbeat_goes_on():
    def pause(said: object) -> None:
        second = max(process.pid or 0 for process in multiprocessing.active_children())
        os.kill(second, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(second, signal.SIGCONT)

    assert watched(host_lives.late, note=pause) == [{"host": 0}, {"host": 1}]


def test_an_interrupt_while_processes_are_started_leaves_none(monkeypatch):
    class Interrupted(driver._Host):
        def __init__(self, job, life, said):
            if job.host:
                raise KeyboardInterrupt
            super().__init__(job, life, said)

    monkeypatch.setattr(driver, "_Host", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        watched(host_lives.done)
    assert not multiprocessing.active_children()


def test_stages_on_parts_of_several_nodes_are_refused():
    with pytest.raises(PlanError) as refused:
        check_nodes(two_stages(cluster=Cluster((1, 3))))
    assert str(refused.value) == (
        "stage 0 has 2 devices of nodes 0, 1, which have 4; over several hosts a stage runs within "
        "a node or on whole nodes: plan with --whole-nodes. [run-hosts-span]"
    )
    check_nodes(host_lives.PLAN)
    check_nodes(two_stages(cluster=Cluster((1, 1, 2))))


def test_documents_of_hosts_are_one():
    alone = host_lives.ALONE | {"allocator": 1, "resident_set_peak_bytes": 2}
    alone |= {"resident_set_before_bytes": 3, "dispatch_seconds": 0.5}
    first = alone | {"measured_peak_bytes_per_device": [5, 6], "ledger_checks": 7}
    first |= {"step_seconds": [1.0, 4.0], "losses": [0.5, 0.25], "reference_losses": [0.5, 0.25]}
    second = first | {"measured_peak_bytes_per_device": [8], "step_seconds": [2.0, 3.0]}
    document = joined([first, second])
    assert document["measured_peak_bytes_per_device"] == [5, 6, 8]
    assert document["ledger_checks"] == 14 and document["step_seconds"] == [2.0, 4.0]
    assert document["losses"] == document["reference_losses"] == [0.5, 0.25]
    assert document["allocator"] is None, "that of one process says nothing of all"
    assert [host["num_devices"] for host in document["hosts"]] == [2, 1]
    assert document["hosts"][1]["allocator"] == 1
