"""How much of a device's memory a plan leaves, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from capture.machine.rates import DeviceMemory
from capture.quantities import format_bytes

#: A plan whose estimate is so much above the limit is not compiled: none that was looked at was so
#: much too high.
HOPELESS = 1.5

Verdict = Literal["fits", "fits by extrapolation", "may not fit", "does not fit"]


@dataclass(frozen=True)
class Peaks:
    """The peak memory of every device, by the best that is known.

    Attributes:
        per_device: Bytes, in the order of the devices; one number stands for devices that are
            alike.
        intervals: Low and high of each, or of groups of devices.
        how: Where the peaks are from, for people: "compiled", "predicted", ...
        coverage: Calibrated probability that a device stays within its interval; None without
            calibration, 1 for compiled peaks.
        extrapolated: Whether the peaks are of a micro-batch size or degrees that were not profiled,
            and not compiled either.
    """

    per_device: tuple[int, ...]
    intervals: Sequence[tuple[int, int]]
    how: str
    coverage: float | None
    extrapolated: bool = False

    @classmethod
    def compiled(cls, *per_device: int) -> Peaks:
        """Return the peaks that a compiler or a replay says, with no interval around them."""
        return cls(per_device, [(peak, peak) for peak in per_device], "compiled", 1.0)


@dataclass(frozen=True)
class Headroom:
    """A plan's peak against the memory that a device has.

    Attributes:
        limit_bytes: What a device can use.
        source: Where the limit is from: the user, or the terms of the target.
        peak_bytes: Need of the device that needs most.
        high_bytes: Upper end of the interval of the device whose upper end is highest.
        coverage, extrapolated: As of ``Peaks``.
    """

    limit_bytes: int
    source: str
    peak_bytes: int
    high_bytes: int
    coverage: float | None
    extrapolated: bool = False

    @classmethod
    def of(
        cls, peaks: Peaks, limit_bytes: int | None, memory: DeviceMemory | None = None
    ) -> Headroom | None:
        """Return the headroom of peaks; None if neither user nor target says how much there is.

        Args:
            peaks: Of a plan.
            limit_bytes: The user's; else the target's is taken.
            memory: What the target's devices can use; None if nobody says.
        """
        if limit_bytes is None and memory is None:
            return None
        limit, source = limit_bytes, "given"
        if limit is None:
            assert memory is not None, "one of them is known"
            limit, source = memory.usable_bytes, str(memory)
        high = max(high for _, high in peaks.intervals)
        return cls(limit, source, max(peaks.per_device), high, peaks.coverage, peaks.extrapolated)

    @property
    def verdict(self) -> Verdict:
        """The verdict: ``fits`` if the whole interval is within the limit; what is extrapolated
        never just fits."""
        if self.high_bytes <= self.limit_bytes:
            return "fits by extrapolation" if self.extrapolated else "fits"
        return "may not fit" if self.peak_bytes <= self.limit_bytes else "does not fit"

    @property
    def spare_bytes(self) -> int:
        """The limit less the peak; negative where that is above it."""
        return self.limit_bytes - self.peak_bytes

    @property
    def least_spare_bytes(self) -> int:
        """The limit less the upper end of the interval."""
        return self.limit_bytes - self.high_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "memory_limit_bytes": self.limit_bytes,
            "limit_source": self.source,
            "headroom_bytes": self.spare_bytes,
            "headroom_at_interval_end_bytes": self.least_spare_bytes,
            "interval_coverage_fraction": self.coverage,
            "verdict": self.verdict,
            "extrapolated": self.extrapolated,
        }

    def __str__(self) -> str:
        known = {None: "interval not calibrated", 1.0: "compiled"}
        sure = known.get(self.coverage) or f"interval {self.coverage:.0%}"
        sure = f"extrapolated, {sure}" if self.extrapolated else sure
        return (
            f"{self.verdict}: {format_bytes(self.spare_bytes)} of "
            f"{format_bytes(self.limit_bytes)} left, {format_bytes(self.least_spare_bytes)} at "
            f"worst ({sure})"
        )
