"""The choices of a stage that the paper has, and both kinds of parallelism together."""

from __future__ import annotations

from capture.plan.choices import Remat, StageChoice


def paper_choices(
    max_devices: int, *, remat: Remat = "none", shard_optimizer: bool = False
) -> dict[int, tuple[StageChoice, ...]]:
    """Return data *or* tensor parallelism in powers of two: 2 log2(k) + 1 choices up to k devices.

    Source: CAPTURE III-C; its count 2 log2(k) - 1 leaves out two choices (READINGS.md, C-j, C-k,
    C-r).

    Example:
        >>> sum(len(choices) for choices in paper_choices(4).values())
        5
    """
    degrees = [1 << bit for bit in range(max_devices.bit_length())]
    return {
        d: tuple(
            StageChoice(dp, tp, remat, shard_optimizer)
            for dp, tp in ([(d, 1), (1, d)] if d > 1 else [(1, 1)])
        )
        for d in degrees
    }


def hybrid_choices(
    max_devices: int, *, remat: Remat = "none", shard_optimizer: bool = False
) -> dict[int, tuple[StageChoice, ...]]:
    """Return data *and* tensor parallelism, in powers of two: log2(d) + 1 choices on d devices.

    Example:
        >>> [(c.data_parallel, c.tensor_parallel) for c in hybrid_choices(4)[4]]
        [(4, 1), (2, 2), (1, 4)]
    """
    return {
        1 << bit: tuple(
            StageChoice(1 << bit - tp, 1 << tp, remat, shard_optimizer) for tp in range(bit + 1)
        )
        for bit in range(max_devices.bit_length())
    }
