"""The peak of a stage in closed form: the maximum over what the schedule lets coincide.

    forward     state + k kept + x received + g gradients_in + n losses + received + batch + forward
    backward    state + k kept + x received + (g + 1) gradients_in + n losses + backward
    update      state + n losses + arriving + max(summaries + update, summarize)

with k micro-batches kept (the one whose backward pass runs included), x waiting inputs, g waiting
gradients and n losses, from the schedule's table (``Schedule.occupancies``). It equals the replay
of the step byte for byte when the parts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.measured.stage_cost import StageCost
from capture.model.graph import LayerGraph
from capture.plan.schedule import Occupancy
from capture.step.interface import StageInterface, stage_values


@dataclass(frozen=True)
class StageMemory:
    """Bytes per device; integers, or arrays of equal shape for many stages at once.

    Attributes:
        params, gradients, optimizer: The state.
        kept: Per micro-batch in flight: everything that the backward pass reads again.
        received: Values from the stage before, those that pass through included, per micro-batch.
        gradients_in: Gradients from the stage after, per micro-batch.
        batch: Leaves of the batch that the forward pass reads.
        forward, backward, update: What the running program needs: temporaries + outputs - aliased
            inputs.
        losses: On the last stage, of one micro-batch.
        arriving: Gradients of parameters that later stages share, one from each of them, all there
            before the update.
        summarize: As ``update``, of the program that sums gradients up for other stages; 0 where
            the optimizer needs none.
        summaries: What that program makes, of all stages: each has all of them for its update.
    """

    params: Any
    gradients: Any
    optimizer: Any
    kept: Any
    received: Any
    gradients_in: Any
    batch: Any
    forward: Any
    backward: Any
    update: Any
    losses: Any = 0
    arriving: Any = 0
    summarize: Any = 0
    summaries: Any = 0

    @property
    def state(self) -> Any:
        return self.params + self.gradients + self.optimizer

    @property
    def end(self) -> Any:
        """Beside state, losses and what arrives, the most that the end of a step needs."""
        return np.maximum(self.summaries + self.update, self.summarize)


def of_interfaces(stages: Sequence[StageInterface]) -> list[StageMemory]:
    """The parts of all stages of a step whose costs are known."""
    summaries = sum(stage.summary_bytes for stage in stages)
    return [
        StageMemory(
            params=sum(stage.param_bytes.values()),
            gradients=sum(stage.param_bytes.values()),
            optimizer=stage.optimizer_bytes,
            kept=kept_of(stage),
            received=sum(stage.value_bytes[v] for v in stage.received),
            gradients_in=sum(stage.value_bytes[v] for v in stage.sent if v in stage.differentiable),
            batch=sum(stage.batch_bytes.values()),
            forward=stage.transient_bytes["forward"],
            backward=stage.transient_bytes["backward"],
            update=stage.transient_bytes["update"],
            losses=0 if s < len(stages) - 1 else sum(stage.value_bytes[v] for v in stage.outputs),
            arriving=sum(
                stage.param_bytes[p]
                for later in stages[s + 1 :]
                for p in later.borrowed
                if p in stage.owned
            ),
            summarize=stage.transient_bytes["summarize"] if summaries else 0,
            summaries=summaries,
        )
        for s, stage in enumerate(stages)
    ]


def kept_of(stage: StageInterface) -> int:
    """What one micro-batch keeps for its backward pass, per device."""
    kept = stage.residual_bytes + sum(
        stage.value_bytes[v] for v in (*stage.kept_inputs, *stage.kept_outputs)
    )
    return kept + sum(stage.batch_bytes[b] for b in stage.kept_batch)


def kept_bytes(
    graph: LayerGraph, first: int, stop: int, data_parallel: int, cost: StageCost
) -> int:
    """What one micro-batch of layers [first, stop) keeps for its backward pass, per device."""
    total = cost.residual_bytes
    if cost.kept_inputs or cost.kept_outputs:
        used, outputs = stage_values(graph, first, stop)
        kept = [used[i] for i in cost.kept_inputs] + [outputs[i] for i in cost.kept_outputs]
        total += sum(graph.values[v].shard_bytes(data_parallel) for v in kept)
    if cost.kept_batch:
        batch = graph.stage_batch(first, stop)
        total += sum(graph.batch[batch[i]].shard_bytes(data_parallel) for i in cost.kept_batch)
    return total


def peak_of(memory: StageMemory, occupancies: Sequence[Occupancy]) -> Any:
    """The peak in bytes per device; of the shape of the parts."""
    instants = [_instant(memory, occupancy) for occupancy in occupancies]
    return np.maximum.reduce(
        [
            *instants,
            memory.state + _num_losses(occupancies) * memory.losses + memory.arriving + memory.end,
        ]
    )


def peaks_by_position(
    memory: StageMemory, positions: Sequence[Sequence[Occupancy]], arriving: Sequence[Any]
) -> np.ndarray:
    """``peak_of`` for many positions at once, stacked along a new first dimension; for arrays,
    without temporary ones.

    Args:
        memory: All but ``arriving``.
        positions: Per position, its occupancies.
        arriving: Per position, as in ``StageMemory``: how many stages share a parameter depends on
            how many follow.
    """
    shape = np.shape(memory.kept)
    fixed = {
        "forward": memory.state + memory.received + memory.batch + memory.forward,
        "backward": memory.state + memory.gradients_in + memory.backward,
    }
    end = memory.state + memory.end
    result, instant = np.empty((len(positions), *shape), np.int64), np.empty(shape, np.int64)
    for peak, occupancies, gradients in zip(result, positions, arriving, strict=True):
        np.add(end, _num_losses(occupancies) * memory.losses + gradients, out=peak)
        for o in occupancies:
            np.multiply(memory.kept, o.num_kept, out=instant)
            instant += fixed[o.kind]
            for count, part in (
                (o.num_waiting_inputs, memory.received),
                (o.num_waiting_gradients, memory.gradients_in),
                (o.num_losses, memory.losses),
            ):
                if count:
                    instant += count * part
            np.maximum(peak, instant, out=peak)
    return result


def _num_losses(occupancies: Sequence[Occupancy]) -> int:
    """At the end of a step: every micro-batch's."""
    return max(occupancy.num_losses for occupancy in occupancies)


