"""What slots hold, in ids of a layer graph: the records from which a runtime lays out their arrays,
and reports name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from capture.plan.task_graph import Span


@dataclass(frozen=True)
class Params:
    """Parameters, or gradients of them.

    Attributes:
        ids: In the order of the arrays.
        form: ``whole``, as their owner has them; ``sent``, copies, which may be casts; ``alone``,
            gradients that a single pass makes, of casts where those are as good.
        share: Which share of each array; None for the arrays.
    """

    ids: tuple[int, ...]
    form: Literal["whole", "sent", "alone"] = "whole"
    share: int | None = None


@dataclass(frozen=True)
class State:
    """Optimizer state of parameters that are updated together."""

    params: tuple[int, ...]


@dataclass(frozen=True)
class Values:
    """Values that pass between layers, or their gradients.

    Attributes:
        ids: In the order of the arrays; of gradients, of which there are none of some.
        rows: Which examples of a lane; None for a whole micro-batch.
    """

    ids: tuple[int, ...]
    rows: Span | None = None
    gradients: bool = False


@dataclass(frozen=True)
class Leaves:
    """Leaves of a batch; the fields are as of ``Values``."""

    ids: tuple[int, ...]
    rows: Span | None = None


@dataclass(frozen=True)
class KeptPart:
    """The activations of one pass that a stage keeps and the layer graph does not name: a field of
    ``capture.step.attribution.StageBuffers``."""

    part: Literal["residuals", "held", "deferred"]


@dataclass(frozen=True)
class Summary:
    """Small values of gradients that all updates read: of a stage, or of a pack's parameters."""

    of: int | tuple[int, ...]


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch."""
