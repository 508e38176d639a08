"""The record of each finished step: a line for people, a line of JSON in a file, and an argument of
a function that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from capture.documents import as_json
from capture.machine.rates import Rates
from capture.model.graph import LayerGraph
from capture.options import listed
from capture.quantities import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from capture.tracing import TracedModel

#: Model FLOPs of a training step per FLOPs of its forward pass, whatever is computed again.
_PASSES = 3


@dataclass(frozen=True)
class StepRecord:
    """A finished step.

    Attributes:
        step: Its number in the training, from 1.
        loss: Mean over the examples; of several models, a list of theirs.
        seconds: From the end of the step before; of the first ones also their meters.
        examples_per_second: Examples of all models, on all devices.
        tokens_per_second: Elements of the largest batch leaf of integers per example, such as the
            ids of a sequence; None of a batch without one.
        model_flops_utilization: Model FLOPs (three times those of the forward pass) over what the
            devices are specified to reach; None where the devices are not those of the plan, or
            have no rates.
        peak_bytes: The most that a device was measured to hold so far; None before it was.
        metered: Whether memory was measured meanwhile, or the step traced, so that it took longer
            than others: the first and the last ones.
    """

    step: int
    loss: float | Sequence[float]
    seconds: float
    examples_per_second: float
    tokens_per_second: float | None = None
    model_flops_utilization: float | None = None
    peak_bytes: int | None = None
    metered: bool = False

    def __str__(self) -> str:
        losses = listed(self.loss)
        values = " ".join(f"{loss:.6f}" for loss in losses)
        said = [
            f"step {self.step}: {'loss' if self.loss is losses[0] else 'losses'} {values}",
            format_seconds(self.seconds),
            f"{format_rate(self.examples_per_second)} examples/s",
        ]
        if self.tokens_per_second is not None:
            said.append(f"{format_rate(self.tokens_per_second)} tokens/s")
        if self.model_flops_utilization is not None:
            said.append(f"MFU {self.model_flops_utilization:.1%}")
        if self.peak_bytes is not None:
            said.append(f"peak {format_bytes(self.peak_bytes)}")
        return ", ".join(said) + " (measured meanwhile)" * self.metered


@dataclass(frozen=True)
class StepWork:
    """The examples, tokens and model FLOPs of a step.

    Attributes:
        examples: Examples of all models.
        tokens: Tokens of these (``StepRecord.tokens_per_second``); 0 where there are none.
        least_seconds: Seconds of the model FLOPs at the devices' specified rate; None if unknown.
    """

    examples: int
    tokens: int
    least_seconds: float | None

    @classmethod
    def of(
        cls, models: Sequence[tuple[TracedModel, int]], num_devices: int, rates: Rates | None
    ) -> StepWork:
        """Count the work of a step.

        Args:
            models: The loss of each model, and its examples in a step.
            num_devices: Devices of the step.
            rates: Of the devices; None where they are not known.
        """
        seconds = sum(
            _PASSES
            * sum(layer.flops for layer in traced.graph.layers)
            * examples
            / traced.graph.microbatch_size
            / rates.rate_of(_computed_in(traced), "default").value
            for traced, examples in models
            if rates is not None
        )
        return cls(
            sum(examples for _, examples in models),
            sum(_tokens_per_example(traced.graph) * examples for traced, examples in models),
            seconds / num_devices if seconds else None,
        )

    def record(
        self,
        step: int,
        loss: float | Sequence[float],
        seconds: float,
        peak_bytes: int | None,
        metered: bool = False,
    ) -> StepRecord:
        """Return the record of a step that took so long."""
        return StepRecord(
            step,
            loss,
            seconds,
            self.examples / seconds,
            self.tokens / seconds if self.tokens else None,
            None if self.least_seconds is None else self.least_seconds / seconds,
            peak_bytes,
            metered,
        )


def _computed_in(traced: TracedModel) -> str:
    """Return the dtype of the largest value between the layers, which is taken for that of the
    products; of a single layer, the dtype in which it reads its largest parameter."""
    graph = traced.graph
    values = [value for value in graph.values if value.differentiable]
    if graph.num_layers == 1 and graph.params:
        pairs = zip(graph.params, traced.casts, strict=True)
        values = [replace(param, dtype=cast.dtype) if cast else param for param, cast in pairs]
    return max(values, key=lambda value: value.size).dtype


def _tokens_per_example(graph: LayerGraph) -> int:
    """Return the elements per example of the largest batch leaf of integers; 0 where each example
    has one, as a label is."""
    sizes = [
        leaf.size // graph.microbatch_size
        for leaf in graph.batch
        if leaf.batch_dim is not None and leaf.dtype.startswith(("int", "uint"))
    ]
    most = max(sizes, default=0)
    return most if most > 1 else 0


class Records:
    """The records of a training, and where they go.

    Args:
        report: Takes lines of progress.
        every: A line is reported for each of so many steps.
        path: A file of JSON lines, which grows; None for none.
        on_step: Takes each record.

    Attributes:
        told: All that were told.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        every: int,
        path: Path | None,
        on_step: Callable[[StepRecord], None],
    ):
        self._report, self._every, self._path, self._on_step = report, every, path, on_step
        self.told = list[StepRecord]()

    def say(self, text: str) -> None:
        """Report a line of its own."""
        self._report(text)

    def add(self, record: StepRecord, *, is_last: bool) -> None:
        """Tell a record."""
        self.told.append(record)
        if is_last or record.step % self._every == 0:
            self._report(str(record))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(as_json(record) + "\n")
        self._on_step(record)
