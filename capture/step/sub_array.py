"""What a builder must know of a sub-array: several models that are one program, cut into segments,
and the arrays that pass between them.

The joint step of q models with L layers has 2 L segments: forward of layer 0 to L - 1, then of
layer L - 1 to 0 the backward pass with the update of what the layer owns. Arrays of the same
lifetime are one *bundle*, which is one slot of the step.

Source: Purandare et al. 2023 (mu-TWO), 3.1 and 4.1; the attributes of a bundle are those of its
Table A (rank, last_fw_uses, first_bw_uses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

CallKind = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class Bundle:
    """Arrays that come to life and die together.

    Attributes:
        name: For people and plans: ``layer 3 maps 0``.
        nbytes: Of all of them.
        writer: Segment that makes them; None for state and what is fed.
        readers: Segments that read them, ascending.
        updater: Segment that replaces them by their new values; None for all but state.
        feed: Leaves of the batch, where they are fed.
        shared: Whether all sub-arrays have the same one, which is there once: parameters that
            nothing updates, or what all read of a batch. It has the same name in all of them.
    """

    name: str
    category: str
    nbytes: int
    writer: int | None
    readers: tuple[int, ...]
    updater: int | None = None
    feed: tuple[int, ...] = ()
    shared: bool = False

    @property
    def is_state(self) -> bool:
        """Whether it outlives the step: parameters and optimizer state."""
        return self.writer is None and not self.feed


@dataclass(frozen=True)
class StepSegment:
    """A part of the joint step.

    Attributes:
        reads: Bundles, by number.
        writes: Bundles that it makes, or replaces by their new values.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A program of a sub-array: a segment, or the slice of one that makes some bundles again.

    Attributes:
        kind: ``"recompute"`` for such a slice.
        segment: From 0.
        inputs, donated, outputs: Bundles; those donated are among the inputs.
    """

    kind: CallKind
    segment: int
    inputs: tuple[int, ...]
    donated: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def read(self) -> frozenset[int]:
        """The inputs."""
        return frozenset(self.inputs)

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.segment, self.inputs, self.donated, self.outputs))

    def __hash__(self) -> int:
        return self._hash  # asked for every program of every step that is weighed


class HeldBundle(NamedTuple):
    """The bundle that a slot of an array's step holds: the sub-array, and its number there."""

    array: int
    bundle: int


class SegmentCall(NamedTuple):
    """A program of an array's step: a call of the first sub-array that makes it; seconds."""

    array: int
    call: Call
    seconds: float


class SubArray(Protocol):
    """The joint step of the models of a sub-array."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_leaves(self) -> int:
        """The number of leaves of its batch; those of sub-array a follow those of a - 1."""
        ...

    @property
    def bundles(self) -> Sequence[Bundle]: ...

    @property
    def segments(self) -> Sequence[StepSegment]: ...

    @property
    def loss(self) -> int:
        """The bundle of the losses."""
        ...

    def sources(self, targets: Sequence[int], available: frozenset[int]) -> tuple[int, ...]:
        """Return what the slice of a forward segment reads to make bundles of it again, from
        bundles that are there."""
        ...


@dataclass(frozen=True)
class ProgramFacts:
    """The name, temporaries and seconds of a compiled program.

    Attributes:
        name: Equal for equal programs: one executable.
        transient_bytes: Temporaries + outputs - aliased inputs.
        seconds: Of one execution on the target; 0 where nobody asks.
    """

    name: str
    transient_bytes: int
    seconds: float = 0.0


class Programs(Protocol):
    """The compiler of sub-arrays' programs, which compiles equal ones once."""

    def facts(self, sub_array: SubArray, call: Call) -> ProgramFacts: ...


@dataclass(frozen=True)
class Issued:
    """The programs, prefetches, frees and swap-outs of one segment, under decided bundles.

    Attributes:
        soon: Swapped bundles that may be fetched before it runs, with the segments that use them,
            in their order.
        slices: Programs that make bundles again, which run before it.
        gone: Bundles that end with it, and that no program takes over.
        outs: Bundles that are swapped out after it.
    """

    soon: tuple[tuple[int, int], ...]
    slices: tuple[Call, ...]
    call: Call
    gone: tuple[int, ...]
    outs: tuple[int, ...]


