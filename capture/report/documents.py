"""What verbs say of a plan, alike for every kind: the documents of ``capture report``, ``explain``,
``verify`` and ``predict``, and what a plan needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.plan.files import PlanFile
from capture.plan.headroom import Headroom
from capture.plan.prediction import Prediction, StepTime, error_fractions
from capture.quantities import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class PlanNeeds:
    """The needs of a plan, by the best that is known: memory, and seconds of a step.

    Attributes:
        peak_bytes: Peak memory of the device that needs most; None if nobody says.
        peak_is: Source of the peak: compiled, predicted or estimated, or unknown.
        headroom: What is left of the limit; None where nobody knows one.
        step_seconds: Seconds of a step; None if nobody says.
        seconds_are: Source of the seconds: simulated, or estimated.
        examples_per_second: Examples of a step per second, of all models that it trains.
        host_peak_bytes: Peak of the host's memory; None where the step does not use it, and of
            stages where only a prediction is known.
        paper_step_seconds: Seconds of a step by the paper's rules, where it has some.
        bubble_fraction: The part of a step in which a stage computes nothing, on average.
        target: The devices that the plan is for.
    """

    peak_bytes: int | None
    peak_is: str
    headroom: Headroom | None = None
    step_seconds: float | None = None
    seconds_are: str = "simulated"
    examples_per_second: float | None = None
    host_peak_bytes: int | None = None
    paper_step_seconds: float | None = None
    bubble_fraction: float | None = None
    target: str = ""

    @classmethod
    def of(cls, plan: PlanFile, memory_limit_bytes: int | None = None) -> PlanNeeds:
        """Return the needs that a plan's file itself holds."""
        peaks, known = plan.peaks, plan.step_estimate
        seconds, how = known or (None, "unknown")
        return cls(
            plan.known_peak_bytes if peaks else None,
            peaks.how if peaks else "unknown",
            plan.headroom(memory_limit_bytes),
            seconds,
            how,
            plan.step_examples * plan.num_models / seconds if seconds else None,
            plan.host_peak_bytes,
            target=plan.target_name if plan.num_devices else "",
        )

    def rows(self) -> dict[str, str]:
        """Return the known needs by name, in words for people."""
        room, found = self.headroom, dict[str, str]()
        if self.target:
            found["target"] = self.target
        if self.peak_bytes is not None:
            found["peak per device"] = f"{format_bytes(self.peak_bytes)} ({self.peak_is})"
        if room is not None:
            found["headroom"] = format_bytes(room.spare_bytes)
            found["headroom at worst"] = format_bytes(room.least_spare_bytes)
            found["verdict"] = room.verdict
        if self.host_peak_bytes is not None:
            found["peak of the host"] = format_bytes(self.host_peak_bytes)
        if self.step_seconds is not None:
            found[f"step time ({self.seconds_are})"] = format_seconds(self.step_seconds)
        if self.paper_step_seconds is not None:
            found["step time by the paper's rules"] = format_seconds(self.paper_step_seconds)
        if self.examples_per_second is not None:
            found["examples/s"] = format_rate(self.examples_per_second)
        if self.bubble_fraction is not None:
            unit = "" if self.seconds_are == "simulated" else " (unit times)"
            found["pipeline bubble"] = f"{self.bubble_fraction:.0%}{unit}"
        return found


@dataclass(frozen=True, kw_only=True)
class PageReport:
    """The document of ``capture report``: a plan in words and numbers.

    Attributes:
        kind: Kind of the plan: stages, sharding, packs or array.
        title, summary: The plan in words.
        needs: Memory and seconds of the plan.
        stages: Peak, parts, headroom and waiting of each stage, of a plan of stages.
        operators: Mode, parameters and cost of each operator, of a plan by operator.
        schedule: Timing of the drawn step, of a plan of stages.
        front: The front that the plan is of; None where it is of none.
        account: As in the document of ``capture verify``.
        written: Files that were written, by what they are.
    """

    kind: str
    title: str
    summary: str
    needs: PlanNeeds
    stages: Sequence[Mapping[str, Any]] = ()
    operators: Sequence[Mapping[str, Any]] = ()
    schedule: Mapping[str, Any] | None = None
    front: Mapping[str, Any] | None = None
    account: Any = None
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExplainReport:
    """The document of ``capture explain``: who needs the memory of a plan, and what changes save.

    Attributes:
        kind: Kind of the plan: stages, sharding, packs or array.
        needs: Memory and seconds of the plan.
        peak_bytes_per_device: Peak memory of every device, of a plan of stages.
        stages: Peak of each stage, its parts by category, layer and buffer, of a plan of stages.
        operators: Mode, parameters and cost of each operator, of a plan by operator.
        tasks: Tasks in the order of issue, of a plan of packs.
        bundles: Fate of every bundle of feature maps of an array, where its programs were looked
            at.
        source: Backend, target and versions of what was compiled.
        found: How the plan was found; None where nobody says.
        changes: Other plans, of one decision changed each, the most saving first.
        untried: Changes that were not tried, because the time was over.
        best_change: The one that saves most; None where none saves anything.
        warnings: Properties of the loss that make its step another than that of one device.
        written: Files that were written, by what they are.
    """

    kind: str
    needs: PlanNeeds
    peak_bytes_per_device: Sequence[int] = ()
    stages: Sequence[Mapping[str, Any]] = ()
    operators: Sequence[Mapping[str, Any]] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    bundles: Sequence[Sequence[str]] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    found: str | None = None
    changes: Sequence[Any] = ()
    untried: Sequence[str] = ()
    best_change: Any = None
    warnings: Sequence[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)


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
        layers_alone_peak_bytes: Of packs, the estimate of a device's peak from layers alone, an
            upper bound; what the plan predicts as well where its packs were not compiled.
        account: Cost of a step, and how often to save, on the terms that the plan was asked for
            with; None where it was asked without.
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
    layers_alone_peak_bytes: int | None = None
    account: Any = None

    status: str = field(init=False)
    prediction_error_fraction_per_device: tuple[float | None, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        guesses, peaks = self.predicted_peak_bytes_per_device, self.peak_bytes_per_device
        errors = error_fractions(guesses, peaks)
        fits = self.headroom is None or self.headroom.verdict == "fits"
        object.__setattr__(self, "status", "ok" if fits else "infeasible")
        object.__setattr__(self, "prediction_error_fraction_per_device", errors)
