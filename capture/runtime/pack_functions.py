"""Layers of a traced loss at a micro-batch size as functions of slots: what the programs of a pack
compute (``capture.runtime.packs``).

Where a slot has the cast of a parameter, the layers' own cast of it does nothing; where several of
them read it, each from the parameter made of it again, so that the gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from capture.model.graph import LayerGraph, Tensor
from capture.plan.task_graph import Span
from capture.tracing import TracedModel
from capture.tracing.slices import struct_of

Arrays = Sequence[Any]


def differentiable(graph: LayerGraph, layer: int) -> list[int]:
    """Return the values that enter a layer and have gradients."""
    return [v for v in graph.crossing(layer) if graph.values[v].differentiable]


class PackFunctions:
    """Layers at a micro-batch size, as functions of slots.

    Args:
        traced: The loss at that size.
        span: The layers.
        where: By parameter, which of the first arguments has it, or its cast, and where.
        pieces: Examples of each piece of what passes between packs.
        leaves: Of the batch, those of each slot of it.
    """

    def __init__(
        self,
        traced: TracedModel,
        span: Span,
        where: Mapping[int, tuple[int, int]],
        pieces: tuple[int, ...],
        leaves: tuple[int, ...],
    ):
        graph = self._graph = traced.graph
        #: Of which casts the gradients are as good as those of the parameters.
        self.once = frozenset(p for p, cast in enumerate(traced.casts) if cast and cast.once)
        self._layers, self.where, self._pieces = traced.slice(*span), where, pieces
        self._leaves = leaves
        self._entering, self._leaving = graph.crossing(span[0]), graph.crossing(span[1])
        self._is_last = span[1] == graph.num_layers

    @property
    def key(self) -> Any:
        """A key of what the pack computes of whole parameters, and which arguments it reads."""
        layers, graph = self._layers, self._graph
        ids = {v: i for i, v in enumerate((*self._entering, *layers.outputs))}
        passed = [graph.values[v] for v in (*self._entering, *self._leaving)]
        flows = [(bool(value.differentiable), value.batch_dim) for value in passed]
        return (
            layers.key,
            self._pieces,
            tuple(self.where[p] for p in layers.params),
            tuple(ids[v] for v in layers.inputs),
            tuple(ids[v] for v in self._leaving),
            tuple(self._leaves.index(b) for b in layers.batch),
            tuple(flows),
            tuple(graph.batch[b].batch_dim for b in self._leaves),
        )

    def forward(
        self, weights: Sequence[Arrays], inputs: Sequence[Arrays], batch: Sequence[Arrays]
    ) -> list[list[Any]]:
        """Return pieces of what leaves the pack; of the last one, the loss."""
        params = self._params(weights, self._layers.params)
        entering = self._joined(self._entering, inputs)
        made = dict(zip(self._layers.outputs, self._run(params, entering, batch), strict=True))
        if self._is_last:
            return [[made[self._layers.outputs[-1]]]]
        return self._split(
            {v: made[v] if v in made else jnp.copy(entering[v]) for v in self._leaving}
        )

    def backward(
        self,
        weights: Sequence[Arrays],
        inputs: Sequence[Arrays],
        batch: Sequence[Arrays],
        cotangents: Sequence[Arrays],
        *,
        share: float,
    ) -> tuple[list[list[Any]], dict[int, Any]]:
        """Return pieces of the gradient of what enters, and the loss of the last pack; and the
        gradient of every parameter, or of its only cast, in the order of the layers."""
        graph, layers = self._graph, self._layers
        params = self._params(weights, self.once)
        entering = self._joined(self._entering, inputs)
        flowing = [v for v in self._entering if graph.values[v].differentiable]
        outputs = [v for v in layers.outputs if graph.values[v].differentiable]

        def apply(params: Arrays, values: Mapping[int, Any]) -> list[Any]:
            made = self._run(params, {**entering, **values}, batch)
            by_value = dict(zip(layers.outputs, made, strict=True))
            return [by_value[v] for v in outputs]

        made, vjp = jax.vjp(apply, params, {v: entering[v] for v in flowing})
        leaving = [v for v in self._leaving if graph.values[v].differentiable]
        arrived = {} if self._is_last else self._joined(leaving, cotangents)
        seeds = [
            jnp.full_like(array, share) if self._is_last else arrived[v]
            for v, array in zip(outputs, made, strict=True)
        ]
        of_params, of_values = vjp(seeds)
        for v in flowing:
            if v in arrived:
                of_values[v] = of_values[v] + arrived[v]
        results = self._split(of_values) if self._entering else []
        return [*results, *([made] if self._is_last else ())], dict(
            zip(layers.params, of_params, strict=True)
        )

    def _params(self, weights: Sequence[Arrays], as_casts: Collection[int]) -> list[Any]:
        """Return the layers' parameters; casts that came are cast back, except ``as_casts``."""
        found = []
        for param in self._layers.params:
            i, j = self.where[param]
            given, own = weights[i][j], struct_of(self._graph.params[param]).dtype
            as_it_is = param in as_casts or given.dtype == own
            found.append(given if as_it_is else given.astype(own))
        return found

    def _run(self, params: Arrays, values: Mapping[int, Any], batch: Sequence[Arrays]) -> list[Any]:
        tensors = [self._graph.batch[b] for b in self._leaves]
        leaves = dict(zip(self._leaves, self._together(tensors, batch), strict=True))
        layers = self._layers
        return layers(params, [values[v] for v in layers.inputs], [leaves[b] for b in layers.batch])

    def _joined(self, values: Sequence[int], pieces: Sequence[Arrays]) -> dict[int, Any]:
        tensors, count = [self._graph.values[v] for v in values], len(self._pieces)
        if len(pieces) > count:  # what was kept at several layers, those before first
            pieces = [
                [array for slot in pieces[piece::count] for array in slot] for piece in range(count)
            ]
        return dict(zip(values, self._together(tensors, pieces), strict=True))

    @staticmethod
    def _together(tensors: Sequence[Tensor], pieces: Sequence[Arrays]) -> list[Any]:
        return [
            pieces[0][i]
            if len(pieces) == 1 or tensor.batch_dim is None
            else jnp.concatenate([piece[i] for piece in pieces], tensor.batch_dim)
            for i, tensor in enumerate(tensors)
        ]

    def _split(self, values: Mapping[int, Any]) -> list[list[Any]]:
        if len(self._pieces) == 1:
            return [list(values.values())]
        found = []
        for start, stop in pairwise(accumulate(self._pieces, initial=0)):
            cut = []
            for v, array in values.items():
                tensor = self._graph.values[v]
                dim = tensor.batch_dim
                assert dim is not None, f"{tensor.name} was found to have no rows"
                rows = tensor.shape[dim] // self._graph.microbatch_size
                cut.append(jax.lax.slice_in_dim(array, start * rows, stop * rows, axis=dim))
            found.append(cut)
        return found
