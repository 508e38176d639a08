"""One of the processes that ``capture run --hosts local`` starts: runs its part of a training, and
tells the one that started it."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from capture import environment
from capture.errors import Violation, users_traceback, violations_of
from capture.model.workload import WorkloadSpec
from capture.plan.stages import Plan

if TYPE_CHECKING:  # it loads JAX, whose flags are set first
    from capture.runtime.training import Training

#: Between two signs of life.
BEAT_SECONDS = 0.5


@dataclass(frozen=True)
class HostJob:
    """What a process is to do.

    Attributes:
        plan, workload: As for ``capture run``.
        training: Fields of ``capture.runtime.training.Training``.
        coordinator: Where host 0 listens.
        num_hosts, host: How many there are, and which this is.
        flags: ``environment.active_flags()`` of the one that started it.
    """

    plan: Plan
    workload: WorkloadSpec
    training: dict[str, Any]
    coordinator: str
    num_hosts: int
    host: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Alive:
    """A sign of life."""


@dataclass(frozen=True)
class Said:
    """A line of progress."""

    text: str


@dataclass(frozen=True)
class Stepped:
    """A step that is finished.

    Attributes:
        num_steps: Of the training, this one included.
        loss: Before its update.
        seconds: That it took.
    """

    num_steps: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Done:
    """The document of the training, for this process's devices."""

    document: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """What broke, and where in the user's files, if it is not a rule of the library."""

    violations: tuple[Violation, ...]
    traceback: str = ""


Message = Alive | Said | Stepped | Done | Failed


def serve(job: HostJob, connection: Connection, parent: int) -> None:
    """The life of a process: it ends when the one that started it ends it, or has ended."""
    os.dup2(2, 1)  # standard output is the document's, of the one that started it
    faulthandler.enable()
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    voice = _Voice(connection, parent)
    try:
        voice.say(Done(_train(job, voice)))
    except BaseException as error:
        violations = violations_of(error)
        known = [violation.code for violation in violations] != ["exception"]
        voice.say(Failed(violations, "" if known else users_traceback(error)))
    threading.Event().wait()  # others may still pull what this process offered


def _train(job: HostJob, voice: _Voice) -> dict[str, Any]:
    environment.prepare_worker(job.plan.cluster.nodes[job.host], "cpu", job.flags)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from capture.runtime import multihost
    from capture.runtime.training import Training, train

    hosts = multihost.initialize(job.coordinator, job.num_hosts, job.host, on_silence=voice.give_up)
    training: Training = Training(**job.training)
    return train(
        job.plan, job.workload.load(), training, voice.report, hosts, stepped=voice.stepped
    )


class _Voice:
    """What this process tells; one thread at a time speaks."""

    def __init__(self, connection: Connection, parent: int):
        self._connection, self._parent, self._lock = connection, parent, threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, message: Message) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:  # nobody is there any more
            os._exit(1)

    def report(self, text: str) -> None:
        self.say(Said(text))

    def stepped(self, num_steps: int, loss: float, seconds: float) -> None:
        self.say(Stepped(num_steps, loss, seconds))

    def give_up(self, sentence: str) -> None:
        self.say(Failed((Violation(sentence, "run-hosts-silent"),)))

    def _beat(self) -> None:
        """A process whose parent was killed ends too."""
        while os.getppid() == self._parent:
            self.say(Alive())
            time.sleep(BEAT_SECONDS)
        os._exit(1)
