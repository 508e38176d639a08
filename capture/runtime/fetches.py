"""What to fetch so that an array lies under another sharding: pure, and the same answer in every
process, so that who sends a piece and who receives it agree without a word.

How the pieces travel is another question: copies inside a process (``reshard.py``), or a transport
between processes (``hosts/``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

import jax
from jax.sharding import Sharding

#: First and last-plus-one index in every dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fetch:
    """A piece for one device.

    Attributes:
        piece: Which of the cuts of the source's shard; None takes the shard whole.
    """

    source: jax.Device
    piece: int | None
    target: jax.Device
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fetches:
    """All pieces of one move.

    Attributes:
        cuts: Per source device whose shard is cut, the boxes, from its shard's first element.
        fetches: Target by target.
        joins: In the same order, per target the indices of the first elements of its pieces.
    """

    cuts: dict[jax.Device, tuple[Box, ...]]
    fetches: tuple[Fetch, ...]
    joins: tuple[tuple[jax.Device, tuple[tuple[int, ...], ...]], ...]


@lru_cache(maxsize=4096)
def plan_fetches(shape: tuple[int, ...], src: Sharding, dst: Sharding) -> Fetches:
    """Plan the pieces of a move. A destination shard overlaps a grid of source shards. Each overlap
    is taken from a device that holds it: the destination itself if it does, else one of its
    process, else the replica with the least to send so far, the first of equal ones.

    Args:
        src, dst: Shardings before and after, on devices of any process.
    """
    cuts: defaultdict[jax.Device, list[Box]] = defaultdict(list)
    fetches: list[Fetch] = []
    joins = []
    sent: Counter[jax.Device] = Counter()
    holders: defaultdict[Box, list[jax.Device]] = defaultdict(list)
    for device, box in boxes(src, shape).items():
        holders[box].append(device)
    for target, wanted in boxes(dst, shape).items():
        starts = []
        for box, devices in sorted(holders.items()):
            part = _overlap(box, wanted)
            if part is None:
                continue
            source = _nearest(devices, target, sent)
            sent[source] += math.prod(stop - start for start, stop in part)
            piece = None
            if part != box:
                local = tuple(
                    (a - origin, b - origin) for (a, b), (origin, _) in zip(part, box, strict=True)
                )
                if local not in cuts[source]:
                    cuts[source].append(local)
                piece = cuts[source].index(local)
            fetches.append(Fetch(source, piece, target, tuple(b - a for a, b in part)))
            starts.append(tuple(start for start, _ in part))
        joins.append((target, tuple(starts)))
    return Fetches(
        {device: tuple(found) for device, found in cuts.items()}, tuple(fetches), tuple(joins)
    )


def boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """Return the part that each device holds, in the order of the sharding's devices."""
    indices = sharding.devices_indices_map(shape)
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in indices.items()
        if index is not None
    }


def _nearest(
    devices: list[jax.Device], target: jax.Device, sent: Counter[jax.Device]
) -> jax.Device:
    return min(
        devices,
        key=lambda device: (
            device != target,
            device.process_index != target.process_index,
            sent[device],
            device.id,
        ),
    )


def _overlap(box: Box, wanted: Box) -> Box | None:
    """Return the part of ``wanted`` that ``box`` holds; an empty dimension is held by everyone."""
    part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True))
    touching = all(
        start < stop or c == d for (start, stop), (c, d) in zip(part, wanted, strict=True)
    )
    return part if touching else None
