"""Errors that users see: what was given, which rule it breaks, what to change, a stable code.

    CaptureError                 every error that the project raises on purpose
    ├── WorkloadError            the model, its batch or its optimizer
    ├── TracingError             cutting the traced loss into layers
    ├── ClusterError             the description of the devices
    ├── PlanError                a plan that breaks a rule, or does not belong to the model
    ├── ProfileError             a profile or a store that is corrupt, of another schema or another model
    ├── TargetError              an unknown target, or one that this installation cannot compile for
    └── ExecutionError           running a plan on the devices of this process

A memory limit that nothing fits is a result (``SearchResult.status == "infeasible"``), not an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule: a sentence for people, and a code for scripts and searches."""

    message: str
    code: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class CaptureError(Exception):
    """One or several violations, all reported at once.

    Example:
        >>> error = PlanError.of("stage_id=4 is outside a pipeline of num_stages=4; stage ids run from 0 to 3.", "plan-devices")
        >>> print(error)
        stage_id=4 is outside a pipeline of num_stages=4; stage ids run from 0 to 3. [plan-devices]
    """

    def __init__(self, violations: Iterable[Violation]):
        self.violations = tuple(violations)
        super().__init__("\n".join(map(str, self.violations)))

    @classmethod
    def of(cls, message: str, code: str) -> CaptureError:
        """The error with a single violation."""
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
    """The model, its batch or its optimizer."""


class TracingError(CaptureError):
    """Cutting the traced loss into layers."""


class ClusterError(CaptureError):
    """The description of the devices."""


class PlanError(CaptureError):
    """A plan that breaks a rule, or does not belong to the model."""


class ProfileError(CaptureError):
    """A profile or a store that is corrupt, of another schema or of another model."""


class TargetError(CaptureError):
    """An unknown target, or one that this installation cannot compile for."""


class ExecutionError(CaptureError):
    """Running a plan on the devices of this process."""
