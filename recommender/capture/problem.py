"""The question every search answers: which contiguous stages, on which devices, in which kind, need
the least memory?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.space import StageSpace
from capture.predictor.alike import Kinds, empty_stages

#: Bytes of what is impossible. Above every real cost, and the sum of two still fits int64.
NEVER = 1 << 61


@dataclass(frozen=True)
class SearchProblem:
    """The problem of every search: to place layers 0..L-1, in order, on all devices of a cluster.

    A stage takes the next d devices: inside one node, or, as an option, on whole equal nodes.

    Many stages of a deep model are alike in every table, which then holds them once (``alike``).

    Attributes:
        cluster: Devices in node-major order.
        num_layers: L.
        choices: Per number of devices d, the ways a stage may use them. A degree that is no key is
            not used.
        cost: Per d, bytes on each device of a stage that holds layers [first, stop) with j stages
            to the end, itself included: int64 (num_choices, K, S) indexed [choice, j - 1,
            alike[first, stop]]. The last row means "K or more". K = 1 where the position does not
            matter (GPipe). Needs no monotonicity; may be negative; ``NEVER`` where impossible. The
            first stage has first == 0, the last stop == L.
        space: Submeshes of stages.
        memory_limit_bytes: What each device has for the plan; None for no limit.
        seconds: Per d, float64 (num_choices, S): one micro-batch's forward and backward pass on a
            stage, what the stage communicates included; infinite where impossible. Only searches
            for speed read it.
        update_seconds: The same for the optimizer update of a stage, once per step; None for
            nothing.
        num_microbatches: Micro-batches in a step, M, for the step time.
        alike: Number of every stage in the tables, (L, L + 1); equal numbers of stages that are
            alike, none of them both of a stage and of an empty one (stop <= first). None: no two
            are, and the last axes of a table that is given are (L, L + 1).

    Raises:
        PlanError: ``search-layers``, ``search-cost``: a cost array is missing or has another shape
            or type, ``search-seconds``: the same of a table of times, or a time that is negative or
            no number, ``search-microbatches``.
    """

    cluster: Cluster
    num_layers: int
    choices: Mapping[int, tuple[StageChoice, ...]]
    cost: Mapping[int, np.ndarray]
    space: StageSpace = StageSpace()
    memory_limit_bytes: int | None = None
    seconds: Mapping[int, np.ndarray] | None = None
    update_seconds: Mapping[int, np.ndarray] | None = None
    num_microbatches: int = 1
    alike: np.ndarray | None = None

    def __post_init__(self):
        if self.num_layers < 1:
            raise PlanError.of(
                f"num_layers={self.num_layers} leaves nothing to place; give at least one layer.",
                "search-layers",
            )
        if self.alike is None:
            stages = np.arange(self.num_layers * (self.num_layers + 1))
            object.__setattr__(self, "alike", stages.reshape(self.num_layers, -1))
        for name, num_axes in (("cost", 2), ("seconds", 1), ("update_seconds", 1)):
            if self._stages[0] == self.kinds.size and getattr(self, name) is not None:
                flat = {d: self._flat(of, num_axes) for d, of in getattr(self, name).items()}
                object.__setattr__(self, name, flat)
        PlanError.check(self._violations())

    def _flat(self, table: np.ndarray, num_axes: int) -> np.ndarray:
        """Return a table whose last axes (L, L + 1), behind ``num_axes`` others, are made one."""
        is_whole = table.shape[num_axes:] == self.kinds.shape
        return table.reshape(*table.shape[:num_axes], self.kinds.size) if is_whole else table

    def _violations(self):
        depths = set()
        for d in self.used_degrees:
            cost = self.cost.get(d)
            if cost is None:
                yield Violation(
                    f"cost has no entry for stages on {d} devices, which choices allow; add "
                    f"cost[{d}].",
                    "search-cost",
                )
                continue
            depths.add(cost.shape[1])
            expected = len(self.choices[d]), cost.shape[1], *self._stages
            if cost.shape != expected or not cost.shape[1]:
                yield Violation(
                    f"cost[{d}] has shape {self._shape(*cost.shape)}; {expected[0]} choices and "
                    f"{self.num_layers} layers need {self._shape(expected[0], 'K', *self._stages)} "
                    "with K >= 1.",
                    "search-cost",
                )
            if cost.dtype != np.int64:
                yield Violation(
                    f"cost[{d}] holds {cost.dtype}; round bytes up once to int64, so that "
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

    @cached_property
    def _stages(self) -> tuple[int]:
        """The shape of the last axis of every table, (S,)."""
        return (int(self.kinds.max()) + 1,)

    def _shape(self, *axes: object) -> str:
        """Return the shape of a table in words, as it may be given."""
        is_whole = axes[-1] == self.kinds.size
        shown = (*axes[:-1], *self.kinds.shape) if is_whole else axes
        return f"({', '.join(map(str, shown))})"

    def _time_violations(self):
        if self.num_microbatches < 1:
            yield Violation(
                f"num_microbatches={self.num_microbatches} is no number of micro-batches; give 1 "
                "or more.",
                "search-microbatches",
            )
        inside = ~self.empty
        for name, tables in (("seconds", self.seconds), ("update_seconds", self.update_seconds)):
            if tables is None:
                continue
            for d in self.used_degrees:
                table, expected = tables.get(d), (len(self.choices[d]), *self._stages)
                if table is None:
                    yield Violation(
                        f"{name} has no entry for stages on {d} devices, which choices allow; add "
                        f"{name}[{d}].",
                        "search-seconds",
                    )
                elif table.shape != expected or table.dtype != np.float64:
                    yield Violation(
                        f"{name}[{d}] is {table.dtype} of shape {self._shape(*table.shape)}; "
                        f"{expected[0]} choices and {self.num_layers} layers need "
                        f"float64 of shape {self._shape(*expected)}.",
                        "search-seconds",
                    )
                elif not (table[:, inside] >= 0).all():
                    yield Violation(
                        f"{name}[{d}] holds a negative number or none at all; a time is 0 or "
                        "more, and infinite where impossible.",
                        "search-seconds",
                    )

    @cached_property
    def kinds(self) -> np.ndarray:
        """The number of every stage in the tables, (L, L + 1): ``alike``, never None."""
        assert self.alike is not None, "it is made where it is not given"
        return self.alike

    @cached_property
    def empty(self) -> np.ndarray:
        """The numbers in the tables that are of no stage, as a mask (S,)."""
        empty = np.zeros(self._stages, bool)
        empty[self.kinds[empty_stages(self.num_layers)]] = True
        return empty

    def spread(self, table: np.ndarray) -> np.ndarray:
        """Spread a table over all stages: (..., S) to (..., L, L + 1)."""
        return table[..., self.kinds]

    def split(self, kinds: Kinds) -> SearchProblem:
        """Return the same problem with stages numbered apart that other tables tell apart."""
        moved: dict[str, Any] = {
            name: {d: kinds.renumber(table, self.kinds) for d, table in tables.items()}
            for name in ("cost", "seconds", "update_seconds")
            if (tables := getattr(self, name)) is not None
        }
        return replace(self, **moved, alike=kinds.of)

    @cached_property
    def degrees(self) -> list[list[int]]:
        """The numbers of devices that a stage starting at device p may take, for every p."""
        return [
            [d for d in here if self.choices.get(d)] for here in self.space.degrees(self.cluster)
        ]

    @cached_property
    def used_degrees(self) -> list[int]:
        return sorted({d for here in self.degrees for d in here})

    @cached_property
    def num_positions(self) -> int:
        """The number K of rows of the cost arrays, one per position of a stage."""
        return next((self.cost[d].shape[1] for d in self.used_degrees), 1)

    @cached_property
    def fewest_stages(self) -> list[int]:
        """The fewest stages that fill exactly the devices from p on, for every p; above the number
        of devices where none do."""
        num_devices = self.cluster.num_devices
        fewest = [num_devices + 1] * num_devices + [0]
        for p in reversed(range(num_devices)):
            fewest[p] = min((1 + fewest[p + d] for d in self.degrees[p]), default=num_devices + 1)
        return fewest

    @property
    def limit_bytes(self) -> int:
        """The memory limit of a device; without one, the most that a possible stage may need."""
        return NEVER - 1 if self.memory_limit_bytes is None else self.memory_limit_bytes

    def bytes_per_choice(self, d: int, j: int, first: int, stop: int) -> np.ndarray:
        """Return the bytes of one stage with j stages to the end, (num_choices,)."""
        return self.cost[d][:, min(j, self.num_positions) - 1, self.kinds[first, stop]]

    def choose(self, d: int, j: int, first: int, stop: int) -> tuple[StageChoice, int]:
        """Return the cheapest choice of a stage and its bytes; the first one among equals."""
        cost = self.bytes_per_choice(d, j, first, stop)
        cheapest = int(cost.argmin())
        return self.choices[d][cheapest], int(cost[cheapest])


def together(*problems: SearchProblem) -> list[SearchProblem]:
    """Return problems of one model with their stages numbered alike."""
    kinds = Kinds(*(problem.kinds for problem in problems))
    return [problem.split(kinds) for problem in problems]
