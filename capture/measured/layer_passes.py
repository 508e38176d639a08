"""Seconds and bytes of layers in one direction, at the micro-batch sizes that were measured and
between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from capture.errors import Violation
from capture.plan.task_graph import Span

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class PassProfile:
    """The measured seconds and bytes of all layers in one direction, by micro-batch size.

    Attributes:
        u: Micro-batch sizes, ascending.
        time: Seconds, per size and layer.
        memory: Bytes, per size and layer.
    """

    u: tuple[int, ...]
    time: tuple[tuple[float, ...], ...]
    memory: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class SizedLayers:
    """The seconds and bytes of every layer in one direction, at one micro-batch size.

    Attributes:
        seconds: Seconds of every layer.
        memory_bytes: Bytes of every layer, as in ``PassProfile``.
        input_bytes: Bytes of the input of every layer.
    """

    seconds: np.ndarray
    memory_bytes: np.ndarray
    input_bytes: np.ndarray

    @cached_property
    def sums(self) -> list[float]:
        """The seconds of the first i layers together, i from 0."""
        return [0.0, *np.cumsum(self.seconds).tolist()]

    @cached_property
    def inner_sums(self) -> list[int]:
        """The bytes of the first i layers together without their inputs, i from 0."""
        return [0, *np.cumsum(self.memory_bytes - self.input_bytes).tolist()]

    @cached_property
    def inputs(self) -> list[int]:
        """The bytes of the input of each layer, and 0 behind the last."""
        return [*self.input_bytes.tolist(), 0]

    def time(self, first: int, stop: int) -> float:
        """Return the seconds of layers [first, stop)."""
        return self.sums[stop] - self.sums[first]

    def pack_bytes(self, first: int, stop: int) -> int:
        """Return C, the bytes of layers [first, stop): their memory, with the input of the first
        layer alone.

        What passes between two layers of a pack is counted by both measurements; the paper's plain
        sum counts it twice (H-i).
        """
        return self.inner_sums[stop] - self.inner_sums[first] + self.inputs[first]

    def forward_bytes(self, pack: Span, kept: Iterable[int]) -> int:
        """Return the bytes of a forward task that keeps the inputs of some of its layers."""
        x, (first, stop) = self.inputs, pack
        return x[first] + self.pack_bytes(*pack) + x[stop] + sum(x[layer] for layer in kept)


def pass_violations(name: str, measured: PassProfile, num_layers: int) -> Iterator[Violation]:
    sizes = measured.u
    ascending = all(one < other for one, other in pairwise(sizes))
    if not sizes or sizes[0] < 1 or not ascending:
        yield Violation(
            f"{name}.u={list(sizes)} must be micro-batch sizes that ascend from 1 or more.",
            "layers-sizes",
        )
    for what in ("time", "memory"):
        rows = getattr(measured, what)
        if len(rows) != len(sizes):
            yield Violation(
                f"{name}.{what} has {len(rows)} rows for {len(sizes)} sizes; give one each.",
                "layers-count",
            )
        for i, row in enumerate(rows):
            yield from row_violations(f"{name}.{what}[{i}]", row, num_layers)


def row_violations(name: str, row: Sequence[float], num_layers: int) -> Iterator[Violation]:
    if len(row) != num_layers:
        yield Violation(
            f"{name} has {len(row)} layers and num_layers={num_layers}; give one value for each.",
            "layers-count",
        )
    # Not a number is not at least 0 either.
    wrong = [i for i, value in enumerate(row) if not 0 <= value < float("inf")]
    if wrong:
        yield Violation(
            f"{name} is {row[wrong[0]]} for layer {wrong[0]} ({len(wrong)} such); give 0 or more.",
            "layers-number",
        )


def interpolated(sizes: Sequence[int], rows: np.ndarray, size: int) -> np.ndarray:
    """Return the row of a micro-batch size, on the line between the rows of its neighbours."""
    above = int(np.searchsorted(sizes, size))
    low, high = sizes[above - 1], sizes[above]
    share = (size - low) / (high - low)
    return rows[above - 1] + (rows[above] - rows[above - 1]) * share
