"""One of the processes that ``capture run --hosts local`` or ``--ray`` starts: runs its part of a
training, and tells the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from capture import environment
from capture.errors import Violation, users_traceback, violations_of
from capture.model.workload import WorkloadSpec
from capture.plan.files import PlanFile
from capture.runtime.step_record import StepRecord

if TYPE_CHECKING:  # it loads JAX, whose flags are set first
    from capture.runtime.asked import Training

#: Between two signs of life.
BEAT_SECONDS = 0.5
#: In what JAX says of transfers and collectives of CPUs (jax 0.10: "recv() failed errno: 107",
#: "UNAVAILABLE: recv-fallback: Connection reset by peer").
_BROKEN_CONNECTION = re.compile(
    r"UNAVAILABLE|\b(send|recv)\b.*(failed|closed)|[Cc]onnection (reset|refused|closed|aborted)"
)
#: Of ``linux/prctl.h``.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class HostJob:
    """The job of one process of a training over hosts.

    Attributes:
        training: Fields of ``capture.runtime.training.Training``.
        coordinator: Where host 0 listens.
        num_hosts, host: How many there are, and which this is.
        flags: ``environment.active_flags`` of the one that started it.
        virtual: Whether it runs on virtual CPU devices; else on those that it finds.
        secret: By which the hosts know each other; None if all are on this machine.
    """

    plan: PlanFile
    workload: WorkloadSpec
    training: dict[str, Any]
    coordinator: str
    num_hosts: int
    host: int
    flags: tuple[str, ...]
    virtual: bool = True
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Alive:
    """A sign of life.

    Attributes:
        at: When it was given, by ``time.monotonic`` of the driver's machine.
    """

    at: float


@dataclass(frozen=True)
class Said:
    """A line of progress."""

    text: str


@dataclass(frozen=True)
class Done:
    """The message that a process is done: the document of the training, for its devices."""

    document: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The message that a process has failed, and why.

    Attributes:
        traceback: Where in the user's files, if it is not a rule of the library.
        crashed: Of a process that has ended, whether it may have done so by itself, as JAX's do
            when the service in host 0 is lost; else somebody has killed it.
    """

    violations: tuple[Violation, ...]
    traceback: str = ""
    crashed: bool = False


Message = Alive | Said | StepRecord | Done | Failed
_T = TypeVar("_T")


def all_of(said: queue.SimpleQueue[_T], seconds: float) -> list[_T]:
    """Return what was said meanwhile, or wait so many seconds for the first of it."""
    found: list[_T] = []
    with contextlib.suppress(queue.Empty):
        found.append(said.get(timeout=seconds))
        while True:
            found.append(said.get_nowait())
    return found


def serve(job: HostJob, connection: Connection, parent: int) -> None:
    """Do a job in its own process, which ends when its parent ends it, or has ended."""
    os.dup2(2, 1)  # standard output is the document's, of the one that started it
    faulthandler.enable()
    _end_with_parent()
    # Ctrl-C reaches the whole group; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process whose parent was killed ends too.
    live(job, Voice(connection.send, lambda: os.getppid() == parent))
    threading.Event().wait()  # others may still pull what this process offered


def live(job: HostJob, voice: Voice) -> None:
    """Do the job, and say what has come of it."""
    try:
        voice.say(Done(_train(job, voice)))
    except BaseException as error:
        violations = _told(error)
        known = [violation.code for violation in violations] != ["exception"]
        voice.say(Failed(violations, "" if known else users_traceback(error)))


def _told(error: BaseException) -> tuple[Violation, ...]:
    """Return an exception as violations; allocations that failed, in Python or in XLA, and
    connections that broke have codes of their own."""
    said = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said:
        why = f"out of memory: {said or 'MemoryError'}; choose a plan that needs less."
        return (Violation(why, "run-host-memory"),)
    if type(error).__name__ == "JaxRuntimeError" and _BROKEN_CONNECTION.search(said):
        why = f"a connection to another host broke: {said}; look at that host and the network."
        return (Violation(why, "run-hosts-cut"),)
    return violations_of(error)


def _end_with_parent() -> None:
    """Have Linux kill this process with its parent, even if stopped; elsewhere ``Voice`` asks."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _train(job: HostJob, voice: Voice) -> dict[str, Any]:
    num_devices = job.plan.known_cluster.nodes[job.host] if job.virtual else None
    environment.prepare_worker(num_devices, "cpu", job.flags)
    import jax

    if job.virtual:
        jax.config.update("jax_platforms", "cpu")
    from capture.runtime import multihost
    from capture.runtime.asked import Training
    from capture.runtime.training import train

    training: Training = Training(**job.training)
    hosts = multihost.initialize(
        job.coordinator,
        job.num_hosts,
        job.host,
        plan=job.plan,
        transport=training.transport,
        secret=job.secret,
        on_silence=voice.give_up,
    )
    workload = job.workload.load()
    return train(job.plan, workload, training, voice.report, hosts, on_step=voice.say)


class Voice:
    """The sender of this process's messages and signs of life; one thread at a time speaks.

    Args:
        is_heard: Whether there is still somebody who hears; else this process ends.
    """

    def __init__(self, send: Callable[[Message], None], is_heard: Callable[[], bool]):
        self._send, self._is_heard, self._lock = send, is_heard, threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, message: Message) -> None:
        try:
            with self._lock:
                self._send(message)
        except OSError:  # nobody is there any more
            os._exit(1)

    def report(self, text: str) -> None:
        self.say(Said(text))

    def give_up(self, sentence: str) -> None:
        self.say(Failed((Violation(sentence, "run-hosts-silent"),)))

    def _beat(self) -> None:
        while self._is_heard():
            self.say(Alive(time.monotonic()))
            time.sleep(BEAT_SECONDS)
        os._exit(1)
