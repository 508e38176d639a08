"""An array of models on one device: the ways of training it that are weighed, and what each needs.

A way is a partition, an order, and what becomes of the feature maps. It is judged as what will run:
its steps are built, replayed and simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

from capture.machine.cluster import Machine
from capture.plan.array import ArrayPrediction, Decision, Order
from capture.step.ledger import Ledger
from capture.step.multiplexed import (
    HOST,
    ArraySteps,
    build_array,
    lifetimes,
    peak_of,
    recomputed_bytes,
    swapped_bytes,
)
from capture.step.program import Run
from capture.step.sub_array import Lifetimes, Programs, SubArray, movable, recomputable
from capture.step.timeline import LinkTimes, Seconds, StepTimeline, simulate_step

Choice = Literal["retain", "swap", "recompute"]


class Profiled(Programs, Protocol):
    """The programs of sub-arrays of any size."""

    def sub_array(self, num_models: int) -> SubArray: ...


@dataclass(frozen=True)
class Way:
    """Which models are one program, and in which order.

    Attributes:
        name: For people: ``multiplexed``.
        partition: Sub-arrays.
        order: Of their passes.
    """

    name: str
    partition: tuple[tuple[int, ...], ...]
    order: Order


def ways(num_models: int) -> list[Way]:
    """Two halves multiplexed, two halves in turn, all fused as one, and none fused; an odd model is
    in the first half.

    Source: Purandare et al. 2023 (mu-TWO), 3.2, which weighs more partitions, and multiplexes in
    all of them (READINGS.md, M-y).
    """

    def halves(parts: int) -> tuple[tuple[int, ...], ...]:
        ends = [-(-num_models * n // parts) for n in range(parts + 1)]
        return tuple(tuple(range(first, stop)) for first, stop in pairwise(ends))

    found = [Way("all fused", halves(1), "in turn")]
    if num_models > 1:
        found = [Way("multiplexed", halves(2), "multiplexed"), *found]
        found.append(Way("none fused", halves(num_models), "in turn"))
    if num_models > 2:
        found.insert(1, Way("in turn", halves(2), "in turn"))
    return found


#: Of sub-arrays of a size, a layer's feature maps: those that its forward pass alone makes and
#: reads, and those that others read.
Unit = tuple[int, int, bool]


@dataclass(frozen=True)
class Evaluation:
    """A way with its choices, replayed and simulated.

    Attributes:
        arrays: Decided.
        steps: Its instructions.
        ledgers: Of them.
        timeline: Of the body.
        excess_bytes: Summed over all instructions, what they need above the limit; 0 if it is kept.
    """

    arrays: tuple[Lifetimes, ...]
    steps: ArraySteps
    ledgers: tuple[Ledger, ...]
    timeline: StepTimeline
    excess_bytes: int

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> int:
        return peak_of(self.ledgers, 0)[0]

    @property
    def host_peak_bytes(self) -> int:
        return peak_of(self.ledgers, HOST)[0]

    def fits(self, limit_bytes: int, host_bytes: int | None) -> bool:
        return self.peak_bytes <= limit_bytes and (
            host_bytes is None or self.host_peak_bytes <= host_bytes
        )

    @property
    def compute_seconds(self) -> float:
        """Of all programs, one after the other."""
        return self._seconds(("forward", "backward", "recompute"))

    @property
    def recompute_fraction(self) -> float:
        """Of the seconds that programs take, those that make things again."""
        return self._seconds(("recompute",)) / self.compute_seconds if self.compute_seconds else 0.0

    def _seconds(self, kinds: Sequence[str]) -> float:
        body = self.steps.body
        return sum(
            body.seconds[each.program]
            for each in body.step.instructions
            if isinstance(each, Run) and body.step.programs[each.program].kind in kinds
        )

    def prediction(self) -> ArrayPrediction:
        """What the plan says of it."""
        peak, _, parts = peak_of(self.ledgers, 0)
        maps = sum(
            life.sub_array.bundles[number].nbytes
            for life in self.arrays
            for number in movable(life.sub_array)
        )
        swapped, again = swapped_bytes(self.steps), recomputed_bytes(self.arrays)
        return ArrayPrediction(
            peak, parts, self.host_peak_bytes, self.seconds, maps - swapped - again, swapped, again
        )


@dataclass(frozen=True)
class ArrayProblem:
    """What is asked of a search.

    Attributes:
        profiled: The models.
        num_models: How many.
        machine: One device.
        limit_bytes: Of its memory.
        host_bytes: What may be swapped at once; None if nobody knows.
    """

    profiled: Profiled
    num_models: int
    machine: Machine
    limit_bytes: int
    host_bytes: int | None = None
    _known: dict[tuple[Way, tuple[tuple[Unit, Choice], ...]], Evaluation] = field(
        default_factory=dict, compare=False
    )

    @property
    def num_evaluated(self) -> int:
        return len(self._known)

    @cached_property
    def _links(self) -> LinkTimes:
        return LinkTimes(self.machine.cluster, self.machine.rates)

    def units(self, way: Way) -> list[Unit]:
        """Whose feature maps are decided together: sub-arrays of one size alike."""
        found: dict[Unit, None] = {}
        for size in dict.fromkeys(len(group) for group in way.partition):
            sub_array = self.profiled.sub_array(size)
            own = set(recomputable(sub_array))
            for number in movable(sub_array):
                layer = sub_array.bundles[number].writer
                assert layer is not None, "feature maps are made by a segment"
                found[size, layer, number in own] = None
        return list(found)

    def choices(self, unit: Unit) -> tuple[Choice, ...]:
        """What may become of it."""
        return ("retain", "swap", "recompute") if unit[2] else ("retain", "swap")

    def decisions(
        self, way: Way, chosen: Mapping[Unit, Choice]
    ) -> tuple[tuple[Decision, ...], ...]:
        """As a plan has them."""
        return tuple(tuple(self._decided(len(group), chosen)) for group in way.partition)

    def _decided(self, size: int, chosen: Mapping[Unit, Choice]) -> Iterator[Decision]:
        sub_array = self.profiled.sub_array(size)
        own = set(recomputable(sub_array))
        for number in movable(sub_array):
            bundle = sub_array.bundles[number]
            assert bundle.writer is not None, "feature maps are made by a segment"
            choice = chosen.get((size, bundle.writer, number in own), "retain")
            if choice != "retain":
                yield Decision(bundle.name, choice)

    def evaluate(self, way: Way, chosen: Mapping[Unit, Choice]) -> Evaluation:
        """A way with choices; what is not chosen is retained."""
        key = way, tuple(sorted((u, c) for u, c in chosen.items() if c != "retain"))
        if key not in self._known:
            self._known[key] = self._evaluate(way, chosen)
        return self._known[key]

    def _evaluate(self, way: Way, chosen: Mapping[Unit, Choice]) -> Evaluation:
        arrays = tuple(
            lifetimes(self.profiled.sub_array(len(group)), decided)
            for group, decided in zip(way.partition, self.decisions(way, chosen), strict=True)
        )
        steps = build_array(arrays, way.order, self.profiled, self.limit_bytes)
        ledgers = steps.replay(record_timeline=True)
        host = self.machine.rates.host
        seconds = Seconds(steps.body.seconds, self._links.seconds, host.duplex)
        timeline = simulate_step(steps.body.step, seconds)
        excess = sum(
            max(0, nbytes - self.limit_bytes)
            for ledger in ledgers
            for _, memory, nbytes in ledger.timeline
            if memory == 0
        )
        return Evaluation(arrays, steps, ledgers, timeline, excess)
