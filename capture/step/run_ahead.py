"""How far the host may run ahead of devices that take memory when a program starts, so that they
hold no more than a step books.

The ledger books a step as if each instruction had finished before the next is issued. The host
issues them much faster. On CPU, programs whose operands are there run in any order and side by
side, each with memory of its own, while what an earlier program reads is not free before that one
ends: with many micro-batches a step then holds twice what it books. On GPUs an allocation takes its
place in the order of the stream, and memory that an earlier program gives back serves a later one,
so nothing needs to wait (by XLA's sources; not tried here).

The rule, per memory; one of those that the same places use stands for all:

    held <= live after the instructions that are known to have finished
            + sum of what every instruction issued since takes

An instruction *takes* what a program needs beside its operands, or the copy that a feed or a
transfer makes. What it gives back (donated and freed slots) counts once it has finished. Before an
instruction that would lift this sum above the budget, the host waits for the oldest ones. With the
replayed peak as budget it is always enough to wait for all: the sum is then what the ledger books
for the instruction. Everything here is known before the first step, so whom to wait for is worked
out once.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from capture.step.ledger import Memory
from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait


def waits(step: Step, budget_bytes: Mapping[Memory, int]) -> list[tuple[int, ...]]:
    """Return, per instruction, the slots whose arrays must be ready before it is issued.

    The first waits for all that outlives a step: the step before may still be running.

    **Assumes** that the results of one instruction are ready together, and that what a program took
    is free once they are. A program that makes nothing is not waited for.

    Args:
        budget_bytes: Per memory; at least its replayed peak, or every instruction waits for all
            before it. A memory that is not named has room for everything.
    """
    window = _Window(step, budget_bytes)
    found = [
        window.issue(index, instruction) for index, instruction in enumerate(step.instructions)
    ]
    state = [slot for slot in step.persistent.values() if step.slots[slot].nbytes]
    return [(*state, *found[0]), *found[1:]]


def with_scratch(step: Step, scratch_bytes: Callable[[str], int]) -> Step:
    """Return the step with what the kernels of its programs allocate added to their temporaries, so
    that its replay and its waits have room for that, too.

    Args:
        scratch_bytes: Gives, for the name of a program, what it may allocate per device; 0 where a
            program of another process is not known.
    """
    run = dict.fromkeys(each.program for each in step.runs)
    larger = {
        name: replace(program, transient_bytes=program.transient_bytes + scratch_bytes(name))
        for name, program in ((name, step.programs[name]) for name in run)
    }
    return replace(step, programs=step.programs | larger)


@dataclass
class _Issued:
    """An instruction that uses a memory and is not known to have finished.

    Attributes:
        takes: Bytes that it takes when it is issued.
        change: By how much what is live has grown when it has finished; negative if it has shrunk.
    """

    index: int
    takes: int
    change: int


@dataclass
class _Allocated:
    """The allocations in one memory: ``live`` bytes after all that has finished, and the bytes
    ``taken`` by the instructions that may not have."""

    budget: float
    live: int = 0
    taken: int = 0
    issued: deque[_Issued] = field(default_factory=deque)

    def issue(self, index: int, takes: int, change: int) -> None:
        self.issued.append(_Issued(index, takes, change))
        self.taken += takes

    def finish(self) -> None:
        """Book that the oldest issued instruction has finished."""
        oldest = self.issued.popleft()
        self.taken -= oldest.takes
        self.live += oldest.change

    def free(self, nbytes: int) -> None:
        """Book the end of a slot that nothing reads, once those that read it have finished."""
        if self.issued:
            self.issued[-1].change -= nbytes
        else:
            self.live -= nbytes


class _Window:
    """The instructions of each memory that are issued so far and not known to have finished.

    An instruction is awaited through an array that it made, or, if those have been donated or freed
    meanwhile, through one that the earliest instruction made that needed them; all that led to it
    has then finished, too. Before the last such array goes it is awaited.
    """

    def __init__(self, step: Step, budgets: Mapping[Memory, int]):
        self._step, self._slots = step, step.slots
        first = step.standing_for
        self._rooms = {
            memory: _Allocated(min(budgets.get(one, inf) for one in first if first[one] == memory))
            for memory in dict.fromkeys(first.values())
        }
        self._maker: dict[int, int] = {}  # of slots that are alive and were made in this step
        # Those of them that hold arrays, by maker.
        self._alive: defaultdict[int, set[int]] = defaultdict(set)
        self._sources: dict[int, set[int]] = {}  # the makers of what an instruction reads
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        self._finished: set[int] = set()
        for memory, nbytes in self._bytes_of(step.persistent.values()).items():
            self._rooms[memory].live += nbytes

    def _bytes_of(self, slots: Iterable[int]) -> Counter[Memory]:
        """Return the bytes of slots per memory."""
        found = Counter[Memory]()
        for slot in slots:
            for memory in self._step.memories[self._slots[slot].place.name]:
                found[memory] += self._slots[slot].nbytes
        return found

    def issue(self, index: int, instruction: Instruction) -> tuple[int, ...]:
        """Enter an instruction; return the slots to wait for before it."""
        match instruction:
            case Feed(slot=slot):
                return self._enter(index, (), (), (slot,), self._bytes_of([slot]))
            case Copy(source=source, target=target):
                takes = dict.fromkeys(self._bytes_of([source]), 0) | self._bytes_of([target])
                return self._enter(index, (source,), (), (target,), takes)
            case Run(donated=donated, outputs=outputs):
                read = {*instruction.read}
                program = self._step.programs[instruction.program]
                memories = Counter(self._step.memories[program.place.name])
                takes = {memory: n * program.transient_bytes for memory, n in memories.items()}
                return self._enter(index, read, donated, outputs, takes)
            case Wait(slot=slot):
                if slot in self._maker:
                    self._finish(self._maker[slot])
                return ()
            case Free(slots=slots):
                for memory, nbytes in self._bytes_of(slots).items():
                    self._rooms[memory].free(nbytes)
                return tuple(self._replace(slots, (), index))

    def _enter(
        self,
        index: int,
        read: Iterable[int],
        donated: Sequence[int],
        made: Sequence[int],
        takes: Mapping[Memory, int],
    ) -> tuple[int, ...]:
        awaited = []
        change = self._bytes_of(made)
        change.subtract(self._bytes_of(donated))
        for memory, nbytes in takes.items():
            room, needed = self._rooms[memory], max(nbytes, change[memory])
            while room.issued and room.live + room.taken + needed > room.budget:
                oldest = room.issued[0].index
                if oldest not in self._finished and (witness := self._witness(oldest)) is not None:
                    awaited.append(witness)
                    self._finish(self._maker[witness])
                room.finish()
            room.issue(index, needed, change[memory])
        self._sources[index] = {self._maker[slot] for slot in read if slot in self._maker}
        for source in self._sources[index]:
            self._readers[source].append(index)
        return (*awaited, *self._replace(donated, made, index))

    def _replace(self, gone: Sequence[int], made: Sequence[int], index: int) -> list[int]:
        """End slots and begin others; return those that end and must be awaited before, because
        nothing else would tell of their makers."""
        makers = {slot: self._maker.pop(slot) for slot in gone if slot in self._maker}
        for slot, maker in makers.items():
            self._alive[maker].discard(slot)
        for slot in made:
            self._maker[slot] = index
            if self._slots[slot].nbytes:
                self._alive[index].add(slot)
        awaited = []
        for slot, maker in makers.items():
            if (
                self._slots[slot].nbytes
                and maker not in self._finished
                and self._witness(maker) is None
            ):
                awaited.append(slot)
                self._finish(maker)
        return awaited

    def _witness(self, index: int) -> int | None:
        """Return the slot whose arrays tell that an instruction has finished."""
        ring, seen = [index], {index}
        while ring:
            maker = heapq.heappop(ring)
            if self._alive[maker]:
                return min(self._alive[maker])
            new = set(self._readers[maker]) - seen
            seen |= new
            for reader in new:
                heapq.heappush(ring, reader)
        return None

    def _finish(self, index: int) -> None:
        """Record that an instruction has finished, and so has everything that it needed."""
        found = [index]
        while found:
            if (one := found.pop()) not in self._finished:
                self._finished.add(one)
                found += self._sources.get(one, ())
