"""Transfers: a value is where it is read.

**Guarantee.** A program reads every value at its own place: where the value was not, it was fed or
copied there, once for all that read it until it goes to rest. What goes to rest is copied there
right behind the program. Nothing else is copied, and a value has one slot per place where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from capture.step.program import Copy, Feed, Free, Place, Run, Step
from capture.step.tasks import Arrival, Block, Round, Task, Turn, Value


def transfer(step: Step, rounds: Iterable[Round], kept: Iterable[Value]) -> list[Turn]:
    """Return the rounds as instructions, without waits and frees but for what is written over.

    Args:
        step: Gets slots, programs, and what it keeps and reports.
        rounds: In program order.
        kept: All values that have a home.
    """
    transfers = _Transfers(step, kept)
    return [transfers.turn(each) for each in rounds]


class _Transfers:
    def __init__(self, step: Step, kept: Iterable[Value]):
        self._step = step
        #: By value, the slot at every place where it is, by its name.
        self._slots: defaultdict[Value, dict[str, int]] = defaultdict(dict)
        for v in kept:
            assert v.home is not None
            slot = step.keep(v.name, v.home, v.category, v.nbytes, v.what, v.holds)
            self._slots[v][v.home.name] = slot
        #: The groups of arrivals, which rounds may share.
        self._blocks: dict[int, tuple[Arrival, Block]] = {}

    def turn(self, each: Round) -> Turn:
        arrivals = [self._arrival(group, each.tasks[0]) for group in each.arrivals or () if group]
        return Turn(each, arrivals, [list(self._run(task)) for task in each.tasks])

    def _arrival(self, group: Arrival, user: Task) -> Block:
        if id(group) not in self._blocks:
            block: Block = []
            if isinstance(group, Task):
                block += self._run(group)
            for value in () if isinstance(group, Task) else group:
                block += self._bring(value, user.where(value), user.label)
            self._blocks[id(group)] = group, block
        return self._blocks[id(group)][1]

    def _run(self, task: Task) -> Iterator[Feed | Copy | Run | Free]:
        self._step.programs.setdefault(task.name, task.program)
        for value in (value for group in task.reads for value in group):
            yield from self._bring(value, task.where(value), task.label)
        reads = tuple(tuple(self._at(v, task) for v in group) for group in task.reads)
        donated = tuple(self._at(value, task) for value in task.takes)
        for value in task.takes:
            if value not in task.makes:
                del self._slots[value][task.where(value).name]
        made = tuple(self._make(value, task.where(value)) for value in task.makes)
        yield Run(task.name, reads, made, donated, task.label)
        changed = [(v, v.source) for v, _ in task.rests if v.source and v.source.home]
        if over := tuple(slot for _, home in changed for slot in self._slots[home].values()):
            yield Free(over)
        for (value, _), target in zip(changed, over, strict=True):
            yield Copy(self._at(value, task), target, value.nbytes, task.label)
        for value, place in task.rests[len(changed) :]:
            yield from self._bring(value, place, task.label)
            self._slots[value] = {place.name: self._slots[value][place.name]}

    def _bring(self, value: Value, place: Place, label: str) -> Iterator[Feed | Copy]:
        here, name = self._slots[value], place.name
        if name in here:
            return
        if value.fed is not None:
            here[name] = self._slot(value, place)
            yield Feed(here[name], *value.fed, label)
            return
        there, index = here or self._slots[value.source or value], None if here else value.index
        assert there, f"{value.what} of {value.holds} is nowhere"
        slots = self._step.slots
        near = (slot for slot in there.values() if slots[slot].place.devices == place.devices)
        source = next(near, next(iter(there.values())))
        here[name] = self._slot(value, place)
        yield Copy(source, here[name], value.nbytes, label, index)

    def _at(self, value: Value, task: Task) -> int:
        return self._slots[value][task.where(value).name]

    def _make(self, value: Value, place: Place) -> int:
        if place.name not in self._slots[value]:
            self._slots[value] = {place.name: self._slot(value, place)}
            self._step.reported += [*self._slots[value].values()] if value.reported else []
        return self._slots[value][place.name]

    def _slot(self, value: Value, place: Place) -> int:
        category = value.resting if place.host and value.resting else value.category
        name = f"{value.what} {len(self._step.slots)}"
        return self._step.slot(name, place, category, value.nbytes, value.what, value.holds)
