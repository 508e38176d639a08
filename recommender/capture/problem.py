"""The question every search answers: which contiguous stages, on which devices, in which kind, need
the least memory?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.space import StageSpace

#: Bytes of what is impossible. Above every real cost, and the sum of two still fits int64.
NEVER = 1 << 61


@dataclass(frozen=True)
class InFlightCost:
    """Bytes that grow linearly with the micro-batches in flight: ``static + in_flight[j - 1] *
    kept``.

    Holds what a dense cost array holds in K times less memory.

    Attributes:
        static: int64 (num_choices, L, L + 1), indexed [choice, first, stop]; ``NEVER`` where
            impossible.
        kept: The same shape, bytes per micro-batch in flight; may be negative, and is ignored where
            ``static`` is ``NEVER``.
        in_flight: int64 (K,): micro-batches that a stage with j stages to the end keeps; the last
            row means "K or more".
    """

    static: np.ndarray
    kept: np.ndarray
    in_flight: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array it stands for: (num_choices, K, L, L + 1)."""
        return self.static.shape[0], len(self.in_flight), *self.static.shape[1:]

    def least_rows(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Least bytes over the choices of n layer ranges, (n, K)."""
        least = np.full((len(first), len(self.in_flight)), NEVER)
        for static, kept in zip(
            self.static[:, first, stop], self.kept[:, first, stop], strict=True
        ):
            value = np.where(static < NEVER, kept, 0)[:, None] * self.in_flight
            value += static[:, None]
            np.minimum(least, value, out=least)
        return least

    def floor(self) -> np.ndarray:
        """Least bytes over choices and positions, (L, L + 1). A line is least at one of its two
        ends."""
        ends = np.array([self.in_flight.min(), self.in_flight.max()])
        kept = np.where(self.static < NEVER, self.kept, 0)
        return np.minimum(self.static + ends[0] * kept, self.static + ends[1] * kept).min(axis=0)

    def of_choice(self, choice: int) -> np.ndarray:
        """Bytes of one choice at every position, (K, L, L + 1)."""
        possible = self.static[choice] < NEVER
        value = np.where(possible, self.kept[choice], 0) * self.in_flight[:, None, None]
        value += np.minimum(self.static[choice], NEVER)
        return value

    def at(self, j: int, first: int, stop: int) -> np.ndarray:
        """Bytes per choice of one stage, (num_choices,)."""
        static = self.static[:, first, stop]
        return np.where(
            static < NEVER, static + self.in_flight[j - 1] * self.kept[:, first, stop], NEVER
        )


@dataclass(frozen=True)
class SearchProblem:
    """Place layers 0..L-1, in order and all of them, on all devices of the cluster.

    A stage takes the next d devices: inside one node, or, as an option, on whole equal nodes.

    Attributes:
        cluster: Devices in node-major order.
        num_layers: L.
        choices: Per number of devices d, the ways a stage may use them. A degree that is no key is
            not used.
        cost: Per d, bytes on each device of a stage that holds layers [first, stop) with j stages
            to the end, itself included: int64 (num_choices, K, L, L + 1) indexed [choice, j - 1,
            first, stop], or the same as ``InFlightCost``. The last row means "K or more". K = 1
            where the position does not matter (GPipe). Needs no monotonicity; may be negative;
            ``NEVER`` where impossible. The first stage has first == 0, the last stop == L.
        space: Submeshes of stages.
        memory_limit_bytes: What each device has for the plan; None for no limit.
        seconds: Per d, float64 (num_choices, L, L + 1) indexed [choice, first, stop]: one
            micro-batch's forward and backward pass on a stage, what the stage communicates
            included; infinite where impossible. Only searches for speed read it.
        update_seconds: The same for the optimizer update of a stage, once per step; None for
            nothing.
        num_microbatches: Micro-batches in a step, M, for the step time.

    Raises:
        PlanError: ``search-layers``, ``search-cost``: a cost array is missing or has another shape
            or type, ``search-seconds``: the same of a table of times, or a time that is negative or
            no number, ``search-microbatches``.
    """

    cluster: Cluster
    num_layers: int
    choices: Mapping[int, tuple[StageChoice, ...]]
    cost: Mapping[int, np.ndarray | InFlightCost]
    space: StageSpace = StageSpace()
    memory_limit_bytes: int | None = None
    seconds: Mapping[int, np.ndarray] | None = None
    update_seconds: Mapping[int, np.ndarray] | None = None
    num_microbatches: int = 1

    def __post_init__(self):
        if self.num_layers < 1:
            raise PlanError.of(
                f"num_layers={self.num_layers} leaves nothing to place; give at least one layer.",
                "search-layers",
            )
        PlanError.check(self._violations())

    def _violations(self):
        depths = set()
        for d in self.used_degrees:
            cost, num_choices = self.cost.get(d), len(self.choices[d])
            if cost is None:
                yield Violation(
                    f"cost has no entry for stages on {d} devices, which choices allow; add "
                    f"cost[{d}].",
                    "search-cost",
                )
                continue
            depths.add(cost.shape[1])
            expected = (num_choices, cost.shape[1], self.num_layers, self.num_layers + 1)
            if cost.shape != expected or not cost.shape[1]:
                yield Violation(
                    f"cost[{d}] has shape {cost.shape}; {num_choices} choices and "
                    f"{self.num_layers} layers need "
                    f"({num_choices}, K, {self.num_layers}, {self.num_layers + 1}) with K >= 1.",
                    "search-cost",
                )
            parts = (
                (cost.static, cost.kept, cost.in_flight)
                if isinstance(cost, InFlightCost)
                else (cost,)
            )
            for part in parts:
                if part.dtype != np.int64:
                    yield Violation(
                        f"cost[{d}] holds {part.dtype}; round bytes up once to int64, so that "
                        "equal costs stay equal.",
                        "search-cost",
                    )
        if len(depths) > 1:
            yield Violation(
                f"cost has {sorted(depths)} position rows for different degrees; use the same K "
                "for all.",
                "search-cost",
            )
        yield from self._time_violations()

    def _time_violations(self):
        if self.num_microbatches < 1:
            yield Violation(
                f"num_microbatches={self.num_microbatches} is no number of micro-batches; give 1 "
                "or more.",
                "search-microbatches",
            )
        inside = ~np.tri(self.num_layers, self.num_layers + 1, dtype=bool)
        for name, tables in (("seconds", self.seconds), ("update_seconds", self.update_seconds)):
            if tables is None:
                continue
            for d in self.used_degrees:
                table, expected = (
                    tables.get(d),
                    (len(self.choices[d]), self.num_layers, self.num_layers + 1),
                )
                if table is None:
                    yield Violation(
                        f"{name} has no entry for stages on {d} devices, which choices allow; add "
                        f"{name}[{d}].",
                        "search-seconds",
                    )
                elif table.shape != expected or table.dtype != np.float64:
                    yield Violation(
                        f"{name}[{d}] is {table.dtype} of shape {table.shape}; {expected[0]} "
                        f"choices and {self.num_layers} layers need "
                        f"float64 of shape {expected}.",
                        "search-seconds",
                    )
                elif not (table[:, inside] >= 0).all():
                    yield Violation(
                        f"{name}[{d}] holds a negative number or none at all; a time is 0 or "
                        "more, and infinite where impossible.",
                        "search-seconds",
                    )

    @cached_property
    def degrees(self) -> list[list[int]]:
        """Numbers of devices that a stage starting at device p may take, for every p."""
        return [
            [d for d in here if self.choices.get(d)] for here in self.space.degrees(self.cluster)
        ]

    @cached_property
    def used_degrees(self) -> list[int]:
        return sorted({d for here in self.degrees for d in here})

    @cached_property
    def num_positions(self) -> int:
        """K: the rows of the cost arrays."""
        return next((self.cost[d].shape[1] for d in self.used_degrees), 1)

    @cached_property
    def fewest_stages(self) -> list[int]:
        """Fewest stages that fill exactly the devices from p on; above the number of devices where
        none do."""
        num_devices = self.cluster.num_devices
        fewest = [num_devices + 1] * num_devices + [0]
        for p in reversed(range(num_devices)):
            fewest[p] = min((1 + fewest[p + d] for d in self.degrees[p]), default=num_devices + 1)
        return fewest

    def floor(self, d: int) -> np.ndarray:
        """Least bytes of a stage on d devices over choices and positions, (L, L + 1); ``NEVER`` on
        and below the diagonal."""
        cost = self.cost[d]
        floor = cost.floor() if isinstance(cost, InFlightCost) else cost.min(axis=(0, 1))
        return np.where(np.tri(*floor.shape) > 0, NEVER, np.minimum(floor, NEVER))

    def least_rows(self, d: int, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Least bytes over the choices of stages on d devices, for n layer ranges, (n, K).

        Exact for peaks, because every choice occupies the same d devices; the choice is read back
        by ``choose``.
        """
        cost = self.cost[d]
        return (
            cost.least_rows(first, stop)
            if isinstance(cost, InFlightCost)
            else cost[:, :, first, stop].min(axis=0).T
        )

    def bytes_of_choice(self, d: int, choice: int) -> np.ndarray:
        """Bytes of all stages on d devices with one choice, (K, L, L + 1)."""
        cost = self.cost[d]
        return cost.of_choice(choice) if isinstance(cost, InFlightCost) else cost[choice]

    def bytes_per_choice(self, d: int, j: int, first: int, stop: int) -> np.ndarray:
        """Bytes of one stage with j stages to the end, (num_choices,)."""
        cost, j = self.cost[d], min(j, self.num_positions)
        return (
            cost.at(j, first, stop)
            if isinstance(cost, InFlightCost)
            else cost[:, j - 1, first, stop]
        )

    def choose(self, d: int, j: int, first: int, stop: int) -> tuple[StageChoice, int]:
        """The cheapest choice of a stage and its bytes; the first one among equals."""
        cost = self.bytes_per_choice(d, j, first, stop)
        cheapest = int(cost.argmin())
        return self.choices[d][cheapest], int(cost[cheapest])
