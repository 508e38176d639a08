"""A training over hosts is started again from its last complete checkpoint, unless it breaks at one
step again and again or breaks a rule; a node that is gone is planned away. Without processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from host_lives import ALONE
from plan_examples import two_stages

from capture.errors import ExecutionError, PlanError, Violation
from capture.machine.cluster import Cluster
from capture.runtime.hosts.process import Alive, Done, Failed
from capture.runtime.hosts.restarts import Restarts, train_over_hosts
from capture.runtime.hosts.saved import MARKER, all_steps, complete_steps
from capture.runtime.hosts.watching import lost
from capture.runtime.step_record import StepRecord

PLAN = two_stages(cluster=Cluster((2, 2)))


class Attempt:
    """What two processes say: steps of the training, then how it ends."""

    def __init__(self, steps: range, broken: Failed | None = None, host: int = 1):
        self.said = [[(0, StepRecord(i, 1.0 / i, 0.5, 8.0))] for i in steps]
        self.said.append([(host, broken)] if broken else [(h, Done(dict(ALONE))) for h in (0, 1)])
        self.ended = False

    def hear(self, seconds: float):
        return self.said.pop(0) if self.said else [(h, Alive(math.inf)) for h in (0, 1)]

    def end(self) -> None:
        self.ended = True


class Starter:
    """Gives attempts in turn; remembers with what they were started."""

    def __init__(self, *attempts: Attempt | BaseException, directory: Path | None = None):
        self.attempts, self.directory = list(attempts), directory
        self.started: list[dict] = []
        self.plans: list = []
        self.saves: dict[int, tuple[int, ...]] = {}
        self.gone: frozenset[int] = frozenset()

    def start(self, plan, training):
        for step in self.saves.get(len(self.started), ()):
            save(self.directory, step)
        attempt = self.attempts[len(self.started)]
        assert all(a.ended for a in self.attempts[: len(self.started)] if isinstance(a, Attempt))
        self.started.append(dict(training))
        self.plans.append(plan)
        if isinstance(attempt, BaseException):
            raise attempt
        return attempt

    def missing(self, plan):
        return self.gone


def save(directory: Path | None, step: int, *, complete: bool = True) -> None:
    assert directory is not None
    (directory / str(step)).mkdir(parents=True)
    if complete:
        (directory / str(step) / MARKER).touch()


def training(directory: Path | None, num_steps: int = 6) -> dict:
    return {"num_steps": num_steps, "save": directory, "restore": None, "check": True}


def test_it_goes_on_from_the_last_complete_checkpoint(tmp_path):
    starter = Starter(
        Attempt(range(1, 5), lost("killed")),
        Attempt(range(3, 4), lost("killed again")),
        Attempt(range(3, 7)),
        directory=tmp_path,
    )
    starter.saves = {1: (2,)}  # after the first has begun
    said: list[str] = []
    save(tmp_path, 4, complete=False)
    document = train_over_hosts(starter, PLAN, training(tmp_path), Restarts(2), said.append)
    assert document["losses"] == [1.0 / i for i in range(1, 7)]
    assert document["step_seconds"] == [0.5] * 6
    assert starter.started[0] == training(tmp_path)
    # What was complete when the first broke: nothing.
    assert starter.started[1] == training(tmp_path) | {"until": 6}
    assert starter.started[2] == starter.started[1] | {"restore": tmp_path, "check": False}
    assert [each["resumed_from_step"] for each in document["restarts"]] == [None, 2]
    assert [each["finished_steps"] for each in document["restarts"]] == [4, 4]
    assert said[0] == "host 1: killed [run-host-lost]"
    assert said[1].startswith("starting again from the beginning (restart 1 of 2")
    assert said[3].startswith("starting again from the checkpoint of step 2 (restart 2 of 2")


def test_new_steps_count_anew_and_a_crash_loop_ends(tmp_path):
    broken = lost("killed")
    starter = Starter(
        Attempt(range(1, 2), broken),
        Attempt(range(1, 3), broken),
        Attempt(range(1, 3), broken),
        Attempt(range(1, 1), broken),
    )
    with pytest.raises(ExecutionError) as error:
        train_over_hosts(starter, PLAN, training(None), Restarts(1))
    assert error.value.codes == ("run-host-lost",) and len(starter.started) == 3


@pytest.mark.parametrize("code", ["run-hosts-differ", "checkpoint-other-model"])
def test_a_broken_rule_is_not_tried_again(code):
    starter = Starter(Attempt(range(0), Failed((Violation("no.", code),))), Attempt(range(1, 7)))
    with pytest.raises(ExecutionError) as error:
        train_over_hosts(starter, PLAN, training(None), Restarts(3))
    assert error.value.codes == (code,) and len(starter.started) == 1


def test_a_second_failure_while_it_starts_again_is_one_more(tmp_path):
    refused = ExecutionError.of("no place for host 1.", "run-host-lost")
    starter = Starter(Attempt(range(1, 3), lost("killed")), refused, Attempt(range(1, 7)))
    document = train_over_hosts(starter, PLAN, training(None), Restarts(2))
    assert len(document["restarts"]) == 2 and len(document["losses"]) == 6


class Interrupted(Attempt):
    """Ctrl-C while it is heard; or, of an attempt that starts, in its place."""

    def hear(self, seconds: float):
        if not self.said[1:]:
            raise KeyboardInterrupt
        return super().hear(seconds)


@pytest.mark.parametrize("phase", ["training", "starting again", "saying why"])
def test_an_interrupt_ends_all_in_every_phase(phase):
    broken = Attempt(range(1, 3), lost("killed"))
    started = Starter(broken, Interrupted(range(1, 3)))
    if phase == "training":
        started.attempts.pop(0)
    elif phase == "starting again":
        started.attempts[1] = KeyboardInterrupt()

    def say(text: str) -> None:
        if phase == "saying why":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_over_hosts(started, PLAN, training(None), Restarts(3), say)
    assert all(each.ended for each in started.attempts[:1] if isinstance(each, Attempt))
    assert len(started.started) == {"training": 1, "starting again": 2, "saying why": 1}[phase]


@pytest.mark.parametrize("how", ["missing", "lost every time"])
def test_a_node_that_is_gone_is_planned_away(how):
    smaller = two_stages(cluster=Cluster((4,)))
    gone: list[frozenset[int]] = []

    def replan(plan, nodes):
        gone.append(nodes)
        return smaller

    breaks = 1 if how == "missing" else 2
    starter = Starter(
        *(Attempt(range(1, 3), lost("killed")) for _ in range(breaks)), Attempt(range(1, 7))
    )
    starter.attempts[-1].said[-1] = [(0, Done(dict(ALONE)))]
    starter.gone = frozenset({1}) if how == "missing" else frozenset()
    document = train_over_hosts(starter, PLAN, training(None), Restarts(1, replan))
    assert gone == [frozenset({1})] and starter.plans == [PLAN] * breaks + [smaller]
    assert document["restarts"][-1]["nodes_gone"] == [1]


def test_a_plan_error_ends_the_run():
    class Refusing(Starter):
        def start(self, plan, training):
            raise PlanError.of("no.", "run-hosts-span")

    with pytest.raises(PlanError):
        train_over_hosts(Refusing(), PLAN, training(None), Restarts(3))


def test_checkpoints_without_a_marker_are_not_complete(tmp_path):
    for step in (10, 9):
        save(tmp_path, step)
    save(tmp_path, 11, complete=False)
    (tmp_path / "12.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "8" / "metadata").mkdir(parents=True)  # of one process
    assert all_steps(tmp_path) == [8, 9, 10, 11] and complete_steps(tmp_path) == [8, 9, 10]
    assert complete_steps(tmp_path / "nowhere") == []
