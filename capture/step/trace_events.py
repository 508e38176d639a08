"""A simulation as a Chrome trace: a JSON file for ui.perfetto.dev or chrome://tracing.

One thread per stream with a complete event per item, and one counter per memory. Times are
microseconds, as the format has them.

Source: Trace Event Format, Google (the phases X, C and M).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capture.step.ledger import Memory, name_of
from capture.step.simulator import Simulation

MICROSECONDS = 1e6


def trace_events(
    simulation: Simulation, processes: Mapping[Memory, str] | None = None
) -> list[dict[str, Any]]:
    """Return the events of a trace, those with a time in its order.

    Items on several streams are shown on each; items on none, such as frees, show in the counters
    only.

    Args:
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
            named.append(name_event("process_name", process, pids[process], 0))
            named.append(order_event("process_sort_index", pids[process], 0, pids[process]))
        return pids[process]

    timed: list[dict[str, Any]] = []
    for stream in dict.fromkeys(stream for item in simulation.work for stream in item.streams):
        tids[stream] = len(tids) + 1
        pid = pid_of(stream, "streams")
        named.append(name_event("thread_name", stream, pid, tids[stream]))
        named.append(order_event("thread_sort_index", pid, tids[stream], tids[stream]))
    for i, (item, start) in enumerate(zip(simulation.work, simulation.starts, strict=True)):
        for stream in item.streams:
            where, times = (pid_of(stream, "streams"), tids[stream]), (start, item.seconds)
            event = complete_event(item.label, item.kind or "work", where, times)
            timed.append(event | {"args": {"item": i}})
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
    """Write the events to a file."""
    save_events(trace_events(simulation, processes), path)


def from_zero(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the same events, the first of those with a time at 0."""
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    return [{**event, "ts": event["ts"] - first} if "ts" in event else event for event in events]


def save_events(events: Sequence[Mapping[str, object]], path: str | Path) -> None:
    """Write a file that ui.perfetto.dev reads."""
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, allow_nan=False) + "\n")


def _microseconds(seconds: float) -> float:
    return float(seconds) * MICROSECONDS


def complete_event(
    name: str, category: str, where: tuple[int, int], times: tuple[float, float]
) -> dict[str, Any]:
    """Return the event (phase X) of what began when and took how long, in seconds."""
    begin, seconds = map(_microseconds, times)
    of = {"ph": "X", "name": name, "cat": category, "pid": where[0], "tid": where[1]}
    return {**of, "ts": begin, "dur": seconds}


def name_event(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    """Return the metadata event (phase M) that names a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def order_event(what: str, pid: int, tid: int, index: int) -> dict[str, Any]:
    """Return the metadata event (phase M) that says where a process or a thread is shown."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": index}}