def _instant(memory: StageMemory, occupancy: Occupancy) -> Any:
    held = (
        memory.state
        + occupancy.num_kept * memory.kept
        + occupancy.num_waiting_inputs * memory.received
    )
    held = held + occupancy.num_losses * memory.losses
    if occupancy.kind == "forward":
        return (
            held
            + occupancy.num_waiting_gradients * memory.gradients_in
            + memory.received
            + memory.batch
            + memory.forward
        )
    return held + (occupancy.num_waiting_gradients + 1) * memory.gradients_in + memory.backward


def peak_parts(memory: StageMemory, occupancies: Sequence[Occupancy]) -> tuple[str, dict[str, int]]:
    """The instant of the peak, and the bytes by category at it; they sum to the peak."""
    state = {
        "parameters": memory.params,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    end = {
        **state,
        "received gradients": memory.arriving,
        "loss": _num_losses(occupancies) * memory.losses,
    }
    candidates = [
        (
            "update",
            {**end, "optimizer": memory.optimizer + memory.summaries, "temporaries": memory.update},
        ),
        ("summarize", {**end, "temporaries": memory.summarize}),
    ]
    for o in occupancies:
        forward = o.kind == "forward"
        parts = {
            **state,
            "activations": o.num_kept * memory.kept,
            "received activations": (o.num_waiting_inputs + forward) * memory.received,
            "received gradients": (o.num_waiting_gradients + (not forward)) * memory.gradients_in,
            "batch": memory.batch if forward else 0,
            "loss": o.num_losses * memory.losses,
            "temporaries": memory.forward if forward else memory.backward,
        }
        candidates.append((o.kind, parts))
    instant, parts = max(candidates, key=lambda item: sum(item[1].values()))
    return instant, {category: int(nbytes) for category, nbytes in parts.items() if nbytes}
