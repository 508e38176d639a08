"""The least state: the least peak of parameters, gradients and optimizer state alone, from tracing,
before anything is measured.

Every plan holds at least this much when it updates its parameters, so a limit below it is answered
in seconds. What passes between stages, what waits for the backward pass and what programs need
while they run comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from capture.machine.cluster import Cluster
from capture.model.graph import LayerGraph
from capture.plan.choices import ParamSplit, StageChoice
from capture.plan.space import StageSpace
from capture.plan.why import Why
from capture.predictor.stage_sums import once_per_stage
from recommender.answer import Answer, StageAnswer
from recommender.capture.minmax import minmax
from recommender.capture.problem import SearchProblem
from recommender.capture.result import SearchResult


def least_state(
    graph: LayerGraph,
    param_bytes: Mapping[ParamSplit, Sequence[int]],
    optimizer_bytes: Sequence[int],
    choices: Sequence[StageChoice],
    cluster: Cluster,
    *,
    space: StageSpace = StageSpace(),
    memory_limit_bytes: int | None = None,
) -> SearchResult:
    """Find the plan of least state: its peak is a lower bound on that of every plan of the space.

    Args:
        graph: The layers.
        param_bytes: Per way to split parameters, bytes per device of every parameter; those of its
            gradient are the same.
        optimizer_bytes: The whole state of every parameter. It is taken to be split as the
            parameter is, and evenly over replicas that split it.
        choices: What stages may do with their devices.
        cluster: Devices.
        space: Submeshes of stages.
        memory_limit_bytes: Per device.
    """
    degrees = space.all_degrees(cluster)
    found: dict[int, dict[StageChoice, np.ndarray]] = {}
    for choice in dict.fromkeys(
        replace(choice, remat="none") for choice in choices if choice.num_devices in degrees
    ):
        found.setdefault(choice.num_devices, {})[choice] = _state_bytes(
            graph, param_bytes, optimizer_bytes, choice
        )
    problem = SearchProblem(
        cluster,
        graph.num_layers,
        {d: tuple(of) for d, of in found.items()},
        {d: np.stack(list(of.values()))[:, None] for d, of in found.items()},
        space,
        memory_limit_bytes,
    )
    return minmax(problem, tie_break="none")


def _state_bytes(
    graph: LayerGraph,
    param_bytes: Mapping[ParamSplit, Sequence[int]],
    optimizer_bytes: Sequence[int],
    choice: StageChoice,
) -> np.ndarray:
    """Return the state of every stage [first, stop): int64 (L, L + 1), bytes per device."""
    params = np.array(param_bytes[choice.param_split], np.int64)
    part = params / np.maximum([tensor.nbytes for tensor in graph.params], 1)
    replicas = choice.data_parallel if choice.shard_optimizer and not choice.shard_params else 1
    optimizer = np.floor(np.array(optimizer_bytes) * part / replicas).astype(np.int64)
    owned = [
        [p for p in layer.params if graph.param_owner(p) == layer.layer_id]
        for layer in graph.layers
    ]
    return 2 * once_per_stage([layer.params for layer in graph.layers], params) + once_per_stage(
        owned, optimizer
    )


def fewest_stages(
    graph: LayerGraph,
    param_bytes: Sequence[int],
    optimizer_bytes: Sequence[int],
    memory_limit_bytes: int,
) -> int | None:
    """Count the fewest pipeline stages, of consecutive layers on one device each, whose parameters,
    gradients and optimizer state fit; None if those of one layer alone do not.

    Pack greedily: a stage takes layers in order while they fit. No other cut has fewer stages,
    because a stage with fewer layers never holds more.

    Args:
        graph: The layers.
        param_bytes, optimizer_bytes: Of every parameter, unsharded.
        memory_limit_bytes: Per device.
    """
    held = _state_bytes(graph, {(1, 1): param_bytes}, optimizer_bytes, StageChoice())
    first = count = 0
    while first < graph.num_layers:
        stop = int(np.searchsorted(held[first, first + 1 :], memory_limit_bytes, "right")) + first
        if stop == first:
            return None
        first, count = stop, count + 1
    return count


def beyond_memory(result: SearchResult) -> StageAnswer:
    """Return the infeasible answer for a limit below the least state."""
    assert result.why is not None, "it is infeasible"
    limit = result.why.memory_limit_bytes
    if not result.stages:  # whatever the memory
        return Answer("infeasible", None, result, result.why)
    stage = max(result.stages, key=lambda stage: stage.peak_bytes)
    why = Why(
        f"Every plan needs at least {result.peak_bytes:,} bytes on a device for parameters, "
        "gradients and optimizer state alone "
        f"(the least has layers {stage.first} to {stage.stop - 1} there), and "
        f"memory_limit_bytes={limit:,}. Raise the limit, use more devices, or parameters and "
        "optimizer state of fewer bytes. Nothing was measured. [memory-limit]",
        code="memory-limit",
        memory_limit_bytes=limit,
        least_state_bytes=result.peak_bytes,
    )
    return Answer("infeasible", None, result, why)
