"""How good predictions were: what was predicted of devices beside the truth, and the statistics of
the paper's Figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class JudgedPeak:
    """One device of one plan: what was predicted and what the compiled stages need.

    Attributes:
        plan: Index of the drawn plan, schedule included.
        predicted, low, high: Predicted bytes and their interval; NaN where a mode has no
            prediction.
        measured: Bytes that the compiled stages need.
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
        """The error of the prediction: predicted over measured, less 1."""
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
    """Return a number as JSON can hold it: None instead of NaN."""
    return None if np.isnan(number) else number


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The sizes of prediction errors relative to the truth; every statistic is None where nothing
    was predicted.

    Attributes:
        num_predictions: Predictions that are counted.
        within_2pct, within_5pct, within_11pct: The part of them that is off by at most that.
        mean_abs_error_fraction, max_abs_error_fraction: Sizes of errors.
    """

    num_predictions: int
    within_2pct: float | None
    within_5pct: float | None
    within_11pct: float | None
    mean_abs_error_fraction: float | None
    max_abs_error_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceErrors(Errors):
    """The errors of predicted peaks of devices, with signs and intervals; None where nothing was
    predicted.

    Attributes:
        mean_error_fraction, lowest_error_fraction: Errors with their signs.
        underpredicted_fraction: The part of predictions below the truth.
        interval_coverage_fraction: The part of intervals that hold the truth.
        num_above_interval: Truths above their intervals.
    """

    mean_error_fraction: float | None
    lowest_error_fraction: float | None
    underpredicted_fraction: float | None
    interval_coverage_fraction: float | None
    num_above_interval: int


@dataclass(frozen=True, kw_only=True)
class Accuracy(DeviceErrors):
    """The statistics of the paper's Figure 7, over the devices whose stages were not compiled
    before.

    Source: CAPTURE IV-B.

    Attributes:
        num_compiled_before: Devices whose stages were.
        num_not_predictable: Devices of which a mode says nothing.
        all_devices: Whether compiled before or not.
        per_plan: The errors of the device of each plan that needs most.
    """

    num_compiled_before: int
    num_not_predictable: int
    all_devices: DeviceErrors
    per_plan: Errors

    @classmethod
    def of(cls, found: Sequence[JudgedPeak]) -> Accuracy:
        """Compute the statistics of predicted peaks beside the truth."""
        predictable = [o for o in found if not np.isnan(o.predicted)]
        peaks: dict[Any, tuple[float, float]] = {}
        for o in predictable:
            predicted, measured = peaks.get(o.plan, (0.0, 0.0))
            peaks[o.plan] = max(predicted, o.predicted), max(measured, o.measured)
        per_plan = [predicted / measured - 1 for predicted, measured in peaks.values()]
        return cls(
            **_of_devices([o for o in predictable if not o.known]),
            num_compiled_before=sum(o.known for o in found),
            num_not_predictable=len(found) - len(predictable),
            all_devices=DeviceErrors(**_of_devices(predictable)),
            per_plan=Errors(**_sizes(np.array(per_plan))),
        )


def _of_devices(found: Sequence[JudgedPeak]) -> dict[str, Any]:
    errors = np.array([o.error for o in found])
    covered = [o.low <= o.measured <= o.high for o in found if not np.isnan(o.low)]
    return {
        **_sizes(errors),
        "mean_error_fraction": float(errors.mean()) if len(errors) else None,
        "lowest_error_fraction": float(errors.min()) if len(errors) else None,
        "underpredicted_fraction": float((errors < 0).mean()) if len(errors) else None,
        "interval_coverage_fraction": float(np.mean(covered)) if covered else None,
        "num_above_interval": sum(o.measured > o.high for o in found if not np.isnan(o.high)),
    }


def _sizes(errors: np.ndarray) -> dict[str, Any]:
    off, known = np.abs(errors), len(errors) > 0
    return {
        "num_predictions": len(errors),
        **{f"within_{p}pct": float((off <= p / 100).mean()) if known else None for p in (2, 5, 11)},
        "mean_abs_error_fraction": float(off.mean()) if known else None,
        "max_abs_error_fraction": float(off.max()) if known else None,
    }
