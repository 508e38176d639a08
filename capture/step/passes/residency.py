"""Residency: what a pass reads comes early, and what goes out ends late, where there is room.

**Guarantee.** The programs are those of the turns, and each device takes its own in their order.
Arrivals come one pass of their device early at most, where they have room below the limit beside
all that is still to come before them. What goes out ends one pass later, or before the first turn
that has no room beside it. So a limit that holds where nothing comes early holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from math import inf

from capture.step.program import Free, Step
from capture.step.room import Room
from capture.step.tasks import Block, Blocks


def reside(step: Step, turns: Sequence[Blocks], limit: float, *, ahead: bool, behind: bool) -> None:
    """Put the instructions of turns into a step, in the order of their issue.

    Args:
        step: Its places, slots and programs. It gets the instructions, and frees of what goes out.
        turns: In program order.
        limit: Bytes of every device.
        ahead: Whether arrivals may come before the pass before.
        behind: Whether what goes out may end a pass later.
    """
    issued = _Residency(step, turns, Room(step, turns, limit))
    for turn in turns:
        issued.turn(turn, ahead=ahead, behind=behind)
    issued.flush(*issued.late)
    step.num_passes = len(step.instructions)


class _Residency:
    """The instructions so far, and what they leave where."""

    def __init__(self, step: Step, turns: Sequence[Blocks], room: Room):
        self._instructions, self._room, self._now = step.instructions, room, 0
        devices = range(step.num_devices)
        #: By device, the turns that wait for what goes out and the slots from which it does, each
        #: with the number of the turn behind which it is; and the turns to come that take room.
        self.late: dict[int, list[tuple[int, list[Block], tuple[int, ...]]]] = {
            device: [] for device in devices
        }
        self._turns = {device: deque[Blocks]() for device in devices}
        for turn in turns:
            for device in room.devices(*turn.body):
                self._turns[device].append(turn)
        self._done, self._there = set[int](), {*step.persistent.values()}

    def turn(self, turn: Blocks, *, ahead: bool, behind: bool) -> None:
        lane, is_pass, room = turn.of.lane, turn.of.arrivals is not None, self._room
        self._now += 1
        for device in room.devices(*turn.body):
            self._turns[device].popleft()
        if turn.of.settled:
            self.flush(*self.late)
        if lane is None:
            self._issue(*turn.body)
            return
        if turn.of.first.program.place.host:
            self.late[lane].append((self._now, turn.body, ()))
            return
        if is_pass and not behind:
            self.flush(lane)
        coming = [block for block in turn.arrivals if id(block) not in self._done]
        # What all devices run has its room when it is issued.
        own = [block for block in turn.body if len(room.devices(block)) == 1]
        self._make_room(lane, *coming, *own)
        self._issue(*coming)
        if is_pass and ahead:
            self._fetch(turn, lane)
        self._issue(*turn.body)
        if is_pass:
            self.flush(lane, before=self._now)

    def flush(self, *devices: int, before: float = inf) -> None:
        """End what went out from devices before a turn, and issue what waits for that."""
        for device in devices:
            late = self.late[device]
            self.late[device] = [each for each in late if each[0] >= before]
            for _, blocks, gone in late[: len(late) - len(self.late[device])]:
                self._issue(*blocks)
                self._instructions += [Free(gone)] if gone else []
                self._room.hold(gone, -1)

    def _fetch(self, turn: Blocks, lane: int) -> None:
        """Issue what the next pass reads, as far as it is made and has room until then."""
        room, coming = self._room, self._turns[lane]
        between = list(takewhile(lambda t: t.of.arrivals is None or t.of.lane != lane, coming))
        beside = room.most_of(lane, [turn, *between])
        for block in coming[len(between)].arrivals if len(between) < len(coming) else ():
            sources = {slot for each in block for slot in each.copied}
            if id(block) in self._done or not room.made >= sources:
                continue
            if all(room.has(d, room.most(d, [block])[0] + beside) for d in room.devices(block)):
                self._issue(block)
            elif self._there >= sources:
                return  # what is there before the step comes in order

    def _make_room(self, device: int, *blocks: Block) -> None:
        if not self._room.has(device, self._room.most(device, blocks)[0]):
            self.flush(device)

    def _issue(self, *blocks: Block) -> None:
        for block in blocks:
            self._done.add(id(block))
            together = len(devices := {*self._room.devices(block)}) > 1
            for each in block:
                for device in devices & self._room.touched(each) if together else ():
                    devices.remove(device)
                    self._make_room(device, block)
                self._instructions.append(each)
                for device, slot in self._room.enter(each):
                    self.late[device].append((self._now, [], (slot,)))
