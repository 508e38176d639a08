"""A discrete-event simulator: items of work on FIFO streams, with the buffers that they allocate
and free.

It knows nothing of pipelines. A stream is anything that does one thing at a time, in the order in
which things are issued to it: the kernels of a device, a copy engine, a link in one direction, a
disk. As with CUDA streams, an item starts when everything that it waits for has ended and every one
of its streams is free:

    start = max(end of each item in ``after``, end of the last item on each of its streams)
    end   = start + seconds

Items come in the order of issue and wait for earlier ones only, so that a single pass finds all
times. Nothing is rounded: seconds given as integers or fractions give exact times.

**Memory.** At one instant several items may end and begin. First, all items that end there and
began earlier release their room, then what they produce comes to life, so that what starts when
they end has their room; then the items of that instant begin in the order of issue, and one without
length ends at once. What an item waits for thus always comes before it. Where no item takes any
time, this is the order of issue: the program order of ``capture.step.program.replay``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from capture.errors import ExecutionError, Violation
from capture.step.ledger import Ledger, Memory, Peak

Key = tuple[float, int, int, int]
"""The total order of events: (seconds, phase, item, what). An item begins (what = 0), releases
(1), and then produces (2)."""


@dataclass(frozen=True)
class Allocation:
    """Bytes with a lifetime.

    Attributes:
        name: What ``Work.frees`` calls it; free to be taken again once it is freed. Temporaries
            need none.
        devices: The memories that hold it, each ``nbytes`` of it: device ids, or names such as
            ``"host"``.
        nbytes: On each of them.
        category: What it is for, as in the ledger.
    """

    name: str
    devices: tuple[Memory, ...]
    nbytes: int
    category: str


@dataclass(frozen=True)
class Work:
    """An item of a simulation, which takes time, memory, or both; its id is its position.

    Attributes:
        streams: All are occupied from beginning to end: a transfer occupies the sender's link and
            the receiver's, a collective the links of all. An item without streams waits for nothing
            but ``after``.
        seconds: Not negative.
        after: Ids of earlier items that must have ended.
        allocates: Live from the beginning, until freed.
        temporaries: Live from the beginning to the end.
        produces: Live from the end on, until freed; for programs whose temporaries count the room
            of their results already, as XLA's memory report does.
        frees: Names of live buffers that end with the item.
        kind: For colours and sums.
    """

    label: str
    streams: tuple[str, ...] = ()
    seconds: float = 0
    after: tuple[int, ...] = ()
    allocates: tuple[Allocation, ...] = ()
    temporaries: tuple[Allocation, ...] = ()
    produces: tuple[Allocation, ...] = ()
    frees: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class MemoryUse:
    """The memory of one device over time.

    Attributes:
        samples: (seconds, live bytes) after every beginning or end that changed it, in order;
            several may share an instant.
        peak: The most that was ever live, the label of the item that reached it first, and its
            parts by category.
    """

    samples: tuple[tuple[float, int], ...]
    peak: Peak


@dataclass(frozen=True)
class Simulation:
    """The beginnings and ends of all items of work, and what devices hold over time.

    Attributes:
        starts, ends: Per item, seconds from the beginning.
        memory: What every device holds that a buffer is on.
    """

    work: tuple[Work, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    memory: Mapping[Memory, MemoryUse]

    @cached_property
    def seconds(self) -> float:
        """The makespan: seconds from the first beginning to the last end."""
        return max(self.ends, default=0)

    @cached_property
    def busy_seconds(self) -> Mapping[str, float]:
        """The sum of the seconds of each stream's items."""
        busy: dict[str, float] = {}
        for item in self.work:
            for stream in item.streams:
                busy[stream] = busy.get(stream, 0) + item.seconds
        return busy


def simulate(work: Sequence[Work]) -> Simulation:
    """Run items of work on their streams and return when each begins and ends.

    Args:
        work: In the order of issue.

    Raises:
        ExecutionError: ``simulate-order`` if an item waits for itself or for a later one,
            ``simulate-seconds`` for a negative time, ``simulate-buffer`` if a buffer is freed that
            is not live, or allocated while it is.

    Example:
        >>> weights = Allocation("weights", (0,), 80, "parameters")
        >>> scratch = Allocation("", (0,), 20, "temporaries")
        >>> work = [
        ...     Work("load", ("host to device",), 2, allocates=(weights,)),
        ...     Work("compute", ("device",), 3, (0,), temporaries=(scratch,), frees=("weights",)),
        ... ]
        >>> simulation = simulate(work)
        >>> simulation.seconds, simulation.memory[0].peak.peak_bytes, simulation.memory[0].samples
        (5, 100, ((0, 80), (2, 100), (5, 0)))
    """
    frees = list[list[_Made]]()
    ExecutionError.check(_violations(work, frees))
    starts, ends = times(
        [item.seconds for item in work],
        [item.after for item in work],
        [item.streams for item in work],
    )
    return Simulation(tuple(work), tuple(starts), tuple(ends), _memory(work, frees, starts, ends))


