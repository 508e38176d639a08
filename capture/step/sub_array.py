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
from typing import Literal, Protocol

CallKind = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class Bundle:
    """Arrays that come to life and die together.

    Attributes:
        name: For people and plans: ``layer 3 maps 0``.
        category: As in the ledger.
        nbytes: Of all of them.
        writer: Segment that makes them; None for state and what is fed.
        readers: Segments that read them, ascending.
        updater: Segment that replaces them by their new values; None for all but state.
        feed: Leaves of the batch, where they are fed.
    """

    name: str
    category: str
    nbytes: int
    writer: int | None
    readers: tuple[int, ...]
    updater: int | None = None
    feed: tuple[int, ...] = ()

    @property
    def is_state(self) -> bool:
        """Whether it outlives the step: parameters and optimizer state."""
        return self.writer is None and not self.feed


@dataclass(frozen=True)
class Segment:
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


class SubArray(Protocol):
    """The joint step of the models of a sub-array."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_leaves(self) -> int:
        """Of a batch; those of sub-array a follow those of a - 1."""
        ...

    @property
    def bundles(self) -> Sequence[Bundle]: ...

    @property
    def segments(self) -> Sequence[Segment]: ...

    @property
    def loss(self) -> int:
        """The bundle of the losses."""
        ...

    def sources(self, targets: Sequence[int], available: frozenset[int]) -> tuple[int, ...]:
        """What the slice of a forward segment reads that makes bundles of it again, from bundles
        that are there."""
        ...


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of a compiled program.

    Attributes:
        name: Equal for equal programs: one executable.
        transient_bytes: Temporaries + outputs - aliased inputs.
        seconds: Of one execution on the target; 0 where nobody asks.
    """

    name: str
    transient_bytes: int
    seconds: float = 0.0


class Programs(Protocol):
    """Compiles the programs of sub-arrays, equal ones once."""

    def facts(self, sub_array: SubArray, call: Call) -> ProgramFacts: ...


@dataclass(frozen=True)
class Issued:
    """What is issued for a segment, once it is decided what becomes of feature maps.

    Attributes:
        soon: Swapped bundles that may be fetched before it runs, with the segments that use them,
            in their order.
        slices: Programs that make bundles again, which run before it.
        call: Its program.
        gone: Bundles that end with it, and that no program takes over.
        outs: Bundles that are swapped out after it.
    """

    soon: tuple[tuple[int, int], ...]
    slices: tuple[Call, ...]
    call: Call
    gone: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True)
