"""The room that turns take of devices, and what there is: how residency decides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from capture.step.ledger import is_device
from capture.step.program import Instruction, Place, Step
from capture.step.tasks import Block, Blocks


class Room:
    """The bytes that are live and still free on each device, as turns are issued.

    Args:
        turns: In program order.
        limit: Of every device.
    """

    def __init__(self, step: Step, turns: Sequence[Blocks], limit: float):
        self._step, self._limit, self._live = step, limit, Counter[int]()
        self.made = {*step.persistent.values()}
        #: Slots that do not end with what uses them last: what stays, or may be on its way out.
        self._stay, self._leaving = self.made.union(step.reported), set[int]()
        #: By slot, how many instructions are to come that use it.
        self._left = Counter[int]()
        #: By block and device, the most that it takes, and what it leaves.
        self._takes: dict[int, dict[int, tuple[int, int]]] = {}
        last, leaving, taken = dict[int, int](), set[int](), set[int]()
        for number, turn in enumerate(turns):
            for block in (*turn.arrivals, *turn.body):
                if id(block) in self._takes:
                    continue
                self._takes[id(block)] = self._taken(block)
                for each in block:
                    for slot in {*each.used}:
                        self._left[slot] += 1
                        last[slot] = number
                    taken.update(each.consumed)
                    leaving.update(self._out(each))
        #: By turn, what ends with it.
        self._ends: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for slot in last.keys() - self._stay - leaving - taken:
            for device in self._on(slot):
                self._ends[id(turns[last[slot]])][device] += step.slots[slot].nbytes

    def _on(self, slot: int) -> tuple[int, ...]:
        return self._memories(self._step.slots[slot].place)

    def _memories(self, place: Place) -> tuple[int, ...]:
        """Return the devices of a place, one for all that do the same; none of a host."""
        return tuple(filter(is_device, self._step.memories[place.name]))

    def _out(self, each: Instruction) -> tuple[int, ...]:
        """Return the slots that a copy to a host reads; none for any other instruction."""
        to_host = any(self._step.slots[slot].place.host for slot in each.made)
        return each.copied if to_host else ()

    def _taken(self, block: Block) -> dict[int, tuple[int, int]]:
        """Return, by device, the most bytes that a block takes of its own, and what it leaves."""
        most, held = dict[int, int](), Counter[int]()
        for each in block:
            if (program := self._step.program_of(each)) is not None:
                for device in self._memories(program.place):
                    most[device] = max(most.get(device, 0), held[device] + program.transient_bytes)
            for some, sign in ((each.begun, 1), (each.consumed, -1)):
                for slot in some:
                    for device in self._on(slot):
                        held[device] += sign * self._step.slots[slot].nbytes
                        most[device] = max(most.get(device, 0), held[device])
        return {device: (most[device], held[device]) for device in most}

    def touched(self, each: Instruction) -> set[int]:
        """Return the devices where an instruction takes room."""
        places = [self._step.slots[slot].place for slot in each.begun]
        if (program := self._step.program_of(each)) is not None:
            places.append(program.place)
        return {device for place in places for device in self._memories(place)}

    def devices(self, *blocks: Block) -> list[int]:
        """Return the devices where blocks take room."""
        return sorted({device for block in blocks for device in self._takes[id(block)]})

    def enter(self, each: Instruction) -> Iterator[tuple[int, int]]:
        """Book an instruction, and the end of what only it has still used. Yield (device, slot) of
        what a copy to a host still uses."""
        made, gone = each.begun, each.consumed
        self.made.update(made)
        self.hold(made)
        self.hold(gone, -1)
        self._leaving.update(self._out(each))
        used = {*each.used}
        self._left.subtract(used)
        for slot in used.difference(self._stay, gone):
            if not self._left[slot] and slot in self._leaving:
                yield from ((device, slot) for device in self._on(slot))
            elif not self._left[slot]:
                self.hold([slot], -1)

    def hold(self, slots: Iterable[int], sign: int = 1) -> None:
        """Book that slots come to life; with sign -1, that they end."""
        for slot in slots:
            for device in self._on(slot):
                self._live[device] += sign * self._step.slots[slot].nbytes

    def has(self, device: int, nbytes: int) -> bool:
        """Return whether a device has so much room."""
        return self._live[device] + nbytes <= self._limit

    def most(self, device: int, blocks: Iterable[Block], held: int = 0) -> tuple[int, int]:
        """Return the most that blocks take of a device, one after the other, and what they leave
        of that; beside what is held."""
        most = held
        for block in blocks:
            need, left = self._takes[id(block)].get(device, (0, 0))
            most, held = max(most, held + need), held + left
        return most, held

    def most_of(self, device: int, turns: Iterable[Blocks]) -> int:
        """Return the most that the bodies of turns take; each ends what is last used in it."""
        most = held = 0
        for turn in turns:
            need, held = self.most(device, turn.body, held)
            most, held = max(most, need), held - self._ends[id(turn)][device]
        return most
