"""What is measured beside stages of pipelines, and what came of it, as plain data: layers, programs
of packs and of arrays of models, and copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from capture.measured.work import ProgramWork
from capture.plan.array import BUNDLE_BYTES, Shared
from capture.plan.choices import Remat
from capture.plan.packs import PacksPlan
from capture.step.sub_array import Call

#: ``update``: of its parameters, on the host; ``add``: of gradients to the sum of other
#: micro-batches, on the device.
Direction = Literal["forward", "backward", "update", "add"]


@dataclass(frozen=True)
class LayerPass:
    """The request to measure one layer alone, in one direction at one micro-batch size.

    Attributes:
        layer: Index of the layer in the model.
        direction: Direction of the pass.
        microbatch_size: Examples; any for updates and sums, which have none.
    """

    layer: int
    direction: Direction
    microbatch_size: int

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the passes that share a trace: their micro-batch size."""
        return (self.microbatch_size,)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON, for people and the store."""
        about = {"layers": [self.layer, self.layer], "direction": self.direction}
        return {**about, "microbatch_size": self.microbatch_size}


@dataclass(frozen=True)
class LayerNeeds:
    """The measured memory and seconds of a layer in one direction.

    Attributes:
        nbytes: Peak bytes without the input: weights, the gradient that arrives, temporaries and
            results, as the compiler of the device reports them. None for updates and sums.
        seconds: Median of the executions after one that is not counted; None where nothing was
            executed, or none came to its end.
        work: What the program computes, where it was compiled for a target with rates.
        failure: Why it could not be executed: out of memory. Empty otherwise.
    """

    nbytes: int | None = None
    seconds: float | None = None
    work: ProgramWork | None = None
    failure: str = ""


@dataclass(frozen=True)
class PackProgram:
    """The request to compile one program of a plan of packs.

    Attributes:
        plan: Plan of packs, for a target.
        name: Name of the program in the plan's step.
    """

    plan: PacksPlan = field(compare=False)
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the programs that share a trace: all of a plan."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON, for people and the store."""
        return {"program": self.name}


#: Copies between a device and its host; ``both`` begin together.
CopyWay = Literal["to device", "to host", "both"]


@dataclass(frozen=True)
class ArrayShape:
    """The settings of an array that, beside its task, decide which programs its sub-arrays have.

    Attributes:
        batch_size, num_layers, shared, shared_batches, bundle_bytes, remat: The fields of the
            plan with these names; what is shared may be a predicate.
    """

    batch_size: int
    num_layers: int = 0
    shared: Shared = ()
    shared_batches: bool = False
    bundle_bytes: int = BUNDLE_BYTES
    remat: Remat | None = None


@dataclass(frozen=True)
class ArrayCall:
    """The request to measure one program of a sub-array.

    Attributes:
        num_models: Number of models that are fused.
        call: The program of the sub-array.
    """

    num_models: int
    call: Call
    part: ClassVar[Literal["segment"]] = "segment"

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the programs that share a trace: their number of models."""
        return (self.num_models,)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON, for people and the store."""
        return {"models": self.num_models, "pass": self.call.kind, "segment": self.call.segment}


@dataclass(frozen=True)
class HostCopy:
    """The request to time a copy between a device and the memory of its host.

    Attributes:
        direction: Direction of the copy, or both at once.
        nbytes: Bytes in each direction.
    """

    direction: CopyWay
    nbytes: int
    part: ClassVar[Literal["copy"]] = "copy"

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the copies that are timed together: their direction."""
        return (self.direction,)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON, for people and the store."""
        return {"direction": self.direction, "nbytes": self.nbytes}


@dataclass(frozen=True)
class ProgramCost:
    """The measured memory and seconds of a program, or the seconds of a copy.

    Attributes:
        transient_bytes: Bytes that a program needs while it runs, as its compiler reports them:
            temporaries + outputs - aliased inputs.
        seconds: Median of the executions after one that is not counted; None where nothing was
            executed, or none came to its end.
        work: What a program computes, where it was compiled for a target with rates.
        failure: Why it could not be executed: out of memory. Empty otherwise.
    """

    transient_bytes: int = 0
    seconds: float | None = None
    work: ProgramWork | None = None
    failure: str = ""
