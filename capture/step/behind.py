"""The waits that each instruction is issued behind, where waits name a place: the rule of the
simulation and of the execution of a step.

A wait with a place holds up the memories of that place. Behind it comes what uses these memories,
what needs a slot of what comes behind it or changes one that this still reads, and so on: all that
is between them in the list. Everything else is issued as if the wait were not there.

A host whose capacity nobody knows has room for what comes early: only its place is held up, and it
may hold more over time than is booked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from capture.step.ledger import Memory
from capture.step.program import Copy, Instruction, Run, Step, Wait


def memories_of(step: Step, each: Instruction) -> Collection[Memory]:
    """Return the memories, by what stands for them, where an instruction takes or gives back room,
    and the devices that run or send. Who reads on a host takes no room there. Of a wait, those that
    it holds up."""
    slots, memories = step.slots, step.held_up
    places = {slots[slot].place.name for slot in each.changed}
    match each:
        case Copy(source=source) if not slots[source].place.host:
            places.add(slots[source].place.name)
        case Run(program=name):
            places.add(step.programs[name].place.name)
        case Wait(place=place):
            places.update(memories if place is None else (place.name,))
    if len(places) == 1:
        return memories[places.pop()]
    return {memory for name in places for memory in memories[name]}


@dataclass(frozen=True)
class Touches:
    """The memories and slots that an instruction touches, or that several do.

    Attributes:
        memories: As of ``memories_of``.
    """

    memories: frozenset[Memory] = frozenset()
    used: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, step: Step, each: Instruction) -> Touches:
        memories = frozenset(memories_of(step, each))
        return cls(memories, frozenset(each.used), frozenset(each.changed))

    def __or__(self, other: Touches) -> Touches:
        return Touches(
            self.memories | other.memories, self.used | other.used, self.changed | other.changed
        )

    def hold_up(self, later: Touches) -> bool:
        """Return whether something later is issued only behind what touches these."""
        return not (
            self.memories.isdisjoint(later.memories)
            and self.changed.isdisjoint(later.used)
            and self.changed.isdisjoint(later.changed)
            and self.used.isdisjoint(later.changed)
        )


class Behind:
    """The waits that each instruction is issued behind, while a step is gone through. Waits have
    numbers that ascend, and each is behind those before it in its memories."""

    def __init__(self, step: Step):
        self._step = step
        #: What the host has waited for, and by memory the waits since, by the memory held up.
        self._all: tuple[int, ...] = ()
        self._at: dict[Memory, Mapping[Memory, int]] = {}
        #: By slot, the waits that what changed it last is behind, and what has used it since.
        self._changed: dict[int, Mapping[Memory, int]] = {}
        self._used: dict[int, Mapping[Memory, int]] = {}

    def enter(self, each: Instruction) -> Iterable[int]:
        """Enter an instruction; return the numbers of the waits that it is issued behind."""
        if not self._at:
            return self._all
        memories, used, changed = memories_of(self._step, each), each.used, each.changed
        at, before, since = self._at, self._changed, self._used
        behind = [at[memory] for memory in memories if memory in at]
        behind += [before[slot] for slot in used if slot in before]
        for slot in changed:
            behind += [of[slot] for of in (before, since) if slot in of]
        found = _latest(behind)
        if not found:
            return self._all
        at.update(dict.fromkeys(memories, found))
        for slot in used:
            since[slot] = _latest([since[slot], found]) if slot in since else found
        for slot in changed:
            before[slot] = since[slot] = found
        return {*self._all, *found.values()}

    def wait(self, each: Wait, number: int) -> None:
        """Note the number of a wait that has been entered."""
        if each.place is None:
            self._all, self._at, self._changed, self._used = (number,), {}, {}, {}
        else:
            self._at |= {one: {one: number} for one in memories_of(self._step, each)}


def _latest(waits: Sequence[Mapping[Memory, int]]) -> Mapping[Memory, int]:
    """Return, by memory, the last of several waits."""
    first, *others = {id(each): each for each in waits}.values() or [{}]
    if not others:
        return first  # as it mostly is
    found = dict(first)
    for each in others:
        found.update(item for item in each.items() if found.get(item[0], -1) < item[1])
    return found
