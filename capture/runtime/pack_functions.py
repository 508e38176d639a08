"""Layers of a traced loss at a micro-batch size as functions of slots: what the programs of a pack
compute (``capture.runtime.packs``).

Where a slot has the cast of a parameter, the layers' own cast of it does nothing; where several of
them read it, each from the parameter made of it again, so that the gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from capture.model.graph import Tensor
from capture.plan.task_graph import Span
from capture.tracing import TracedModel
from capture.tracing.segment import Arrays, Segment
from capture.tracing.slices import struct_of


class PackFunctions(Segment):
    """Layers at a micro-batch size, as functions of slots.

    Args:
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
        graph = traced.graph
        super().__init__(graph, traced.slice(*span), graph.crossing(span[0]))
        #: Of which casts the gradients are as good as those of the parameters.
        self.once = frozenset(p for p, cast in enumerate(traced.casts) if cast and cast.once)
        self.where, self._pieces, self._leaves = where, pieces, leaves
        self._leaving = graph.crossing(span[1])

    @property
    def key(self) -> Any:
        """A key of what the pack computes of whole parameters, and which arguments it reads."""
        layers, graph = self.layers, self.graph
        ids = {v: i for i, v in enumerate((*self.given, *layers.outputs))}
        passed = [graph.values[v] for v in (*self.given, *self._leaving)]
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

    def forward_pieces(
        self, weights: Sequence[Arrays], inputs: Sequence[Arrays], batch: Sequence[Arrays]
    ) -> list[list[Any]]:
        """Return pieces of what leaves the pack; of the last one, the loss."""
        params = self._params(weights, self.layers.params)
        entering = self._joined(self.given, inputs)
        made = dict(zip(self.layers.outputs, self._run(batch, params, entering), strict=True))
        if self.is_last:
            return [[made[self.layers.outputs[-1]]]]
        return self._split(
            {v: made[v] if v in made else jnp.copy(entering[v]) for v in self._leaving}
        )

    def backward_pieces(
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
        params, entering = self._params(weights, self.once), self._joined(self.given, inputs)
        made, backward = self.forward(partial(self._run, batch), params, entering)
        losses = [[made[v] for v in self.outputs]] if self.is_last else []
        arrived: Iterable[Any] = [jnp.full_like(loss, share) for own in losses for loss in own]
        if not self.is_last:
            arrived = self._joined(self.cotangents, cotangents).values()
        of_params, of_values = self.gradients(backward, arrived)
        found = self._split(dict(zip(self.inputs, of_values, strict=True))) if self.given else []
        return [*found, *losses], dict(zip(self.layers.params, of_params, strict=True))

    def _params(self, weights: Sequence[Arrays], as_casts: Collection[int]) -> list[Any]:
        """Return the layers' parameters; casts that came are cast back, except ``as_casts``."""
        found = []
        for param in self.layers.params:
            i, j = self.where[param]
            given, own = weights[i][j], struct_of(self.graph.params[param]).dtype
            as_it_is = param in as_casts or given.dtype == own
            found.append(given if as_it_is else given.astype(own))
        return found

    def _run(self, batch: Sequence[Arrays], params: Arrays, values: Mapping[int, Any]) -> list[Any]:
        tensors = [self.graph.batch[b] for b in self._leaves]
        leaves = dict(zip(self._leaves, self._together(tensors, batch), strict=True))
        layers = self.layers
        return layers(params, [values[v] for v in layers.inputs], [leaves[b] for b in layers.batch])

    def _joined(self, values: Sequence[int], pieces: Sequence[Arrays]) -> dict[int, Any]:
        tensors, count = [self.graph.values[v] for v in values], len(self._pieces)
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
                tensor = self.graph.values[v]
                dim = tensor.batch_dim
                assert dim is not None, f"{tensor.name} was found to have no rows"
                rows = tensor.shape[dim] // self.graph.microbatch_size
                cut.append(jax.lax.slice_in_dim(array, start * rows, stop * rows, axis=dim))
            found.append(cut)
        return found
