"""What ``capture verify`` and ``capture predict`` say of a plan, alike for every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.plan.headroom import Headroom
from capture.plan.prediction import Prediction, StepTime
from capture.report.needs import PlanNeeds


@dataclass(frozen=True)
class PredictReport:
    """The document of ``capture predict``: a plan by what was measured of its model.

    Attributes:
        kind: Kind of the plan: stages.
        needs: Memory and seconds of the plan.
        prediction: Memory of every stage and device.
        written: Files that were written, by what they are.
    """

    kind: str
    needs: PlanNeeds
    prediction: Prediction
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PeakRow:
    """The peak of devices that hold the same.

    Attributes:
        devices: Numbers of the devices.
        peak_bytes: Peak memory of each, by the compiler.
        parts_bytes: Bytes of the peak by category.
        instant: Instant of the peak.
        stage_id, layers: The stage, and its first and last layer, of a plan of stages.
    """

    devices: tuple[int, ...]
    peak_bytes: int
    parts_bytes: Mapping[str, int]
    instant: str = "step"
    stage_id: int | None = None
    layers: tuple[int, int] | None = None

    @classmethod
    def of(cls, devices: Sequence[int], peak: Any, **of_stage: Any) -> PeakRow:
        """Return the row of a peak of a ledger."""
        return cls(tuple(devices), peak.peak_bytes, dict(peak.parts), str(peak.instant), **of_stage)


@dataclass(frozen=True)
class VerifyReport:
    """The document of ``capture verify``: a plan by the compiler of its target, beside its
    prediction.

    Attributes:
        kind: Kind of the plan: stages, sharding or packs.
        target: Kind of device that it was compiled for.
        peak_bytes_per_device: Peak memory of every device, by the compiler.
        predicted_peak_bytes_per_device: Peaks that the plan predicts; None if it predicts none.
        peaks: Peaks by stage or by device, with their parts.
        headroom: What is left of the limit; None where nobody knows one.
        host_peak_bytes: Peak of the host's memory; None where the step does not use it.
        time: A step, simulated from the compiled programs; None without rates.
        source: Backend, target and versions.
        num_compiled: Programs that nobody had compiled before; None where that is not counted.
        warnings: Properties of the loss that make its step another than that of one device.
        status: ``"ok"``, or ``"infeasible"`` where the peaks do not stay within the limit.
        prediction_error_fraction_per_device: Predicted over compiled, less 1; null of a device that
            holds nothing.
    """

    kind: str
    target: str
    peak_bytes_per_device: tuple[int, ...]
    predicted_peak_bytes_per_device: tuple[int, ...] | None
    peaks: tuple[PeakRow, ...]
    headroom: Headroom | None
    host_peak_bytes: int | None = None
    time: StepTime | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    num_compiled: int | None = None
    warnings: Sequence[str] = ()

    status: str = field(init=False)
    prediction_error_fraction_per_device: tuple[float | None, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        guesses, peaks = self.predicted_peak_bytes_per_device, self.peak_bytes_per_device
        errors: tuple[float | None, ...] | None = None
        if guesses is not None:
            errors = tuple(
                guess / peak - 1 if peak else None
                for guess, peak in zip(guesses, peaks, strict=True)
            )
        fits = self.headroom is None or self.headroom.verdict == "fits"
        object.__setattr__(self, "status", "ok" if fits else "infeasible")
        object.__setattr__(self, "prediction_error_fraction_per_device", errors)
