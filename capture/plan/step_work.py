"""The work of a step: examples, tokens and model FLOPs; with its seconds, simulated or measured,
the tokens per second and the model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from capture.machine.rates import Rates
from capture.model.graph import LayerGraph

#: Model FLOPs of a training step per FLOPs of its forward pass, whatever is computed again.
_PASSES = 3


class CastTo(Protocol):
    """The cast through which all layers read a parameter."""

    @property
    def dtype(self) -> str: ...


#: The casts of a model's parameters, None for a parameter without one; None if nobody knows them.
Casts = Sequence[CastTo | None] | None


@dataclass(frozen=True)
class StepWork:
    """The examples, tokens and model FLOPs of a step.

    Attributes:
        examples: Examples of all models.
        tokens: Tokens of these: elements per example of the largest batch leaf of integers, such as
            the ids of a sequence; 0 where there are none.
        flops: Model FLOPs: three times those of the forward pass.
        least_seconds: Seconds of the model FLOPs at the devices' specified rate; None if unknown.
    """

    examples: int
    tokens: int
    flops: float
    least_seconds: float | None

    @classmethod
    def of(
        cls,
        models: Sequence[tuple[LayerGraph, Casts, int]],
        num_devices: int,
        rates: Rates | None,
    ) -> StepWork:
        """Count the work of a step.

        Args:
            models: The layers of each model, the casts of its parameters, and its examples in a
                step.
            num_devices: Devices of the step.
            rates: Of the devices; None where they are not known.
        """
        flops = [
            _PASSES * sum(layer.flops for layer in graph.layers) * examples / graph.microbatch_size
            for graph, _, examples in models
        ]
        dtypes = [dtype for graph, casts, _ in models if (dtype := _computed_in(graph, casts))]
        seconds = 0.0
        if rates is not None and len(dtypes) == len(flops):
            reached = [rates.rate_of(dtype, "default").value for dtype in dtypes]
            seconds = sum(each / rate for each, rate in zip(flops, reached, strict=True))
        return cls(
            sum(examples for *_, examples in models),
            sum(_tokens_per_example(graph) * examples for graph, _, examples in models),
            sum(flops),
            seconds / num_devices if seconds else None,
        )

    def tokens_per_second(self, seconds: float) -> float | None:
        """Return the tokens per second of a step that takes so long; None without tokens."""
        return self.tokens / seconds if self.tokens else None

    def utilization(self, seconds: float) -> float | None:
        """Return the model FLOPs utilization of a step that takes so long; None if unknown."""
        return None if self.least_seconds is None else self.least_seconds / seconds


def _computed_in(graph: LayerGraph, casts: Casts) -> str | None:
    """Return the dtype of the largest value between the layers, which is taken for that of the
    products; of a single layer, the dtype in which it reads its largest parameter, None if nobody
    knows its casts."""
    values = [value for value in graph.values if value.differentiable]
    if graph.num_layers == 1 and graph.params:
        if casts is None:
            return None
        pairs = zip(graph.params, casts, strict=True)
        values = [replace(param, dtype=cast.dtype) if cast else param for param, cast in pairs]
    return max(values, key=lambda value: value.size).dtype


def _tokens_per_example(graph: LayerGraph) -> int:
    """Return the elements per example of the largest batch leaf of integers; 0 where each example
    has one, as a label is."""
    sizes = [
        leaf.size // graph.microbatch_size
        for leaf in graph.batch
        if leaf.batch_dim is not None and leaf.dtype.startswith(("int", "uint"))
    ]
    most = max(sizes, default=0)
    return most if most > 1 else 0
