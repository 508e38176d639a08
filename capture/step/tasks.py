"""What a lowering emits: which programs run where, in program order, with the values that they read
and make. It names no slot and copies, awaits and frees nothing: ``capture.step.passes`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capture.step.program import Instruction, Place, Program


@dataclass(eq=False, slots=True)
class Value:
    """Arrays that live and die together.

    Attributes:
        what, category, nbytes, holds: As of the slots that they are in.
        home: Where the arrays are before the step and after it; None if the step makes them.
        name: For people, and unique in a step; of values without a home it may be left out.
        source: The value of which this one is a copy, made where it is read first.
        index: Which arrays of the source; None for all.
        fed: The part of the batch and the leaves that it comes from, if it does.
        resting: The category in the memory of a host; by default ``category``.
        reported: Whether the step returns the arrays, as it does losses.
    """

    what: str
    category: str
    nbytes: int
    holds: Any
    home: Place | None = None
    name: str = ""
    source: Value | None = None
    index: int | tuple[int, ...] | None = None
    fed: tuple[int, tuple[int, ...]] | None = None
    resting: str = ""
    reported: bool = False


@dataclass(eq=False, slots=True)
class Task:
    """One execution of a program in its turn, with the values that it reads and makes.

    Attributes:
        name, program: Unique in a step; what runs, and where.
        makes: The results. A value that is taken over and made is changed in its place.
        rests: Values that go to another place behind the program and leave this one. A copy of a
            value with a home is written over that value.
        ends: Values that nothing reads behind the program, or nothing has read since a copy that
            may not have ended: they stay till then, and end there.
        at: The places of values that are not where the program is, which may be several devices.
    """

    name: str
    program: Program
    reads: tuple[tuple[Value, ...], ...]
    makes: tuple[Value, ...]
    takes: tuple[Value, ...] = ()
    rests: Sequence[tuple[Value, Place]] = ()
    ends: tuple[Value, ...] = ()
    at: Mapping[Value, Place] = field(default_factory=dict)
    label: str = ""

    def where(self, value: Value) -> Place:
        return self.at.get(value, self.program.place)


@dataclass(eq=False, slots=True)
class Send:
    """The transfer of a value, in its turn, to where it is read; one with a home is written over.

    Attributes:
        value, place: What, and where to.
        nbytes: Of the value at its source, if that has other arrays, too.
        rests: Whether it leaves where it was.
    """

    value: Value
    place: Place
    label: str
    nbytes: int = 0
    rests: bool = False


Arrival = Task | tuple[Value, ...]


class Round(NamedTuple):
    """Tasks that belong together.

    Attributes:
        tasks: In program order.
        lane: The device whose round it is; None if devices work together. A round on a host that
            has a lane runs when the next pass of that device has been issued.
        arrivals: What a pass reads from elsewhere, by groups that come together, in order; a group
            may be what all devices make for the passes of each. None between passes.
        settled: Whether everything that goes out has gone before.
    """

    tasks: Sequence[Task | Send]
    lane: int | None = None
    arrivals: Sequence[Arrival] | None = None
    settled: bool = False

    @property
    def first(self) -> Task:
        """The first task of the round that runs a program."""
        return next(task for task in self.tasks if isinstance(task, Task))


Block = list[Instruction]
"""The instructions of a task, or of a group of arrivals."""


class Blocks(NamedTuple):
    """A round as blocks of instructions."""

    of: Round
    arrivals: list[Block]
    body: list[Block]
