"""What a process of a run says when its training breaks, and what its driver weighs."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from host_lives import ALONE
from processes import REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.cli import options
from capture.cli.output import emit
from capture.cli.run import as_text
from capture.runtime.hosts import process
from capture.runtime.hosts.documents import joined
from capture.runtime.hosts.process import Failed, Message, Voice


class JaxRuntimeError(RuntimeError):
    """Of JAX, by its name."""


def said_of(monkeypatch, error: BaseException) -> Failed:
    """What a process says whose training raises it."""
    said: list[Message] = []

    def train(job, voice):
        raise error

    monkeypatch.setattr(process, "_train", train)
    process.live(None, Voice(said.append, lambda: True))  # type: ignore[arg-type]
    (failed,) = [each for each in said if isinstance(each, Failed)]
    return failed


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MemoryError(), "run-host-memory", "out of memory: MemoryError; choose a plan"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.\nmore"),
            "run-host-memory",
            "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.; choose",
        ),
        (
            JaxRuntimeError("UNAVAILABLE: recv-fallback: Connection reset by peer"),
            "run-hosts-cut",
            "a connection to another host broke: UNAVAILABLE: recv-fallback",
        ),
        (
            JaxRuntimeError("INTERNAL: recv() failed errno: 107"),
            "run-hosts-cut",
            "a connection to another host broke: INTERNAL: recv() failed",
        ),
        # A user's own words are no break of JAX's connections.
        (OSError("Connection reset by peer"), "exception", "OSError: Connection reset by peer"),
        (
            FloatingPointError("invalid value (nan) encountered in jit(f)"),
            "exception",
            "FloatingPointError: invalid value (nan)",
        ),
        (SystemExit(3), "exception", "SystemExit: 3"),
    ],
)
def test_what_breaks_a_training_has_a_code(monkeypatch, error, code, says):
    failed = said_of(monkeypatch, error)
    (violation,) = failed.violations
    assert violation.code == code and says in violation.message
    assert bool(failed.traceback) == (code == "exception")


def test_errors_of_machines_say_that_the_same_command_resumes():
    lost = {"ray-lost", "run-host-lost", "run-hosts-cut", "run-hosts-silent", "run-hosts-start"}
    assert lost < options.ENDED_EARLY


def test_a_loss_that_is_no_number_is_null_in_the_document_of_all(capsys):
    alone = ALONE | {"losses": [1.0, float("nan")], "step_seconds": [0.5, 0.5]}
    emit(SimpleNamespace(json=True), joined([alone, alone]), "")  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["losses"] == [1.0, None]


def test_a_run_says_where_its_state_is():
    document = ALONE | {"losses": [0.5], "saved": "run/12"}
    assert [*as_text(document)][-2:] == ["loss 0.500000", "state -> run/12"]


def test_a_driver_loads_no_jax_and_is_small():
    """Until it has started a process, heard it and ended it."""
    code = (
        "import sys, host_lives, capture.cli.main, capture.cli.run\n"
        "from pathlib import Path\n"
        "from capture.runtime.hosts.driver import LocalProcesses\n"
        "from capture.runtime.hosts.watching import watch\n"
        "if __name__ == '__main__':\n"
        "    processes = LocalProcesses([host_lives.JOB], host_lives.done)\n"
        "    assert watch(processes, 1) == [{'host': 0}]\n"
        "    processes.end()\n"
        "    assert not {'jax', 'jaxlib', 'ray'} & {*sys.modules}\n"
        # Of rusage, what the parent held when it forked would count, too.
        "    held = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "    print(1024 * int(held))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=environment_apart(REPOSITORY / "tests"),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert int(told.stdout) < 300e6
