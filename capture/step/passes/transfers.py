"""Transfers: a value is where it is read.

**Guarantee.** A program reads every value at its own place: where the value was not, it was fed or
copied there, once for all that read it until it goes to rest. What goes to rest is copied there
right behind the program, what is sent in its turn. Nothing else is copied, and a value has one slot
per place where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from capture.step.program import Copy, Feed, Free, Instruction, Place, Run, Step
from capture.step.tasks import Arrival, Block, Blocks, Round, Send, Task, Value


def transfer(step: Step, rounds: Iterable[Round], kept: Iterable[Value]) -> list[Blocks]:
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
        #: Those of which a slot has the name, if they have one.
        self._named = {*kept}
        for v in kept:
            assert v.home is not None
            slot = step.keep(v.name, v.home, v.category, v.nbytes, v.what, v.holds)
            self._slots[v][v.home.name] = slot
        #: The groups of arrivals, which rounds may share.
        self._blocks: dict[int, tuple[Arrival, Block]] = {}

    def turn(self, each: Round) -> Blocks:
        arrivals = [self._arrival(group, each) for group in each.arrivals or () if group]
        body = [self._send(t) if isinstance(t, Send) else self._run(t) for t in each.tasks]
        return Blocks(each, arrivals, body)

    def _arrival(self, group: Arrival, of: Round) -> Block:
        if id(group) not in self._blocks:
            block, user = list[Instruction](), of.first
            match group:
                case Task():
                    block = self._run(group)
                case values:
                    for value in values:
                        self._bring(value, user.where(value), user.label, block)
            self._blocks[id(group)] = group, block
        return self._blocks[id(group)][1]

    def _run(self, task: Task) -> Block:
        label, slots, block = task.label, self._slots, list[Instruction]()
        self._step.programs.setdefault(task.name, task.program)
        at, place, bring = task.at.get, task.program.place, self._bring
        reads = tuple(
            [tuple([bring(v, at(v, place), label, block) for v in group]) for group in task.reads]
        )
        donated = tuple([slots[v][at(v, place).name] for v in task.takes])
        for value in {*task.takes}.difference(task.makes):
            del slots[value][at(value, place).name]
        made = tuple([self._make(value, at(value, place)) for value in task.makes])
        block.append(Run(task.name, reads, made, donated, label))
        changed = [(v, v.source) for v, _ in task.rests if v.source and v.source.home]
        if over := tuple(slot for _, home in changed for slot in slots[home].values()):
            block.append(Free(over))
        for (value, _), target in zip(changed, over, strict=True):
            block.append(Copy(slots[value][at(value, place).name], target, value.nbytes, label))
        for value, rest in task.rests[len(changed) :]:
            slots[value] = {rest.name: bring(value, rest, label, block)}
        if task.ends:
            block.append(Free(tuple([slots[v].pop(at(v, place).name) for v in task.ends])))
        return block

    def _send(self, send: Send) -> Block:
        value, block = send.value, list[Instruction]()
        if send.rests and value.fed is not None:
            self._slots[value].clear()  # it is fed again
        elif value.home is None or value.source is None:
            slot = self._bring(value, send.place, send.label, block)
            if send.rests:
                self._slots[value] = {send.place.name: slot}
        else:
            (over,), (source,) = self._slots[value].values(), self._slots[value.source].values()
            nbytes = max(value.nbytes, send.nbytes)
            block = [Free((over,)), Copy(source, over, nbytes, send.label, value.index)]
        return block

    def _bring(self, value: Value, place: Place, label: str, block: Block) -> int:
        """Return the slot of a value at a place, with what makes it if it is not there."""
        here, name = self._slots[value], place.name
        if name not in here and value.fed is not None:
            here[name] = self._slot(value, place)
            block.append(Feed(here[name], *value.fed, label))
        elif name not in here:
            there, index = here or self._slots[value.source or value], None if here else value.index
            assert there, f"{value.what} of {value.holds} is nowhere"
            slots = self._step.slots
            near = (slot for slot in there.values() if slots[slot].place.devices == place.devices)
            source = next(near, next(iter(there.values())))
            nbytes = max(value.nbytes, slots[source].nbytes if index is None else 0)
            here[name] = self._slot(value, place)
            block.append(Copy(source, here[name], nbytes, label, index))
        return here[name]

    def _make(self, value: Value, place: Place) -> int:
        if place.name not in self._slots[value]:
            self._slots[value] = {place.name: self._slot(value, place)}
            self._step.reported += [*self._slots[value].values()] if value.reported else []
        return self._slots[value][place.name]

    def _slot(self, value: Value, place: Place) -> int:
        category = value.resting if place.host and value.resting else value.category
        name = f"{value.name or value.what} {len(self._step.slots)}"
        name = name if value in self._named else value.name or name
        self._named.add(value)
        return self._step.slot(name, place, category, value.nbytes, value.what, value.holds)
