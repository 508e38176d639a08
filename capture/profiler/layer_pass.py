"""One layer alone, in one direction at one micro-batch size, as plain data: what is measured, and
what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from capture.measured.work import ProgramWork

#: ``update``: of its parameters, on the host; ``add``: of gradients to the sum of other
#: micro-batches, on the device.
Direction = Literal["forward", "backward", "update", "add"]


@dataclass(frozen=True)
class LayerPass:
    """What is measured.

    Attributes:
        layer: Of the model.
        direction: Of the pass.
        microbatch_size: Examples; any for updates and sums, which have none.
    """

    layer: int
    direction: Direction
    microbatch_size: int

    @property
    def group(self) -> tuple[Any, ...]:
        """Passes of one size share what is traced."""
        return (self.microbatch_size,)

    def to_json(self) -> dict[str, Any]:
        """Return what is measured, for people and the store."""
        about = {"layers": [self.layer, self.layer], "direction": self.direction}
        return {**about, "microbatch_size": self.microbatch_size}


@dataclass(frozen=True)
class LayerNeeds:
    """What came of it.

    Attributes:
        nbytes: At the peak, the input aside: weights, the gradient that arrives, temporaries and
            results, as the compiler of the device reports them. None of updates and sums.
        seconds: Median of the executions after one that is not counted; None where nothing was
            executed, or none came to its end.
        work: What the program computes, where it was compiled for a target with rates.
        failure: Why it could not be executed: out of memory. Empty otherwise.
    """

    nbytes: int | None = None
    seconds: float | None = None
    work: ProgramWork | None = None
    failure: str = ""