def times(
    seconds: Sequence[float],
    after: Sequence[Sequence[int]],
    streams: Sequence[Sequence[Hashable]],
) -> tuple[list[float], list[float]]:
    """Return when items begin and end, without their memory: searches ask thousands of times.

    Args:
        seconds, after, streams: Per item, as of ``Work``.
    """
    starts: list[float] = []
    ends: list[float] = []
    free_at: dict[Hashable, float] = {}
    for i, length in enumerate(seconds):
        start: float = 0
        for j in after[i]:
            if ends[j] > start:
                start = ends[j]
        on = streams[i]
        for stream in on:
            free = free_at.get(stream, 0)
            if free > start:
                start = free
        end = start + length
        for stream in on:
            free_at[stream] = end
        starts.append(start)
        ends.append(end)
    return starts, ends


# A buffer as the item that made it and the buffer itself: names may come again.
_Made = tuple[int, Allocation]


def _violations(work: Sequence[Work], frees: list[list[_Made]]) -> Iterator[Violation]:
    """Yield what is wrong with the items; append the buffers that each of them frees."""
    live: dict[str, _Made] = {}
    for i, item in enumerate(work):
        name = f"item {i} ({item.label})"
        if wrong := [j for j in item.after if not 0 <= j < i]:
            yield Violation(
                f"{name} waits for the items {wrong}; give ids of earlier items only, 0 <= id < "
                f"{i}.",
                "simulate-order",
            )
        if not item.seconds >= 0:  # not a number is no time either
            yield Violation(
                f"{name} takes seconds={item.seconds}; give 0 or more.", "simulate-seconds"
            )
        frees.append([])
        yield from _allocated(i, item.allocates, live, name)
        for freed in item.frees:
            if freed in live:
                frees[i].append(live.pop(freed))
            else:
                yield Violation(
                    f"{name} frees buffer {freed!r}, which no earlier item allocated, or one "
                    "freed already.",
                    "simulate-buffer",
                )
        yield from _allocated(i, item.produces, live, name)


def _allocated(
    i: int, buffers: Sequence[Allocation], live: dict[str, _Made], name: str
) -> Iterator[Violation]:
    for buffer in buffers:
        if buffer.name in live:
            yield Violation(
                f"{name} allocates buffer {buffer.name!r}, which item {live[buffer.name][0]} did "
                "and nothing freed.",
                "simulate-buffer",
            )
        live[buffer.name] = (i, buffer)


def _keys(i: int, start: float, end: float) -> tuple[Key, Key, Key]:
    """Return the keys that sort item i's beginning, release and production among all events."""
    if end > start:
        return (start, 2, i, 0), (end, 0, i, 1), (end, 1, i, 2)
    return (start, 2, i, 0), (start, 2, i, 1), (start, 2, i, 2)


# ---- memory over time ----------------------------------------------------------------------------


def _memory(
    work: Sequence[Work],
    frees: Sequence[Sequence[_Made]],
    starts: Sequence[float],
    ends: Sequence[float],
) -> dict[Memory, MemoryUse]:
    """Return memory over time: book every beginning and end in a ledger, in the order of time."""
    samples: dict[Memory, list[tuple[float, int]]] = {}
    events: list[Key] = []
    for i, item in enumerate(work):
        for buffer in (*item.allocates, *item.temporaries, *item.produces):
            for device in buffer.devices:
                samples.setdefault(device, [])
        changes = (
            item.allocates or item.temporaries,
            item.temporaries or item.frees,
            item.produces,
        )
        events += [
            key for key, change in zip(_keys(i, starts[i], ends[i]), changes, strict=True) if change
        ]
    ledger = Ledger()
    existed: set[tuple[int, str]] = set()
    for seconds, _, i, what in sorted(events):
        item = work[i]
        made = ((*item.allocates, *item.temporaries), (), item.produces)[what]
        dropped = (*item.temporaries, *(buffer for _, buffer in frees[i])) if what == 1 else ()
        for maker, buffer in frees[i] if what == 1 else ():
            if (maker, buffer.name) not in existed:
                raise ExecutionError.of(
                    f"item {i} ({item.label}) frees buffer {buffer.name!r} at {float(seconds):g} "
                    f"s, before item {maker} "
                    f"({work[maker].label}) allocates it; let it wait for that item (after).",
                    "simulate-buffer",
                )
        existed.update((i, buffer.name) for buffer in made)
        for buffer in dropped:
            ledger.drop(buffer.devices, buffer.nbytes, buffer.category)
        for buffer in made:
            ledger.hold(buffer.devices, buffer.nbytes, buffer.category, item.label)
        for device in {device for buffer in (*dropped, *made) for device in buffer.devices}:
            samples[device].append((seconds, ledger.live_bytes[device]))
    return {
        device: MemoryUse(tuple(levels), ledger.peak_of(device))
        for device, levels in samples.items()
    }
