"""The peak of a stage in closed form: the maximum over what the schedule lets coincide.

    forward     held + received + batch + forward
    backward    held + gradients_in + backward
    update      state + gradients + n losses + arriving + max(summaries + update, summarize)

    held        state + a gradients + k kept + w deferred + x received + g gradients_in + n losses

with a = 1 from the first gradients of parameters on, and 0 before, k micro-batches kept (the one
whose backward pass runs included), w of which the gradients of weights are to come, x waiting
inputs, g waiting gradients and n losses, from the schedule's table (``Schedule.moments``). Of a
split backward pass, the program of the inputs counts as backward, that of the weights takes itself
alone. Stages that share devices are summed, each with what it holds while one of them executes. It
equals the replay of the step byte for byte when the parts do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capture.measured.stage_cost import StageCost
from capture.model.graph import LayerGraph
from capture.plan.choices import StageChoice
from capture.plan.schedule import Moment, Occupancy
from capture.step.interface import StageInterface, stage_interface, stage_values


@dataclass(frozen=True)
class StageMemory:
    """The parts of a stage's memory, bytes per device; integers, or arrays of equal shape for many
    stages at once.

    Attributes:
        params, optimizer: The state.
        gradients: Accumulators, from the first gradients of a step to the stage's update.
        kept: Everything that the backward pass reads again, per micro-batch in flight.
        received: Values from the stage before, those that pass through included, per micro-batch.
        gradients_in: Gradients from the stage after, per micro-batch.
        batch: Leaves of the batch that the forward pass reads.
        forward, backward, update: Bytes that the running program needs: temporaries + outputs -
            aliased inputs.
        losses: The losses of one micro-batch; 0 but on the last stage.
        arriving: Gradients of parameters that later stages share, one from each of them, all there
            before the update.
        summarize: Bytes that the program which sums gradients up for other stages needs while it
            runs; 0 where the optimizer needs none.
        summaries: The results of that program of all stages: each has all of them for its update.
        summary: The result of that program of this stage.
        deferred: Bytes that the gradients of weights read, of a split backward pass, per
            micro-batch.
        backward_inputs, backward_weights: Bytes that the two programs of a split backward pass need
            while they run.
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
    summary: Any = 0
    deferred: Any = 0
    backward_inputs: Any = 0
    backward_weights: Any = 0

    @property
    def state(self) -> Any:
        """The bytes per device that stay in memory between steps: parameters and optimizer
        state."""
        return self.params + self.optimizer

    @property
    def end(self) -> Any:
        """The most bytes that the end of a step needs beside state, losses and gradients that
        arrive from later stages."""
        return self.gradients + np.maximum(self.summaries + self.update, self.summarize)


def of_interfaces(stages: Sequence[StageInterface]) -> list[StageMemory]:
    """Return the parts of the memory of every stage of a step whose costs are known."""
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
            summary=stage.summary_bytes,
            deferred=deferred_of(stage),
            backward_inputs=stage.transient_bytes.get("backward_inputs", 0),
            backward_weights=stage.transient_bytes.get("backward_weights", 0),
        )
        for s, stage in enumerate(stages)
    ]


def kept_of(stage: StageInterface) -> int:
    """Return the bytes per device that one micro-batch keeps in a stage for its backward pass."""
    kept = stage.residual_bytes + sum(
        stage.value_bytes[v] for v in (*stage.kept_inputs, *stage.kept_outputs)
    )
    return kept + sum(stage.batch_bytes[b] for b in stage.kept_batch)


def deferred_of(stage: StageInterface) -> int:
    """Return the bytes per device that one micro-batch keeps for the gradients of weights; 0 where
    the backward pass is not split."""
    if (split := stage.split) is None:
        return 0
    values = sum(stage.value_bytes[v] for v in (*split.inputs, *split.outputs, *split.cotangents))
    batch = sum(stage.batch_bytes[b] for b in split.batch)
    return split.residual_bytes + split.deferred_bytes + values + batch


def kept_bytes(
    graph: LayerGraph, first: int, stop: int, choice: StageChoice, cost: StageCost
) -> int:
    """Return the bytes per device that one micro-batch of layers [first, stop) keeps for its
    backward pass."""
    total = cost.residual_bytes
    if cost.kept_inputs or cost.kept_outputs:
        used, outputs = stage_values(graph, first, stop)
        kept = [used[i] for i in cost.kept_inputs] + [outputs[i] for i in cost.kept_outputs]
        total += sum(graph.value_bytes(v, choice.value_split) for v in kept)
    if cost.kept_batch:
        batch = graph.stage_batch(first, stop)
        leaves = (graph.batch[batch[i]] for i in cost.kept_batch)
        total += sum(leaf.shard_bytes(choice.data_parallel) for leaf in leaves)
    return total


