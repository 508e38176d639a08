"""Who holds how many bytes on which device, in program order: the one place where peaks come from.

The abstract replay and the real execution book the same instructions here, so their peaks agree
byte for byte.

    hold     live[d] += bytes                     a buffer comes to life
    execute  peak[d] = max(peak[d], live[d] + t)  a program runs; t = temporaries + outputs - aliased inputs
    drop     live[d] -= bytes

Source: XLA's buffer assignment is the arena that the CPU and GPU clients really allocate for a
program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peak:
    """The high-water mark of one device.

    Attributes:
        peak_bytes: The most that was live, the running program included.
        instant: Label of the instruction at which it was reached first.
        parts: Bytes by category at that instant; ``"temporaries"`` is the running program's own
            part. They sum to ``peak_bytes``.
    """

    peak_bytes: int
    instant: str
    parts: dict[str, int]


@dataclass
class Ledger:
    """Live bytes per device and category, and the peak so far.

    Args:
        num_devices: Devices 0 to num_devices - 1.
        record_timeline: Keep every change, for memory-over-time plots.
    """

    num_devices: int
    record_timeline: bool = False
    timeline: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self):
        self._live = [0] * self.num_devices
        self._parts: list[dict[str, int]] = [defaultdict(int) for _ in range(self.num_devices)]
        self._peak = [Peak(0, "", {})] * self.num_devices

    def hold(self, devices: Iterable[int], nbytes: int, category: str, label: str = "") -> None:
        """A buffer of ``nbytes`` on each of the devices comes to life."""
        for device in devices:
            self._live[device] += nbytes
            self._parts[device][category] += nbytes
            self._mark(device, 0, label)

    def drop(self, devices: Iterable[int], nbytes: int, category: str) -> None:
        """The buffer is released."""
        for device in devices:
            self._live[device] -= nbytes
            self._parts[device][category] -= nbytes
            assert self._parts[device][category] >= 0, (
                f"{category} on device {device} dropped more than was held"
            )
            if self.record_timeline:
                self.timeline.append((f"free {category}", device, self._live[device]))

    def execute(self, devices: Iterable[int], transient_bytes: int, label: str) -> None:
        """A program runs on the devices and needs so much beside what is live."""
        for device in devices:
            self._mark(device, transient_bytes, label)

    def _mark(self, device: int, transient_bytes: int, label: str) -> None:
        total = self._live[device] + transient_bytes
        if self.record_timeline:
            self.timeline.append((label, device, total))
        if total > self._peak[device].peak_bytes:
            parts = {category: nbytes for category, nbytes in self._parts[device].items() if nbytes}
            if transient_bytes:
                parts["temporaries"] = transient_bytes
            self._peak[device] = Peak(total, label, parts)

    @property
    def live_bytes_per_device(self) -> tuple[int, ...]:
        return tuple(self._live)

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        return tuple(peak.peak_bytes for peak in self._peak)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        return tuple(self._peak)