class Lifetimes:
    """When the bundles of a sub-array are used, once it is decided which are swapped or made again.

    Attributes:
        sub_array: The segments.
        swapped: Bundle -> how many segments before its first use backward it is fetched.
        recomputed: Bundles.
        behind: Swapped bundle -> after how many segments of all sub-arrays its copy to the host is
            waited for, where something could come early in its place.
    """

    sub_array: SubArray
    swapped: dict[int, int]
    recomputed: frozenset[int]
    behind: dict[int, int] = field(default_factory=dict)

    @cached_property
    def slices(self) -> dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
        """Backward segment -> what is made again before it: (forward segment, bundles, sources)."""
        bundles, found = self.sub_array.bundles, dict[tuple[int, int], list[int]]()
        for number in sorted(self.recomputed):
            writer = bundles[number].writer
            assert writer is not None, f"{bundles[number].name} is made by no segment"
            found.setdefault((bundles[number].readers[0], writer), []).append(number)
        slices: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        for (reader, writer), targets in found.items():
            sources = self.sub_array.sources(tuple(targets), self._kept(writer))
            slices.setdefault(reader, []).append((writer, tuple(targets), sources))
        return slices

    def _kept(self, writer: int) -> frozenset[int]:
        """Bundles that a segment read or made and that need not be made again."""
        read = set(self.sub_array.segments[writer].reads)
        made = {
            number
            for number, bundle in enumerate(self.sub_array.bundles)
            if bundle.writer == writer and number not in self.recomputed
            if any(reader >= self.sub_array.num_layers for reader in bundle.readers)
        }
        return frozenset(read | made)

    @cached_property
    def uses(self) -> list[tuple[int, ...]]:
        """Per bundle, the segments at which it has to be there, ascending."""
        uses = [set(bundle.readers) for bundle in self.sub_array.bundles]
        for reader, slices in self.slices.items():
            for _, _, sources in slices:
                for source in sources:
                    uses[source].add(reader)
        return [tuple(sorted(found)) for found in uses]

    def last_forward(self, number: int) -> int:
        """Last segment of the forward pass that makes or reads a bundle."""
        bundle, layers = self.sub_array.bundles[number], self.sub_array.num_layers
        writer = -1 if bundle.writer is None else bundle.writer
        return max([use for use in self.uses[number] if use < layers], default=writer)

    def first_backward(self, number: int) -> int:
        """First segment of the backward pass at which it is used; one behind the last if none."""
        layers = self.sub_array.num_layers
        return min([use for use in self.uses[number] if use >= layers], default=2 * layers)

    @cached_property
    def issued(self) -> list[Issued]:
        """Per segment."""
        sub_array, layers = self.sub_array, self.sub_array.num_layers
        bundles, loss = sub_array.bundles, sub_array.loss
        dying: list[list[int]] = [[] for _ in sub_array.segments]
        for number, uses in enumerate(self.uses):
            if uses and not bundles[number].is_state:
                dying[uses[-1]].append(number)
        soon: list[list[tuple[int, int]]] = [[] for _ in sub_array.segments]
        outs: list[list[int]] = [[] for _ in sub_array.segments]
        for number in sorted(self.swapped):
            use = self.first_backward(number)
            outs[self.last_forward(number)].append(number)
            for segment in range(max(layers, use - self.swapped[number]), use):
                soon[segment].append((use, number))
        found = []
        for segment, work in enumerate(sub_array.segments):
            ends = set(dying[segment])
            donated = tuple(n for n in work.reads if n in ends or n in work.writes)
            idle = [
                n
                for n in work.writes
                if n in self.recomputed or not (self.uses[n] or bundles[n].is_state)
            ]
            gone = [n for n in (*dying[segment], *idle) if n not in donated and n != loss]
            kind: CallKind = "backward" if segment >= layers else "forward"
            slices = tuple(
                Call("recompute", writer, sources, (), targets)
                for writer, targets, sources in self.slices.get(segment, ())
            )
            call = Call(kind, segment, work.reads, donated, work.writes)
            found.append(
                Issued(
                    tuple(sorted(soon[segment])), slices, call, tuple(gone), tuple(outs[segment])
                )
            )
        return found

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Bundles that are there, on the device or its host, between the passes."""
        layers = self.sub_array.num_layers
        return tuple(
            number
            for number, (bundle, uses) in enumerate(
                zip(self.sub_array.bundles, self.uses, strict=True)
            )
            if not bundle.is_state and number not in self.recomputed
            if uses and uses[-1] >= layers
            if (uses[0] if bundle.writer is None else bundle.writer) < layers
        )


def movable(sub_array: SubArray) -> list[int]:
    """Bundles that may be swapped: made by the forward pass and read by the backward pass."""
    layers = sub_array.num_layers
    return [
        number
        for number, bundle in enumerate(sub_array.bundles)
        if bundle.writer is not None and bundle.writer < layers
        if bundle.readers and bundle.readers[-1] >= layers
    ]


def recomputable(sub_array: SubArray) -> list[int]:
    """Those of them that no other forward segment reads: the slice that makes them again begins at
    what their layer read."""
    layers = sub_array.num_layers
    return [
        number for number in movable(sub_array) if sub_array.bundles[number].readers[0] >= layers
    ]
