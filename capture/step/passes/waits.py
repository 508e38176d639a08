"""Waits: what a copy between a device and a host uses ends behind a wait for it.

**Guarantee.** The rule of ``capture.step.program.replay`` holds, and no wait is needless or early:
each is right before the instruction that ends what its copy uses, and nothing else has told the
host that the copy has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait


def wait(step: Step, *, by_place: bool = False) -> None:
    """Insert the waits into a step.

    Args:
        step: Complete but for them, of any kind of plan.
        by_place: Whether only the devices wait from which something goes, or to which it comes.
    """
    waits, found, passes = _Waits(step), list[Instruction](), step.num_passes
    for number, each in enumerate(step.instructions):
        before = dict.fromkeys(waits.before(number, each))
        found += [Wait(slot, step.slots[slot].place if by_place else None) for slot in before]
        found.append(each)
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

    def before(self, number: int, each: Instruction) -> Iterator[int]:
        """Enter an instruction; yield the targets of the copies to wait for before it."""
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
                    yield from self._end(slot)
                    self._users.pop(slot, None)
            case Free(slots=slots):
                for slot in slots:
                    yield from self._end(slot)
                    for target in [*self._users.pop(slot, ())]:
                        yield from self._ended(target)

    def _end(self, slot: int) -> Iterator[int]:
        """Yield the copy into a slot that ends, if its source is freed only after it."""
        if slot in self._source:
            yield from self._ended(slot)

    def _ended(self, target: int) -> Iterator[int]:
        yield target
        self._users[target].pop(target, None)
        if (source := self._source.pop(target, None)) is not None:
            self._users[source].pop(target, None)
