"""What people call a plan of stages, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from capture.plan.choices import StageChoice
from capture.plan.stage import Stage
from capture.quantities import counted


def strategy(stages: Sequence[Stage], schedule: str, num_microbatches: int) -> str:
    """Return the name of a plan for a table: how its stages use their devices, what they recompute,
    and its micro-batches.

    Example:
        >>> choice = StageChoice(4, 1, "cheap", shard_optimizer=True, shard_params=True)
        >>> strategy([Stage(0, 2, (0, 1, 2, 3), choice)], "1f1b", 2)
        'FSDP over 4 devices, remat cheap, 2 micro-batches'
    """
    choices = [stage.choice for stage in stages]
    parts = [_all(list(map(of_devices, choices)))]
    if len(stages) > 1:
        parts = [f"{len(stages)} stages of {parts[0]}", schedule.upper()]
    parts += [
        f"remat {_all([choice.remat for choice in choices])}",
        *(f"{way} on the host" for way in sorted({w for s in stages for w in s.offload})),
        counted(num_microbatches, "micro-batch", "micro-batches"),
    ]
    return ", ".join(parts)


def of_devices(choice: StageChoice) -> str:
    """Return how a stage uses its devices.

    Example:
        >>> of_devices(StageChoice(2, 4, shard_optimizer=True))
        'data parallel 2 (ZeRO 1) x tensor parallel 4'
    """
    dp, tp = choice.data_parallel, choice.tensor_parallel
    if choice.num_devices == 1:
        return "one device"
    tensor = f"tensor parallel {tp}{' with sequence' * choice.sequence_parallel}"
    if dp == 1:
        return tensor
    zero = " (ZeRO 1)" if choice.shard_optimizer else ""
    replicas = f"FSDP over {dp}" if choice.shard_params else f"data parallel {dp}{zero}"
    return f"{replicas} x {tensor}" if tp > 1 else f"{replicas} devices"


def _all(words: Sequence[str]) -> str:
    """Return the word of all stages, or the different ones in order."""
    return " | ".join(dict.fromkeys(words))
