"""What a plan is predicted to need: per device, per stage, per layer, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.documents import write
from capture.plan.headroom import Peaks


@dataclass(frozen=True)
class StagePrediction:
    """The predicted peak memory of one stage's devices, which all need the same.

    Attributes:
        peak_bytes: Peak memory per device.
        interval_bytes: (low, high) that holds the measured peak with the calibrated probability.
        instant: The pass that runs at the peak: forward, backward or update.
        parts_bytes: Bytes of the peak by category; they sum to ``peak_bytes``.
        layers_bytes: Bytes of the peak by category, per layer of the stage; they sum to
            ``parts_bytes`` but for what passes between stages.
        extrapolated: Whether a degree or a micro-batch size was not profiled.
        verified: Whether the stage was compiled as it is: its peak is the compiler's.
    """

    peak_bytes: int
    interval_bytes: tuple[int, int]
    instant: str
    parts_bytes: Mapping[str, int]
    layers_bytes: tuple[Mapping[str, int], ...]
    extrapolated: bool = False
    verified: bool = False


@dataclass(frozen=True)
class Prediction:
    """A plan's predicted memory.

    Attributes:
        stages: Predictions of the stages, in pipeline order.
        peak_bytes_per_device: Predicted peak memory, in node-major device order.
        interval_bytes_per_device: (low, high) around each device's peak, in the same order.
        source: Backend and target of the measurements, and the predictor.
        interval_coverage: Probability for which the interval was calibrated; None if it was not.
    """

    stages: tuple[StagePrediction, ...]
    peak_bytes_per_device: tuple[int, ...]
    interval_bytes_per_device: tuple[tuple[int, int], ...] = ()
    source: Mapping[str, Any] = field(kw_only=True)
    interval_coverage: float | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_bytes_per_device)

    @property
    def extrapolated(self) -> bool:
        """Whether some stage has a degree or a micro-batch size that was not profiled, and was not
        compiled as it is."""
        return any(stage.extrapolated for stage in self.stages)

    @property
    def peaks(self) -> Peaks:
        """The predicted peak of every device, with its interval."""
        return Peaks(
            self.peak_bytes_per_device,
            self.interval_bytes_per_device or [stage.interval_bytes for stage in self.stages],
            "predicted",
            self.interval_coverage,
            self.extrapolated,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes_per_device": list(self.peak_bytes_per_device),
            "interval_bytes_per_device": write(self.interval_bytes_per_device),
            "interval_coverage": self.interval_coverage,
            "extrapolated": self.extrapolated,
            "source": dict(self.source),
            "stages": write(self.stages),
        }


@dataclass(frozen=True)
class StepTime:
    """A simulated step of a plan.

    Attributes:
        step_seconds: Seconds of the step.
        examples_per_second: Examples of the global batch per second, on all devices.
        model_flops_per_second_per_device: Three times the FLOPs of the forward pass, whatever is
            recomputed, per second and device.
        bubble_fraction_per_stage: The part of the step in which a stage computes nothing.
        passes_seconds_per_stage: Seconds of one execution of each program of a stage, by its kind.
        sends_seconds: Seconds that a micro-batch takes from each stage but the last to the next.
        exposed_seconds_per_stage: Seconds of the step in which the devices of a stage only send to
            each other, as it is compiled; () where stages are not compiled.
        simulated: Always: nothing of it was measured.
        tokens_per_second: Tokens of the global batch per second, on all devices; None of a batch
            without them.
        model_flops_utilization: Model FLOPs over what the devices are specified to reach (MFU);
            None where nobody knows in which data type they are computed.
    """

    step_seconds: float
    examples_per_second: float
    model_flops_per_second_per_device: float
    bubble_fraction_per_stage: tuple[float, ...]
    passes_seconds_per_stage: tuple[Mapping[str, float], ...] = ()
    sends_seconds: tuple[float, ...] = ()
    exposed_seconds_per_stage: tuple[float, ...] = ()
    simulated: bool = True
    tokens_per_second: float | None = None
    model_flops_utilization: float | None = None


def error_fractions(
    predicted: Sequence[int] | None, compiled: Sequence[int]
) -> tuple[float | None, ...] | None:
    """Return, per device, the predicted peak over the compiled one, less 1: None of a device that
    holds nothing. None where nothing was predicted.

    Example:
        >>> error_fractions((15, 0), (10, 0))
        (0.5, None)
    """
    if predicted is None:
        return None
    peaks = zip(predicted, compiled, strict=True)
    return tuple(guess / peak - 1 if peak else None for guess, peak in peaks)


@dataclass(frozen=True)
class Verified:
    """The peak memory of a plan's own stages, as the target's compiler reports it.

    Attributes:
        peak_bytes_per_device: Compiled peak memory, in node-major device order.
        predicted_peak_bytes_per_device: Predicted peak memory beside it, if the plan was predicted.
        prediction_error_fraction_per_device: Predicted over compiled, less 1; null of a device that
            holds nothing.
        source: Backend, target and versions.
        num_stages_compiled: Stages of which nothing was known before.
    """

    peak_bytes_per_device: tuple[int, ...]
    predicted_peak_bytes_per_device: tuple[int, ...] | None = None
    prediction_error_fraction_per_device: tuple[float | None, ...] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    num_stages_compiled: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_bytes_per_device)
