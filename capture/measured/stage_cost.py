"""What only the compiler knows of a stage: bytes that its programs keep and need, and the work that
they do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from capture import documents
from capture.measured.work import ProgramWork


@dataclass(frozen=True)
class UpdateCost:
    """The part of ``StageCost`` that depends on parameters and optimizer alone: the end of a step;
    see there."""

    update_bytes: int
    optimizer_bytes: int
    summarize_bytes: int = 0
    summary_bytes: int = 0
    update_work: ProgramWork | None = None

    def to_json(self) -> dict[str, Any]:
        return documents.but_none(self)


@dataclass(frozen=True)
class SplitCost:
    """The part of ``StageCost`` that a split backward pass has beside it: bytes per device for one
    micro-batch.

    Attributes:
        inputs_bytes, weights_bytes: While the programs of the gradients of inputs and of weights
            run: temporaries + outputs - aliased inputs.
        residual_bytes: Bytes of the residuals that the gradients of weights read too.
        deferred_bytes: What the program of the inputs makes for that of the weights.
        kept_inputs, kept_outputs, kept_batch: Positions, as in ``StageCost``, of what the gradients
            of weights read again.
        cotangents: Positions among the gradients that arrive, of what they read.
        inputs_work, weights_work: What the programs compute, read and send.
    """

    inputs_bytes: int
    weights_bytes: int
    residual_bytes: int
    deferred_bytes: int
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    kept_batch: tuple[int, ...] = ()
    cotangents: tuple[int, ...] = ()
    inputs_work: ProgramWork | None = None
    weights_work: ProgramWork | None = None

    def to_json(self) -> dict[str, Any]:
        return documents.but_none(self)


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage that only the compiler knows: bytes per device for one micro-batch, and
    work.

    Attributes:
        residual_bytes: Activations kept for the backward pass, other than inputs, outputs and batch
            leaves.
        forward_bytes, backward_bytes, update_bytes: While the program runs: temporaries + outputs -
            aliased inputs.
        optimizer_bytes: State of the optimizer for the owned parameters.
        kept_inputs, kept_outputs, kept_batch: Positions among the stage's inputs, outputs and batch
            leaves of what the backward pass reads again.
        summarize_bytes, summary_bytes: The program while it runs, and its result, where an update
            needs values of other stages.
        forward_work, backward_work, update_work: What the programs compute, read and send; None
            where no times are wanted (``cpu``).
        split: Cost of its backward pass in two programs; None where it was not asked for.
    """

    residual_bytes: int
    forward_bytes: int
    backward_bytes: int
    update_bytes: int
    optimizer_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    kept_batch: tuple[int, ...]
    summarize_bytes: int = 0
    summary_bytes: int = 0
    forward_work: ProgramWork | None = None
    backward_work: ProgramWork | None = None
    update_work: ProgramWork | None = None
    split: SplitCost | None = None

    def keeping(self, nbytes: int) -> StageCost:
        """Return the cost with ``nbytes`` kept for the backward pass, all named residuals."""
        return replace(self, residual_bytes=nbytes, kept_inputs=(), kept_outputs=(), kept_batch=())

    def to_json(self) -> dict[str, Any]:
        return documents.but_none(self)


@dataclass(frozen=True)
class StageBounds:
    """The bounds of a stage from tracing: two costs between which that of the compiler is expected.

    Attributes:
        least: No compiled cost is below it, in any field.
        most: A cost with as much as was ever seen beside what stands in memory.
        sizes: Per program, the bytes per device of donated arguments, and then of results, which
            may have the memory of one of as many bytes.
        common_bytes: Bytes, of what is kept at least, that all replicas have alike, such as
            statistics of a batch: where parameters are split over replicas, a compiler may split
            it, too.
    """

    least: StageCost
    most: StageCost
    sizes: tuple[tuple[int, ...], ...] = ()
    common_bytes: int = 0


#: Of a stage whose programs need nothing, or are not known.
NO_COST = StageCost(0, 0, 0, 0, 0, (), (), ())
