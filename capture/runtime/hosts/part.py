"""The part of a step that one of several processes executes: what happens at its own places, and
the copies that it sends or receives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import jax

from capture.runtime.frame import Action, Frame, Layout
from capture.runtime.hosts.across import BoundCopy, CopyAcross
from capture.runtime.hosts.transport import Transport
from capture.step.offers import Crossing, OfferedStep, with_offers
from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Step, Wait


class Sharing(Protocol):
    """The processes that share a step, as one of them sees them."""

    process: int

    @property
    def transport(self) -> Transport:
        """The way in which arrays travel."""
        ...

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers, the same in every process."""
        ...


@dataclass(frozen=True)
class SharedStep:
    """A step that several processes execute, the same in all of them.

    Attributes:
        copies: Per copy that leaves a process, by its number in the step.
    """

    offered: OfferedStep
    copies: Mapping[int, CopyAcross]

    @property
    def step(self) -> Step:
        return self.offered.step

    @cached_property
    def digest(self) -> str:
        """A hash of the step's instructions and slots, 16 hexadecimal digits."""
        text = repr((self.step.instructions, self.step.slots))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def of(
        cls, step: Step, layout: Layout, devices: Sequence[jax.Device], window: int
    ) -> SharedStep:
        """Work out a step's copies between processes, and how long their offers wait.

        Args:
            step: As in one process.
            devices: By device id of the step.
            window: See ``capture.step.offers``.
        """
        copies = {}
        for number, copy in enumerate(step.instructions):
            if isinstance(copy, Copy) and _crosses(step, copy, devices):
                sources = copy.taken(layout(step.slots[copy.source]))
                targets = [struct.sharding for struct in layout(step.slots[copy.target])]
                copies[number] = CopyAcross(sources, targets, copy.label)  # type: ignore[arg-type]
        ids = {device.id: number for number, device in enumerate(devices)}
        crossings = {
            number: Crossing(
                crossing.pairs,
                {ids[device]: nbytes for device, nbytes in crossing.piece_bytes.items()},
            )
            for number, crossing in ((n, copy.crossing) for n, copy in copies.items())
        }
        offered = with_offers(step, crossings, window)
        return cls(offered, {new: copies[old] for new, old in offered.crossings.items()})