def split_bytes(
    graph: LayerGraph, first: int, stop: int, choice: StageChoice, cost: StageCost
) -> int:
    """Return the bytes per device that one micro-batch of layers [first, stop) keeps for the
    gradients of weights, from a cost with a split backward pass."""
    assert cost.split is not None, "measured with a split backward pass"
    no_params = [0] * len(graph.params)
    return deferred_of(stage_interface(graph, first, stop, (), choice, no_params, cost))


def peaks_by_position(
    memory: StageMemory,
    positions: Sequence[Sequence[Occupancy]],
    arriving: Sequence[object],
    optimizer_rests: bool = False,
) -> np.ndarray:
    """Compute the peak bytes of a stage alone on its devices for many positions of a plain schedule
    at once, stacked along a new first dimension; for arrays, without temporary ones.

    Args:
        memory: All but ``arriving``.
        positions: The occupancies of every position.
        arriving: Bytes per position, as in ``StageMemory``: how many stages share a parameter
            depends on how many follow.
        optimizer_rests: Whether the optimizer's state is on a host until the update.
    """
    shape = np.broadcast_shapes(*(np.shape(part) for part in vars(memory).values()))
    there = memory.params if optimizer_rests else memory.state
    fixed = {
        "forward": there + memory.received + memory.batch + memory.forward,
        "backward": there + memory.gradients_in + memory.backward,
    }
    end = memory.state + memory.end
    result, instant = np.empty((len(positions), *shape), np.int64), np.empty(shape, np.int64)
    for peak, occupancies, gradients in zip(result, positions, arriving, strict=True):
        num_losses = max(o.num_losses for o in occupancies)
        np.add(end, num_losses * memory.losses + gradients, out=peak)
        for o in occupancies:
            np.multiply(memory.kept, o.num_kept, out=instant)
            instant += fixed[o.kind]
            for count, part in (
                (o.accumulates, memory.gradients),
                (o.num_waiting_inputs, memory.received),
                (o.num_waiting_gradients, memory.gradients_in),
                (o.num_losses, memory.losses),
            ):
                if count:
                    instant += count * part
            np.maximum(peak, instant, out=peak)
    return result


def _num_losses(moments: Sequence[Moment]) -> int:
    """Return the number of losses in memory at the end of a step: one per micro-batch."""
    return max(moment[-1].num_losses for moment in moments)


def peak_parts(
    stages: Sequence[StageMemory], moments: Sequence[Moment]
) -> tuple[str, list[dict[str, int]]]:
    """Return the instant of the peak, and the bytes by category at it, per stage that shares the
    device. All of them sum to the peak."""
    candidates = [*_parts_at_end(stages, moments), *(_parts_at(stages, m) for m in moments)]
    instant, parts = max(candidates, key=lambda item: sum(sum(p.values()) for p in item[1]))
    return instant, [
        {category: int(nbytes) for category, nbytes in of_stage.items() if nbytes}
        for of_stage in parts
    ]


def _state_parts(stage: StageMemory) -> dict[str, Any]:
    return {"parameters": stage.params, "optimizer": stage.optimizer}


def _parts_at_end(
    stages: Sequence[StageMemory], moments: Sequence[Moment]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for running in range(len(stages)):
        for instant, summaries in (
            ("update", [0 if s < running else each.summaries for s, each in enumerate(stages)]),
            ("summarize", [each.summary if s < running else 0 for s, each in enumerate(stages)]),
        ):
            updated = range(running) if instant == "update" else ()
            yield (
                instant,
                [
                    {
                        **_state_parts(each),
                        "gradients": each.gradients * (s not in updated),
                        "received gradients": each.arriving * (s not in updated),
                        "optimizer": each.optimizer + summaries[s],
                        "loss": (s == len(stages) - 1) * _num_losses(moments) * each.losses,
                        "temporaries": getattr(each, instant) if s == running else 0,
                    }
                    for s, each in enumerate(stages)
                ],
            )


def _parts_at(stages: Sequence[StageMemory], moment: Moment) -> tuple[str, list[dict[str, Any]]]:
    parts, running = [], ""
    for stage, o in zip(stages, moment, strict=True):
        forward, gradients = o.kind == "forward", o.kind in ("backward", "backward_inputs")
        running = running if o.kind == "idle" else o.kind
        parts.append(
            {
                **_state_parts(stage),
                "gradients": o.accumulates * stage.gradients,
                "activations": o.num_kept * stage.kept + o.num_deferred * stage.deferred,
                "received activations": (o.num_waiting_inputs + forward) * stage.received,
                "received gradients": (o.num_waiting_gradients + gradients) * stage.gradients_in,
                "batch": stage.batch if forward else 0,
                "loss": o.num_losses * stage.losses,
                "temporaries": 0 if o.kind == "idle" else getattr(stage, o.kind),
            }
        )
    return running, parts
