"""What a plan of any kind needs, by the best that is known: memory, and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass

from capture.plan.files import PlanFile
from capture.plan.headroom import Headroom
from capture.quantities import format_bytes, format_rate, format_seconds, signed_bytes


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
        )

    def rows(self) -> dict[str, str]:
        """Return the known needs by name, in words for people."""
        room, found = self.headroom, dict[str, str]()
        if self.peak_bytes is not None:
            found["peak per device"] = f"{format_bytes(self.peak_bytes)} ({self.peak_is})"
        if room is not None:
            found["headroom"] = signed_bytes(room.spare_bytes)
            found["headroom at worst"] = signed_bytes(room.least_spare_bytes)
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
            unit = "" if self.step_seconds is not None else " (unit times)"
            found["pipeline bubble"] = f"{self.bubble_fraction:.0%}{unit}"
        return found
