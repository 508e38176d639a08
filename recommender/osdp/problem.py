"""The problem of OSDP's searches: modes for all operators and a batch size, within the memory of a
device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from capture.errors import PlanError
from capture.plan.sharding import Mode
from capture.step.operator_cost import CostModel
from recommender.bisection import last_that_holds


@dataclass(frozen=True)
class Options:
    """The options of each kind of equal operators; the arrays are (..., kinds, modes), infinite
    where a kind has no further mode.

    Leading dimensions are batch sizes, or limits of what may be transient.

    Attributes:
        counts: Operators of each kind.
        modes: By kind.
        resident_bytes, transient_bytes: Whole numbers, rounded up, so that their sums are exact.
        seconds: Time of one step.
    """

    counts: np.ndarray
    modes: tuple[tuple[Mode, ...], ...]
    resident_bytes: np.ndarray
    transient_bytes: np.ndarray
    seconds: np.ndarray

    def __getitem__(self, index) -> Options:
        """Return the options of one batch size, or of one limit."""
        return Options(
            self.counts,
            self.modes,
            self.resident_bytes[index],
            self.transient_bytes[index],
            self.seconds[index],
        )

    def within(self, transient_bytes: np.ndarray) -> Options:
        """Return the options for each of some limits of transient bytes, with one more leading
        dimension; modes above the limit are infinite."""
        allowed = self.transient_bytes <= transient_bytes[:, None, None]
        columns = (
            np.where(allowed, column, np.inf)
            for column in (self.resident_bytes, self.transient_bytes, self.seconds)
        )
        return Options(self.counts, self.modes, *columns)

    def transient_levels(self) -> np.ndarray:
        """Return the values that the largest transient of a plan can have, in bytes, ascending."""
        values = np.unique(self.transient_bytes[np.isfinite(self.transient_bytes)])
        return values[values >= self.transient_bytes.min(axis=-1).max()]

    def least_bytes(self) -> float:
        """Return the least memory of any choice: not always that of the finest slices, whose
        buffers cost something too (O-o)."""
        levels = self.transient_levels()
        resident = self.within(levels).resident_bytes.min(axis=-1) @ self.counts
        return float((resident + levels).min())


@dataclass(frozen=True)
class ShardingProblem:
    """The problem of OSDP: least seconds per example over modes and batch sizes, subject to

        sum of resident bytes + largest transient bytes <= memory limit of a device

    Attributes:
        cost: What operators cost in each mode, for a model on devices.
        max_batch_size: Examples per device to try at most; None to go on until nothing fits.

    Raises:
        PlanError: ``osdp-unbounded`` if no operator keeps anything per example and
            ``max_batch_size`` is None.

    Source: paper, Eq. 1 (there, nothing is transient).
    """

    cost: CostModel
    max_batch_size: int | None = None

    def __post_init__(self):
        if self.max_batch_size is None and self.least_bytes == self.options(2).least_bytes():
            raise PlanError.of(
                f"no operator of model {self.cost.model.name!r} keeps anything per example, so "
                "every batch size fits; give max_batch_size.",
                "osdp-unbounded",
            )

    @property
    def memory_limit_bytes(self) -> float:
        return self.cost.machine.memory_limit_bytes

    @cached_property
    def least_bytes(self) -> float:
        """The least bytes that any plan needs, at one example per device."""
        return self.options(1).least_bytes()

    @cached_property
    def num_batch_sizes(self) -> int:
        """The number of batch sizes 1, 2, ... that fit: memory never falls when a batch grows
        (Algorithm 1, line 12; 3.2, Scheduler)."""
        return last_that_holds(
            lambda size: self.options(size).least_bytes() <= self.memory_limit_bytes,
            start=1,
            most=np.inf if self.max_batch_size is None else self.max_batch_size,
        )

    def options(self, batch_size: int | np.ndarray) -> Options:
        """Return the options at a batch size, or at several: their dimension comes first."""
        model, sizes = self.cost.model, np.asarray(batch_size)
        kinds = [model.operators[position] for position, _ in model.counts]
        modes = tuple(self.cost.modes(operator) for operator in kinds)
        columns = np.full((3, *sizes.shape, len(kinds), max(map(len, modes))), np.inf)
        for i, operator in enumerate(kinds):
            for j, mode in enumerate(modes[i]):
                cost = self.cost.cost(operator, mode, sizes)
                of_mode = (cost.resident_bytes, cost.transient_bytes, cost.seconds)
                for column, values in zip(columns, of_mode, strict=True):
                    column[..., i, j] = values
        return Options(
            np.array([count for _, count in model.counts]),
            modes,
            np.ceil(columns[0]),
            np.ceil(columns[1]),
            columns[2],
        )
