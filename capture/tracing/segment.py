"""Consecutive layers of a traced loss, forward and backward: what stages, packs and models of an
array are made of. How the layers run, on whole arrays or pieces, with casts or checkpoints, is a
function that each of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax

from capture.model.graph import LayerGraph
from capture.model.workload import PyTree
from capture.tracing.slices import StageSlice

Arrays = Sequence[Any]


class Segment:
    """The differentiation of consecutive layers.

    Args:
        given: The values that come from earlier layers; by default those that the layers read.

    Attributes:
        inputs, outputs: Values with gradients, of those given and of those made.
        is_last: Whether the layers end in the loss.
    """

    def __init__(self, graph: LayerGraph, layers: StageSlice, given: Sequence[int] | None = None):
        self.graph, self.layers = graph, layers
        self.given = layers.inputs if given is None else given
        self.inputs, self.outputs = self._smooth(self.given), self._smooth(layers.outputs)
        self.is_last = layers.stop == graph.num_layers

    @cached_property
    def cotangents(self) -> tuple[int, ...]:
        """The values whose gradients arrive: outputs, and given ones that later layers read."""
        known = {*self.layers.outputs, *self.given}
        return tuple(v for v in self._smooth(self.graph.crossing(self.layers.stop)) if v in known)

    def _smooth(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(v for v in values if self.graph.values[v].differentiable)

    def forward(
        self,
        run: Callable[[Any, Mapping[int, Any]], Arrays],
        params: Any,
        values: Mapping[int, Any],
    ) -> tuple[dict[int, Any], Callable[..., Any]]:
        """Return what the layers make, by value, and the function that goes backwards.

        Args:
            run: Runs the layers, from parameters and given values to ``layers.outputs``.
            params: Parameters to differentiate by, in any tree.
        """

        def apply(params: PyTree, inputs: Arrays) -> tuple[list[Any], dict[int, Any]]:
            results = run(params, {**values, **dict(zip(self.inputs, inputs, strict=True))})
            made = dict(zip(self.layers.outputs, results, strict=True))
            return [made.pop(v) for v in self.outputs], made

        inputs = [values[v] for v in self.inputs]
        made, backward, others = jax.vjp(apply, params, inputs, has_aux=True)
        return {**dict(zip(self.outputs, made, strict=True)), **others}, backward

    def gradients(
        self, backward: Callable[..., Any], cotangents: Iterable[Any]
    ) -> tuple[Any, list[Any]]:
        """Return the gradients of parameters and of ``inputs``.

        Args:
            cotangents: The gradients that arrived; of layers that end in the loss, its own.
        """
        of = self.outputs if self.is_last else self.cotangents
        arrived = dict(zip(of, cotangents, strict=True))
        of_params, of_inputs = backward([arrived[v] for v in self.outputs])
        return of_params, [
            gradient + arrived[v] if v in arrived else gradient
            for v, gradient in zip(self.inputs, of_inputs, strict=True)
        ]
