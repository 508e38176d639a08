"""Passes of stages that are bounded one after the other, because they share what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from capture.measured.profile import StageConfig


@dataclass(frozen=True)
class BoundedPasses:
    """The request to bound passes of the same layers and remat, without the end of a step.

    Attributes:
        configs: Degrees and micro-batch sizes differ.
        num_devices: Most of a stage.
        by_example: Whether what a device needs depends on its own examples alone, so that some of
            the bounds may follow from others (``capture.profiler.lines``).
    """

    configs: tuple[StageConfig, ...]
    num_devices: int
    by_example: bool = False

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of batches that share something: equal for all, because none do."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return the stage configs of the batch in words, for people."""
        return {"bounds": [str(config) for config in self.configs]}


#: ``share(batches, here)`` has passes bounded, by ``here`` or elsewhere, and yields each batch once
#: that is done: with the documents of its bounds, None of those that follow from others, if it was
#: elsewhere.
Share = Callable[
    [Sequence[BoundedPasses], Callable[[BoundedPasses], None]],
    Iterator[tuple[BoundedPasses, Sequence[Any] | None]],
]


def alone(
    batches: Sequence[BoundedPasses], here: Callable[[BoundedPasses], None]
) -> Iterator[tuple[BoundedPasses, Sequence[Any] | None]]:
    """Bound batches of passes one after the other in this process: a ``Share`` of one process."""
    for batch in batches:
        here(batch)
        yield batch, None
