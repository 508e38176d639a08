"""What runs measure of a graph: Algorithm A."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Protocol

from capture.papers.mutwo.graph import TrainingGraph

#: Of which the first are not counted (3.2, 4 iterations per partition).
NUM_WARM_UP, NUM_MEASURED = 1, 3


class Device(Protocol):
    """The executor that runs a graph operation by operation."""

    def execute(self, rank: int) -> float:
        """Run an operation and return its seconds."""
        ...

    def swap_out(self, v: int) -> float:
        """Copy a value to the host and return the seconds; the device's memory is free then."""
        ...

    def swap_in(self, v: int) -> float:
        """Copy a value from the host and return the seconds."""
        ...


def profile(
    graph: TrainingGraph,
    device: Device,
    num_warm_up: int = NUM_WARM_UP,
    num_measured: int = NUM_MEASURED,
) -> TrainingGraph:
    """Measure a graph by Algorithm A: every operation runs with no more of the feature maps than
    its pass has use for, so all that has to fit is one operation. The median of iterations counts
    (M-ac).

    Args:
        graph: Its seconds are those that are measured afterwards.
        device: Runs it.
        num_warm_up, num_measured: Iterations that do not count, and that do.

    Returns:
        The graph with run_time of every node, and swap_time of every intermediate, in both
        directions.
    """
    measured: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for iteration in range(num_warm_up + num_measured):
        for rank in range(len(graph.operations)):
            backward = rank - graph.num_forward
            found: list[tuple[str, int, float]] = []
            for v in graph.first_bw_uses[backward] if backward >= 0 else ():
                found.append(("in", v, device.swap_in(v)))
            found.append(("run", rank, device.execute(rank)))
            for v in graph.last_fw_uses[rank] if backward < 0 else ():
                found.append(("out", v, device.swap_out(v)))
            for what, number, seconds in found if iteration >= num_warm_up else ():
                measured[what, number].append(seconds)
    medians = {what: median(seconds) for what, seconds in measured.items()}
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=medians["run", rank])
            for rank, operation in enumerate(graph.operations)
        ),
        values=tuple(
            replace(
                value,
                swap_in_seconds=medians.get(("in", v), 0.0),
                swap_out_seconds=medians.get(("out", v), 0.0),
            )
            for v, value in enumerate(graph.values)
        ),
    )
