"""What the kernels of a GPU took, by JAX's profiler: the device's own clock, launches aside."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DeviceKernel:
    """Equal kernels, or copies, of a run.

    Attributes:
        name: The driver's.
        operation: Of XLA's program; empty if the profiler does not say it.
        module: The program's name; empty likewise.
        count: How many ran.
        seconds: Of all of them.
    """

    name: str
    operation: str
    module: str
    count: int
    seconds: float


@dataclass(frozen=True)
class DeviceRun:
    """What a GPU did while something ran.

    Attributes:
        kernels: Those that took longest first.
        span_seconds: From the start of the first one to the end of the last one.
        busy_seconds: Of it, during which at least one ran.
    """

    kernels: tuple[DeviceKernel, ...]
    span_seconds: float
    busy_seconds: float


def profiled(run: Callable[[], Any]) -> DeviceRun:
    """Run something once under the profiler; it must wait for its own results.

    Raises:
        RuntimeError: if the profiler saw no kernel.
    """
    import jax
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(file))
    count: Counter[tuple[str, str, str]] = Counter()
    seconds: Counter[tuple[str, str, str]] = Counter()
    intervals = []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # the others say the same again, by operation
                continue
            for event in line.events:
                told = dict(event.stats)
                key = (event.name, str(told.get("hlo_op", "")), str(told.get("hlo_module", "")))
                count[key] += 1
                seconds[key] += event.duration_ns * 1e-9
                intervals.append((event.start_ns, event.start_ns + event.duration_ns))
    if not intervals:
        lines = [(plane.name, [line.name for line in plane.lines]) for plane in data.planes]
        raise RuntimeError(f"the profiler saw no kernel of a GPU: {lines}")
    intervals.sort()
    busy, reached = 0.0, intervals[0][0]
    for start, stop in intervals:
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    kernels = [DeviceKernel(*key, count[key], nbytes) for key, nbytes in seconds.most_common()]
    return DeviceRun(tuple(kernels), (reached - intervals[0][0]) * 1e-9, busy * 1e-9)