class Uses:
    """The segments that use a sub-array's bundles if all are retained, whatever is decided.

    Attributes:
        last_forward: By bundle, the last segment of the forward pass that makes or reads it.
        dying: Per segment, the bundles that are used last at it, ascending.
    """

    def __init__(self, sub_array: SubArray):
        self.sub_array, layers = sub_array, sub_array.num_layers
        bundles, loss = sub_array.bundles, sub_array.loss
        self.nbytes = [bundle.nbytes for bundle in bundles]
        self.state = frozenset(n for n, bundle in enumerate(bundles) if bundle.is_state)
        self.shared = frozenset(n for n, bundle in enumerate(bundles) if bundle.shared)
        self.dying: list[list[int]] = [[] for _ in sub_array.segments]
        self.last_forward: list[int] = []
        #: What a segment makes that the backward pass reads.
        self._made: list[list[int]] = [[] for _ in sub_array.segments]
        for number, bundle in enumerate(bundles):
            writer, uses = bundle.writer, bundle.readers
            self.last_forward.append(
                max([use for use in uses if use < layers], default=-1 if writer is None else writer)
            )
            if uses and not (bundle.is_state or bundle.shared):
                self.dying[uses[-1]].append(number)
            if writer is not None and uses and uses[-1] >= layers:
                self._made[writer].append(number)
        self.issued = [
            self.issued_at(segment, self.dying[segment], loss)
            for segment in range(len(sub_array.segments))
        ]
        self._sources: dict[tuple[tuple[int, ...], frozenset[int]], tuple[int, ...]] = {}

    def issued_at(self, segment: int, dying: Sequence[int], loss: int) -> Issued:
        """Return what is issued for a segment at which some bundles are used for the last time."""
        sub_array, bundles = self.sub_array, self.sub_array.bundles
        work, ends = sub_array.segments[segment], set(dying)
        donated = tuple(n for n in work.reads if n in ends or n in work.writes)
        idle = [n for n in work.writes if not (bundles[n].readers or bundles[n].is_state)]
        gone = tuple(n for n in (*dying, *idle) if n not in donated and n != loss)
        kind: CallKind = "backward" if segment >= sub_array.num_layers else "forward"
        return Issued((), (), Call(kind, segment, work.reads, donated, work.writes), gone, ())

    def sources(self, writer: int, targets: tuple[int, ...], recomputed: frozenset[int]):
        """Return the bundles that are read to make some bundles of a segment again: what it read,
        and what else of it need not be made again."""
        made = [number for number in self._made[writer] if number not in recomputed]
        kept = frozenset((*self.sub_array.segments[writer].reads, *made))
        key = targets, kept
        if key not in self._sources:
            self._sources[key] = self.sub_array.sources(targets, kept)
        return self._sources[key]


