"""How good predictions were: what was predicted of devices beside the truth, and the statistics of
the paper's Figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Outcome:
    """One device of one plan: what was predicted and what the compiled stages need.

    Attributes:
        plan: Index of the drawn plan, schedule included.
        predicted, low, high: In bytes; NaN where a mode has no prediction.
        measured: In bytes.
        known: Whether the stage's programs were compiled for the profile or the calibration.
    """

    plan: tuple[int, str]
    stage: int
    predicted: float
    low: float
    high: float
    measured: float
    known: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        plan, schedule = self.plan
        return {
            "plan": plan,
            "schedule": schedule,
            "stage": self.stage,
            "predicted_bytes": finite(self.predicted),
            "interval_bytes": [finite(self.low), finite(self.high)],
            "measured_bytes": self.measured,
            "compiled_before": self.known,
        }


def finite(number: float) -> float | None:
    """None for NaN, which JSON does not have."""
    return None if np.isnan(number) else number


def statistics(found: Sequence[Outcome]) -> dict[str, Any]:
    """The statistics of Figure 7 over the stages that were not compiled before, then over all
    devices and over plans.

    Source: CAPTURE IV-B.
    """
    predictable = [o for o in found if not np.isnan(o.predicted)]
    fresh = [o for o in predictable if not o.known]
    peaks: dict[Any, tuple[float, float]] = {}
    for o in found:
        if not np.isnan(o.predicted):
            predicted, measured = peaks.get(o.plan, (0.0, 0.0))
            peaks[o.plan] = max(predicted, o.predicted), max(measured, o.measured)
    per_plan = np.array([predicted / measured - 1 for predicted, measured in peaks.values()])
    return {
        "num_predictions": len(fresh),
        "num_compiled_before": sum(o.known for o in found),
        "num_not_predictable": len(found) - len(predictable),
        **_of_devices(fresh),
        "all_devices": {"num_predictions": len(predictable), **_of_devices(predictable)},
        "per_plan": {
            "num_predictions": len(per_plan),
            **_shares(per_plan),
            "mean_abs_error_fraction": float(np.abs(per_plan).mean()) if len(per_plan) else None,
            "max_abs_error_fraction": float(np.abs(per_plan).max()) if len(per_plan) else None,
        },
    }


def _of_devices(found: Sequence[Outcome]) -> dict[str, Any]:
    errors = np.array([o.error for o in found])
    covered = [o.low <= o.measured <= o.high for o in found if not np.isnan(o.low)]
    above = [o.measured > o.high for o in found if not np.isnan(o.high)]
    return {
        **_shares(errors),
        "mean_abs_error_fraction": float(np.abs(errors).mean()) if len(errors) else None,
        "max_abs_error_fraction": float(np.abs(errors).max()) if len(errors) else None,
        "mean_error_fraction": float(errors.mean()) if len(errors) else None,
        "lowest_error_fraction": float(errors.min()) if len(errors) else None,
        "underpredicted_fraction": float((errors < 0).mean()) if len(errors) else None,
        "interval_coverage_fraction": float(np.mean(covered)) if covered else None,
        "num_above_interval": sum(above),
    }


def _shares(errors: np.ndarray) -> dict[str, float | None]:
    return {
        f"within_{p}pct": float((np.abs(errors) <= p / 100).mean()) if len(errors) else None
        for p in (2, 5, 11)
    }
