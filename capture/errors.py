"""Errors that users see: what was given, which rule it breaks, what to change, a stable code.

    CaptureError                 every error that the project raises on purpose
    ├── WorkloadError            the model, its batch or its optimizer
    ├── TracingError             cutting the traced loss into layers
    ├── ClusterError             the description of the devices
    ├── PlanError                a plan that breaks a rule, or does not belong to the model
    ├── ProfileError             a profile or a store that is corrupt, or of another schema or model
    ├── TargetError              an unknown target, or one that this installation cannot compile for
    ├── ExecutionError           running a plan on the devices of this process
    └── OptionError              the command line itself

A memory limit that nothing fits is a result (``SearchResult.status == "infeasible"``), not an
error.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

#: At the end of a line: the code of a broken rule.
_CODE = re.compile(r" \[([a-z0-9]+(?:-[a-z0-9]+)+)\]$", re.M)
_ROOT = Path(__file__).resolve().parent.parent
#: What is below these is no file of a user's.
_LIBRARIES = (
    *(f"{_ROOT / name}{os.sep}" for name in ("capture", "profiling_runs", "recommender")),
    sysconfig.get_path("stdlib") + os.sep,
)


@dataclass(frozen=True)
class Violation:
    """One broken rule: a sentence for people, and a code for scripts and searches."""

    message: str
    code: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class CaptureError(Exception):
    """An error with one or several broken rules, all reported at once.

    Example:
        >>> message = "stage_id=4 is outside a pipeline of num_stages=4; stage ids run from 0 to 3."
        >>> error = PlanError.of(message, "plan-devices")
        >>> print(error)
        stage_id=4 is outside a pipeline of num_stages=4; stage ids run from 0 to 3. [plan-devices]
    """

    def __init__(self, violations: Iterable[Violation]):
        self.violations = tuple(violations)
        super().__init__("\n".join(map(str, self.violations)))

    @classmethod
    def of(cls, message: str, code: str) -> CaptureError:
        """Return the error with a single violation."""
        return cls([Violation(message, code)])

    @classmethod
    def check(cls, violations: Iterable[Violation]) -> None:
        """Raise this error with every violation, or return if there is none."""
        if violations := tuple(violations):
            raise cls(violations)

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(violation.code for violation in self.violations)

    def __reduce__(self):
        return type(self), (self.violations,)


class WorkloadError(CaptureError):
    """An error of the model, its batch or its optimizer."""


class TracingError(CaptureError):
    """An error while the traced loss is cut into layers."""


class ClusterError(CaptureError):
    """An error in the description of the devices."""


class PlanError(CaptureError):
    """An error of a plan that breaks a rule, or does not belong to the model."""


class ProfileError(CaptureError):
    """An error of a profile or a store that is corrupt, of another schema or of another model."""


class TargetError(CaptureError):
    """An error of a target that is unknown, or that this installation cannot compile for."""


class ExecutionError(CaptureError):
    """An error while a plan runs on the devices of this process."""


class OptionError(CaptureError):
    """An error of the command line: an unknown verb or option, or a value that one does not
    take."""


def said_once(failures: Iterable[str], most: int = 3) -> str:
    """Return failures as one text in which equal causes are said once, with their number and an
    example.

    Args:
        failures: Each as ``"where: why"``.
        most: Causes that are said; of the others the number.

    Example:
        >>> said_once(["stage 0: no memory", "stage 1: no memory", "stage 2: odd"])
        '2 such as stage 0: no memory; stage 2: odd'
    """
    befell: dict[str, list[str]] = {}
    for failure in failures:
        where, _, why = failure.partition(": ")
        befell.setdefault(plain(why)[:400], []).append(where)
    causes = sorted(befell.items(), key=lambda item: -len(item[1]))
    said = [
        f"{f'{len(where)} such as ' * (len(where) > 1)}{where[0]}: {why}"
        for why, where in causes[:most]
    ]
    said += [f"{len(causes) - most} other causes"] * (len(causes) > most)
    return "; ".join(said)


def plain(text: str) -> str:
    """Return a message without the codes at the ends of its lines, to be part of another one, which
    has its own."""
    return _CODE.sub("", text)


def violations_of(error: BaseException) -> tuple[Violation, ...]:
    """Return an exception as broken rules: those of the library's own errors, those that a model's
    message gives with codes, else one line with the type, the message and where it was raised.

    Example:
        >>> error = ValueError("size='3B' is no size of gpt; choose tiny. [workload-size]")
        >>> [violation.code for violation in violations_of(error)]
        ['workload-size']
        >>> print(violations_of(ValueError("no such size"))[0])
        ValueError: no such size [exception]
    """
    if isinstance(error, CaptureError):
        return error.violations
    lines = str(error).splitlines()
    codes = [_CODE.search(line) for line in lines]
    if lines and all(codes):
        return tuple(
            Violation(plain(line), code[1])
            for line, code in zip(lines, codes, strict=True)
            if code is not None
        )
    said = error.msg if isinstance(error, SyntaxError) else next(iter(lines), "")
    where = raised_at(error)
    return (
        Violation(
            (f"{where}: " if where else "") + type(error).__name__ + (f": {said}" if said else ""),
            "exception",
        ),
    )


def is_bug(error: BaseException) -> bool:
    """Return whether an exception is a fault of this library: neither its own refusal, nor raised
    in a user's file, nor what JAX and the compiler say to a program.

    Example:
        >>> is_bug(KeyError("v")), is_bug(RuntimeError("out of memory")), is_bug(ValueError("no"))
        (True, False, True)
    """
    said_by_others = (CaptureError, RuntimeError, OSError, MemoryError)
    if isinstance(error, said_by_others) or raised_at(error):
        return False
    # JAX takes its own frames out, and keeps them with the cause.
    frames = traceback.extract_tb(error.__traceback__)
    cause = error.__cause__
    if cause is not None and type(cause).__name__ == "UnfilteredStackTrace":
        frames += traceback.extract_tb(cause.__traceback__)
    by_jax = bool(frames) and f"{os.sep}jax{os.sep}" in frames[-1].filename
    of_jax = type(error).__module__.partition(".")[0] in ("jax", "jaxlib")
    return not (of_jax or (by_jax and isinstance(error, (TypeError, ValueError))))


def raised_at(error: BaseException) -> str:
    """Return ``file:line in function`` of the innermost frame that is of no library, or of what
    Python cannot read; empty if all are."""
    if isinstance(error, SyntaxError) and error.filename and (file := users_file(error.filename)):
        return f"{file}:{error.lineno}"
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if file := users_file(frame.filename):
            found = f"{file}:{frame.lineno}" + (
                "" if frame.name.startswith("<") else f" in {frame.name}"
            )
    return found


def users_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame of a user's file on; all of it where there is none;
    none for what Python cannot read."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    start: TracebackType | None = error.__traceback__
    while start is not None and not users_file(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


def users_file(file: str) -> str:
    """Return a path as people name it, from here if it is below; empty for files of libraries and
    of this project."""
    if file.startswith(("<", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file:
        return ""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
