"""Estimate what training a model needs, from tracing alone: nothing is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from capture.model.graph import LayerGraph
from capture.model.workload import WorkloadProtocol
from capture.plan.choices import Remat

#: Forward passes that a training step is worth: a backward pass takes about two.
TRAINING_PASSES = 3
#: Activation checkpointing modes that are counted: everything is kept, what is cheap to make again
#: is not, and layers keep their inputs alone.
REMATS: tuple[Remat, ...] = ("none", "cheap", "full")
#: Over so many devices, and fewer, it is counted what sharded parameters take.
MAX_DEVICES = 2**14


@dataclass(frozen=True)
class TrainingNeed:
    """The memory and work of one training step of a model on one device, nothing sharded.

    Attributes:
        graph: The layers, at the micro-batch size.
        optimizer_bytes: Per parameter of the graph, its optimizer state.
        activation_bytes: Per activation checkpointing mode, what a micro-batch keeps for the
            backward pass, layer by layer; with ``cheap``, stages of several layers keep no more.
        largest_layer_bytes: The activations of the layer that keeps most of them if all are kept.
        zero3_param_bytes: Per number of devices, a power of two, the bytes that one of them holds
            of each parameter, sharded as FSDP (ZeRO-3) does.
        auto_layers: Whether the layers were cut automatically.
    """

    graph: LayerGraph
    optimizer_bytes: tuple[int, ...]
    activation_bytes: Mapping[Remat, int] = field(hash=False)
    largest_layer_bytes: int
    zero3_param_bytes: Mapping[int, tuple[int, ...]] = field(hash=False)
    auto_layers: bool = False

    @property
    def param_bytes(self) -> int:
        """The bytes of the parameters; their gradients have as many."""
        return sum(tensor.nbytes for tensor in self.graph.params)

    @property
    def state_bytes(self) -> int:
        """The bytes of parameters, gradients and optimizer state."""
        return 2 * self.param_bytes + sum(self.optimizer_bytes)

    @property
    def forward_flops(self) -> int:
        """The floating-point operations of a forward pass of one micro-batch."""
        return sum(layer.flops for layer in self.graph.layers)

    @property
    def largest_layer_param_bytes(self) -> int:
        """The bytes of the parameters of the layer that reads most of them."""
        params = self.graph.params
        return max(sum(params[p].nbytes for p in layer.params) for layer in self.graph.layers)

    def zero3_state_bytes(self, num_devices: int) -> int:
        """Return the bytes of parameters, gradients and optimizer state that one device holds if
        all are sharded as FSDP (ZeRO-3) does."""
        held = self.zero3_param_bytes[num_devices]
        return sum(
            2 * part + optimizer * part // max(tensor.nbytes, 1)
            for part, optimizer, tensor in zip(
                held, self.optimizer_bytes, self.graph.params, strict=True
            )
        )


def training_need(
    workload: WorkloadProtocol, microbatch_size: int = 1, num_layers: int | None = None
) -> TrainingNeed:
    """Trace a model and count the memory and work of a training step.

    Args:
        workload: The task.
        microbatch_size: Examples of a micro-batch.
        num_layers: Layers to cut into; None at the model's marks.

    Raises:
        TracingError: if the model cannot be traced.
    """
    from capture.profiler.compile import CompileBackend
    from capture.profiler.kept import kept_activations

    backend = CompileBackend(workload, num_layers)
    traced, sharding = backend.traced(microbatch_size), backend.sharding(microbatch_size)
    kept = {remat: kept_activations(backend, microbatch_size, remat) for remat in REMATS}
    return TrainingNeed(
        traced.graph,
        backend.state_bytes(microbatch_size),
        {remat: each.total_bytes for remat, each in kept.items()},
        kept["none"].largest_layer_bytes,
        {2**n: sharding.param_bytes((1, 2**n)) for n in range(MAX_DEVICES.bit_length())},
        traced.auto_layers,
    )
