"""Which partition of an array trains fastest, by mu-TWO's scheduler: 3.2 (5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capture.machine.rates import HostLink
from capture.papers.mutwo.policy import CycleSchedule, schedule_cycle
from capture.papers.mutwo.readings import Readings
from capture.papers.mutwo.sub_arrays import Posed, pose, resident_bytes
from recommender.mutwo.problem import Profiled


@dataclass(frozen=True)
class PartitionSchedule:
    """A partition of an array into sub-arrays, with the schedules of its pairs.

    Attributes:
        sizes: Models of each sub-array.
        pairs: Sub-arrays that are multiplexed, by place in ``sizes``.
        posed: Per sub-array.
        schedules: Per pair.
    """

    sizes: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    posed: tuple[Posed, ...]
    schedules: tuple[CycleSchedule, ...]

    @property
    def fits(self) -> bool:
        return all(schedule.fits for schedule in self.schedules)

    @property
    def peak_bytes(self) -> int:
        return max(schedule.peak_bytes for schedule in self.schedules)

    @property
    def seconds(self) -> float:
        """The seconds of one update of every model: one pair trains after the other (M-y, M-z)."""
        return sum(schedule.execute().seconds for schedule in self.schedules)


def schedule_partition(
    profiled: Profiled,
    sizes: Sequence[int],
    host: HostLink,
    limit_bytes: int,
    readings: Readings,
) -> PartitionSchedule:
    """Run Algorithm B on the pairs of a partition: sub-arrays whose iterations take about as long.

    Args:
        profiled: Sub-arrays of every size.
        sizes: Models of each, an even number of them.
        host: The link over which feature maps are swapped.
        limit_bytes: What may be held; the weights of all sub-arrays are.
        readings: Of the algorithms.
    """
    assert len(sizes) % 2 == 0, f"sub-arrays come in pairs: {sizes}"
    posed = tuple(
        pose(profiled.sub_array(size), profiled, host, f"sub-array {n}")
        for n, size in enumerate(sizes)
    )
    seconds = [sum(op.seconds for op in one.graph.operations) for one in posed]
    order = sorted(range(len(sizes)), key=lambda n: (-seconds[n], n))
    pairs = tuple(zip(order[::2], order[1::2], strict=True))
    static = resident_bytes(posed)
    schedules = tuple(
        schedule_cycle([posed[a].graph, posed[b].graph], limit_bytes, readings, static)
        for a, b in pairs
    )
    return PartitionSchedule(tuple(sizes), pairs, posed, schedules)


def fastest(partitions: Iterable[PartitionSchedule]) -> PartitionSchedule | None:
    """Return the fastest partition of those that fit; None if none does (M-f)."""
    fitting = [one for one in partitions if one.fits]
    return min(fitting, key=lambda one: (one.seconds, one.peak_bytes), default=None)
