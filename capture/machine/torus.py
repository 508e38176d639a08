"""Collectives on slices of a torus of chips, axis by axis.

A chip has a link to each of its two neighbours on every axis; W are the bytes per second of a link
in one direction, a is the latency of a hop. An axis that wraps is a ring, whose directions both
carry bytes; one that does not is a line, and what reaches its end has one link to come in by. On an
axis with c devices of a group, h hops apart, h groups share every link. Seconds of V bytes, which
are those of all of the axis:

    all-gather, reduce-scatter   ring, halves    (c - 1) (h a + V h / (2 c W))
                                 ring, both ways  floor(c / 2) (h a + V h / (c W))
                                 line             (c - 1) (h a + V h / (c W))
    all-to-all                   ring    floor(c / 2) h a + V floor(c^2 / 4) h / (2 c W)
                                 line    (c - 1) h a + V floor(c^2 / 4) h / (c W)

A group that is a box of k axes goes through its axes one after the other (axis by axis), with more
bytes on each; or it cuts the array into k parts, and part j begins with axis j, so that all axes
are in use together (all axes at once). Other groups make one ring of all their devices, over the
links on their shortest ways. All-reduces are a reduce-scatter and an all-gather. Devices of one
chip stand on an axis of their own, with links as between chips, which are slower.

Not modelled: twisted tori, whose bandwidth is higher where an axis is twice as long as another.

Source: J. Austin et al., How to Scale Your Model, parts 2 and 3 (rings in both directions, one axis
after the other or all at once, a quarter for all-to-alls); Chan, Heimlich, Purkayastha, van de
Geijn 2007 (collectives on meshes).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations
from typing import NamedTuple

from capture.machine.rates import AlphaBeta, TorusLinks

Coordinates = tuple[int, ...]


class GroupAxis(NamedTuple):
    """How a group stands on one axis of a torus.

    Attributes:
        size: Devices c of the group on the axis.
        apart: Hops h between two of them.
        is_ring: Whether the last of them is as far from the first.
    """

    size: int
    apart: int
    is_ring: bool

    def gather(self, hop: AlphaBeta, both_ways: bool) -> AlphaBeta:
        """Return the cost of an all-gather along the axis.

        Args:
            hop: A byte over one link: its latency, and 1 / W.
            both_ways: In rings, whole parts in both directions, which has half of the steps,
                instead of a half of each part in each direction.
        """
        steps, parts = self.size - 1, self.size
        if self.is_ring and both_ways:
            steps = self.size // 2
        elif self.is_ring:
            parts = 2 * self.size
        return hop.times(steps * self.apart, steps * self.apart / parts)

    def exchange(self, hop: AlphaBeta) -> AlphaBeta:
        """Return the cost of an all-to-all along the axis, of V bytes on each device."""
        steps = self.size // 2 if self.is_ring else self.size - 1
        crossing = self.size**2 // 4 / self.size / (2 if self.is_ring else 1)
        return hop.times(steps * self.apart, crossing * self.apart)


@dataclass(frozen=True)
class Torus:
    """One slice of chips. Devices count host by host, hosts and the chips of a host along the first
    axis first, as JAX counts them.

    Attributes:
        links: Of the target.
        shape: Chips on each axis.

    Example:
        >>> from capture.machine.target import Target
        >>> torus = Torus(Target.load("v5p").rates.fabric.torus, (4, 4, 4))
        >>> torus.coordinates[4]  # the first device of the second host
        (0, 2, 0, 0)
        >>> [name for name in torus.costs("all-gather", 16, 1) if "halves" in name]
        ['axis by axis, halves', 'all axes at once, halves']
    """

    links: TorusLinks
    shape: tuple[int, ...]

    @property
    def devices_per_host(self) -> int:
        """The devices of a host."""
        return self.links.devices_per_chip * math.prod(self.links.host)

    @property
    def num_devices(self) -> int:
        """The devices of the slice."""
        return self.links.devices_per_chip * math.prod(self.shape)

    @cached_property
    def coordinates(self) -> tuple[Coordinates, ...]:
        """The place of each device: its number on its chip, then its chip on each axis."""
        host = (self.links.devices_per_chip, *self.links.host)
        hosts = tuple(n // of for n, of in zip(self._lengths, host, strict=True))
        within = tuple(_counted(host))
        return tuple(
            tuple(at * n + inner for at, n, inner in zip(place, host, part, strict=True))
            for place in _counted(hosts)
            for part in within
        )

    @property
    def _lengths(self) -> tuple[int, ...]:
        return (self.links.devices_per_chip, *self.shape)

    @cached_property
    def wraps(self) -> tuple[bool, ...]:
        """The axes that are rings, true or false for each; that of a chip's own devices is none."""
        closed = [length % self.links.wraps_at == 0 for length in self.shape]
        if self.links.wraps_together:
            closed = [all(closed)] * len(closed)
        return (False, *closed)

    @property
    def hop(self) -> AlphaBeta:
        """The cost of a message to a neighbour."""
        return AlphaBeta(self.links.latency_seconds.value, 1 / self.links.bytes_per_second.value)

    def is_block(self, first: int, num_devices: int) -> bool:
        """Return whether so many devices from ``first`` on are a box of the torus."""
        return _box(self.coordinates[first : first + num_devices]) is not None

    def costs(self, kind: str, size: int, stride: int) -> dict[str, AlphaBeta]:
        """Return what a collective takes by each algorithm, by name, as ``Links.costs`` does."""
        if kind == "collective-permute":
            pairs = [(d, d + stride) for d in range(self.num_devices - stride)]
            return {"one message": self.message(pairs)}
        axes, twice = self._axes(size, stride), 2 if kind == "all-reduce" else 1
        if axes is None:
            around = self._around(kind, size, stride)
            return {"one ring of all": around.times(twice, twice)}
        if kind == "all-to-all":
            each = [axis.exchange(self.hop) for axis in axes]
            together = AlphaBeta(len(axes) * max(c[0] for c in each), max(c[1] for c in each))
            return {"axis by axis": sum(each, AlphaBeta(0, 0)), "all axes at once": together}
        found = {}
        for way, both_ways in (("halves", False), ("both ways", True)):
            each = [axis.gather(self.hop, both_ways) for axis in axes]
            sizes, order = [axis.size for axis in axes], range(len(axes))
            phases = [_in_phases(each, sizes, [one]) for one in permutations(order)]
            rotated = [[*order[i:], *order[:i]] for i in order]
            found[f"axis by axis, {way}"] = min(phases, key=lambda of: of.seconds_per_byte)
            found[f"all axes at once, {way}"] = _in_phases(each, sizes, rotated)
        found = {name: cost.times(twice, twice) for name, cost in found.items()}
        return found

    def message(self, pairs: Sequence[tuple[int, int]]) -> AlphaBeta:
        """Return the cost of messages that pairs of devices send at the same time, each by the
        shortest way, along one axis after the other."""
        load, hops = Counter[tuple[Coordinates, int, int]](), 0
        for source, target in pairs:
            route = list(self._route(self.coordinates[source], self.coordinates[target]))
            hops = max(hops, len(route))
            load.update(route)
        return self.hop.times(hops, max(load.values(), default=0))

    def _route(
        self, at: Coordinates, target: Coordinates
    ) -> Iterator[tuple[Coordinates, int, int]]:
        """Yield the links of a way: from where, along which axis, in which direction."""
        for axis, length in enumerate(self._lengths):
            distance, step = target[axis] - at[axis], 1
            if self.wraps[axis]:
                distance %= length
                if distance > length - distance:
                    distance, step = length - distance, -1
            elif distance < 0:
                distance, step = -distance, -1
            for _ in range(distance):
                yield at, axis, step
                moved = at[axis] + step
                at = (*at[:axis], moved % length if self.wraps[axis] else moved, *at[axis + 1 :])

    def _groups(self, size: int, stride: int) -> list[list[int]]:
        """Return all groups of so many devices a stride apart."""
        block = size * stride
        return [
            list(range(start + offset, start + block, stride))
            for start in range(0, self.num_devices - block + 1, block)
            for offset in range(stride)
        ]

    def _axes(self, size: int, stride: int) -> list[GroupAxis] | None:
        """Return how groups stand on the axes where they have several devices; None if they are no
        boxes, or not all alike."""
        found = {_box([self.coordinates[d] for d in group]) for group in self._groups(size, stride)}
        if len(found) != 1 or (box := found.pop()) is None:
            return None
        return [
            GroupAxis(count, apart, wraps and count * apart == length)
            for (count, apart), wraps, length in zip(box, self.wraps, self._lengths, strict=True)
            if count > 1
        ]

    def _around(self, kind: str, size: int, stride: int) -> AlphaBeta:
        """Return the cost of an all-gather, reduce-scatter or all-to-all round a ring of all
        devices, as their order has it."""
        groups = self._groups(size, stride) or [list(range(0, size * stride, stride))]
        step = self.message([(g[i - 1], g[i]) for g in groups for i in range(size)])
        sent = (size - 1) / 2 if kind == "all-to-all" else (size - 1) / size
        return step.times(size - 1, sent)


