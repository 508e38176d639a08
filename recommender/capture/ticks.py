"""The times of a problem as whole numbers, so that sums do not depend on their order and equal
plans stay equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from capture.errors import PlanError
from capture.step.times import pipeline_seconds
from recommender.capture.problem import NEVER, SearchProblem
from recommender.capture.result import PlacedStage

#: Every step value stays below it, so that the sum of a value and ``NEVER`` still fits int64.
_LARGEST_VALUE = 1 << 59


@dataclass(frozen=True)
class Ticks:
    """The values of stages: ``unit`` x ticks of time, plus one per stage. So of two plans of equal
    time, the one of fewer stages is less.

    A tick is a power of two seconds, below 1e-11 of the longest stage time unless micro-batches and
    devices are many thousands.

    Attributes:
        stage: Per degree, int64 (num_choices, S); ``NEVER`` where impossible.
        update: Per degree, the same for the update, without adding one.
        unit: More than the stages of any plan, and a multiple of the devices.
        num_waits: M - 1: how often the slowest stage is waited for.
    """

    stage: Mapping[int, np.ndarray]
    update: Mapping[int, np.ndarray]
    unit: int
    num_waits: int

    @classmethod
    def of(cls, problem: SearchProblem) -> Ticks:
        """Return the times of a problem as whole numbers.

        Raises:
            PlanError: ``search-seconds`` if it has none.
        """
        if problem.seconds is None:
            raise PlanError.of(
                "The problem has no times of stages, which a search for speed needs; give seconds.",
                "search-seconds",
            )
        num_devices = problem.cluster.num_devices
        stage, update = {}, {}
        for d in problem.used_degrees:
            own, updates = problem.seconds[d], problem.update_seconds
            once = np.zeros_like(own) if updates is None else updates[d]
            stage[d] = np.where(np.isfinite(once) & ~problem.empty, own, np.inf)
            update[d] = np.where(np.isfinite(stage[d]), once, 0.0)
        longest = max(
            (float(t[np.isfinite(t)].max(initial=0)) for t in stage.values()), default=0.0
        )
        longest_update = max((float(t.max(initial=0)) for t in update.values()), default=0.0)
        # A multiple of the devices, so that an update divides among them exactly.
        unit = 2 * num_devices
        # Half a tick of rounding per term is what the last summand leaves room for.
        num_terms = num_devices + problem.num_microbatches
        upper = (num_terms * longest + longest_update) or 1.0
        per_second = 2.0 ** math.floor(math.log2((_LARGEST_VALUE // unit - num_terms) / upper))

        def whole(times: np.ndarray) -> np.ndarray:
            finite = np.where(np.isfinite(times), times, 0)
            return np.rint(finite * per_second).astype(np.int64) * unit

        return cls(
            {d: np.where(np.isfinite(t), whole(t) + 1, NEVER) for d, t in stage.items()},
            {d: np.where(np.isfinite(stage[d]), whole(t), NEVER) for d, t in update.items()},
            unit,
            problem.num_microbatches - 1,
        )

    def step(self, stage_values: Sequence[int], update_values: Iterable[int]) -> int:
        """Return a step's value: unit x ``pipeline_seconds`` in ticks, plus one per stage."""
        return sum(stage_values) + self.num_waits * (max(stage_values) - 1) + max(update_values)


def step_seconds(problem: SearchProblem, stages: Sequence[PlacedStage]) -> float:
    """Return the seconds of a step: ``pipeline_seconds`` of the stages' times."""
    assert problem.seconds is not None, "only problems with times have a step time"
    at = [
        (d, problem.choices[d].index(s.choice), problem.kinds[s.first, s.stop])
        for s in stages
        for d in [s.choice.num_devices]
    ]
    times = [float(problem.seconds[d][choice, kind]) for d, choice, kind in at]
    updates = problem.update_seconds
    once = [0.0] if updates is None else [float(updates[d][c, kind]) for d, c, kind in at]
    return pipeline_seconds(times, once, problem.num_microbatches)
