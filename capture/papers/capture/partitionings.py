"""The generated profiling partitionings of the paper (Description 1), corrected where it cannot
work as printed.

    line 1     [1, 1, eq(L - 2, G - 2)]                 M_i of layers 0 and 1
    lines 2-4  [n, 1, ...]                              M_a and M_i along the first base block
    line 5     [q + 1, 1, ...]                          M_a of the layer after it
    then       the first GPU is fixed to q layers and the procedure repeats on the next
    lines 14-15, last: [.., q, 1, 1], [.., q - 1, 1, 2], and its mirror image

As printed, with q = L / G layers per fixed GPU, the last two GPUs' layers are never alone; with
q = (L - 2) / (G - 2), rounded down, M_a of the last layer but one is missing. The coverage test
decides, for any (L, G) (READINGS.md, C-a to C-d).
"""

from __future__ import annotations

from dataclasses import dataclass

from capture.errors import ProfileError


def eq(num_layers: int, num_stages: int) -> list[int]:
    """Share layers out equally over stages by number, the first ones taking the remainder.

    Example:
        >>> eq(7, 3)
        [3, 2, 2]
    """
    base, extra = divmod(num_layers, num_stages)
    return [base + (i < extra) for i in range(num_stages)]


@dataclass(frozen=True)
class Coverage:
    """The layers for which a set of partitionings gives no M_i, or no M_a."""

    missing_isolated: tuple[int, ...]
    missing_added: tuple[int, ...]


def coverage(partitionings: list[list[int]], num_layers: int) -> Coverage:
    """Return which M_i and M_a a set of partitionings cannot give (derived from the runs:
    READINGS.md, C-d)."""
    ranges = stage_ranges(partitionings)
    alone = {first for first, stop in ranges if stop == first + 1}
    added = {stop - 1 for first, stop in ranges if (first, stop - 1) in ranges}
    return Coverage(
        tuple(layer for layer in range(num_layers) if layer not in alone),
        tuple(layer for layer in range(1, num_layers) if layer not in added),
    )


def stage_ranges(partitionings: list[list[int]]) -> set[tuple[int, int]]:
    """Return every stage [first, stop) that occurs."""
    found = set()
    for partitioning in partitionings:
        first = 0
        for size in partitioning:
            found.add((first, first + size))
            first += size
    return found


def pipeline_partitionings(num_layers: int, num_stages: int) -> list[list[int]]:
    """Return partitionings of L layers over G stages that isolate every layer and add every layer
    to a neighbour once.

    Args:
        num_layers: L, at least G.
        num_stages: G, at least 1.

    Returns:
        At most L + 1 partitionings for G >= 3 where the paper's scheme applies; numbers of layers
        per stage, each summing to L.

    Raises:
        ProfileError: ``profile-partitionings`` if G > L, or G < 3 and L > G: no partitioning
            isolates the inner layers.

    Source: CAPTURE III-A1, Description 1; READINGS.md, C-a to C-d.

    Example:
        >>> pipeline_partitionings(4, 4)
        [[1, 1, 1, 1]]
    """
    if num_stages > num_layers or num_stages < min(3, num_layers):
        raise ProfileError.of(
            f"num_layers={num_layers} on num_stages={num_stages}: no partitioning places every "
            "layer alone on a stage; "
            "profile with 3 to num_layers stages, or in the default mode, which measures layer "
            "windows directly.",
            "profile-partitionings",
        )
    if num_stages == num_layers:
        return [[1] * num_layers]  # the only partitioning; no layer is ever added to another
    partitionings: list[list[int]] = []
    fixed: list[int] = []
    while (free := num_stages - len(fixed)) >= 3:
        rest = num_layers - sum(fixed)
        base = (rest - 2) // (free - 2)
        for head in range(1, base + 2):
            num_singles = 2 if head >= base and free > 3 else 1
            if rest - head - num_singles >= free - 1 - num_singles:
                partitionings.append(
                    [
                        *fixed,
                        head,
                        *[1] * num_singles,
                        *eq(rest - head - num_singles, free - 1 - num_singles),
                    ]
                )
        fixed.append(base)
    partitionings += _repairs(partitionings, num_layers, num_stages)
    return [list(p) for p in dict.fromkeys(map(tuple, partitionings))]


def _repairs(partitionings: list[list[int]], num_layers: int, num_stages: int) -> list[list[int]]:
    """Return one partitioning per statistic that is still missing (lines 14 and 15, and what an
    uneven L leaves)."""
    added: list[list[int]] = []
    while True:
        gap = coverage(partitionings + added, num_layers)
        if gap.missing_isolated:
            added.append(
                _with_range(
                    gap.missing_isolated[0], gap.missing_isolated[0] + 1, num_layers, num_stages
                )
            )
        elif gap.missing_added:
            layer = gap.missing_added[0]
            pair = next(
                (
                    r
                    for r in _pairs(
                        layer, num_layers, num_stages, stage_ranges(partitionings + added)
                    )
                ),
                None,
            )
            assert pair is not None, f"no partitioning adds layer {layer}"
            added.append(_with_range(*pair, num_layers, num_stages))
        else:
            return added


def _pairs(
    layer: int, num_layers: int, num_stages: int, ranges: set[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return ranges that would give M_a of a layer, those that need one new partitioning first."""
    options = []
    for first in range(layer - 1, -1, -1):
        for wanted, other in (
            ((first, layer + 1), (first, layer)),
            ((first, layer), (first, layer + 1)),
        ):
            if (
                wanted not in ranges
                and _possible(*wanted, num_layers, num_stages)
                and (other in ranges or other[1] - other[0] == 1)
            ):
                options.append(wanted)
    return options


def _possible(first: int, stop: int, num_layers: int, num_stages: int) -> bool:
    before, after = first, num_layers - stop
    least = 1 + (before > 0) + (after > 0)
    return least <= num_stages <= 1 + before + after


def _with_range(first: int, stop: int, num_layers: int, num_stages: int) -> list[int]:
    """Return a partitioning with [first, stop) as a stage, the others as equal as they can be."""
    before, after, others = first, num_layers - stop, num_stages - 1
    left = min(
        before,
        max(
            0 if before == 0 else 1, others - after, round(others * before / max(1, before + after))
        ),
    )
    if after:
        left = min(left, others - 1)
    return [
        *(eq(before, left) if left else []),
        stop - first,
        *(eq(after, others - left) if others - left else []),
    ]
