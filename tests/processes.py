"""Processes that tests start: what they see of this one, and the programs of ``tests/programs``."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from timeouts import TIMEOUT_SECONDS

from capture import environment

REPOSITORY = Path(__file__).resolve().parents[1]

#: Tests compile much and run little: machine code that is not optimised, and not cut into parts for
#: threads, takes less time and has the same buffers. They are for CPU programs. Fusions without
#: emitters of their own take a third of the time, and have the same buffers but where an operation
#: becomes a loop; XLA of jax 0.12 does not know the flag.
QUICK_CODE = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        *(["--xla_cpu_use_fusion_emitters=false"] if environment.jax_release() < (0, 12) else []),
    )
)


def environment_apart(*paths: Path, xla_flags: str = "", **changes: str) -> dict[str, str]:
    """Variables of a process that knows neither this one's devices nor its flags.

    Args:
        paths: Where it finds modules, beside the repository.
        xla_flags: Its ``XLA_FLAGS``; without any, ``capture.environment`` alone sets them.
        changes: Further variables.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    if xla_flags:
        kept["XLA_FLAGS"] = xla_flags
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *paths)))} | changes


def output_of(program: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What a module of ``tests/programs`` writes, run by its path from the repository's root; a
    failure of it is a failed assertion.

    Args:
        env: Its variables; ``environment_apart()`` without any.
    """
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests/programs" / f"{program}.py", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment_apart() if env is None else env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def user_model(name: str) -> str:
    """The source of a file of ``tests/user_models``, to be written where a test's user works."""
    return (REPOSITORY / "tests/user_models" / f"{name}.py").read_text()


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first process of a session which asks for it fills, for all of
    pytest-xdist's: to read, or to copy."""
    base = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / f"once-{name}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            filled = base / f"once-{name}-{os.getpid()}"
            filled.mkdir()
            make(filled)
            filled.rename(folder)
    return folder
