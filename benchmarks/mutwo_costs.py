"""Arrays of models as data: the graph of a sub-array of every size, with the bytes and seconds of
what it runs. Searches are posed with it where there is no model, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from capture.step.sub_array import Bundle, Call, ProgramFacts, StepSegment


@dataclass(frozen=True)
class Graph:
    """The joint step of some models (``SubArray``), and what its programs cost.

    Attributes:
        num_models: That are fused.
        num_layers: L; segments 0 to L - 1 are the forward pass, the others the backward pass.
        bundles: In any order; the last one is that of the losses.
        seconds: By segment.
        temporaries_bytes: By segment, beside what it makes.
        made_from: By bundle that may be recomputed, the bundles from which it is made: what its
            layer read, or others that the layer made.
        made_seconds: By such a bundle, from these.
        num_leaves: Of a batch.
        task: Name of what the models train, where an array has several such tasks.
    """

    num_models: int
    num_layers: int
    bundles: tuple[Bundle, ...]
    seconds: tuple[float, ...]
    temporaries_bytes: tuple[int, ...]
    made_from: Mapping[int, tuple[int, ...]] = field(default_factory=dict, hash=False)
    made_seconds: Mapping[int, float] = field(default_factory=dict, hash=False)
    num_leaves: int = 1
    task: str = ""
    _known: dict[Call, ProgramFacts] = field(default_factory=dict, compare=False, repr=False)

    @property
    def loss(self) -> int:
        return len(self.bundles) - 1

    @cached_property
    def segments(self) -> tuple[StepSegment, ...]:
        """What they read and write, as the bundles say."""
        reads: list[list[int]] = [[] for _ in range(2 * self.num_layers)]
        writes: list[list[int]] = [[] for _ in range(2 * self.num_layers)]
        for number, bundle in enumerate(self.bundles):
            for reader in bundle.readers:
                reads[reader].append(number)
            for made in (bundle.writer, bundle.updater):
                if made is not None:
                    writes[made].append(number)
        pairs = zip(reads, writes, strict=True)
        return tuple(StepSegment(tuple(read), tuple(written)) for read, written in pairs)

    def sources(self, targets: Sequence[int], available: frozenset[int]) -> tuple[int, ...]:
        """See ``SubArray``."""
        needed = self._needed(targets, available)
        return tuple(sorted({s for n in needed for s in self.made_from[n]} - needed))

    def _needed(self, targets: Iterable[int], available: frozenset[int]) -> set[int]:
        """Bundles that are made again: targets, and what of their layer is not there."""
        needed, pending = set[int](), list(targets)
        while pending:
            number = pending.pop()
            if number not in needed:
                needed.add(number)
                pending += [
                    n for n in self.made_from[number] if n not in available and n in self.made_from
                ]
        return needed

    def facts(self, call: Call) -> ProgramFacts:
        """What a program needs: room for what it makes beside what it takes over."""
        if call not in self._known:
            made = sum(self.bundles[n].nbytes for n in call.outputs if n not in call.donated)
            if call.kind == "recompute":
                needed = self._needed(call.outputs, frozenset(call.inputs))
                made = sum(self.bundles[n].nbytes for n in needed)
                seconds = sum(self.made_seconds[n] for n in sorted(needed))
            else:
                made += self.temporaries_bytes[call.segment]
                seconds = self.seconds[call.segment]
            name = f"{call.kind} {call.segment} of {self.num_models} {len(self._known)}{self.task}"
            self._known[call] = ProgramFacts(name, made, seconds)
        return self._known[call]


@dataclass(frozen=True)
class ArrayCosts:
    """Sub-arrays of the sizes that are known (``Profiled``).

    Attributes:
        graphs: By the number of models that are fused.
    """

    graphs: Mapping[int, Graph]

    def sub_array(self, num_models: int) -> Graph:
        return self.graphs[num_models]

    def facts(self, sub_array: Graph, call: Call) -> ProgramFacts:
        return sub_array.facts(call)
