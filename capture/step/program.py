"""One training step as a list of instructions over named slots: a language that knows places,
programs and copies, and no system.

It is made once, by a builder per kind of plan, and read three times: ``replay`` books it in a
ledger without allocating anything, ``capture.step.timeline`` simulates it, and
``capture.runtime.dispatch`` executes it on arrays, booking the same ledger. Slots are groups of
arrays that live and die together, so the list stays short.

    Feed   rows of the batch from the host into a slot
    Run    a program on slots; donated slots die, output slots come to life
    Copy   a slot, or some arrays of it, into a slot of another place
    Wait   the host goes on, or what uses some memories, when the copy into a slot has ended
    Free   slots that nothing reads any more

**Program order is memory order.** A GPU's client takes memory when a program or a copy from the
host is issued, in the order of the programs, so whatever runs later finds what an earlier one gave
back: a slot that only programs read is freed without waiting, and a prefetch is an earlier
``Copy``. What a *copy* reads is the exception. It is given back when the copy ends, which no
program's order tells: booked when the copy is issued, a step that swaps everything out replays far
below what it takes. So what a copy between a device and a host reads or writes is freed only after
its ``Wait`` (or, what it writes, after a program read it), in the memory that waits, and the peak
over time is at most the ledger's, however slow the link (``tests/property/test_step_memory.py``).

Between devices program order has to suffice: a pipeline sends what each micro-batch made over a
link that is faster than the passes around it, and a host that waited for each would end the
run-ahead by which stages overlap. What is still on its way is then held longer than booked; the
simulation shows it, and ``capture.step.run_ahead`` bounds it where it matters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from capture.errors import ExecutionError, Violation
from capture.quantities import format_bytes
from capture.step.ledger import Ledger, Memory, is_device

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """The memory of a host.

    Attributes:
        name: Unique in a step.
        capacity_bytes: Capacity for the slots of a step; None if nobody knows.
    """

    name: str
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class Place:
    """Devices, and a memory of theirs: their own, or that of their host. A device may be in several
    places.

    Attributes:
        name: Unique in a step; what people call it.
        devices: Their ids; each has its part of a slot.
        host: The host whose memory holds those parts; None for the devices' own.
    """

    name: str
    devices: tuple[int, ...]
    host: Host | None = None

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """The memory that holds each device's part, in the order of the devices."""
        return self.devices if self.host is None else (self.host.name,) * len(self.devices)


@dataclass(frozen=True)
class Program:
    """A program that a ``Run`` names. Seconds are given at simulation, the executable at execution.

    Attributes:
        kind: What people call it, alike at all places: ``forward``.
        place: Where its inputs and outputs are.
        transient_bytes: Temporaries + outputs - aliased inputs, per device.
        call: What it computes, as a record of its kind of plan; whoever compiles or times it reads
            this and not its name.
    """

    kind: str
    place: Place
    transient_bytes: int
    call: Any = None


@dataclass(frozen=True)
class Slot:
    """A group of arrays that live and die together.

    Attributes:
        name: Unique in a step.
        place: Where they are.
        category: Category of its bytes in the ledger.
        nbytes: Bytes per device.
        what: What the arrays are, in the words of the builder.
        holds: Which arrays, as a record of its kind of plan: what lays them out, and takes them
            apart.
    """

    name: str
    place: Place
    category: str
    nbytes: int
    what: str = ""
    holds: Any = None


class _AnyInstruction:
    @property
    def made(self) -> tuple[int, ...]:
        """The slots that it writes: they come to life, or are changed in their place."""
        return ()

    @property
    def used(self) -> tuple[int, ...]:
        """The slots that it reads or writes."""
        return self.made

    @property
    def begun(self) -> tuple[int, ...]:
        """The slots that come to life."""
        return self.made

    @property
    def copied(self) -> tuple[int, ...]:
        """The slot that a copy reads."""
        return ()

    @property
    def consumed(self) -> tuple[int, ...]:
        """The slots that a program takes over for good."""
        return ()

    @property
    def changed(self) -> tuple[int, ...]:
        """The slots that it writes or ends."""
        return (*self.made, *self.consumed)


