"""Who holds how many bytes in which memory, in program order: the one place where peaks come from.

The abstract replay and the real execution book the same instructions here, so their peaks agree
byte for byte.

    hold     live[m] += bytes                     a buffer comes to life
    execute  peak[m] = max(peak[m], live[m] + t)  a program runs; t is what it takes:
                                                  temporaries + outputs - aliased inputs
    drop     live[m] -= bytes

Source: XLA's buffer assignment is the arena that the CPU and GPU clients really allocate for a
program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from capture.quantities import format_bytes

Memory = int | str
"""That of a device, by its id, or another one, such as a host's, by its name."""


def is_device(memory: Memory) -> TypeGuard[int]:
    """Return whether a memory is that of a device."""
    return isinstance(memory, int)


def name_of(memory: Memory) -> str:
    """Return the name of a memory for messages: ``device 0`` or that of a host."""
    return f"device {memory}" if is_device(memory) else str(memory)


@dataclass(frozen=True)
class Peak:
    """The high-water mark of one memory.

    Attributes:
        peak_bytes: The most that was live, the running program included.
        instant: Label of the instruction at which it was reached first.
        parts: Bytes by category at that instant; ``"temporaries"`` is the running program's own
            part. They sum to ``peak_bytes``.
    """

    peak_bytes: int
    instant: str
    parts: dict[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in self.parts.items())
        return f"{format_bytes(self.peak_bytes)} at {self.instant!r} ({parts})"


_NOTHING = Peak(0, "", {})


@dataclass
class Ledger:
    """The live bytes per memory and category, and the peak so far.

    Args:
        num_devices: Devices 0 to num_devices - 1 are there even if nothing is booked on them.
        record_timeline: Keep every change, for memory-over-time plots.
    """

    num_devices: int = 0
    record_timeline: bool = False
    timeline: list[tuple[str, Memory, int]] = field(default_factory=list)

    def __post_init__(self):
        self._live: dict[Memory, int] = defaultdict(int)
        self._parts: dict[Memory, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._most: dict[Memory, int] = defaultdict(int)
        self._peaks: dict[Memory, Peak] = defaultdict(lambda: _NOTHING)

    def hold(self, memories: Iterable[Memory], nbytes: int, category: str, label: str = "") -> None:
        """Book that a buffer of ``nbytes`` comes to life in each of the memories; one that is named
        twice holds two."""
        live, parts, most = self._live, self._parts, self._most
        for memory in memories:
            live[memory] += nbytes
            parts[memory][category] += nbytes
            if live[memory] > most[memory] or self.record_timeline:
                self._mark(memory, 0, label)

    def drop(self, memories: Iterable[Memory], nbytes: int, category: str) -> None:
        """Book that a buffer is released in each of the memories."""
        for memory in memories:
            self._live[memory] -= nbytes
            self._parts[memory][category] -= nbytes
            assert self._parts[memory][category] >= 0, (
                f"{category} on {name_of(memory)} dropped more than was held"
            )
            if self.record_timeline:
                self.timeline.append((f"free {category}", memory, self._live[memory]))

    def execute(self, memories: Iterable[Memory], transient_bytes: int, label: str) -> None:
        """Book that a program runs, which needs so much beside what is live in each memory."""
        live, most = self._live, self._most
        for memory in memories:
            if live[memory] + transient_bytes > most[memory] or self.record_timeline:
                self._mark(memory, transient_bytes, label)

    def _mark(self, memory: Memory, transient_bytes: int, label: str) -> None:
        total = self._live[memory] + transient_bytes
        if self.record_timeline:
            self.timeline.append((label, memory, total))
        if total > self._most[memory]:
            self._most[memory] = total
            parts = {category: nbytes for category, nbytes in self._parts[memory].items() if nbytes}
            if transient_bytes:
                parts["temporaries"] = transient_bytes
            self._peaks[memory] = Peak(total, label, parts)

    @property
    def live_bytes(self) -> Mapping[Memory, int]:
        return self._live

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        return tuple(peak.peak_bytes for peak in self.peaks)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peaks of the devices, in order of their ids."""
        return tuple(self.peak_of(device) for device in range(self.num_devices))

    def peak_of(self, memory: Memory) -> Peak:
        return self._peaks[memory]
