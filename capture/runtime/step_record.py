"""The record of each finished step: a line for people, a line of JSON in a file, and an argument of
a function that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capture.documents import as_json
from capture.options import listed
from capture.plan.step_work import StepWork
from capture.quantities import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class StepRecord:
    """A finished step.

    Attributes:
        step: Its number in the training, from 1.
        loss: Mean over the examples; of several models, a list of theirs.
        seconds: From the end of the step before; of the first ones also their meters.
        examples_per_second: Examples of all models, on all devices.
        tokens_per_second: Tokens (``StepWork.tokens``) of all models, on all devices; None of a
            batch without them.
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

    @classmethod
    def of(
        cls,
        work: StepWork,
        step: int,
        loss: float | Sequence[float],
        seconds: float,
        peak_bytes: int | None,
        metered: bool = False,
    ) -> StepRecord:
        """Return the record of a step with this work that took so long."""
        return cls(
            step,
            loss,
            seconds,
            work.examples / seconds,
            work.tokens_per_second(seconds),
            work.utilization(seconds),
            peak_bytes,
            metered,
        )

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
class Records:
    """The records of a training, and where they go.

    Args:
        every: A line is reported for each of so many steps.
        path: A file of JSON lines, which grows; None for none.
    """

    _report: Callable[[str], None]
    _every: int
    _path: Path | None
    _on_step: Callable[[StepRecord], None]
    told: list[StepRecord] = field(default_factory=list)

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
