"""The result of every search for packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from capture.documents import fields_of
from capture.plan.task_graph import Configuration, Packs
from recommender.harmony.problem import PackedConfiguration


@dataclass(frozen=True)
class Point:
    """A configuration that was simulated, with its estimated time and memory.

    Attributes:
        choice: The configuration, and the packings that it is from.
        seconds: Of the step, estimated.
        task_bytes: The largest task of any device.
        max_idle_fraction, mean_idle_fraction: Of the devices, after their ends.
    """

    choice: PackedConfiguration
    seconds: float
    task_bytes: int
    max_idle_fraction: float
    mean_idle_fraction: float

    @property
    def configuration(self) -> Configuration:
        return self.choice.configuration

    def to_json(self) -> dict[str, Any]:
        one, other = self.configuration.forward, self.configuration.backward
        return {
            "forward": _written(one, self.choice.forward_packing),
            "backward": _written(other, self.choice.backward_packing),
            "step_seconds": self.seconds,
            **fields_of(self, "task_bytes", "max_idle_fraction", "mean_idle_fraction"),
        }


@dataclass(frozen=True)
class PacksResult:
    """The result of a search for packs: the points that were simulated, the best among them.

    Attributes:
        status: ``infeasible`` if there is none.
        algorithm: Name of the answer.
        points: Those that were simulated, in the order of the search; no other can be better.
        single_first: Whether a point that holds the whole model in one pack ranks before all
            others, however slow it is.
        seconds: Wall time of the search.
    """

    status: Literal["ok", "infeasible"]
    algorithm: str
    points: tuple[Point, ...]
    single_first: bool = False
    seconds: float = 0.0

    @property
    def optimal(self) -> bool:
        """Always False: nothing is proven over all packs, as the problem is NP-hard (4.3.1)."""
        return False

    @property
    def best(self) -> Point | None:
        """The best point; of equal ones, the first. None if there is none."""
        return next(iter(self.top(1)), None)

    @property
    def fits_one_device(self) -> Point | None:
        """The fastest point that holds the whole model in one pack, so that one device could train
        it resident; None if there is none."""
        singles = [point for point in self.points if point.choice.single]
        return min(singles, key=lambda point: point.seconds, default=None)

    def top(self, count: int) -> tuple[Point, ...]:
        """Return the ``count`` best points, in order; of equal ones, the first."""
        return tuple(sorted(self.points, key=self._key)[:count])

    def of_sizes(self, count: int) -> tuple[Point, ...]:
        """Return the best point of each pair of micro-batch sizes, the best ``count`` of these."""
        found: dict[tuple[int, int], Point] = {}
        for point in self.top(len(self.points)):
            one, other = point.configuration.forward, point.configuration.backward
            found.setdefault((one.microbatch_size, other.microbatch_size), point)
        return tuple(found.values())[:count]

    def _key(self, point: Point) -> tuple[bool, float]:
        return self.single_first and not point.choice.single, point.seconds

    def to_json(self) -> dict[str, Any]:
        written = fields_of(self, "algorithm", "optimal", "seconds")
        return {**written, "num_simulated": len(self.points)}


@dataclass(frozen=True)
class Baseline:
    """The step of another system, as estimated for comparison.

    Attributes:
        name: Of the system.
        seconds: Of a step; None if it cannot run.
        microbatch_size: Of one GPU.
        volumes_bytes: Of all GPUs, by tensor and direction.
        device_bytes: Of the GPU that needs most.
        host_bytes: Of the host.
        reason: Why it cannot run.
    """

    name: str
    seconds: float | None
    microbatch_size: int = 0
    volumes_bytes: Mapping[str, int] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0
    reason: str = ""

    @property
    def swap_bytes(self) -> int:
        """The bytes that travel over the host's links in a step, both ways."""
        return sum(n for name, n in self.volumes_bytes.items() if name != "p2p")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fits": self.seconds is not None,
            "step_seconds": self.seconds,
            **fields_of(self, "microbatch_size", "swap_bytes", "volumes_bytes"),
            "peak_bytes": self.device_bytes,
            "host_peak_bytes": self.host_bytes,
            "why": self.reason,
        }


def _written(packs: Packs, packing: str) -> dict[str, Any]:
    return {
        "microbatch_size": packs.microbatch_size,
        "packs": list(packs.lengths),
        "packing": packing,
    }