@dataclass(frozen=True)
class Lifetimes:
    """The segments that use a sub-array's bundles, once swaps and recomputations are decided.

    Attributes:
        where: They are used if nothing is.
        swapped: Bundle -> how many segments before its first use backward it is fetched.
        behind: Swapped bundle -> after how many segments of all sub-arrays its copy to the host is
            waited for, where something could come early in its place.
    """

    where: Uses
    swapped: dict[int, int]
    recomputed: frozenset[int]
    behind: dict[int, int] = field(default_factory=dict)

    @property
    def sub_array(self) -> SubArray:
        return self.where.sub_array

    @cached_property
    def slices(self) -> dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
        """The recomputations before each backward segment: (forward segment, bundles, sources)."""
        bundles, found = self.sub_array.bundles, dict[tuple[int, int], list[int]]()
        for number in sorted(self.recomputed):
            writer = bundles[number].writer
            assert writer is not None, f"{bundles[number].name} is made by no segment"
            found.setdefault((bundles[number].readers[0], writer), []).append(number)
        slices: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        for (reader, writer), targets in found.items():
            sources = self.where.sources(writer, tuple(targets), self.recomputed)
            slices.setdefault(reader, []).append((writer, tuple(targets), sources))
        return slices

    @cached_property
    def _more(self) -> dict[int, tuple[int, ...]]:
        """The uses of each bundle that slices read too: its readers and those slices' segments."""
        bundles, more = self.sub_array.bundles, dict[int, set[int]]()
        for reader, slices in self.slices.items():
            for _, _, sources in slices:
                for source in sources:
                    if reader not in bundles[source].readers:
                        more.setdefault(source, set(bundles[source].readers)).add(reader)
        return {number: tuple(sorted(uses)) for number, uses in more.items()}

    def uses(self, number: int) -> tuple[int, ...]:
        """Return the segments at which a bundle has to be there, ascending."""
        return self._more.get(number, self.sub_array.bundles[number].readers)

    def last_forward(self, number: int) -> int:
        """Return the last segment of the forward pass that makes or reads a bundle."""
        return self.where.last_forward[number]

    def first_backward(self, number: int) -> int:
        """Return the first backward segment that uses a bundle; one behind the last if none."""
        layers = self.sub_array.num_layers
        return next((use for use in self.uses(number) if use >= layers), 2 * layers)

    @cached_property
    def issued(self) -> list[Issued]:
        """The programs, prefetches, frees and swap-outs of each segment."""
        sub_array, layers = self.sub_array, self.sub_array.num_layers
        bundles, found = sub_array.bundles, list(self.where.issued)
        dying: dict[int, set[int]] = {}
        for number, uses in self._more.items():
            last = bundles[number].readers[-1]
            if uses[-1] != last and number not in self.where.state | self.where.shared:
                dying.setdefault(last, set(self.where.dying[last])).remove(number)
                dying.setdefault(uses[-1], set(self.where.dying[uses[-1]])).add(number)
        for segment, ends in dying.items():
            found[segment] = self.where.issued_at(segment, sorted(ends), sub_array.loss)
        idle: dict[int, list[int]] = {}
        for number in sorted(self.recomputed):
            idle.setdefault(bundles[number].writer or 0, []).append(number)
        soon: dict[int, list[tuple[int, int]]] = {}
        outs: dict[int, list[int]] = {}
        for number in sorted(self.swapped):
            use = self.first_backward(number)
            outs.setdefault(self.last_forward(number), []).append(number)
            for segment in range(max(layers, use - self.swapped[number]), use):
                soon.setdefault(segment, []).append((use, number))
        slices = {
            segment: tuple(
                Call("recompute", writer, sources, (), targets) for writer, targets, sources in own
            )
            for segment, own in self.slices.items()
        }
        for segment in {*idle, *soon, *outs, *slices}:
            plain = found[segment]
            found[segment] = Issued(
                tuple(sorted(soon.get(segment, ()))),
                slices.get(segment, ()),
                plain.call,
                (*plain.gone, *idle.get(segment, ())),
                tuple(outs.get(segment, ())),
            )
        return found

    @cached_property
    def between(self) -> tuple[int, ...]:
        """The bundles that are there, on the device or its host, between the passes."""
        layers, found = self.sub_array.num_layers, []
        for number, bundle in enumerate(self.sub_array.bundles):
            uses = self.uses(number)
            if uses and uses[-1] >= layers and not (bundle.is_state or bundle.shared):
                made = uses[0] if bundle.writer is None else bundle.writer
                if made < layers and number not in self.recomputed:
                    found.append(number)
        return tuple(found)


def movable(sub_array: SubArray) -> list[int]:
    """Return bundles that may be swapped: made by the forward and read by the backward pass."""
    layers = sub_array.num_layers
    return [
        number
        for number, bundle in enumerate(sub_array.bundles)
        if bundle.writer is not None and bundle.writer < layers
        if bundle.readers and bundle.readers[-1] >= layers
    ]


def recomputable(sub_array: SubArray) -> list[int]:
    """Return the movable bundles that no other forward segment reads: the slice that makes them
    again begins at what their layer read."""
    layers = sub_array.num_layers
    return [
        number for number in movable(sub_array) if sub_array.bundles[number].readers[0] >= layers
    ]
