"""The data of our own search as graphs for mu-TWO's algorithms, and their answers as decisions of a
plan: so both answer the same question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from capture.machine.rates import HostLink
from capture.papers.mutwo.graph import GraphValue, Operation, Slice, TrainingGraph
from capture.papers.mutwo.schedule import PairSchedule
from capture.plan.array import Decision
from capture.step.sub_array import Call, Programs, SubArray, Uses, movable, recomputable


@dataclass(frozen=True)
class Posed:
    """A sub-array as a graph for mu-TWO's algorithms.

    Attributes:
        sub_array: Of it.
        graph: Its segments are the operations. What one layer's passes alone use of its feature
            maps is one value, and so is what it hands on.
        bundles: By value.
        static_bytes: Parameters, optimizer state, batches and losses of its own.
        shared_bytes: Parameters that all sub-arrays share.
    """

    sub_array: SubArray
    graph: TrainingGraph
    bundles: tuple[tuple[int, ...], ...]
    static_bytes: int
    shared_bytes: int = 0

    def decisions(self, schedule: PairSchedule) -> Iterator[Decision]:
        """Yield what a schedule of this backward pass decides of bundles; a copy in may begin as
        many backward segments early as its prompt is before its access."""
        now = schedule.now
        for v, numbers in enumerate(self.bundles):
            for number in numbers:
                name = self.sub_array.bundles[number].name
                if v in now.swaps:
                    prompt, access = now.swaps[v], schedule.access(v)
                    ahead = max(int(prompt.at_forward), access - prompt.rank)
                    yield Decision(name, "swap", ahead)
                elif v in now.recomputed:
                    yield Decision(name, "recompute")


def pose(
    sub_array: SubArray, programs: Programs, host: HostLink, name: str, by_bundle: bool = False
) -> Posed:
    """Return a sub-array as a graph.

    Args:
        sub_array: Its segments and bundles.
        programs: Their seconds and bytes.
        host: The link over which bundles are swapped.
        name: Of the graph.
        by_bundle: Every bundle of feature maps is a value by itself.
    """
    bundles = sub_array.bundles
    static = [
        n
        for n, bundle in enumerate(bundles)
        if bundle.is_state or bundle.feed or n == sub_array.loss
    ]
    moved, again = movable(sub_array), frozenset(recomputable(sub_array))
    groups: dict[tuple[int, ...], list[int]] = {}
    for n, bundle in enumerate(bundles):
        if n in moved and not by_bundle:
            assert bundle.writer is not None, "feature maps are made by a segment"
            groups.setdefault((bundle.writer, n in again), []).append(n)
        elif n not in static:
            groups[-1, n, 0] = [n]
    value_of = {n: v for v, numbers in enumerate(groups.values()) for n in numbers}

    def value(numbers: list[int]) -> GraphValue:
        sizes = [bundles[n].nbytes for n in numbers]
        return GraphValue(
            bundles[numbers[0]].name,
            sum(sizes),
            sum(map(host.to_device.seconds, sizes)),
            sum(map(host.to_host.seconds, sizes)),
        )

    numbers = tuple(map(tuple, groups.values()))
    slices = {}
    for v, own in enumerate(numbers):
        if own[0] in again:
            found = _slice(sub_array, programs, own, value_of)
            if found is not None:
                slices[v] = found
    # As they are when everything is retained: they take over what ends in them.
    calls = [issued.call for issued in Uses(sub_array).issued]
    operations = tuple(_operation(sub_array, programs, call, value_of) for call in calls)
    values = tuple(map(value, groups.values()))
    graph = TrainingGraph(name, values, operations, sub_array.num_layers, slices)
    alone, shared = (
        sum(bundles[n].nbytes for n in static if bundles[n].shared == is_shared)
        for is_shared in (False, True)
    )
    return Posed(sub_array, graph, numbers, alone, shared)


def resident_bytes(posed: Sequence[Posed]) -> int:
    """Return the bytes that all sub-arrays hold in any case: what they share counts once."""
    return posed[0].shared_bytes + sum(one.static_bytes for one in posed)


def _operation(
    sub_array: SubArray, programs: Programs, call: Call, value_of: dict[int, int]
) -> Operation:
    bundles, facts = sub_array.bundles, programs.facts(sub_array, call)
    # The bytes of a program count what it writes, less what it takes over.
    made = sum(bundles[n].nbytes for n in call.outputs if n in value_of)
    made -= sum(bundles[n].nbytes for n in call.donated if n in value_of)
    return Operation(
        f"{call.kind} {call.segment}",
        _values(call.inputs, value_of),
        _values(call.outputs, value_of),
        facts.seconds,
        max(0, facts.transient_bytes - made),
        tuple(
            v
            for v in _values(call.donated, value_of)
            if _ends(sub_array, v, call.segment, value_of)
        ),
    )


def _values(numbers, value_of: dict[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value_of[n] for n in numbers if n in value_of))


def _ends(sub_array: SubArray, v: int, segment: int, value_of: dict[int, int]) -> bool:
    """Return whether no bundle of a value is read later."""
    own = [n for n, value in value_of.items() if value == v]
    return max(sub_array.bundles[n].readers[-1] for n in own) == segment


def _slice(
    sub_array: SubArray, programs: Programs, targets: tuple[int, ...], value_of: dict[int, int]
) -> Slice | None:
    """Return the slice that makes bundles of a layer again, from what it read and what else is kept
    of it; None if that is not there in the backward pass."""
    bundles, layers = sub_array.bundles, sub_array.num_layers
    writer = bundles[targets[0]].writer
    assert writer is not None, "feature maps are made by a segment"
    made = {
        n
        for n, bundle in enumerate(bundles)
        if bundle.writer == writer and n not in targets and bundle.readers
        if bundle.readers[-1] >= layers
    }
    available = frozenset(made | set(sub_array.segments[writer].reads))
    sources = sub_array.sources(targets, available)
    moved, needed = set(movable(sub_array)), bundles[targets[0]].readers[0]
    if any(
        n in value_of and not (n in moved and bundles[n].readers[-1] >= needed) for n in sources
    ):
        return None
    facts = programs.facts(sub_array, Call("recompute", writer, sources, (), targets))
    return Slice(frozenset(_values(sources, value_of)), facts.seconds, facts.transient_bytes)