def _counted(lengths: Sequence[int]) -> Iterator[Coordinates]:
    """Yield all places of a grid, along its first axis first."""
    for number in range(math.prod(lengths)):
        place = []
        for length in lengths:
            number, at = divmod(number, length)
            place.append(at)
        yield tuple(place)


def _box(members: Sequence[Coordinates]) -> tuple[tuple[int, int], ...] | None:
    """Return per axis how many members of a box stand on it, and how far apart; None if they are no
    box, or not at equal distances."""
    sides = [sorted(set(values)) for values in zip(*members, strict=True)]
    if math.prod(map(len, sides)) != len(members) or len(set(members)) < len(members):
        return None
    apart = [{b - a for a, b in pairwise(side)} or {1} for side in sides]
    if any(len(distances) > 1 for distances in apart):
        return None
    return tuple((len(side), min(gap)) for side, gap in zip(sides, apart, strict=True))


def _in_phases(
    each: Sequence[AlphaBeta], sizes: Sequence[int], orders: Sequence[Sequence[int]]
) -> AlphaBeta:
    """Return the cost of an all-gather of one part of the array for each order of axes; in every
    phase no two parts have the same axis, and they wait for each other before they change axes."""
    held, total = [1 / len(orders) / math.prod(sizes)] * len(orders), AlphaBeta(0, 0)
    for axes in zip(*orders, strict=True):
        held = [part * sizes[axis] for part, axis in zip(held, axes, strict=True)]
        sent = (part * each[axis].seconds_per_byte for part, axis in zip(held, axes, strict=True))
        total += AlphaBeta(max(each[axis].fixed_seconds for axis in axes), max(sent))
    return total
