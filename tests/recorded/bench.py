"""What a recorded case is, where it works, and those that need a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.recorded.access import REPOSITORY

FILES = Path(__file__).resolve().parent / "files"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Bench:
    """Where a case works: its own folder, with a store in which nothing is; the working directory
    is ``FILES``.
    """

    folder: Path

    @property
    def measuring(self) -> tuple[str, ...]:
        return "--store", str(self.folder / "store.sqlite"), "--workers", "0"


@contextlib.contextmanager
def _usual_fusions() -> Iterator[None]:
    """Measure the programs that users' processes compile, to the byte: not all fusions that tests
    compile quickly have the same buffers."""
    flag = "xla_cpu_use_fusion_emitters"
    if f"{flag}=false" not in os.environ.get("XLA_FLAGS", ""):
        yield
        return
    from jax.stages import Lowered  # after flags are set

    compiled = Lowered.compile

    def usual(lowered: Lowered, compiler_options: Mapping[str, Any] | None = None) -> Any:
        return compiled(lowered, {flag: True, **(compiler_options or {})})

    with mock.patch.object(Lowered, "compile", usual):
        yield


@dataclass(frozen=True)
class Case:
    """A question whose answer is recorded.

    Attributes:
        ask: From a bench to facts.
        compiles: Whether it compiles or traces, so that its facts are of one version of JAX.
        timed: Whether the model of times decides: its facts change where that model is changed on
            purpose.
        apart: Whether it compiles for a target that is not there, in a process of its own.
        sample: Whether it is among those that the default test command asks.
    """

    name: str
    ask: Callable[[Bench], Mapping[str, Any]]
    compiles: bool = False
    timed: bool = False
    apart: bool = False
    sample: bool = True

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        with (
            tempfile.TemporaryDirectory(prefix="capture-recorded-") as folder,
            contextlib.chdir(FILES),
            _usual_fusions() if self.compiles else contextlib.nullcontext(),
        ):
            return json.loads(json.dumps(self.ask(Bench(Path(folder)))))


CASES: dict[str, Case] = {}


def case(
    name: str, **properties: bool
) -> Callable[[Callable[[Bench], Mapping[str, Any]]], Callable[[Bench], Mapping[str, Any]]]:
    def add(ask: Callable[[Bench], Mapping[str, Any]]) -> Callable[[Bench], Mapping[str, Any]]:
        assert name not in CASES, name
        CASES[name] = Case(name, ask, **properties)
        return ask

    return add


def apart(names: list[str]) -> dict[str, Any]:
    """The facts of cases, made in one process that compiles for GPUs."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    environment |= {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.recorded.cases", *names],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
