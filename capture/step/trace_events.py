"""A simulation as a Chrome trace: a JSON file for ui.perfetto.dev or chrome://tracing.

One thread per stream with a complete event per item, and one counter per memory. Times are
microseconds, as the format has them.

Source: Trace Event Format, Google (the phases X, C and M).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.step.ledger import Memory, name_of
from capture.step.simulator import Simulation

MICROSECONDS = 1e6


def trace_events(
    simulation: Simulation, processes: Mapping[Memory, str] | None = None
) -> list[dict[str, Any]]:
    """The events, those with a time in its order.

    Items on several streams are shown on each; items on none, such as frees, show in the counters
    only.

    Args:
        simulation: Any.
        processes: The heading under which a stream or a memory is shown; by default ``"streams"``
            and ``"memory"``.
    """
    processes = processes or {}
    pids: dict[str, int] = {}
    tids: dict[str, int] = {}
    named: list[dict[str, Any]] = []

    def pid_of(where: Memory, otherwise: str) -> int:
        process = processes.get(where, otherwise)
        if process not in pids:
            pids[process] = len(pids) + 1
            named.append(_name("process_name", process, pids[process], 0))
            named.append(_order("process_sort_index", pids[process], 0, pids[process]))
        return pids[process]

    timed: list[dict[str, Any]] = []
    for stream in dict.fromkeys(stream for item in simulation.work for stream in item.streams):
        tids[stream] = len(tids) + 1
        pid = pid_of(stream, "streams")
        named.append(_name("thread_name", stream, pid, tids[stream]))
        named.append(_order("thread_sort_index", pid, tids[stream], tids[stream]))
    for i, (item, start) in enumerate(zip(simulation.work, simulation.starts, strict=True)):
        for stream in item.streams:
            event = {
                "ph": "X",
                "name": item.label,
                "cat": item.kind or "work",
                "pid": pid_of(stream, "streams"),
                "tid": tids[stream],
            }
            timed.append(
                event
                | {
                    "ts": _microseconds(start),
                    "dur": _microseconds(item.seconds),
                    "args": {"item": i},
                }
            )
    for device, use in simulation.memory.items():
        name = f"memory of {name_of(device)}"
        event = {"ph": "C", "name": name, "pid": pid_of(device, "memory")}
        timed += [
            event | {"ts": _microseconds(seconds), "args": {"bytes": nbytes}}
            for seconds, nbytes in use.samples
        ]
    # Stable: samples of one instant keep their order.
    return named + sorted(timed, key=lambda event: event["ts"])


def save_trace(
    simulation: Simulation, path: str | Path, processes: Mapping[Memory, str] | None = None
) -> None:
    """Write the events to a file.

    Args:
        simulation, processes: As for ``trace_events``.
        path: Ends in ``.json`` by custom.
    """
    Path(path).write_text(
        json.dumps(
            {"traceEvents": trace_events(simulation, processes), "displayTimeUnit": "ms"},
            allow_nan=False,
        )
        + "\n"
    )


def _microseconds(seconds: float) -> float:
    return float(seconds) * MICROSECONDS


def _name(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _order(what: str, pid: int, tid: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": index}}
