"""What the builder of a step of packs remembers: the passes that are to come, what they read, and
what every device has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from capture.plan.task_graph import Span, Task
from capture.step.holds import Params
from capture.step.pack_sizes import PartOf
from capture.step.program import Instruction, Place


class PackCall(NamedTuple):
    """What a program of a step of packs computes.

    Attributes:
        kind: Of its pass, as sizes are asked for, or ``summarize``, ``widen``, ``cast``.
        span: Its layers.
        size: Examples of the micro-batch; 0 of what has none.
        device: On which it runs; 0 of all.
        pieces: Examples of each piece in which its rows come: it puts them together.
    """

    kind: str
    span: Span
    size: int = 0
    device: int = 0
    pieces: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For people."""
        rows = "+".join(map(str, self.pieces)) if len(self.pieces) > 1 else ""
        first, stop = self.span
        return f"{self.kind} {first} {stop} {self.size} {self.device} {rows}".rstrip()


@dataclass
class Unit:
    """A pass: one micro-batch of a task, or an update.

    Attributes:
        task: Whose.
        i: Its micro-batch among those of the task.
        batch: Pieces of what it reads of the batch, once they are issued.
        inputs: Pieces of X, likewise: slots, and where on the host they came from.
        gradients: Likewise of dY.
    """

    task: Task
    i: int
    batch: list[int] | None = None
    inputs: list[Came] | None = None
    gradients: list[Came] | None = None

    @property
    def at(self) -> int:
        """Its micro-batch among all of the pack."""
        return self.task.start + self.i

    @property
    def size(self) -> int:
        return self.task.sizes[self.i]


class Came(NamedTuple):
    """What a pass reads.

    Attributes:
        slot: On the device.
        source: On the host, where it was copied from there.
        last: Whether nobody reads that again.
    """

    slot: int
    source: int | None = None
    last: bool = True


class Part(NamedTuple):
    """What devices get of the weights of a pack at once.

    Attributes:
        what: ``whole`` for parameters as they are, ``casts``, or ``shared`` for one of another
            pack.
        of: The run of layers, or the parameter.
        holds: These.
        nbytes: Whole.
        sources: Slots of the host that have it, one of each share.
        arrays: Which of theirs; None for all.
    """

    what: PartOf
    of: Span | int
    holds: Params
    nbytes: int
    sources: tuple[int, ...]
    arrays: int | tuple[int, ...] | None = None


@dataclass
class Late:
    """What is done a pass later: copies to wait for, slots to free, and what may follow then."""

    waits: Sequence[int]
    frees: Sequence[int]
    then: Callable[[], Iterable[Instruction]] = tuple


@dataclass
class Rank:
    """What a device has.

    Attributes:
        place, host: Its memory, and its place in that of the host.
        units: Passes that are to come, the next one last.
        weights: Of a task, by id, their slots, and what is in each.
        summed: Gradients of the backward task that is under way; of what it owns, then of each
            parameter that is shared.
        late: Of the pass before.
    """

    place: Place
    host: Place
    units: list[Unit]
    weights: dict[int, dict[int, Part]] = field(default_factory=dict)
    summed: tuple[int, ...] = ()
    late: list[Late] = field(default_factory=list)
