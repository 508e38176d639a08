"""One program of a plan of packs, as plain data: what is compiled, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from capture.plan.packs import PacksPlan


@dataclass(frozen=True)
class PackProgram:
    """What is compiled.

    Attributes:
        plan: Of packs, for a target.
        name: Of the program, in the plan's step.
    """

    plan: PacksPlan = field(compare=False)
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> tuple[Any, ...]:
        """All programs of a plan share what is traced."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return what is measured, for people and the store."""
        return {"program": self.name}


@dataclass(frozen=True)
class PackNeeds:
    """What came of it.

    Attributes:
        transient_bytes: Temporaries and results, less what they are written over.
    """

    transient_bytes: int
