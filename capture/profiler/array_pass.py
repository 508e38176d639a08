"""What is measured of an array of models, as plain data, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from capture.measured.work import ProgramWork
from capture.plan.array import BUNDLE_BYTES, Shared
from capture.step.sub_array import Call

#: Of copies between a device and its host; ``both`` begin together.
Direction = Literal["to device", "to host", "both"]


@dataclass(frozen=True)
class ArrayShape:
    """What beside a task decides which programs its sub-arrays have.

    Attributes:
        batch_size, num_layers, shared, shared_batches, bundle_bytes: As in the plan; what is shared
            may be a predicate.
    """

    batch_size: int
    num_layers: int = 0
    shared: Shared = ()
    shared_batches: bool = False
    bundle_bytes: int = BUNDLE_BYTES


@dataclass(frozen=True)
class ArrayCall:
    """A program of a sub-array.

    Attributes:
        num_models: That are fused.
        call: Of it.
    """

    num_models: int
    call: Call
    part: ClassVar[Literal["segment"]] = "segment"

    @property
    def group(self) -> tuple[Any, ...]:
        """Programs of as many models share what is traced."""
        return (self.num_models,)

    def to_json(self) -> dict[str, Any]:
        """Return what is measured, for people and the store."""
        return {"models": self.num_models, "pass": self.call.kind, "segment": self.call.segment}


@dataclass(frozen=True)
class HostCopy:
    """A copy between a device and the memory of its host.

    Attributes:
        direction: Of the copy, or both at once.
        nbytes: In each direction.
    """

    direction: Direction
    nbytes: int
    part: ClassVar[Literal["copy"]] = "copy"

    @property
    def group(self) -> tuple[Any, ...]:
        """Copies in one direction belong together."""
        return (self.direction,)

    def to_json(self) -> dict[str, Any]:
        """Return what is measured, for people and the store."""
        return {"direction": self.direction, "nbytes": self.nbytes}


@dataclass(frozen=True)
class ArrayNeeds:
    """What came of it.

    Attributes:
        transient_bytes: Of a program, as its compiler reports them: temporaries + outputs - aliased
            inputs.
        seconds: Median of the executions after one that is not counted; None where nothing was
            executed, or none came to its end.
        work: What a program computes, where it was compiled for a target with rates.
        failure: Why it could not be executed: out of memory. Empty otherwise.
    """

    transient_bytes: int = 0
    seconds: float | None = None
    work: ProgramWork | None = None
    failure: str = ""
