"""How the tensors of a model are split at a tensor-parallel degree, parameters and what passes
between stages: decided layer by layer, so that any stage agrees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec

from capture.memo import memo
from capture.model.graph import LayerGraph, Tensor, item_bytes
from capture.partition.sequence import SequenceSplit, SequenceSplits
from capture.partition.tensor_parallel import DATA_AXIS, MODEL_AXIS, Rule, parameter_specs
from capture.plan.choices import ParamSplit, StageChoice
from capture.tracing import TracedModel
from capture.tracing.slices import LayerCall, struct_of


class ModelSharding:
    """The specs of all parameters per tensor-parallel degree; a shared parameter is split as its
    first layer wants it.

    Args:
        traced: The model.
        rule: See ``parameter_specs``.
    """

    def __init__(self, traced: TracedModel, rule: Rule = "auto"):
        self._traced, self._rule = traced, rule
        self._by_key: dict[tuple[str, int], list[PartitionSpec]] = {}
        self._sequences = SequenceSplits(traced)

    @memo
    def specs(self, degree: int) -> list[PartitionSpec]:
        """Return one spec per parameter of the graph; equal layers are walked once."""
        graph = self._traced.graph
        specs: dict[int, PartitionSpec] = {}
        for layer in graph.layers:
            own = self._layer_specs(layer.layer_id, degree)
            for p, spec in zip(layer.params, own, strict=True):
                specs.setdefault(p, spec)
        return [specs.get(p, PartitionSpec()) for p in range(len(graph.params))]

    def _layer_specs(self, layer_id: int, degree: int) -> list[PartitionSpec]:
        graph = self._traced.graph
        layer, one = graph.layers[layer_id], self._traced.slice(layer_id, layer_id + 1)
        key = (layer.key, degree)
        by_name = isinstance(self._rule, Mapping)  # names differ between equal layers
        if key not in self._by_key or by_name:
            params = [struct_of(graph.params[p]) for p in one.params]
            args = [struct_of(graph.values[v]) for v in one.inputs] + [
                struct_of(graph.batch[b]) for b in one.batch
            ]
            count = len(one.inputs)
            found = parameter_specs(
                lambda p, a: one(p, a[:count], a[count:]),
                params,
                args,
                degree,
                self._rule,
                [graph.params[p].name for p in one.params],
            )
            of_param = dict(zip(one.params, found, strict=True))
            self._by_key[key] = [of_param[p] for p in layer.params]
        return self._by_key[key]

    def param_bytes(self, split: ParamSplit) -> tuple[int, ...]:
        """Return the bytes per device of every parameter of the graph."""
        return tuple(
            _shard_bytes(p, spec, split)
            for p, spec in zip(self._traced.graph.params, self.specs(split[0]), strict=True)
        )

    def layer_splits(self, degree: int) -> list[tuple[LayerCall, SequenceSplit | None]]:
        """Return every layer with the split of its sequence parallelism; None where there is
        none."""
        return self._sequences.of_layers(self.specs(degree), degree)

    def graph(self, choices: Iterable[StageChoice]) -> LayerGraph:
        """Return the model's graph with the dimensions along which stages with these choices split
        the values between them."""
        degrees = sorted({choice.value_split[1] for choice in choices} - {1})
        return replace(self._traced.graph, value_dims={d: self._value_dims(d) for d in degrees})

    @memo
    def _value_dims(self, degree: int) -> tuple[int | None, ...]:
        return self._sequences.value_dims(self.specs(degree), degree)


def over_replicas(spec: PartitionSpec, shape: Sequence[int], data_parallel: int) -> PartitionSpec:
    """Return a spec that also splits the largest dimension that is whole and even over the
    replicas; the spec itself where there is none."""
    if data_parallel == 1:
        return spec
    axes = [*spec, *[None] * (len(shape) - len(spec))]
    free = [
        d
        for d, axis in enumerate(axes)
        if axis is None and shape[d] % data_parallel == 0 and shape[d]
    ]
    if free:
        axes[max(free, key=lambda d: shape[d])] = DATA_AXIS
    return PartitionSpec(*axes)


def _shard_bytes(tensor: Tensor, spec: PartitionSpec, split: ParamSplit) -> int:
    degrees = {MODEL_AXIS: split[0], DATA_AXIS: split[1]}
    spec = over_replicas(spec, tensor.shape, split[1])
    shape = [
        size // degrees[spec[d]] if d < len(spec) and spec[d] else size
        for d, size in enumerate(tensor.shape)
    ]
    return math.prod(shape) * item_bytes(tensor.dtype)