class StepPart:
    """The part of a step that one process executes."""

    def __init__(self, shared: SharedStep, hosts: Sharing, devices: Sequence[jax.Device]):
        self.step = shared.step
        self._shared, self._hosts, self._devices = shared, hosts, devices
        self._here = {
            place.name
            for place in self.step.places
            if any(devices[d].process_index == hosts.process for d in place.devices)
        }
        self._copies = {
            number: BoundCopy(copy, hosts.process, hosts.transport)
            for number, copy in shared.copies.items()
        }
        self._pieces: dict[int, dict[jax.Device, int]] = {number: {} for number in self._copies}
        for slot, (number, device) in shared.offered.pieces.items():
            if self.has(self.step.slots[slot].place):
                self._pieces[number][devices[device]] = slot
        # Tells lists apart: processes that are not in the same one never take each other's arrays.
        self._salt = int(shared.digest[:4], 16) >> 1 << 40
        self._first = self._salt

    @property
    def crossings(self) -> dict[int, frozenset[tuple[int, int]]]:
        """The (sender, receiver) pairs of each copy between processes, by number in the step."""
        return {number: copy.crossing.pairs for number, copy in self._shared.copies.items()}

    def has(self, place: Place) -> bool:
        """Return whether a place has devices of this process."""
        return place.name in self._here

    def begin(self) -> None:
        """Reserve numbers for an execution's copies; every process has begun as many before."""
        self._first = self._salt + self._hosts.reserve(len(self.step.instructions))

    @property
    def memories(self) -> list[int]:
        """The numbers of this process's devices in the step."""
        return [
            number
            for number, device in enumerate(self._devices)
            if device.process_index == self._hosts.process
        ]

    @cached_property
    def view(self) -> Step:
        """The step as this process can wait in it: slots of others hold nothing, and only a sender
        waits for what it sent."""
        slots = [
            slot if self.has(slot.place) else replace(slot, nbytes=0) for slot in self.step.slots
        ]
        instructions: list[Instruction] = [
            Free(())
            if number in self._copy_of and not self._waits(number, *instruction.used)
            else instruction
            for number, instruction in enumerate(self.step.instructions)
        ]
        return replace(self.step, slots=slots, instructions=instructions)

    def _waits(self, number: int, slot: int) -> bool:
        """Return whether this process waits: for what it sends, and for copies of its own."""
        copy = self._copies.get(self._copy_of[number])
        return self.has(self.step.slots[slot].place) if copy is None else copy.sends

    @cached_property
    def _copy_of(self) -> dict[int, int]:
        """The number of the last copy into a wait's slot before the wait, by number of the wait."""
        found, last = {}, {}
        for number, instruction in enumerate(self.step.instructions):
            match instruction:
                case Copy(target=slot) | Feed(slot=slot):
                    last[slot] = number
                case Wait(slot=slot):
                    found[number] = last[slot]
                case _:
                    pass
        return found

    def bind(self, number: int, instruction: Instruction) -> Action | None:
        """Return this process's action at an instruction; None if one process would do the same."""
        slots = self.step.slots
        match instruction:
            case Run(program=program):
                here = self.has(self.step.programs[program].place)
            case Wait() if self._copy_of[number] in self._copies:
                return self._bind_wait(self._copy_of[number])
            case Wait(slot=slot):
                here = self.has(slots[slot].place)
            case Copy() if number in self._copies:
                return self._bind_copy(number, instruction)
            case Copy(target=slot) | Feed(slot=slot):
                here = self.has(slots[slot].place)
                if here and slot in self._shared.offered.pieces:
                    return self._bind_cut(slot)
            case Free(slots=freed):
                here = any(self.has(slots[slot].place) for slot in freed)
        return None if here else _nothing

    def _bind_wait(self, number: int) -> Action:
        copy = self._copies[number]
        return (lambda frame: copy.wait(self._first + number)) if copy.sends else _nothing

    def _bind_cut(self, target: int) -> Action:
        number, device = self._shared.offered.pieces[target]
        program, taken = self._copies[number].cutters(self._devices[device]), self._taken(number)

        def action(frame: Frame) -> None:
            frame.slots[target] = program(taken(frame))

        return action

    def _bind_copy(self, number: int, instruction: Copy) -> Action:
        copy, pieces, target = self._copies[number], self._pieces[number], instruction.target
        has_source = self.has(self.step.slots[instruction.source].place)
        receives, taken = copy.receives, self._taken(number)

        def action(frame: Frame) -> None:
            cuts = {device: frame.slots[slot] or [] for device, slot in pieces.items()}
            arrays = copy(taken(frame) if has_source else (), cuts, self._first + number)
            if receives:
                frame.slots[target] = arrays

        return action if copy.takes_part else _nothing

    def _taken(self, number: int) -> Callable[[Frame], Sequence[jax.Array]]:
        """Return a function from a frame to the arrays that a copy takes of its source."""
        copy = self.step.instructions[number]
        assert isinstance(copy, Copy)

        def taken(frame: Frame) -> Sequence[jax.Array]:
            arrays = frame.slots[copy.source]
            assert arrays is not None, f"{copy.label}: the source is not alive"
            return copy.taken(arrays)

        return taken


def _crosses(step: Step, copy: Copy, devices: Sequence[jax.Device]) -> bool:
    places = (step.slots[copy.source].place, step.slots[copy.target].place)
    return len({devices[d].process_index for place in places for d in place.devices}) > 1


def _nothing(frame: Frame) -> None:
    """Do nothing at an instruction that only other processes execute."""