@dataclass(frozen=True)
class Feed(_AnyInstruction):
    """An instruction that brings rows of the batch into a slot. ``batch`` are leaves of the batch;
    ``microbatch`` numbers the parts that it was cut into."""

    slot: int
    microbatch: int
    batch: tuple[int, ...]
    label: str

    @property
    def made(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Run(_AnyInstruction):
    """An instruction that runs a program. ``inputs`` are its argument groups, each a tuple of
    slots; ``outputs`` the slots of its results."""

    program: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    label: str

    @property
    def read(self) -> tuple[int, ...]:
        """The slots of all arguments, in their order."""
        return tuple([slot for group in self.inputs for slot in group])

    @property
    def made(self) -> tuple[int, ...]:
        return self.outputs

    @property
    def used(self) -> tuple[int, ...]:
        return (*self.read, *self.outputs)

    @property
    def begun(self) -> tuple[int, ...]:
        return tuple([slot for slot in self.outputs if slot not in self.donated])

    @property
    def consumed(self) -> tuple[int, ...]:
        return tuple([slot for slot in self.donated if slot not in self.outputs])


@dataclass(frozen=True)
class Copy(_AnyInstruction):
    """An instruction that copies a slot out, in, or from device to device, as the places of the
    slots say. ``nbytes`` is what the busier side sends or receives, per device; ``index`` selects
    an array of the source, or some."""

    source: int
    target: int
    nbytes: int
    label: str
    index: int | tuple[int, ...] | None = None

    def taken(self, arrays: Sequence[T]) -> Sequence[T]:
        """Return those of the source's arrays that are copied."""
        if self.index is None:
            return arrays
        which = (self.index,) if isinstance(self.index, int) else self.index
        return [arrays[i] for i in which]

    @property
    def made(self) -> tuple[int, ...]:
        return (self.target,)

    @property
    def used(self) -> tuple[int, ...]:
        return self.source, self.target

    @property
    def copied(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Wait(_AnyInstruction):
    """A wait of the host for the copy that makes a slot. With a place, only its memories wait: what
    comes behind it, and neither uses these nor needs what does, may be issued before."""

    slot: int
    place: Place | None = None

    @property
    def used(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Free(_AnyInstruction):
    slots: tuple[int, ...]

    @property
    def changed(self) -> tuple[int, ...]:
        return self.slots


Instruction = Feed | Run | Copy | Wait | Free


@dataclass
class Step:
    """The instructions of a step, its slots, and those that outlive it.

    Attributes:
        places: Places of the slots, in the order in which people think of them.
        programs: Programs that the instructions run, by name.
        slots: Indexed by the instructions.
        instructions: Instructions in the order of issue.
        persistent: Slots that are there before the step, by name. They live on, or end in it.
        made: Slots that live on after the step and are not there before it, by name.
        reported: Slots whose arrays the step returns beside its state: losses.
        num_passes: Instructions before the updates.
    """

    places: tuple[Place, ...]
    programs: dict[str, Program] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    persistent: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    num_passes: int = 0

    @property
    def num_devices(self) -> int:
        return 1 + max(device for place in self.places for device in place.devices)

    @property
    def runs(self) -> list[Run]:
        """The instructions that run a program."""
        return self.all_of(Run)

    @property
    def copies(self) -> list[Copy]:
        """The instructions that copy."""
        return self.all_of(Copy)

    @property
    def moved_bytes(self) -> dict[str, int]:
        """The bytes that are copied to the memory of a host, and from there to devices."""
        moved = {"to_host": 0, "to_device": 0}
        for copy in self.copies:
            source, target = (self.slots[slot].place.host for slot in (copy.source, copy.target))
            if source != target:
                moved["to_device" if target is None else "to_host"] += copy.nbytes
        return moved

    def program_of(self, each: Instruction) -> Program | None:
        """Return the program that an instruction runs, if it runs one."""
        return self.programs[each.program] if isinstance(each, Run) else None

    def all_of(self, kind: type[T]) -> list[T]:
        """Return the instructions of a kind."""
        return [each for each in self.instructions if isinstance(each, kind)]

    @cached_property
    def users(self) -> dict[Memory, tuple[str, ...]]:
        """The names of the places that use each memory."""
        found: defaultdict[Memory, list[str]] = defaultdict(list)
        for place in self.places:
            for memory in dict.fromkeys(place.memories):
                found[memory].append(place.name)
        ordered = sorted(found, key=lambda memory: (not is_device(memory), memory))
        return {memory: tuple(found[memory]) for memory in ordered}

    @cached_property
    def standing_for(self) -> dict[Memory, Memory]:
        """The memory that stands for each one: the first that the same places use. They hold the
        same at every instant, and their devices do the same."""
        first: dict[tuple[str, ...], Memory] = {}
        return {memory: first.setdefault(names, memory) for memory, names in self.users.items()}

    @cached_property
    def memories(self) -> dict[str, tuple[Memory, ...]]:
        """The memories of each place, by what stands for them; a host's once per device."""
        return {
            place.name: place.memories
            if place.host
            else tuple(sorted({self.standing_for[device] for device in place.devices}))
            for place in self.places
        }

    @cached_property
    def held_up(self) -> dict[str, tuple[Memory, ...]]:
        """The memories that a wait of each place holds up. The place itself, by its name, of a host
        whose capacity nobody knows: it has room for everything."""
        endless = {p.name for p in self.places if p.host and p.host.capacity_bytes is None}
        return self.memories | {name: (name,) for name in endless}

    def slot(self, name: str, *of: Any, **more: Any) -> int:
        """Add a ``Slot`` with the given fields and return its number."""
        self.slots.append(Slot(name, *of, **more))
        return len(self.slots) - 1

    def keep(self, name: str, *of: Any, **more: Any) -> int:
        """Add a slot that lives from before the step to after it, and return its number."""
        self.persistent[name] = self.slot(name, *of, **more)
        return self.persistent[name]


def replay(step: Step, *, record_timeline: bool = False, by_slot: bool = False) -> Ledger:
    """Book a step in a ledger without allocating anything, and return the ledger.

    Args:
        record_timeline: As for ``Ledger``.
        by_slot: Name the parts of a peak by slots instead of their categories.

    Returns:
        The ledger after the step: peaks per memory with their parts.

    Raises:
        ExecutionError: ``step-wait`` if a slot is freed while a copy may still use it,
            ``step-host-memory`` if a host's capacity is exceeded.
    """
    hosts = {place.host.name: place.host for place in step.places if place.host is not None}
    if hosts:
        ExecutionError.check(_unawaited(step))
    if by_slot:
        step = replace(step, slots=[replace(slot, category=slot.name) for slot in step.slots])
    ledger = Ledger(step.num_devices, record_timeline)
    begin(ledger, step)
    for instruction in step.instructions:
        book(ledger, step, instruction)
    ExecutionError.check(_overfull(hosts.values(), ledger))
    return ledger


def begin(ledger: Ledger, step: Step) -> None:
    """Enter what is there before the step."""
    for number in step.persistent.values():
        slot = step.slots[number]
        ledger.hold(slot.place.memories, slot.nbytes, slot.category, "before the step")


def book(ledger: Ledger, step: Step, instruction: Instruction) -> None:
    """Enter one instruction into the ledger."""
    slots = step.slots
    match instruction:
        case Feed(slot=number, label=label) | Copy(target=number, label=label):
            slot = slots[number]
            ledger.hold(slot.place.memories, slot.nbytes, slot.category, label)
        case Run():
            program = step.programs[instruction.program]
            place, nbytes = program.place, program.transient_bytes
            if place.host is None:
                ledger.execute(place.devices, nbytes, instruction.label)
            else:  # which has room for what runs on all of them
                ledger.execute([place.host.name], len(place.devices) * nbytes, instruction.label)
            _drop(ledger, slots, instruction.donated)
            for number in instruction.outputs:
                slot = slots[number]
                ledger.hold(slot.place.memories, slot.nbytes, slot.category, instruction.label)
        case Free():
            _drop(ledger, slots, instruction.slots)


def _drop(ledger: Ledger, slots: list[Slot], gone: Iterable[int]) -> None:
    for number in gone:
        slot = slots[number]
        ledger.drop(slot.place.memories, slot.nbytes, slot.category)


def _unawaited(step: Step) -> Iterator[Violation]:
    """Yield a violation for each slot freed while a copy from or to a host may still use it.

    A program waits itself for whoever reads a slot that it takes over.
    """
    source_of: dict[int, int] = {}
    users: defaultdict[int, dict[int, str]] = defaultdict(dict)  # slot -> its copies, by target
    for instruction in step.instructions:
        match instruction:
            case Feed(slot=slot, label=label):
                users[slot][slot] = label
            case Copy(source=source, target=target, label=label):
                if step.slots[source].place.host or step.slots[target].place.host:
                    source_of[target] = source
                    users[source][target] = users[target][target] = label
            case Wait(slot=slot, place=place):
                for end in (source_of.get(slot, slot), slot):
                    there = step.slots[end].place.memories
                    if place is None or {*there} <= {*place.memories}:
                        users[end].pop(slot, None)
                        users[end].pop(end, None)  # which has ended before it was copied
            case Run():
                for slot in instruction.read:
                    users[slot].pop(slot, None)
                for slot in instruction.donated:
                    source_of.pop(slot, None)  # nothing is left to wait for
                    users.pop(slot, None)
            case Free():
                for slot in instruction.slots:
                    source_of.pop(slot, None)
                    for target, label in users.pop(slot, {}).items():
                        yield Violation(
                            f"slot {step.slots[slot].name!r} is freed while {label!r} may still "
                            f"use it; wait for {step.slots[target].name!r} before.",
                            "step-wait",
                        )


def _overfull(hosts: Iterable[Host], ledger: Ledger) -> Iterator[Violation]:
    for host in hosts:
        peak = ledger.peak_of(host.name)
        if host.capacity_bytes is not None and peak.peak_bytes > host.capacity_bytes:
            parts = ", ".join(f"{what} {format_bytes(part)}" for what, part in peak.parts.items())
            yield Violation(
                f"the step holds {format_bytes(peak.peak_bytes)} in the memory of {host.name} at "
                f"{peak.instant!r} ({parts}), which has capacity_bytes={host.capacity_bytes}; "
                "keep less there, or name a host with more.",
                "step-host-memory",
            )
