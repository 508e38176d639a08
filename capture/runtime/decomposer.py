"""The layers of any traced loss, each callable alone: ``layers = decompose(workload, 4)``.

    forward     weights, input, batch -> output
    backward    the same, gradient of the output -> gradient of the input, gradients of the weights;
                it computes the forward pass again

Every argument and result is a list of arrays. Chained, the calls are the loss and its gradient:
what passes between two layers is all that later ones read: a value that skips layers goes through
those between as a copy.

Source: Li et al. 2022 (Harmony), 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from capture.measured.layer_passes import Pass
from capture.model.graph import Tensor, content_hash
from capture.model.workload import PyTree, WorkloadProtocol
from capture.runtime.pack_functions import PackFunctions
from capture.tracing import TracedModel, trace
from capture.tracing.slices import struct_of


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """One direction of consecutive layers.

    Attributes:
        function: Of the arguments; returns lists of arrays: output or loss; backward the gradient
            of the input, of the last layers also the loss, and the gradients of the weights.
        weights, input, batch, gradient: The arguments. The gradient is that of the output: empty
            forward, and for the last layers, which begin at the loss.
        key: Equal keys mean the same program on other parameters.
    """

    function: Callable[..., list[list[Any]]]
    weights: tuple[Tensor, ...]
    input: tuple[Tensor, ...]
    batch: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]
    key: str

    @property
    def arguments(self) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes of the arguments, in the order of the function's."""
        groups = (self.weights, self.input, self.batch, self.gradient)
        return [[struct_of(tensor) for tensor in group] for group in groups]

    def __call__(self, weights: Any, input: Any, batch: Any, gradient: Any = ()) -> list[list[Any]]:
        return self.function(weights, input, batch, gradient)


@dataclass(frozen=True, eq=False)
class Decomposed:
    """A loss as layers. Made by ``decompose``.

    Attributes:
        traced: The loss at the micro-batch size.
    """

    traced: TracedModel

    @property
    def num_layers(self) -> int:
        return self.traced.graph.num_layers

    def weights(self, params: PyTree, first: int, stop: int | None = None) -> list[Any]:
        """Return the parameters that layers [first, stop) read; one layer's if ``stop`` is None."""
        leaves = jax.tree.leaves(self.traced.split_params(params))
        return [leaves[p] for p in self.traced.slice(*_span(first, stop)).params]

    def batch(self, batch: PyTree, first: int, stop: int | None = None, key: Any = None) -> Any:
        """Return the leaves of a micro-batch that layers [first, stop) read."""
        leaves = self.traced.batch_leaves(batch, key)
        return [leaves[b] for b in self.traced.graph.stage_batch(*_span(first, stop))]

    def forward(self, first: int, stop: int | None = None) -> LayerProgram:
        """Return the forward pass of layers [first, stop)."""
        return self.program("forward", first, stop)

    def backward(self, first: int, stop: int | None = None) -> LayerProgram:
        """Return the backward pass of layers [first, stop), of a loss that counts whole."""
        return self.program("backward", first, stop)

    def program(self, which: Pass, first: int, stop: int | None = None) -> LayerProgram:
        """Return the forward or the backward pass of layers [first, stop)."""
        span, graph = _span(first, stop), self.traced.graph
        layers = self.traced.slice(*span)
        where = {param: (0, i) for i, param in enumerate(layers.params)}
        leaves = graph.stage_batch(*span)
        pack = PackFunctions(self.traced, span, where, (graph.microbatch_size,), leaves)
        flows = () if which == "forward" else pack.cotangents

        def forward(weights: Any, input: Any, batch: Any, gradient: Any) -> list[list[Any]]:
            return pack.forward_pieces([weights], [input], [batch])

        def backward(weights: Any, input: Any, batch: Any, gradient: Any) -> list[list[Any]]:
            made, of_weights = pack.backward_pieces(
                [weights], [input], [batch], [gradient] if flows else [], share=1.0
            )
            return [*made, [of_weights[p] for p in layers.params]]

        tensors = (
            tuple(graph.params[p] for p in layers.params),
            tuple(graph.values[v] for v in graph.crossing(span[0])),
            tuple(graph.batch[b] for b in leaves),
            tuple(graph.values[v] for v in flows),
        )
        shapes = [[[list(t.shape), t.dtype] for t in group] for group in tensors]
        key = content_hash([which, repr(pack.key), shapes])
        return LayerProgram(forward if which == "forward" else backward, *tensors, key=key)


def decompose(
    workload: WorkloadProtocol,
    microbatch_size: int,
    *,
    num_layers: int | None = None,
    unmarked_layers: int | None = None,
) -> Decomposed:
    """Trace a loss, and make every layer callable alone. Nothing is allocated.

    Args:
        microbatch_size: Examples that a call takes.
        num_layers, unmarked_layers: Into how many layers it is cut: see ``trace``.

    Raises:
        WorkloadError, TracingError: as ``trace``.
    """
    traced = trace(workload, microbatch_size, num_layers, unmarked_layers=unmarked_layers)
    return Decomposed(traced)


def _span(first: int, stop: int | None) -> tuple[int, int]:
    return first, first + 1 if stop is None else stop
