"""Waits: what a copy between a device and a host uses ends behind a wait for it.

**Guarantee.** The rule of ``capture.step.program.replay`` holds, and no wait is needless or early:
each is right before the instruction that ends what its copy uses, and nothing else has told the
memory where that was that the copy has ended. Nobody else waits: what goes out holds up its device,
and what comes in the host, which both have room when it is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait


def wait(step: Step) -> None:
    """Insert the waits into a step, each with the place of what ends behind it.

    Args:
        step: Complete but for them, of any kind of plan.
    """
    waits, found, passes = _Waits(step), list[Instruction](), step.num_passes
    for number, each in enumerate(step.instructions):
        before = list(dict.fromkeys(waits.before(number, each)))
        found += [*before, each]
        passes += len(before) if number < step.num_passes else 0
    step.instructions, step.num_passes = found, passes


class _Waits:
    """The copies that may not have ended."""

    def __init__(self, step: Step):
        self._slots = step.slots
        #: By slot, the targets of the copies that may still use it.
        self._users: defaultdict[int, dict[int, None]] = defaultdict(dict)
        #: By target, the source, if that is freed behind it.
        self._source: dict[int, int] = {}
        #: The copies, by their place in the list, whose sources are freed and not taken over by a
        #: program, which waits itself.
        self._freed, freed = set[int](), set[int]()
        for number in reversed(range(len(step.instructions))):
            match step.instructions[number]:
                case Free(slots=slots):
                    freed.update(slots)
                case Run(donated=donated):
                    freed.difference_update(donated)
                case Copy(source=source, target=target):
                    if source in freed:
                        self._freed.add(number)
                    freed.discard(target)

    def before(self, number: int, each: Instruction) -> Iterator[Wait]:
        """Enter an instruction; yield the waits before it."""
        match each:
            case Feed(slot=slot):
                self._users[slot][slot] = None
            case Copy(source=source, target=target):
                if self._slots[source].place.host or self._slots[target].place.host:
                    self._users[target][target] = None
                    if number in self._freed:
                        self._users[source][target] = None
                        self._source[target] = source
            case Run():
                for slot in each.read:
                    self._users[slot].pop(slot, None)
                for slot in each.donated:
                    yield from self._last_told(slot)
                    self._users.pop(slot, None)
            case Free(slots=slots):
                for slot in slots:
                    yield from self._last_told(slot)
                    users = self._users.pop(slot, {})
                    for target in [one for one in users if one != slot] or users:
                        yield Wait(target, self._slots[slot].place)  # tells of that into the slot

    def _last_told(self, slot: int) -> Iterator[Wait]:
        """Yield the wait for the copy into a slot that ends, if its source is freed only after it:
        then nothing tells any more that the copy has ended."""
        source = self._source.pop(slot, None)
        if source is not None and slot in self._users[source]:
            del self._users[source][slot]
            self._users[source].pop(source, None)
            yield Wait(slot, self._slots[source].place)
