"""How long a step takes, and what every memory holds when: the instructions on the simulator.

The instructions that the replay books and the runtime executes become items of work, in one way for
every kind of plan. Devices that serve the same places do the same at the same time, so they share
streams, called by their place where they have but one:

    Run    on "stage 0 compute"
    Copy   on "stage 0 -> stage 1"; every direction of every pair is a stream, so activations and
           gradients do not block each other, nor does a stage that sends to two others
           on "stage 0 host" from the host, on "stage 0 -> host" to it, or on the first in both
           directions where they share the link
    Feed   on "stage 0 host"
    Wait   takes no time; what is issued behind it (``capture.step.behind``) begins when the copy
           has ended
    Free   takes no time, and happens when everything issued before it that uses the slots has ended

A program or a copy waits for what wrote the slots that it reads; a program that donates a slot also
for what still reads it. A copy from or to a host begins when the programs have ended that were
issued before it in the memory that it writes, where it takes its room.

**Two peaks.** The replay books the instructions one after the other. On real streams a transfer
between devices may arrive earlier, or the one before it leave later, than in that order, and a feed
may run ahead of programs, so the peak over time can lie above or below the peak of the replay. Both
are reported. Without these two it is never above: see ``capture.step.program``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from capture.machine.cluster import Cluster
from capture.machine.links import Links
from capture.machine.rates import Rates
from capture.step.behind import Behind
from capture.step.ledger import Ledger, Memory, Peak, name_of
from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Step, Wait, replay
from capture.step.simulator import Allocation, MemoryUse, Simulation, Work, simulate

TransferSeconds = Callable[[Feed | Copy, int, Place | None, Place], float]
"""(instruction, bytes per device, from where: None for the batch on its host, to where) ->
seconds."""


@dataclass(frozen=True)
class Seconds:
    """The times that a simulation needs: of programs, and of feeds and copies.

    Attributes:
        programs: Per name in the table of the step, of one execution.
        transfer: Time of a feed or a copy. Where the places differ in degree, the bytes are the
            larger of both sides, which is what the busier link carries.
        duplex: Whether copies to a host and from it pass each other, as of ``HostLink``.
    """

    programs: Mapping[str, float]
    transfer: TransferSeconds
    duplex: bool = True


@dataclass(frozen=True)
class LinkTimes:
    """Times of transfers from the links of a target: latency + bytes per device / rate.

    **Assumes** that every device has its link to itself, and sends or receives its part at the same
    time as the others of its place. Where devices share an adapter this is too fast for parts that
    all differ: of replicas one would have to leave the node, and how many there are is not known.
    """

    cluster: Cluster
    rates: Rates

    def seconds(
        self, instruction: Feed | Copy, nbytes: int, source: Place | None, target: Place
    ) -> float:
        """Return the seconds of a transfer: over the link of the host if one side is there; else
        over that inside a node if all devices of both places lie in one, or between nodes."""
        if source is None or source.host:
            return self.rates.host.to_device.seconds(nbytes)
        if target.host:
            return self.rates.host.to_host.seconds(nbytes)
        return self.between(source.devices, target.devices, nbytes)

    def between(self, source: Sequence[int], target: Sequence[int], nbytes: int) -> float:
        """Return the seconds over the link in a node, or between nodes; or over a torus."""
        if self.cluster.slice_shape:
            return self._links.routed(tuple(source), tuple(target)).seconds(nbytes)
        nodes = {self.cluster.node_of_device[device] for device in (*source, *target)}
        return self._links.send_seconds(nbytes, len(nodes) > 1)

    @cached_property
    def _links(self) -> Links:
        return Links(self.rates, self.cluster.layout)


@dataclass(frozen=True)
class StepTimeline:
    """A step, simulated.

    Attributes:
        simulation: What happened when. Devices that serve the same places hold the same bytes at
            every instant, so the first of them stands for all in ``simulation.memory``.
        program_order: The ledger of the replay, for comparison.
        processes: Where ``capture.step.trace_events`` shows a stream or a memory: under the place,
            a link under the sender.
        program_seconds: Per name in the table of the step, of one execution.
    """

    simulation: Simulation
    program_order: Ledger
    step: Step
    processes: Mapping[Memory, str]
    program_seconds: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        return self.simulation.seconds

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """The bubble of each place on devices, the part of the step in which these compute nothing:
        1 - busy / step; 0 if the step takes no time."""
        busy = [
            self.simulation.busy_seconds.get(compute_stream(self.processes[place.devices[0]]), 0)
            for place in self.step.places
            if place.host is None
        ]
        return tuple(
            1 - seconds / self.step_seconds if self.step_seconds else 0 for seconds in busy
        )

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """The memory of each device over time. ``program_order.peaks`` are those of the replay."""
        return tuple(self.memory_of(device) for device in range(self.step.num_devices))

    def memory_of(self, memory: Memory) -> MemoryUse:
        """Return the memory of a device or a host over time."""
        return self.simulation.memory.get(self.step.standing_for.get(memory, memory), _UNUSED)

    @property
    def peak_bytes_per_device(self) -> tuple[int, ...]:
        """The peaks over time; those of the replay are ``program_order.peak_bytes_per_device``."""
        return tuple(use.peak.peak_bytes for use in self.memory)


_UNUSED = MemoryUse(((0, 0),), Peak(0, "", {}))


def compute_stream(name: str) -> str:
    """Return the stream on which a place computes; of a device in several, by its own name."""
    return f"{name} compute"


def simulate_step(step: Step, seconds: Seconds, *, feeds_ahead: int | None = 1) -> StepTimeline:
    """Simulate one step.

    Args:
        feeds_ahead: How many programs of its place a feed may run ahead: 0 starts it when the
            program before its own has ended, 1 during that program, and so on; None as soon as the
            link is free, as far ahead as the step goes.

    Returns:
        The timeline. Exact if all seconds are integers or fractions.

    Raises:
        ExecutionError: the codes of ``replay`` and of ``simulate``.
    """
    ledger = replay(step)
    items = _Items(step, seconds, feeds_ahead)
    return StepTimeline(simulate(items.work), ledger, step, items.processes, seconds.programs)


class _Items:
    """The items of work of a step; remembers which wrote a slot, and which have read it since."""

    def __init__(self, step: Step, seconds: Seconds, feeds_ahead: int | None):
        self._step, self._seconds, self._feeds_ahead = step, seconds, feeds_ahead
        standing, users = step.standing_for, step.users
        self.processes: dict[Memory, str] = {}
        for memory, names in users.items():
            self.processes[memory] = names[0] if len(names) == 1 else name_of(standing[memory])
        #: By place, what its streams are called by.
        self._lanes = {
            place.name: tuple(dict.fromkeys(self.processes[memory] for memory in place.memories))
            for place in step.places
        }
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._runs: dict[str, list[int]] = {name: [] for name in self.processes.values()}
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._behind = Behind(step)
        #: The waits behind which the instruction is issued that is being entered.
        self._waited: Iterable[int] = ()
        self.work: list[Work] = []
        persistent = tuple(step.persistent.values())
        self._add(
            Work("before the step", allocates=self._buffers(persistent), kind="state"),
            writes=persistent,
        )
        for instruction in step.instructions:
            self._enter(instruction)

    def _enter(self, instruction: Instruction) -> None:
        self._waited = self._behind.enter(instruction)
        match instruction:
            case Feed():
                self._feed(instruction)
            case Run():
                self._run(instruction)
            case Copy():
                self._copy(instruction)
            case Wait(slot=slot):
                self._add(Work("wait", after=self._after({self._writer[slot]}), kind="wait"))
                self._behind.wait(instruction, len(self.work) - 1)
            case Free(slots=slots):
                self._free(slots)

    def _add(self, item: Work, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        i = len(self.work)
        self.work.append(item)
        for slot in reads:
            self._readers[slot].append(i)
        for slot in writes:
            self._writer[slot], self._readers[slot] = i, []

    def _after(self, items: Iterable[int]) -> tuple[int, ...]:
        """Return what an item waits for: the given items, and what it is issued behind."""
        return tuple(sorted({*items, *self._waited}))

    def _streams(self, pattern: str, *places: Place) -> tuple[str, ...]:
        """Return the pattern with the lanes of every place; shown where the first of them is."""
        key = (pattern, *(place.name for place in places))
        if key not in self._known:
            lanes = list(product(*(self._lanes[name] for name in key[1:])))
            self._known[key] = tuple(pattern.format(*each) for each in lanes)
            self.processes |= zip(self._known[key], (each[0] for each in lanes), strict=True)
        return self._known[key]

    def _buffers(self, slots: Sequence[int]) -> tuple[Allocation, ...]:
        named = [self._step.slots[slot] for slot in slots]
        return tuple(
            Allocation(slot.name, self._step.memories[slot.place.name], slot.nbytes, slot.category)
            for slot in named
        )

    def _names(self, slots: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._step.slots[slot].name for slot in slots)

    def _last_runs(self, place: Place, ahead: int | None) -> list[int]:
        """Return the programs at a place that must end before what may run ahead of so many."""
        runs = [self._runs[lane] for lane in self._lanes[place.name]]
        return [] if ahead is None else [of[-1 - ahead] for of in runs if len(of) > ahead]

    def _feed(self, feed: Feed) -> None:
        slot = self._step.slots[feed.slot]
        item = Work(
            f"feed micro-batch {feed.microbatch} to {slot.place.name}",
            self._streams("{} host", slot.place),
            self._seconds.transfer(feed, slot.nbytes, None, slot.place),
            self._after(self._last_runs(slot.place, self._feeds_ahead)),
            allocates=self._buffers([feed.slot]),
            kind="feed",
        )
        self._add(item, writes=[feed.slot])

    def _run(self, run: Run) -> None:
        program = self._step.programs[run.program]
        memories, lanes = self._step.memories[program.place.name], self._lanes[program.place.name]
        reads = run.read
        after = {self._writer[slot] for slot in reads}.union(
            *(self._readers[slot] for slot in run.donated)
        )
        for lane in lanes:
            self._runs[lane].append(len(self.work))
        item = Work(
            run.label,
            self._streams(compute_stream("{}"), program.place),
            self._seconds.programs[run.program],
            self._after(after),
            temporaries=(Allocation("", memories, program.transient_bytes, "temporaries"),),
            produces=self._buffers(run.outputs),
            frees=self._names(run.donated),
            kind=program.kind,
        )
        self._add(item, reads, run.outputs)

    def _free(self, slots: Sequence[int]) -> None:
        """Add one item per place, so that what one place gives back does not wait for another."""
        at: dict[str, list[int]] = {}
        for slot in slots:
            at.setdefault(self._step.slots[slot].place.name, []).append(slot)
        for here in at.values():
            after = {self._writer[slot] for slot in here}.union(
                *(self._readers[slot] for slot in here)
            )
            names = self._names(here)
            self._add(Work("free", after=self._after(after), frees=names, kind="free"))

    def _copy(self, copy: Copy) -> None:
        source, target = (self._step.slots[slot].place for slot in (copy.source, copy.target))
        after = [self._writer[copy.source]]
        if source.host or target.host:
            after += self._last_runs(target, 0)
        if source.host and not target.host:
            streams = self._streams("{} host", target)
        elif target.host and not source.host:
            streams = self._streams("{} -> host" if self._seconds.duplex else "{} host", source)
        else:
            streams = self._streams("{} -> {}", source, target)
        item = Work(
            copy.label,
            streams,
            self._seconds.transfer(copy, copy.nbytes, source, target),
            self._after(after),
            allocates=self._buffers([copy.target]),
            kind="transfer",
        )
        self._add(item, [copy.source], [copy.target])
