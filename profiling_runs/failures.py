"""The failures of measurements, in words: once per cause, however many stages it befell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from capture.measured.profile import StageConfig, layers_in_words
from capture.plan.choices import StageChoice


def causes(failures: Mapping[StageConfig, str]) -> tuple[str, ...]:
    """Return each cause of failure behind the stages that it befell, that of most stages first.

    Example:
        >>> firsts, degrees = (6, 7), (1, 2, 4)
        >>> failed = [StageConfig(a, 8, StageChoice(dp), 16) for a in firsts for dp in degrees]
        >>> causes(dict.fromkeys(failed, "no memory"))
        ('6 stages (all with layer 7; data parallel 1, 2, 4, tensor parallel 1; micro-batch size
        16): no memory',)
        >>> causes({StageConfig(3, 5, StageChoice(2, remat="full"), 16): "no memory"})
        ('layers 3 to 4, data parallel 2, tensor parallel 1, remat full, micro-batch size 16: no
        memory',)
    """
    befell: dict[str, list[StageConfig]] = {}
    for config, cause in sorted(failures.items()):
        befell.setdefault(cause, []).append(config)
    return tuple(
        f"{_stages(configs)}: {cause}"
        for cause, configs in sorted(befell.items(), key=lambda item: -len(item[1]))
    )


def _stages(configs: Sequence[StageConfig]) -> str:
    if len(configs) == 1:
        return str(configs[0])
    first, stop = max(config.first for config in configs), min(config.stop for config in configs)
    layers = layers_in_words(
        min(config.first for config in configs), max(config.stop for config in configs)
    )
    if first < stop:
        layers = f"all with {layers_in_words(first, stop)}"
    return (
        f"{len(configs)} stages ({layers}; "
        f"{ways((config.choice, config.microbatch_size) for config in configs)})"
    )


def ways(found: Iterable[tuple[StageChoice, int]]) -> str:
    """Return choices and micro-batch sizes in words, all together.

    Example:
        >>> ways([(StageChoice(1, 2), 8), (StageChoice(2, 2, "full"), 4)])
        'data parallel 1, 2, tensor parallel 2, remat full, none; micro-batch sizes 4, 8'
    """
    pairs = set(found)
    choices, sizes = [choice for choice, _ in pairs], _several(size for _, size in pairs)
    said = [
        f"data parallel {_several(c.data_parallel for c in choices)}",
        f"tensor parallel {_several(c.tensor_parallel for c in choices)}",
    ]
    if {choice.remat for choice in choices} != {"none"}:
        said.append(f"remat {_several(choice.remat for choice in choices)}")
    return (
        f"{', '.join(said)}; micro-batch size{'s' * (len({size for _, size in pairs}) > 1)} {sizes}"
    )


def _several(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))
