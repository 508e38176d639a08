"""Count what a training step keeps of a forward pass for its backward pass, from tracing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from capture.compiler.target_devices import devices_of
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.model.graph import item_bytes
from capture.plan.choices import Remat, StageChoice
from capture.profiler.compile import CompileBackend
from capture.runtime.residuals import Residuals


@dataclass(frozen=True)
class KeptActivations:
    """The bytes that the backward pass reads of one micro-batch on one device.

    Attributes:
        total_bytes: Bytes of all layers together.
        largest_layer_bytes: Bytes of the layer that keeps most, beside what layers hand to each
            other.
    """

    total_bytes: int
    largest_layer_bytes: int


def kept_activations(
    backend: CompileBackend, microbatch_size: int, remat: Remat
) -> KeptActivations:
    """Count the bytes of the values that layers keep for the backward pass, each once. Equal layers
    are traced once.

    Args:
        backend: Backend of the model.
        microbatch_size: Examples.
        remat: What the backward pass computes again.
    """
    traced, choice = backend.traced(microbatch_size), StageChoice(remat=remat)
    graph, devices = traced.graph, devices_of(Target.load("cpu"), 1)
    of_key = dict[str, Residuals]()
    values, batch, own = set[int](), set[int](), [0]
    for layer in range(graph.num_layers):
        config = StageConfig(layer, layer + 1, choice, microbatch_size)
        key = backend.key(config)
        if key not in of_key:
            of_key[key] = backend.programs(config, devices=devices).residuals
        kept, stage = of_key[key], traced.slice(layer, layer + 1)
        values |= {stage.inputs[i] for i in kept.inputs}
        values |= {stage.outputs[i] for i in kept.outputs}
        batch |= {stage.batch[i] for i in kept.batch}
        own.append(
            sum(math.prod(v.aval.shape) * item_bytes(str(v.aval.dtype)) for v in kept.stored)
        )
    between = [graph.values[v] for v in values] + [graph.batch[b] for b in batch]
    return KeptActivations(sum(own) + sum(tensor.nbytes for tensor in between), max(own))
