"""Random valid plans, for judging predictions: uniform over stage count, then cuts, degrees and
kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from capture.errors import PlanError
from capture.machine.cluster import Cluster
from capture.plan.choices import StageChoice
from capture.plan.orders import ScheduleKind
from capture.plan.space import StageSpace
from capture.plan.stage import Stage


def count_fillings(degrees: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return counts[p][s]: the ordered sequences of s stage sizes that fill exactly the devices
    from p on; exact integers.

    Args:
        degrees: Per device p, the sizes that a stage starting there may have.

    Example:
        >>> count_fillings([[1, 2], [1]])[0]  # one stage of two devices, or two of one
        [0, 1, 1]
    """
    num_devices = len(degrees)
    counts = [[0] * (num_devices + 1) for _ in range(num_devices + 1)]
    counts[num_devices][0] = 1
    for p in reversed(range(num_devices)):
        for d in degrees[p]:
            for num_stages in range(num_devices - p - d + 1):
                counts[p][num_stages + 1] += counts[p + d][num_stages]
    return counts


def random_plans(
    cluster: Cluster,
    num_layers: int,
    choices: Mapping[int, Sequence[StageChoice]],
    seed: int | np.random.Generator,
    space: StageSpace = StageSpace(),
) -> Iterator[tuple[Stage, ...]]:
    """Yield valid plans without end; take as many as needed with ``itertools.islice``.

    Each plan draws, uniformly: the number of stages among those that some plan has; an ordered
    filling of the devices with that many stages; the layer boundaries; a choice per stage. Drawing
    over all plans instead would give almost only the largest stage counts.

    Args:
        cluster: Devices to fill, all of them.
        num_layers: Layers to place, all of them.
        choices: Per number of devices, the ways a stage may use them.
        seed: A seed, or a generator that is advanced.
        space: Submeshes of stages.

    Raises:
        PlanError: ``sampling-empty`` if there is no valid plan, when the first is asked for.

    Source: CAPTURE IV-B evaluates 500 random plans and does not say how they were drawn; the order
    of draws is ours.

    Example:
        >>> choices = {d: (StageChoice(d, 1), StageChoice(1, d)) for d in (1, 2, 4)}
        >>> plan = next(random_plans(Cluster((4,)), 8, choices, seed=0))
        >>> plan[0].first, plan[-1].stop, sum(stage.choice.num_devices for stage in plan)
        (0, 8, 4)
    """
    degrees = [[d for d in here if choices.get(d)] for here in space.degrees(cluster)]
    fillings = count_fillings(degrees)
    stage_counts = [s for s, count in enumerate(fillings[0]) if count and 0 < s <= num_layers]
    if not stage_counts:
        raise PlanError.of(
            f"No plan places num_layers={num_layers} on all {cluster.num_devices} devices of "
            f"cluster {cluster} with stages on "
            f"{sorted(choices)} devices; use more layers, other degrees or another cluster.",
            "sampling-empty",
        )
    generator = np.random.default_rng(seed)
    while True:
        num_stages = int(generator.choice(stage_counts))
        plan, device = [], 0
        for stage_id, (first, stop) in enumerate(_cuts(num_layers, num_stages, generator)):
            # Counts may exceed 64 bits, so only their ratios become floats.
            counts = [fillings[device + d][num_stages - stage_id - 1] for d in degrees[device]]
            shares = [count / sum(counts) for count in counts]
            d = int(generator.choice(degrees[device], p=shares))
            choice = choices[d][int(generator.integers(len(choices[d])))]
            plan.append(Stage.at(device, first, stop, choice))
            device += d
        yield tuple(plan)


def random_table_plans(
    cluster: Cluster,
    num_layers: int,
    choices: Mapping[int, Sequence[StageChoice]],
    kind: ScheduleKind,
    seed: int | np.random.Generator,
    space: StageSpace = StageSpace(),
) -> Iterator[tuple[Stage, ...]]:
    """Yield valid plans without end, as ``random_plans``, for a schedule that is not plain: groups
    of equally many devices.

    Each plan draws, uniformly: the number of devices of a group; the layer boundaries; the degrees
    of each group, which its stages share.

    Raises:
        PlanError: ``sampling-empty`` if there is no valid plan, when the first is asked for.
    """
    degrees, num_devices = space.degrees(cluster), cluster.num_devices
    sizes = [
        d
        for d in sorted(choices)
        if choices[d]
        and num_devices % d == 0
        and num_devices // d * kind.stages_per_group <= num_layers
        and all(d in degrees[p] for p in range(0, num_devices, d))
    ]
    if not sizes:
        raise PlanError.of(
            f"No plan of groups of {kind.stages_per_group} stages places num_layers={num_layers} "
            f"on all {num_devices} devices of cluster {cluster}; use more layers, other degrees or "
            "another cluster.",
            "sampling-empty",
        )
    generator = np.random.default_rng(seed)
    while True:
        d = int(generator.choice(sizes))
        placement = kind.placement(num_devices // d)
        cuts = _cuts(num_layers, len(placement), generator)
        every = [int(generator.integers(len(choices[d]))) for _ in range(num_devices // d)]
        yield tuple(
            Stage.at(group * d, first, stop, choices[d][every[group]])
            for group, (first, stop) in zip(placement, cuts, strict=True)
        )


def _cuts(
    num_layers: int, num_stages: int, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """Draw the layers of stages, from the first to before the last."""
    borders = np.sort(generator.choice(num_layers - 1, num_stages - 1, replace=False)) + 1
    return list(pairwise([0, *borders.tolist(), num_layers]))
